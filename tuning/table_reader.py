"""Reads a ``megamoe.table/1`` file strictly: every fault of form with its line and the name of the rule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megamoe_cli.config import check as check_config
from megamoe_cli.errors import UsageError
from megamoe_cli.tuning.schema import (
    ANY, AXES, INTEGER_KEYS, KERNEL, MATCH_KEYS, SCHEMA, SOURCES, TEXT_KEYS, VERDICTS, Choice, Evidence, Match, Policy, Range,
    Span, Table,
)
from megamoe_cli.tuning.yaml_source import Fields, Located, Problem, parse, read


def load(path: Path, problems: list[Problem]) -> Table | None:
    """Decodes a file. None when it is so broken that there is no table; UsageError (exit 2) when it is no YAML."""
    return decode(read(path), path, problems)


def decode(text: str, path: Path | None, problems: list[Problem]) -> Table | None:
    """The table in ``text``; every fault of form goes to ``problems``. A wrong schema version is the only fault named
    then, since nothing else can be judged by it."""
    root = parse(text, path or "table", problems)
    if not isinstance(root.value, dict):
        problems.append(Problem(root.line, "wrong-type", "a table must be a mapping"))
        return None
    version = root.value.get("schema")
    if version is None or version.value != SCHEMA:
        line = (root.keys or {}).get("schema", root.line)
        said = "there is no schema version" if version is None else f"schema is {version.plain()!r}"
        problems.append(Problem(line, "schema-version", f"{said}; this program reads {SCHEMA!r}"))
        return None
    before = len(problems)
    with Fields(root, "the table", problems) as top:
        top.node("schema")
        lines = dict(root.keys or {})
        digest = _kernel(top, problems)
        provenance = _provenance(top, problems)
        match = _match(top, problems, str(provenance.get("source", "")))
        configs = _configs(top, problems, lines)
        policies = _policies(top, problems)
        source = str(provenance.get("source", ""))
        ranges = tuple(_settled(_range(item, problems), configs, source, problems) for item in top.items("ranges"))
        evidence = tuple(_evidence(item, problems) for item in top.items("evidence", required=False))
        table = Table(
            path, match, top.text("axis", choices=AXES), top.text("default"), tuple(r for r in ranges if r), configs, policies,
            tuple(e for e in evidence if e), _validation(top, problems), provenance, digest, top.text("title", required=False),
            tuple(top.take("notes", _texts, "a list of text", (), required=False)), lines)
    # What is missing or of the wrong kind has no value that could be judged further.
    return None if any(p.rule in ("missing-key", "wrong-type", "bad-value") for p in problems[before:]) else table


def _kernel(top: Fields, problems: list[Problem]) -> str:
    node = top.node("kernel")
    if node is None:
        return ""
    with Fields(node, "kernel", problems) as kernel:
        kernel.text("name", choices=(KERNEL,))
        # A baseline is a rule of thumb: it belongs to no build.
        return kernel.text("source_digest", required=False)


def _match(top: Fields, problems: list[Problem], source: str) -> Match:
    node = top.node("match")
    values: dict[str, int | str | Span] = {}
    if node is None:
        return Match(values)
    with Fields(node, "match", problems) as match:
        for key in MATCH_KEYS:
            value = match.node(key)
            if value is None:
                continue
            line = match.line_of(key)
            if value.value == ANY or (isinstance(value.value, dict) and key in INTEGER_KEYS):
                if source != "baseline":
                    problems.append(Problem(line, "wildcard", f"match: {key} must be exact; only a baseline may match several"))
                values[key] = ANY if value.value == ANY else _span(value, key, problems)
            elif key in TEXT_KEYS:
                values[key] = match.text(key, choices=TEXT_KEYS[key])
            else:
                values[key] = match.integer(key, default=0, low=1) or 0
    return Match(values)


def _span(node: Located, key: str, problems: list[Problem]) -> Span:
    with Fields(node, f"match: {key}", problems) as span:
        low = span.integer("from", default=0, low=0) or 0
        high = span.take("to", _upper, "a number or .inf", math.inf)
    if high <= low:
        problems.append(Problem(node.line, "bad-value", f"match: {key}: [{low}, {high:g}) holds nothing"))
    return Span(low, high)


def _configs(top: Fields, problems: list[Problem], lines: dict[str, int]) -> dict[str, Choice]:
    found: dict[str, Choice] = {}
    for name, line, node in top.mappings("configs"):
        lines[f"configs.{name}"] = line
        if not isinstance(node.value, dict):
            problems.append(Problem(line, "wrong-type", f"configuration {name!r} must be a mapping"))
            continue
        for key, at in (node.keys or {}).items():
            lines[f"configs.{name}.{key}"] = at
        try:
            found[name] = Choice.from_dict(node.plain())
        except UsageError as error:
            at = next((lines[f"configs.{name}.{key}"] for key in node.value if repr(key) in str(error) or str(error).startswith(key)), line)
            rule = "unknown-key" if error.rule == "config-key" else "illegal-configuration"
            problems.append(Problem(at, rule, f"configuration {name!r}: {error}"))
    return found


def _policies(top: Fields, problems: list[Problem]) -> dict[str, Policy]:
    found = {}
    for name, line, node in top.mappings("policies", required=False):
        with Fields(node, f"policy {name!r}", problems) as policy:
            enabled = policy.flag("enabled")
            reason = policy.text("reason", required=not enabled)
            found[name] = Policy(enabled, reason, line)
    return found


def _range(node: Located, problems: list[Problem]) -> Range | None:
    before = len(problems)
    with Fields(node, "a range", problems) as entry:
        start = entry.number("from", default=0.0)
        end = entry.take("to", _upper, "a number or .inf", math.inf)
        use = entry.text("use")
        ids = entry.take("evidence", _texts, "a list of evidence ids", ())
        note, otherwise = entry.text("note", required=False), entry.text("otherwise", required=False)
        if start is not None and (start < 0 or math.isinf(start)):
            entry.bad(entry.line_of("from"), "bad-value", f"a range starts at {start:g}; loads are finite and not negative")
    return None if any(p.rule != "unknown-key" for p in problems[before:]) else Range(start, end, use, tuple(ids), node.line, note, "", otherwise)


def _settled(entry: Range | None, configs: dict[str, Choice], source: str, problems: list[Problem]) -> Range | None:
    """A baseline's range whose wish the kernel does not implement yet takes what it names otherwise; nothing else may name one."""
    if entry is None or not entry.otherwise:
        return entry
    if source != "baseline":
        problems.append(Problem(entry.line, "bad-value", f"only a baseline has an otherwise; a {source} table says what was found"))
        return None
    if entry.use in configs and check_config(configs[entry.use].config).rule == "not-implemented":
        return replace(entry, use=entry.otherwise, wanted=entry.use, otherwise="")
    return entry


def _evidence(node: Located, problems: list[Problem]) -> Evidence | None:
    before = len(problems)
    with Fields(node, "an evidence row", problems) as row:
        values: dict[str, Any] = {"id": row.text("id"), "config": row.text("config"), "tokens": row.integer("tokens", 0, low=0),
                                  "routing": row.text("routing"), "line": node.line}
        for key in ("median_us", "vs_incumbent", "vs_default", "floor_us", "model_us"):
            values[key] = row.take(key, _positive, "a positive number", None, required=False)
        for key in ("ci_us", "vs_incumbent_ci"):
            values[key] = row.take(key, _pair, "two numbers, low then high", None, required=False)
        values["verdict"] = row.text("verdict", required=False, choices=VERDICTS)
        values["rounds"] = row.integer("rounds", 0, required=False, low=0)
        values["machine"], values["stage"] = row.text("machine", required=False), row.text("stage", required=False)
    return None if any(p.rule != "unknown-key" for p in problems[before:]) else Evidence(**values)


def _validation(top: Fields, problems: list[Problem]) -> dict[str, Any] | None:
    node = top.node("validation", required=False)
    if node is None:
        return None
    with Fields(node, "validation", problems) as entry:
        out: dict[str, Any] = {"holdout": entry.integer("holdout", 0, low=0), "seed": entry.integer("seed", 0, required=False)}
        for key in ("worst_slowdown", "geomean", "max_slowdown"):
            out[key] = entry.take(key, _positive, "a positive number", None, required=False)
        out["points"] = []
        for item in entry.items("points", required=False):
            with Fields(item, "a validation point", problems) as point:
                out["points"].append({"tokens": point.integer("tokens", 0), "routing": point.text("routing"), "use": point.text("use"),
                                      "slowdown": point.take("slowdown", _positive, "a positive number"),
                                      "vs_incumbent": point.take("vs_incumbent", _positive, "a positive number", None, required=False)})
    return out


_MACHINE = {"gpu": str, "gpu_uuid_hash": str, "driver": str, "cuda": str, "torch": str, "compiler": str, "sm_mhz": list,
            "throttle": list, "shared": bool, "aa_noise": float, "where": str}
_PROVENANCE = {"run": str, "created": str, "commit": str, "dirty": bool, "partial": bool, "seed": int, "strategy": str, "space": str,
               "incumbent": str, "comment": str, "min_gain": float, "tolerance": float, "cache": str, "model": str}


def _provenance(top: Fields, problems: list[Problem]) -> dict[str, Any]:
    node = top.node("provenance")
    if node is None:
        return {}
    with Fields(node, "provenance", problems) as entry:
        out: dict[str, Any] = {"source": entry.text("source", choices=SOURCES)}
        for key, kind in _PROVENANCE.items():
            if entry.node(key, required=False) is not None:
                out[key] = entry.take(key, _of(kind), kind.__name__)
        machines = []
        for item in entry.items("machines", required=False):
            with Fields(item, "a machine", problems) as machine:
                facts: dict[str, Any] = {"id": machine.text("id")}
                for key, kind in _MACHINE.items():
                    if machine.node(key, required=False) is not None:
                        facts[key] = machine.take(key, _of(kind), kind.__name__)
                machines.append(facts)
        if machines:
            out["machines"] = machines
    return out


def _of(kind: type) -> Any:
    def convert(value: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if value is not None and type(value) is not kind:
            raise TypeError
        return value

    return convert


def _upper(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TypeError
    return float(value)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    if not 0 < value < math.inf:
        raise ValueError(f"{value} is not positive and finite")
    return float(value)


def _pair(value: Any) -> tuple[float, float]:
    low, high = (_positive(v) for v in value)
    if low > high:
        raise ValueError(f"{low} is above {high}")
    return low, high


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError
    return value
