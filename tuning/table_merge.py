"""Several machines' tables in one, and what differs between two: by evidence, never by order of arguments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megamoe_cli.config import LAUNCH_FIELDS, KernelConfig
from megamoe_cli.errors import UsageError
from megamoe_cli.tuning.schema import Choice, Evidence, Range, Table

TOLERANCE = 0.02  # configurations this close to the best of a machine count as equally good


def edges(tables: Sequence[Table]) -> list[tuple[float, float]]:
    """The ranges that all boundaries of all tables cut [0, inf) into."""
    points = sorted({0.0, math.inf} | {limit for t in tables for r in t.ranges for limit in (r.start, r.end)})
    return list(zip(points, points[1:]))


def pick_at(table: Table, value: float) -> Choice:
    entry = table.range_at(value)
    return table.configs[entry.use if entry else table.default]


def slowdowns(table: Table, choice: Choice, low: float, high: float) -> dict[int, float]:
    """Tokens -> how much slower ``choice`` was than the best configuration measured there (with the routing where it was most), for
    sizes in [low, high). By the paired ratios to the machine's incumbent: times of different moments are not compared."""
    ranks, topk, experts = _scale(table)
    names = [name for name, own in table.configs.items() if own == choice]
    by_size: dict[tuple[int, str], list[Evidence]] = {}
    for row in table.evidence:
        if row.vs_incumbent is not None and low <= table.axis_value(row.tokens, ranks, topk, experts) < high:
            by_size.setdefault((row.tokens, row.routing), []).append(row)
    out: dict[int, float] = {}
    for (tokens, _), rows in by_size.items():
        mine = [row.vs_incumbent for row in rows if row.config in names]
        if mine:
            slowdown = min(mine) / min(row.vs_incumbent for row in rows) - 1  # type: ignore[operator]
            out[tokens] = max(slowdown, out.get(tokens, slowdown))
    return out


def merge(tables: Sequence[Table], tolerance: float = TOLERANCE) -> Table:
    """One table from measured tables of the same match, axis and kernel. Each machine's evidence is kept. Where machines
    pick differently, a configuration within ``tolerance`` of the best on all of them is taken, else the default; both
    are listed in ``notes``. UsageError when the tables are not about the same thing."""
    first = tables[0]
    for other in tables[1:]:
        for what, mine, theirs in (("match", dict(first.match.values), dict(other.match.values)), ("axis", first.axis, other.axis),
                                   ("kernel sources", first.digest, other.digest)):
            if mine != theirs:
                raise UsageError(f"{other.path} cannot be merged with {first.path}: their {what} differ{_difference(mine, theirs)}",
                                 rule="merge-match")
    for table in tables:
        if table.source != "measured":
            raise UsageError(f"{table.path} is a {table.source} table; only measured tables can be merged", rule="merge-source")
    parts = [_renamed(table, number, tables) for number, table in enumerate(tables, 1)]
    configs: dict[str, Choice] = {}
    for part in parts:
        configs |= part.configs
    defaults = [part.configs[part.default] for part in parts]
    default = _name_of(configs, max(defaults, key=defaults.count))
    notes = [note for part in parts for note in part.notes]
    if len(set(defaults)) > 1:
        notes.append(f"machines have different defaults; {configs[default].name()} is kept")
    ranges: list[Range] = []
    for low, high in edges(parts):
        choice, note = _agree(parts, low, high, configs[default], tolerance)
        if note:
            notes.append(f"[{low:g}, {high:g}): {note}")
        use = _name_of(configs, choice)
        support = [row.id for part in parts for row in _rows_in(part, use, low, high)]
        if not support and use != default:
            # Boundaries of the other machine cut off a piece between two sizes: the whole range's evidence speaks for it.
            support = [name for part in parts for entry in part.ranges if entry.use == use and entry.start <= low < entry.end for name in entry.evidence]
        ranges.append(Range(low, high, use, tuple(dict.fromkeys(support))))
    merged = joined(ranges)
    used = {r.use for r in merged} | {default} | {row.config for part in parts for row in part.evidence}
    machines = [m for part in parts for m in part.provenance.get("machines", [])]
    provenance = {**first.provenance, "machines": machines, "partial": any(t.partial for t in tables),
                  "dirty": any(t.provenance.get("dirty", False) for t in tables),
                  "run": "+".join(str(t.provenance.get("run", "?")) for t in tables)}
    return replace(first, path=None, ranges=tuple(merged), configs={n: c for n, c in configs.items() if n in used}, default=default,
                   evidence=tuple(row for part in parts for row in part.evidence), provenance=provenance, notes=tuple(dict.fromkeys(notes)),
                   validation=_worst([t.validation for t in tables]))


def _difference(mine: Any, theirs: Any) -> str:
    if not isinstance(mine, dict):
        return f" ({mine} and {theirs})"
    keys = [key for key in mine if mine[key] != theirs.get(key)]
    return f" in {keys[0]} ({mine[keys[0]]} and {theirs.get(keys[0])})" if keys else ""


def _renamed(table: Table, number: int, tables: Sequence[Table]) -> Table:
    """Names that cannot collide: configurations by what they are, evidence and machines by the table they come from."""
    catalogue = list(dict.fromkeys(choice for t in tables for choice in t.configs.values()))
    names = {old: f"c{catalogue.index(choice) + 1}" for old, choice in table.configs.items()}
    machines = {str(m["id"]): f"t{number}{m['id']}" for m in table.provenance.get("machines", [])}
    return replace(
        table, default=names[table.default], configs={names[old]: choice for old, choice in table.configs.items()},
        ranges=tuple(replace(r, use=names[r.use], evidence=tuple(f"t{number}{e}" for e in r.evidence)) for r in table.ranges),
        evidence=tuple(replace(row, id=f"t{number}{row.id}", config=names[row.config], machine=machines.get(row.machine, row.machine))
                       for row in table.evidence),
        provenance={**table.provenance, "machines": [{**m, "id": machines[str(m["id"])]} for m in table.provenance.get("machines", [])]})


def _scale(table: Table) -> tuple[int, int, int]:
    """(ranks, topk, experts) as far as the match fixes them."""
    ranks, topk, experts = (table.match.get(key) or 1 for key in ("ranks", "topk", "experts"))
    return ranks, topk, experts


def _name_of(configs: dict[str, Choice], choice: Choice) -> str:
    return next(name for name, own in configs.items() if own == choice)


def _rows_in(table: Table, use: str, low: float, high: float) -> list[Evidence]:
    ranks, topk, experts = _scale(table)
    return [row for row in table.measured(use) if low <= table.axis_value(row.tokens, ranks, topk, experts) < high]


def _agree(parts: Sequence[Table], low: float, high: float, default: Choice, tolerance: float) -> tuple[Choice, str]:
    picks = list(dict.fromkeys(pick_at(part, low) for part in parts))
    if len(picks) == 1:
        return picks[0], ""
    fits: list[tuple[float, str, Choice]] = []
    for choice in picks:
        found = [slowdowns(part, choice, low, high) for part in parts]
        worst = max((value for machine in found for value in machine.values()), default=math.inf)
        if all(found) and worst <= tolerance:
            fits.append((worst, choice.name(), choice))
    said = " and ".join(choice.name() for choice in picks)
    if fits:
        worst, name, choice = min(fits, key=lambda entry: entry[:2])
        return choice, f"machines pick {said}; {name} is within {100 * worst:.1f}% of the best on all of them"
    return default, f"machines pick {said}, and neither is within {100 * tolerance:g}% on all of them: the default"


def joined(ranges: Sequence[Range]) -> list[Range]:
    """Adjacent ranges with the same pick become one, unless only one of them has evidence."""
    out: list[Range] = []
    for entry in ranges:
        last = out[-1] if out else None
        if last and last.use == entry.use and bool(last.evidence) == bool(entry.evidence) and last.note == entry.note:
            out[-1] = replace(last, end=entry.end, evidence=tuple(dict.fromkeys((*last.evidence, *entry.evidence))))
        else:
            out.append(entry)
    return out


def _worst(found: Sequence[Any]) -> dict[str, Any] | None:
    present = [entry for entry in found if entry]
    if not present:
        return None
    worst = max(present, key=lambda entry: entry.get("worst_slowdown") or 0)
    return {**worst, "holdout": sum(entry["holdout"] for entry in present), "points": [p for entry in present for p in entry["points"]]}


# -- what differs ----------------------------------------------------------------------------------


CROSSOVER = 0.05


@dataclass(frozen=True)
class Difference:
    """[low, high): what each table picks. ``verdict``: ``same`` when the evidence has the two within what the runs call
    equally good, ``differs`` when it does not, ``unknown`` when there is none. ``cost``: how far apart they are, as a fraction, at the
    worst size."""

    low: float
    high: float
    first: Choice
    second: Choice
    verdict: str
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        return {"from": self.low, "to": None if math.isinf(self.high) else self.high, "a": self.first.name(), "b": self.second.name(),
                "verdict": self.verdict, "cost": self.cost}


def equally_good(a: Table, b: Table) -> float:
    """How far apart two picks may be that both runs let pass: the tolerance they fitted with or the slowdown they allowed on held-out
    sizes, and the noise that each showed against itself."""
    fitted = max(float(t.provenance.get("tolerance", TOLERANCE)) for t in (a, b))
    allowed = max(float((t.validation or {}).get("max_slowdown") or 1.0) - 1 for t in (a, b))
    return max(fitted, allowed) + sum(max((float(m.get("aa_noise", 0.0)) for m in t.provenance.get("machines", [])), default=0.0) for t in (a, b))


def diff(a: Table, b: Table) -> list[Difference]:
    """Where two tables of one axis pick differently. Stretches that hold no token count are none. Where two picks cross each run
    may be off by what it lets pass, on different sides: there they may be twice as far apart."""
    tolerance = equally_good(a, b)
    if a.axis != b.axis:
        raise UsageError(f"{a.path} is by {a.axis}, {b.path} by {b.axis}; their ranges cannot be compared", rule="diff-axis")
    found: list[Difference] = []
    for low, high in edges((a, b)):
        first, second = pick_at(a, low), pick_at(b, low)
        if first == second or not _holds_a_count(a, b, low, high):
            continue
        last = found[-1] if found else None
        if last and (last.first, last.second, last.high) == (first, second, low):
            low = last.low
            found.pop()
        cost = _cost(a, b, first, second, low, high)
        allowed = tolerance * (2 if _one_crossover(a, b, low, high) else 1)
        verdict = "unknown" if cost is None else "same" if cost <= allowed else "differs"
        found.append(Difference(low, high, first, second, verdict, cost))
    return found


def _one_crossover(a: Table, b: Table, low: float, high: float) -> bool:
    """Is [low, high) what lies between two tables' boundaries of the same two kernels, and less than ``CROSSOVER`` of its load?"""
    if not 0 < low < high <= low * (1 + CROSSOVER):
        return False
    below = math.nextafter(low, 0.0)
    kernels = [[_kernel_alone(pick_at(table, at)) for at in (below, low, high)] for table in (a, b)]
    return any(mine[1] == theirs[0] and theirs[1] == mine[2] for mine, theirs in (kernels, kernels[::-1]))


def _holds_a_count(a: Table, b: Table, low: float, high: float) -> bool:
    """Is there a whole number of tokens whose load lies in [low, high)? True where the tables match different things."""
    scale = a.axis_value(1, *_scale(a))
    return a.match != b.match or math.ceil(low / scale - 1e-9) * scale < high


def _cost(a: Table, b: Table, first: Choice, second: Choice, low: float, high: float) -> float | None:
    """How far apart the two picks are in [low, high), as a fraction, at the worst size: by the ratios of the tables which
    measured both; where none did, by both picks' ratios to the built-in default, which every run measures. Where
    no measured size lies inside, the better of the two sizes around it: two tables may set one boundary a little apart."""
    inside = _cost_at(a, b, first, second, low, high)
    if inside is not None or math.isinf(high):
        return inside
    loads = sorted({t.axis_value(row.tokens, *_scale(t)) for t in (a, b) for row in t.evidence})
    around = [max((v for v in loads if v < low), default=None), min((v for v in loads if v >= high), default=None)]
    costs = [_cost_at(a, b, first, second, v, math.nextafter(v, math.inf)) for v in around if v is not None]
    return min((cost for cost in costs if cost is not None), default=None)


def _cost_at(a: Table, b: Table, first: Choice, second: Choice, low: float, high: float) -> float | None:
    ratios: dict[tuple[int, str], list[float]] = {}
    for table in (a, b):
        one, two = (_times(table, choice, low, high, "vs_incumbent") for choice in (first, second))
        for size in one.keys() & two.keys():
            ratios.setdefault(size, []).append(one[size] / two[size])
    if not ratios:
        mine, theirs = _times(a, first, low, high, "vs_default"), _times(b, second, low, high, "vs_default")
        ratios = {size: [mine[size] / theirs[size]] for size in mine.keys() & theirs.keys()}
    return max((max(value, 1 / value) - 1 for found in ratios.values() for value in found), default=None)


def _times(table: Table, choice: Choice, low: float, high: float, over: str) -> dict[tuple[int, str], float]:
    """(tokens, routing) -> the row's ratio (``vs_incumbent`` or ``vs_default``), for sizes in [low, high) where it was measured."""
    names = [name for name, own in table.configs.items() if own == choice]
    return {(row.tokens, row.routing): getattr(row, over) for name in names for row in _rows_in(table, name, low, high) if getattr(row, over) is not None}


def model_error(a: Table, b: Table) -> dict[str, Any] | None:
    """How far a static table's model is from measured times of the same configurations and sizes; None when the two are
    not a static and a measured table. Errors are model/measured - 1."""
    static, measured = (a, b) if a.source == "static" else (b, a)
    if (static.source, measured.source) != ("static", "measured"):
        return None
    known = {(_same_kernel(measured.configs[row.config]), row.tokens, row.routing): row.median_us for row in measured.evidence if row.config in measured.configs}
    ratios = []
    for row in static.evidence:
        key = (_same_kernel(static.configs[row.config]), row.tokens, row.routing)
        if row.model_us and known.get(key):
            ratios.append(row.model_us / known[key] - 1)  # type: ignore[operator]
    if not ratios:
        return {"points": 0}
    return {"points": len(ratios), "median": statistics.median(ratios), "worst": max(ratios, key=abs),
            "median_abs": statistics.median(abs(r) for r in ratios)}


def _same_kernel(choice: Choice) -> Choice:
    """Without what a plan table fills in, so that a resolved configuration equals the one it came from."""
    return replace(choice, config=replace(choice.config, stages=0, regs_dispatch=0, regs_tma=0, regs_math=0))


def _kernel_alone(choice: Choice) -> KernelConfig:
    """Without what a launch is told."""
    return replace(_same_kernel(choice).config, **{name: getattr(KernelConfig(), name) for name in LAUNCH_FIELDS})
