"""Which configuration to launch, and why: a measured table before a baseline before the built-in default.

    pick = lookup(Query.of(shape, ranks, machine), tokens)
    pick.choice.config, pick.line()

A broken table is a miss with one warning, never the end of a program; a table that was named by hand must be right. A
table never answers for another geometry, SM count or kind of ranks: eight virtual ranks say nothing about eight GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from megamoe_cli import paths
from megamoe_cli.config import KernelConfig
from megamoe_cli.config import check as check_config
from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.schema import Choice, Table
from megamoe_cli.tuning.table_check import load_usable
from megamoe_cli.tuning.yaml_source import Problem

# A static table is a model's opinion: it answers only when it is named.
PREFERENCE = ("measured", "baseline")


@dataclass(frozen=True)
class Machine:
    """Where ranks run. ``sms``: of one GPU. ``backend``: virtual, processes, nvlink (or fake, in tests)."""

    sms: int
    backend: str
    name: str = ""
    arch: str = "sm_90a"

    def sms_per_rank(self, ranks: int) -> int:
        """Ranks that share a GPU divide it; a GPU of its own has all."""
        return self.sms if self.backend == "nvlink" else self.sms // ranks


@dataclass(frozen=True)
class Query:
    """What a table must match, exactly."""

    shape: Shape
    ranks: int
    machine: Machine

    def values(self) -> dict[str, int | str]:
        s, m = self.shape, self.machine
        # One rank on one GPU is the same launch however it was started.
        backend = "virtual" if self.ranks == 1 and m.backend in ("nvlink", "processes") else m.backend
        return {"arch": m.arch, "sms": m.sms, "backend": backend, "sms_per_rank": m.sms_per_rank(self.ranks), "ranks": self.ranks,
                "experts": s.experts, "topk": s.topk, "hidden": s.hidden, "intermediate": s.intermediate, "dtype": "e4m3",
                "scale": "block128"}

    def shared_sms(self) -> int | None:
        """SMs that all ranks share, for the predicate; None where each rank has a GPU."""
        return self.machine.sms if self.machine.backend in ("virtual", "processes", "fake") else None


@dataclass(frozen=True)
class Pick:
    """A choice and its reason. ``source``: measured, baseline, static, default or explicit."""

    choice: Choice
    source: str
    why: str
    table: Path | None = None
    name: str = ""
    warnings: tuple[str, ...] = ()
    considered: tuple[str, ...] = ()  # what was looked at and did not answer, one line each
    beyond: str = ""  # said of a load outside what the table measured

    def line(self) -> str:
        """One line for the user."""
        return f"config: {self.choice.name()} ({self.why})"


@dataclass
class Library:
    """The tables of some folders or files. ``problems``: files that could not be used, one line each."""

    tables: list[tuple[Table, list[Problem]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, folders: Sequence[Path]) -> Library:
        found = cls()
        for folder in folders:
            for path in sorted(folder.glob("*.yaml")) if folder.is_dir() else []:
                try:
                    found.tables.append(_load(path, path.stat().st_mtime_ns))
                except (UsageError, OSError) as error:
                    found.problems.append(f"table {path.name} is not used: {error}")
        return found

    @classmethod
    def of(cls, setting: str | None) -> Library:
        """``auto`` (or None): the usual folders. ``none``: no table. Else a file, which must be usable (UsageError)."""
        if setting in (None, "", "auto"):
            return cls.load(paths.table_dirs())
        if setting == "none":
            return cls()
        path = Path(setting)
        if not path.is_file():
            raise UsageError(f"there is no table {setting} (auto and none are the other choices)", rule="table")
        return cls([load_usable(path)])


@lru_cache(maxsize=64)
def _load(path: Path, mtime_ns: int) -> tuple[Table, list[Problem]]:
    return load_usable(path)


def lookup(query: Query, tokens: int, library: Library, *, named: bool = False) -> Pick:
    """The choice for ``tokens`` per rank (the largest of all ranks). ``named``: the library is one table that the user
    named, so a static one answers too, and a mismatch is a UsageError. Outside what a measured table measured the baseline
    answers, which was made for every load; the table's own default where there is none."""
    considered: list[str] = []
    warnings = list(library.problems)
    beyond: Pick | None = None
    values = query.values()
    ranked = sorted(enumerate(library.tables), key=lambda entry: (_rank(entry[1][0]), entry[0]))
    for _, (table, problems) in ranked:
        label = f"{table.path.name if table.path else 'table'} ({table.source})"
        wrong = table.match.mismatches(values)
        if wrong:
            if named:
                raise UsageError(f"{label} is not for this: {'; '.join(wrong)}", rule="table-match")
            considered.append(f"{label}: {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
            continue
        if table.source not in PREFERENCE and not named:
            considered.append(f"{label}: a model's ranking answers only when it is named")
            continue
        pick = _from_table(table, problems, query, tokens, label)
        verdict = check_config(pick.choice.config, query.shape, query.ranks, query.shared_sms(), pick.choice.ctas or None)
        if not verdict:
            said = f"{label} picks {pick.choice.name()}, which is illegal here ({verdict.rule}: {verdict.explanation})"
            if named:
                raise UsageError(said, rule=verdict.rule)
            warnings.append(said)
            considered.append(said)
            continue
        if pick.beyond and not named:
            beyond = beyond or pick
            considered.append(pick.beyond)
            continue
        return _answer(pick, beyond, warnings, considered)
    if beyond is not None:
        return _answer(beyond, None, warnings, [line for line in considered if line != beyond.beyond])
    why = "the built-in default: " + ("no table matches" if library.tables else "tables are off" if not warnings else "no usable table")
    return Pick(Choice(KernelConfig()), "default", why, warnings=tuple(warnings), considered=tuple(considered))


def _answer(pick: Pick, beyond: Pick | None, warnings: Sequence[str], considered: Sequence[str]) -> Pick:
    """``beyond``: of a table that came first and had not measured the load."""
    said = [f"{pick.beyond}; its default is used"] if pick.beyond else []
    if beyond is not None:
        said.append(f"{beyond.beyond}; {pick.table.name if pick.table else pick.source} is used")
    return replace(pick, warnings=(*said, *pick.warnings, *warnings), considered=tuple(considered))


def _rank(table: Table) -> int:
    order = [*PREFERENCE, "static"]
    return order.index(table.source)


def _from_table(table: Table, problems: Sequence[Problem], query: Query, tokens: int, label: str) -> Pick:
    value = table.axis_value(tokens, query.ranks, query.shape.topk, query.shape.experts)
    entry = table.range_at(value)
    assert entry is not None, "a usable table covers everything"
    load = f"{tokens} tokens" if table.axis == "tokens" else f"{tokens} tokens = {value:g} expected per local expert"
    why = f"{label}: {load} in [{entry.start:g}, {entry.end:g})"
    warnings = [f"{label}: {p.rule}: {p.message}" for p in problems if p.rule in ("stale", "dirty", "partial")]
    beyond = f"{label}: {load} is outside what was measured" if table.source != "baseline" and not entry.evidence else ""
    rows = {row.id: row for row in table.evidence}
    near = min((rows[name] for name in entry.evidence), key=lambda row: abs(row.tokens - tokens), default=None)
    if near is not None and near.median_us is not None:
        why += f", {near.verdict} than the incumbent" if near.verdict in ("better", "worse") else f", {near.verdict} as the incumbent" \
            if near.verdict == "same" else ", unclear against the incumbent"
        why += f" at {near.tokens} tokens ({near.vs_incumbent:.3g}x its time)" if near.vs_incumbent else ""
    elif near is not None:
        why += f", model {near.model_us:.4g} us at {near.tokens} tokens"
    if any(p.rule == "stale" for p in problems):
        why += ", stale"
    return Pick(table.configs[entry.use], table.source, why, table.path, entry.use, tuple(warnings), beyond=beyond)


def edge_counts(library: Library, query: Query) -> list[int]:
    """Every token count at which some table's pick may change, ascending from 0."""
    edges = {0, 1}
    for table, _ in library.tables:
        scale = 1.0 if table.axis == "tokens" else query.ranks * query.shape.topk / query.shape.experts
        edges |= {int(r.start / scale) + step for r in table.ranges for step in (0, 1)}
    return sorted(edges)


def running_machine(backend: str, ranks: int) -> Machine | None:
    """The GPU that ``--backend backend`` would use here, or None: no SM90 GPU, or the emulator."""
    from megamoe_cli.backends.driver import visible_gpus
    from megamoe_cli.backends.picking import pick

    if backend == "emulator":
        return None
    try:
        gpus = visible_gpus()
        choice = pick(backend, ranks, gpus)
    except (EnvironmentUnfit, UsageError):
        return None  # who runs it says why
    hopper = [gpu for gpu in gpus if gpu.is_sm90]
    if choice.name == "emulator" or not hopper:
        return None
    return Machine(hopper[0].sms, choice.name, hopper[0].name)


class Picker:
    """Picks for the running GPU and says each pick once. ``say``/``warn`` take a line. Without a GPU: no pick at all."""

    def __init__(self, setting: str | None, backend: str, say: object = None, warn: object = None) -> None:
        self.setting, self.backend = setting or "auto", backend
        self._say, self._warn = say or (lambda line: None), warn or (lambda line: None)
        self._library: Library | None = None
        self._said: set[str] = set()
        self._machines: dict[int, Machine | None] = {}

    @property
    def library(self) -> Library:
        if self._library is None:
            self._library = Library.of(self.setting)
        return self._library

    def machine(self, ranks: int) -> Machine | None:
        if ranks not in self._machines:
            self._machines[ranks] = running_machine(self.backend, ranks)
        return self._machines[ranks]

    def pick(self, shape: Shape, ranks: int, tokens: int) -> Pick | None:
        """The pick, or None where there is no GPU to pick for or tables are off."""
        machine = self.machine(ranks) if self.setting != "none" else None
        if machine is None:
            return None
        found = lookup(Query(shape, ranks, machine), tokens, self.library, named=self.setting != "auto")
        self._once(found.line(), self._say)
        for warning in found.warnings:
            self._once(warning, self._warn)
        return found

    def choices(self, shape: Shape, ranks: int) -> list[Choice]:
        """Every choice that some token count may get: what must be built so that nothing compiles later."""
        machine = self.machine(ranks) if self.setting != "none" else None
        if machine is None:
            return []
        query = Query(shape, ranks, machine)
        found = [lookup(query, tokens, self.library, named=self.setting != "auto") for tokens in edge_counts(self.library, query)]
        for pick in found:
            for warning in pick.warnings:
                if "outside what was measured" not in warning:
                    self._once(warning, self._warn)
        return list(dict.fromkeys(pick.choice for pick in found))

    def _once(self, line: str, to: object) -> None:
        if line not in self._said:
            self._said.add(line)
            to(line)  # type: ignore[operator]
