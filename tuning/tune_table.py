"""From the outcome of a run to a table: ranges on expected tokens per local expert, each with the rows it stands on."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megamoe_cli.tuning.fit import Fit
from megamoe_cli.tuning.lookup import Query
from megamoe_cli.tuning.paired import times
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import EXPECTED, Choice, Evidence, Match, Range, Table
from megamoe_cli.tuning.tuner import Outcome, Record

CACHE_STATE = "L2 as the launch before left it"


def match_of(query: Query) -> Match:
    return Match(query.values())


def file_name(query: Query) -> str:
    """One name for one match: another run on such a machine replaces the file."""
    s, m = query.shape, query.machine
    gpu = "-".join("".join(ch if ch.isalnum() else " " for ch in m.name.lower()).split()) or "gpu"
    return f"{gpu}-{m.sms}sm-h{s.hidden}-i{s.intermediate}-e{s.experts}-k{s.topk}-r{query.ranks}-{query.values()['backend']}.yaml"


def ranges_of(fitted: Fit, plan: Plan, names: Mapping[Choice, str], evidence: Mapping[Choice, Mapping[int, Sequence[str]]], default: str) -> list[Range]:
    """Half-open, from 0 to infinity. What lies outside the measured sizes is the default's, without evidence."""
    out: list[Range] = []
    smallest = min((p.tokens for s in fitted.segments for p in s.points), default=0)
    for segment in fitted.segments:
        start, end = _axis(plan, segment.start), _axis(plan, segment.end)
        if not out and smallest > 1:
            start = _axis(plan, smallest - 0.5)
            out.append(Range(0.0, start, default, (), note="below what was measured"))
        rows = evidence.get(segment.choice, {})
        ids = [row for p in segment.points for row in rows.get(p.tokens, ())]
        out.append(Range(start, end, names[segment.choice], tuple(dict.fromkeys(ids))))
    out.append(Range(out[-1].end if out else 0.0, math.inf, default, (), note="above what was measured" if out else "nothing was measured"))
    return out


def _axis(plan: Plan, tokens: float) -> float:
    """Six digits: boundaries lie half a token off every count, so rounding moves none across one."""
    return float(f"{plan.load(tokens):.6g}")


def names_of(fitted: Fit, default: Choice, others: Sequence[Choice] = ()) -> dict[Choice, str]:
    """``cN``: picked by a range. ``xN``: not picked, but measured at every size, so that tables can be compared."""
    chosen = [c for c in fitted.choices if c != default]
    beside = [c for c in others if c not in chosen and c != default]
    return {default: "default"} | {c: f"c{n}" for n, c in enumerate(chosen, 1)} | {c: f"x{n}" for n, c in enumerate(beside, 1)}


def measured_everywhere(plan: Plan, out: Outcome) -> list[Choice]:
    """Configurations with an evidence row at every searched size."""
    known: dict[Choice, set[int]] = {}
    for tokens, routing, choice in out.records:
        if routing == plan.routing:
            known.setdefault(choice, set()).add(tokens)
    for tokens in out.base_times:
        known.setdefault(plan.incumbent(tokens), set()).add(tokens)
    return sorted((c for c, sizes in known.items() if out.searched and out.searched <= sizes), key=lambda c: c.name())


def measured_table(plan: Plan, out: Outcome, machines: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> Table:
    """``machines``: facts of the GPUs that measured. ``source``: commit and dirty of the sources."""
    names = names_of(out.fitted, plan.default, measured_everywhere(plan, out))
    rows: list[Evidence] = []
    ids: dict[Choice, dict[int, list[str]]] = {}   # a size may have rows of two routings
    for tokens in sorted(out.noise):
        for choice, name in names.items():
            row = _row(plan, out, tokens, choice, name, f"e{len(rows) + 1}")
            if row is not None:
                rows.append(row)
                ids.setdefault(choice, {}).setdefault(tokens, []).append(row.id)
    for held in out.promoted:
        for choice, pairs in held.pairs.items():
            if choice in names and pairs:
                row = _held_row(held, plan, choice, names[choice], f"e{len(rows) + 1}")
                rows.append(row)
                ids.setdefault(choice, {}).setdefault(held.tokens, []).append(row.id)
    held_out = out.held_out
    validation: dict[str, Any] | None = None
    if held_out is not None and held_out.points:
        validation = {
            "holdout": len(held_out.points), "worst_slowdown": _rounded(held_out.worst), "geomean": _rounded(held_out.geomean),
            "max_slowdown": _rounded(1 + plan.settings.max_slowdown), "seed": plan.seed,
            "points": [{"tokens": h.tokens, "routing": h.routing, "use": names[h.pick], "slowdown": _rounded(h.slowdown),
                        "vs_incumbent": _rounded(h.vs_incumbent)} for h in sorted(held_out.points, key=lambda h: h.tokens)]}
    partial = out.stopped is not None or held_out is None or not held_out.complete
    provenance = {
        "source": "measured", "run": plan.run, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{key: source[key] for key in ("commit", "dirty") if key in source}, "partial": partial, "seed": plan.seed,
        "strategy": plan.strategy, "space": plan.space, "incumbent": plan.incumbent_from, "min_gain": plan.settings.min_gain,
        "tolerance": plan.settings.tolerance, "cache": CACHE_STATE, "machines": [dict(m) for m in machines]}
    return Table(None, match_of(plan.query), EXPECTED, "default", tuple(ranges_of(out.fitted, plan, names, ids, "default")),
                 {name: choice for choice, name in names.items()}, evidence=tuple(rows), validation=validation, provenance=provenance,
                 digest=plan.digest, notes=tuple(dict.fromkeys(out.notes)))


def _row(plan: Plan, out: Outcome, tokens: int, choice: Choice, name: str, row_id: str) -> Evidence | None:
    record = out.records.get((tokens, plan.routing, choice))
    base = out.records.get((tokens, plan.routing, plan.default))
    default_ratio = 1.0 if plan.default == plan.incumbent(tokens) else base.found.median if base else None
    if choice == plan.incumbent(tokens):
        pairs = out.base_times[tokens]
        return _evidence(row_id, name, tokens, plan.routing, pairs, 1, 1.0, None, default_ratio, "same", "noise", "", None)
    if record is None:
        return None
    last = record.trials[-1]
    return _evidence(row_id, name, tokens, plan.routing, record.pairs, 0, record.found.median, (record.found.low, record.found.high),
                     default_ratio, record.verdict, _stage(record), last.machine, last.floor_us or None)


def _stage(record: Record) -> str:
    return record.stage.removesuffix("-more")


def _held_row(held: Any, plan: Plan, choice: Choice, name: str, row_id: str) -> Evidence:
    from megamoe_cli.tuning.paired import ratio, verdict

    own = choice == plan.incumbent(held.tokens)
    found = ratio(held.pairs[choice])
    base = held.ratios.get(plan.default)
    return _evidence(row_id, name, held.tokens, held.routing, held.pairs[choice], 1 if own else 0, 1.0 if own else found.median,
                     None if own else (found.low, found.high), base.median if base else None,
                     "same" if own else verdict(found, 0.0, plan.settings.min_gain), "validate", "", None)


def _evidence(row_id: str, name: str, tokens: int, routing: str, pairs: Sequence[Sequence[float]], side: int, ratio: float,
              interval: tuple[float, float] | None, default_ratio: float | None, verdict: str, stage: str, machine: str,
              floor: float | None) -> Evidence:
    median, low, high = times(pairs, side)
    return Evidence(row_id, name, tokens, routing, _rounded(median), (_rounded(low), _rounded(high)), _rounded(ratio),
                    tuple(_rounded(v) for v in interval) if interval else None,  # type: ignore[arg-type]
                    _rounded(ratio / default_ratio) if default_ratio else None, verdict, len(pairs), machine, stage,
                    _rounded(floor) if floor else None)


def _rounded(value: float) -> float:
    return float(f"{min(value, 1e9):.5g}")


def static_table(plan: Plan, fitted: Fit, model: Mapping[tuple[int, Choice], float], source: Mapping[str, Any], compiler: str) -> Table:
    """The model's ranking. Every number of it is a model's, and it answers only when it is named."""
    names = names_of(fitted, plan.default)
    rows: list[Evidence] = []
    ids: dict[Choice, dict[int, list[str]]] = {}
    for tokens in plan.sizes:
        for choice, name in names.items():
            rows.append(Evidence(f"e{len(rows) + 1}", name, tokens, plan.routing, model_us=_rounded(model[tokens, choice]), stage="model"))
            ids.setdefault(choice, {})[tokens] = [rows[-1].id]
    provenance = {
        "source": "static", "run": plan.run, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **{key: source[key] for key in ("commit", "dirty") if key in source}, "space": plan.space, "tolerance": plan.settings.tolerance,
        "model": "tiles, bytes and measured ceilings of an H200; nothing was run",
        "machines": [{"id": "m1", "gpu": f"none (assumed {plan.machine.sms} SMs)", "compiler": compiler}]}
    return Table(None, match_of(plan.query), EXPECTED, "default", tuple(ranges_of(fitted, plan, names, ids, "default")),
                 {name: choice for choice, name in names.items()}, evidence=tuple(rows), provenance=provenance, digest=plan.digest)
