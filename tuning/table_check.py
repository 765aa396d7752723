"""Judges a decoded table: cover of the axis, reachability, legality of what it picks, what stands behind it.

Everything is a :class:`Problem` with line and rule. Errors make a table unusable; warnings (a stale kernel digest,
uncommitted sources, a partial run) are shown with every lookup and are errors only with ``--strict``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from megamoe_cli.config import check as check_config
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.schema import FLOOR_SLACK, Evidence, Range, Table
from megamoe_cli.tuning.table_reader import load
from megamoe_cli.tuning.yaml_source import ERROR, WARNING, Problem

CHECK_RULES = {
    "schema-version": "the file says schema: megamoe.table/1",
    "unknown-key": "no key that the schema does not have",
    "duplicate-key": "no key twice in one mapping",
    "missing-key": "every required key is there",
    "wrong-type": "every value has the kind the schema says",
    "bad-value": "every value is one of those the schema allows",
    "wildcard": "only a baseline matches several values of a key",
    "gap": "ranges follow each other from 0 to .inf",
    "overlap": "no load is in two ranges",
    "unreachable": "no range is empty or hidden behind earlier ones",
    "unknown-configuration": "every range, row and default names a configuration of the table",
    "illegal-configuration": "every named configuration passes the one predicate (megamoe_cli/config.py)",
    "disabled-policy": "no range picks a policy that the table disables",
    "contradiction": "a row's median lies in its interval and not below the floor, and its verdict fits its ratio",
    "unknown-evidence": "evidence that a range names exists and is about its configuration",
    "missing-evidence": "in a measured table a range without evidence uses the default",
    "model-marked": "a static table has model times only, a measured one has none",
    "validation": "held-out sizes were not slower than the table's own limit",
    "awaited": "the kernel implements what a baseline's range would rather take (warning)",
    "unused-configuration": "every configuration is used (warning)",
    "stale": "the kernel sources are those the table was measured with (warning)",
    "dirty": "the kernel was built from committed sources (warning)",
    "partial": "the run that made the table was complete (warning)",
}


@lru_cache(maxsize=1)
def kernel_digest() -> str:
    """What a table is stale against: a digest of every source the GPU kernel reaches (the emulator's are not among them)."""
    from megamoe_cli.compile.entry import ROOT_HEADER
    from megamoe_cli.compile.sources import closure
    from megamoe_cli.paths import kernels_dir

    return "sha256:" + closure(f'#include "{ROOT_HEADER}"\n', kernels_dir(), emulator=False).digest[:16]


def check_file(path: Path) -> tuple[Table | None, list[Problem]]:
    """The table and everything wrong with it, in line order. UsageError (exit 2) when the file is no YAML."""
    problems: list[Problem] = []
    table = load(path, problems)
    if table is not None:
        problems += check_table(table)
    return table, sorted(set(problems))


def errors_of(problems: list[Problem], strict: bool = False) -> list[Problem]:
    return [p for p in problems if strict or p.severity == ERROR]


def check_table(table: Table) -> list[Problem]:
    """Every rule beyond form."""
    problems: list[Problem] = []
    _cover(table, problems)
    _configurations(table, problems)
    _evidence(table, problems)
    _standing(table, problems)
    return problems


def _cover(table: Table, problems: list[Problem]) -> None:
    reached = 0.0
    for entry in table.ranges:
        span = f"[{entry.start:g}, {entry.end:g})"
        if entry.end <= entry.start:
            problems.append(Problem(entry.line, "unreachable", f"{span} holds no load"))
        elif entry.end <= reached:
            problems.append(Problem(entry.line, "unreachable", f"{span} is hidden behind the ranges before it, which reach {reached:g}"))
        elif entry.start < reached:
            problems.append(Problem(entry.line, "overlap", f"{span} begins below {reached:g}, where the range before it ends"))
        elif entry.start > reached:
            problems.append(Problem(entry.line, "gap", f"nothing covers [{reached:g}, {entry.start:g})"))
        reached = max(reached, entry.end)
    if not math.isinf(reached):
        line = table.ranges[-1].line if table.ranges else table.lines.get("ranges", 1)
        problems.append(Problem(line, "gap", f"nothing covers [{reached:g}, inf)"))


def _configurations(table: Table, problems: list[Problem]) -> None:
    shape, ranks, sms = geometry(table)
    if not table.configs:
        problems.append(Problem(table.lines.get("configs", 1), "unknown-configuration", "the table has no configuration"))
    for name, choice in table.configs.items():
        line = table.lines.get(f"configs.{name}", 1)
        verdict = check_config(choice.config, shape, ranks, sms, choice.ctas or None)
        users = [r for r in table.ranges if r.use == name]
        waits = [r for r in table.ranges if r.wanted == name]
        if verdict.rule == "not-implemented" and waits and not users and name != table.default:
            problems.append(Problem(line, "awaited", f"configuration {name!r}: {verdict.explanation}; {waits[0].use!r} is taken meanwhile", WARNING))
        elif not verdict:
            problems.append(Problem(line, "illegal-configuration", f"configuration {name!r}: {verdict.rule}: {verdict.explanation}"))
        policy = table.policies.get(choice.config.policy)
        if policy is not None and not policy.enabled:
            for entry in users:
                problems.append(Problem(entry.line, "disabled-policy",
                                        f"{_span(entry)} picks {name!r}, whose policy {choice.config.policy!r} is disabled: {policy.reason}"))
            if name == table.default:
                problems.append(Problem(table.lines.get("default", line), "disabled-policy",
                                        f"the default {name!r} has the disabled policy {choice.config.policy!r}"))
        if not any(name in r.names for r in table.ranges) and name != table.default and not table.measured(name):
            problems.append(Problem(line, "unused-configuration", f"nothing uses configuration {name!r}", WARNING))
    known = set(table.configs)
    if table.default not in known:
        problems.append(Problem(table.lines.get("default", 1), "unknown-configuration", f"the default {table.default!r} is not in configs"))
    for entry in table.ranges:
        for name in (name for name in entry.names if name not in known):
            problems.append(Problem(entry.line, "unknown-configuration", f"{_span(entry)} picks {name!r}, which is not in configs"))


def geometry(table: Table) -> tuple[Shape | None, int | None, int | None]:
    """(shape, ranks, SMs that the ranks share) as far as the match fixes them exactly; for ``config.check``."""
    get = table.match.get
    values = [get(key) for key in ("hidden", "intermediate", "experts", "topk")]
    shape = Shape(*values) if None not in values else None  # type: ignore[arg-type]
    shared = table.match.values.get("backend") in ("virtual", "processes", "fake")
    return shape, get("ranks") if shape else None, get("sms") if shared and shape else None


def _contradictions(row: Evidence) -> Iterator[str]:
    """What the tuner never writes."""
    us, ratio = row.median_us, row.vs_incumbent
    if us is not None and row.ci_us is not None and not row.ci_us[0] <= us <= row.ci_us[1]:
        yield f"median_us {us:g} lies outside its interval {row.ci_us[0]:g} to {row.ci_us[1]:g}"
    if us is not None and row.floor_us is not None and us < FLOOR_SLACK * row.floor_us:
        yield f"median_us {us:g} is below the floor of {row.floor_us:g}"
    if ratio is not None and (row.verdict == "better" and ratio >= 1 or row.verdict == "worse" and ratio <= 1):
        yield f"it says {row.verdict} at {ratio:g} of the incumbent's time"


def _evidence(table: Table, problems: list[Problem]) -> None:
    rows = {}
    for row in table.evidence:
        if row.id in rows:
            problems.append(Problem(row.line, "duplicate-key", f"evidence {row.id!r} is given a second time"))
        rows[row.id] = row
        if row.config not in table.configs:
            problems.append(Problem(row.line, "unknown-configuration", f"evidence {row.id!r} is about {row.config!r}, which is not in configs"))
        if table.source == "static" and (row.model_us is None or row.median_us is not None or row.verdict):
            problems.append(Problem(row.line, "model-marked", f"evidence {row.id!r}: a static table has model_us and no measured number"))
        if table.source == "measured" and (row.model_us is not None or row.median_us is None or not row.verdict):
            problems.append(Problem(row.line, "model-marked", f"evidence {row.id!r}: a measured table has median_us and a verdict, and no model number"))
        problems += [Problem(row.line, "contradiction", f"evidence {row.id!r}: {said}") for said in _contradictions(row)]
    for entry in table.ranges:
        for name in entry.evidence:
            row = rows.get(name)
            if row is None:
                problems.append(Problem(entry.line, "unknown-evidence", f"{_span(entry)} names evidence {name!r}, which is not in the table"))
            elif row.config != entry.use:
                problems.append(Problem(entry.line, "unknown-evidence",
                                        f"{_span(entry)} picks {entry.use!r} on evidence {name!r}, which is about {row.config!r}"))
        if table.source != "baseline" and not entry.evidence and entry.use != table.default:
            problems.append(Problem(entry.line, "missing-evidence",
                                    f"{_span(entry)} picks {entry.use!r} without evidence; only the default {table.default!r} needs none"))


def _standing(table: Table, problems: list[Problem]) -> None:
    lines = table.lines
    if table.source != "baseline":
        if not table.digest:
            problems.append(Problem(lines.get("kernel", 1), "missing-key", "a table that was not written by hand names its source_digest"))
        elif table.digest != kernel_digest():
            problems.append(Problem(lines.get("kernel", 1), "stale",
                                    f"made with kernel sources {table.digest}; they are {kernel_digest()} now", WARNING))
    provenance = lines.get("provenance", 1)
    if table.provenance.get("dirty"):
        problems.append(Problem(provenance, "dirty", "the kernel was built from sources that no commit has", WARNING))
    if table.partial:
        problems.append(Problem(provenance, "partial", "the run ended before it had measured everything it planned", WARNING))
    found = table.validation
    if found and found.get("worst_slowdown") and found.get("max_slowdown") and found["worst_slowdown"] > found["max_slowdown"]:
        problems.append(Problem(lines.get("validation", 1), "validation",
                                f"slower by {found['worst_slowdown']:g} on a held-out size, above the limit {found['max_slowdown']:g}"))


def _span(entry: Range) -> str:
    return f"[{entry.start:g}, {entry.end:g})"


def load_usable(path: Path) -> tuple[Table, list[Problem]]:
    """A table that may answer, with its warnings. UsageError (exit 2) naming the first error when it may not."""
    table, problems = check_file(path)
    bad = errors_of(problems)
    if table is None or bad:
        more = f" (and {len(bad) - 1} more: megamoe table check {path})" if len(bad) > 1 else ""
        first = bad[0]
        raise UsageError(f"{path}:{first.line}: {first.rule}: {first.message}{more}", rule=first.rule)
    return table, problems
