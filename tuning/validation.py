"""Sizes that were not tuned: range edges and one beside them, geometric middles, other seeds and another routing.

At each the pick runs beside everything else the table knows. Where it loses more than the limit, the size becomes a
point of the fit (the range splits there, or yields), and what is new is held out and measured again.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megamoe_cli.tuning.fit import Fit, Point, boundary
from megamoe_cli.tuning.paired import ONE, Ratio, ratio, verdict
from megamoe_cli.tuning.schema import Choice

if TYPE_CHECKING:
    from megamoe_cli.tuning.tuner import Tuner

REPAIRS = 8  # enough to find a crossover between neighbouring powers of two to the token
MOST = 16  # held-out sizes, edges first


@dataclass
class Held:
    """One held-out size. ``slowdown``: the pick's time over the best of what the table knows there."""

    tokens: int
    routing: str
    pick: Choice
    slowdown: float
    vs_incumbent: float
    ratios: dict[Choice, Ratio] = field(default_factory=dict)
    pairs: dict[Choice, list[list[float]]] = field(default_factory=dict)


@dataclass
class HeldOut:
    """The result on held-out sizes that stayed held out. ``complete``: every planned one was measured."""

    points: list[Held] = field(default_factory=list)
    repaired: list[int] = field(default_factory=list)
    complete: bool = True

    @property
    def worst(self) -> float:
        return max((p.slowdown for p in self.points), default=1.0)

    @property
    def geomean(self) -> float:
        """Of time over the incumbent's."""
        return math.exp(statistics.fmean(math.log(p.vs_incumbent) for p in self.points)) if self.points else 1.0


def held_out_sizes(fitted: Fit, tuned: list[int], asked: list[int]) -> list[int]:
    """What to hold out: the counts on both sides of every boundary, then the middles between tuned sizes, largest gaps
    first. ``asked`` replaces the choice. None of them was tuned."""
    if asked:
        return [t for t in asked if t not in tuned]
    sizes = sorted(tuned)
    edges = [t for low, high in fitted.edges() for t in (low, high)]
    middles = [math.floor(boundary(a, b)) for a, b in sorted(zip(sizes, sizes[1:]), key=lambda gap: gap[0] / gap[1])]
    return [t for t in dict.fromkeys([*edges, *middles]) if t not in sizes and t > 0][:MOST]


def validate(tuner: Tuner) -> HeldOut:
    """Measures, repairs, measures again. Stop passes through: what was held out so far is in ``tuner.out.held_out``."""
    settings = tuner.plan.settings
    extra: list[Point] = []
    result = HeldOut()
    if not tuner.out.searched:
        return result
    for turn in range(REPAIRS + 1):
        tuned = sorted({*tuner.out.searched, *(p.tokens for p in extra)})
        sizes = held_out_sizes(tuner.out.fitted, tuned, tuner.plan.holdout)
        tuner.on_stage(f"validation on {len(sizes)} held-out sizes")
        result = HeldOut(repaired=sorted(p.tokens for p in extra), complete=False)
        tuner.out.held_out = result
        for tokens in sizes:
            held = _measure(tuner, tokens, _routing(tuner, tokens))
            if held is not None:
                result.points.append(held)
        result.complete = True
        bad = [held for held in result.points if held.slowdown > 1 + settings.max_slowdown]
        if not bad or turn == REPAIRS:
            return result
        tuner.out.notes += [f"{h.tokens} tokens: the pick {h.pick.name()} was {100 * (h.slowdown - 1):.1f}% slower than the best there; "
                            f"that size became part of the fit" for h in bad]
        extra += [_point(tuner, held) for held in bad]
        tuner.out.promoted += bad
        tuner.refit(extra)
    return result


def _routing(tuner: Tuner, tokens: int) -> str:
    """Odd sizes with another routing than the one that was tuned on: of the two beside a boundary one each. It hangs on nothing but the
    size: a crossover can lie elsewhere for each routing (flash at 64 tokens: 2 % and 6.5 % from the best), so two runs that
    drew different ones would set their ranges apart."""
    other = "powerlaw" if tuner.plan.routing == "uniform" else "uniform"
    return other if tokens % 2 else tuner.plan.routing


def _measure(tuner: Tuner, tokens: int, routing: str) -> Held | None:
    """Everything the table may pick beside the incumbent, on this size. None when it does not fit on the device."""
    own, pick = tuner.plan.incumbent(tokens), tuner.out.fitted.choice_at(tokens)
    assert pick is not None, "ranges cover every size between the smallest and the largest"
    rounds = tuner.plan.settings.final_rounds
    ratios: dict[Choice, Ratio] = {own: ONE}
    kept: dict[Choice, list[list[float]]] = {}
    for choice in dict.fromkeys([pick, *tuner.out.fitted.choices, tuner.plan.default]):
        if choice == own or choice in tuner.measurer.failed:
            continue
        trials = [tuner.measurer.duel("validate", tokens, choice, own, rounds, routing=routing)]
        if trials[0].status == "unfit":
            return None
        if not trials[0].ok:
            continue
        found = ratio(trials[0].pairs)
        best = min(r.median for r in ratios.values())
        if choice == pick and found.median > best * (1 + tuner.plan.settings.max_slowdown / 2):
            # Near the limit: noise must not split a range.
            trials.append(tuner.measurer.duel("validate-more", tokens, choice, own, 2 * rounds, routing=routing))
        kept[choice] = [pair for trial in trials if trial.ok for pair in trial.pairs]
        ratios[choice] = ratio(kept[choice])
        kept.setdefault(own, kept[choice])  # its own times are the other side's
    if pick not in ratios:
        tuner.out.notes.append(f"{tokens} tokens: the pick {pick.name()} failed on a held-out size")
        return Held(tokens, routing, pick, math.inf, math.inf, ratios, kept)
    mine = ratios[pick].median
    return Held(tokens, routing, pick, mine / min(r.median for r in ratios.values()), mine, ratios, kept)


def _point(tuner: Tuner, held: Held) -> Point:
    """A held-out size as a point of the fit. Its numbers are from processes and inputs that no choice was made on, so what
    beat the pick by more than the limit is taken as proven."""
    settings, noise = tuner.plan.settings, tuner.out.noise_level
    own = tuner.plan.incumbent(held.tokens)
    rows = {c: r for c, r in held.ratios.items() if c != own}
    limit = held.vs_incumbent / (1 + settings.max_slowdown)
    verdicts = {c: "better" if r.median < min(limit, 1.0) else verdict(r, noise, settings.min_gain) for c, r in rows.items()}
    return Point(held.tokens, own, rows, verdicts, set(tuner.measurer.failed), held.routing)
