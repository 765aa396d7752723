"""From measured sizes to ranges: the fewest distinct configurations within a tolerance of the best of every size.

At each size a configuration is *allowed* when it is within the tolerance of the best proven time there (the incumbent's,
or that of one whose gain stands clear of the noise). Ties go to the incumbent, then to fewer registers. Boundaries lie
at the geometric middle between two sizes; a range has two sizes where that costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from megamoe_cli.tuning.paired import ONE, Ratio
from megamoe_cli.tuning.schema import Choice

EXACT_CANDIDATES = 24  # up to so many the smallest cover is searched exactly, above that greedily


@dataclass(frozen=True)
class Point:
    """One size: ratio and verdict of each configuration against ``incumbent`` (whose ratio is 1). ``banned`` ones were not
    confirmed here, or are disqualified."""

    tokens: int
    incumbent: Choice
    ratios: Mapping[Choice, Ratio]
    verdicts: Mapping[Choice, str]
    banned: Collection[Choice] = ()
    routing: str = ""

    def ratio(self, choice: Choice) -> Ratio | None:
        return ONE if choice == self.incumbent else self.ratios.get(choice)

    def best(self) -> float:
        """The best proven ratio: 1, or that of the fastest configuration that is better beyond the noise."""
        proven = [r.median for c, r in self.ratios.items() if c not in self.banned and self.verdicts.get(c) == "better"]
        return min([1.0, *proven])

    def loss(self, choice: Choice) -> float:
        """How much slower than the best proven; infinite when it was not measured here or may not be used."""
        found = self.ratio(choice)
        if found is None or choice in self.banned:
            return math.inf
        return max(0.0, found.median / self.best() - 1)

    def allowed(self, choice: Choice, tolerance: float) -> bool:
        """The incumbent, or what is proven better or proven the same: an unclear one takes nobody's place."""
        return self.loss(choice) <= tolerance and (choice == self.incumbent or self.verdicts.get(choice) in ("better", "same"))


@dataclass(frozen=True)
class Segment:
    """Sizes ``points`` share ``choice``; it holds for tokens in [start, end), ``start`` counted in half tokens so that no
    token count lies on a boundary."""

    choice: Choice
    points: tuple[Point, ...]
    start: float
    end: float


@dataclass
class Fit:
    segments: list[Segment] = field(default_factory=list)

    def choice_at(self, tokens: float) -> Choice | None:
        return next((s.choice for s in self.segments if s.start <= tokens < s.end), None)

    @property
    def choices(self) -> list[Choice]:
        return list(dict.fromkeys(segment.choice for segment in self.segments))

    def edges(self) -> list[tuple[int, int]]:
        """(last token count below, first above) of every inner boundary."""
        return [(math.floor(s.start), math.floor(s.start) + 1) for s in self.segments[1:]]


def fit(points: Sequence[Point], tolerance: float, registers: Callable[[Choice], int] = lambda choice: 0) -> Fit:
    """The ranges of ``points`` (several of one size: the choice must do for all). Every size gets a configuration, since
    its incumbent is always allowed."""
    sizes: dict[int, list[Point]] = {}
    for point in points:
        sizes.setdefault(point.tokens, []).append(point)
    groups = [tuple(sizes[tokens]) for tokens in sorted(sizes)]
    if not groups:
        return Fit()
    # What is nowhere proven better and nowhere the incumbent takes nobody's place, also not to save a configuration.
    worthy = {p.incumbent for p in points} | {c for p in points for c, said in p.verdicts.items() if said == "better" and c not in p.banned}
    allowed = [_allowed(group, tolerance, worthy) for group in groups]
    chosen = _cover(groups, allowed, registers)
    picks = _segments(groups, allowed, chosen, registers)
    return Fit(_joined(groups, picks))


def _allowed(group: Sequence[Point], tolerance: float, worthy: Collection[Choice]) -> list[Choice]:
    every = [c for c in dict.fromkeys([c for p in group for c in (p.incumbent, *p.ratios)]) if c in worthy]
    good = [c for c in every if all(p.allowed(c, tolerance) for p in group)]
    if good:
        return good
    # Routings of one size disagree: what loses least in the worst of them.
    ranked = sorted(every, key=lambda c: (max(p.loss(c) for p in group), c.name()))
    return ranked[:1]


def _cost(choice: Choice, group: Sequence[Point]) -> tuple[int, float]:
    """(uses that no proof stands behind, loss): what a tie is decided by after the number of configurations."""
    unproven = sum(choice != p.incumbent and p.verdicts.get(choice) != "better" for p in group)
    return unproven, max(p.loss(choice) for p in group)


def _cover(groups: Sequence[Sequence[Point]], allowed: Sequence[Sequence[Choice]], registers: Callable[[Choice], int]) -> list[Choice]:
    """The smallest set of configurations with an allowed one at every size. Ties: fewest uses without proof (so the
    incumbents'), least loss, fewest registers."""
    pool = list(dict.fromkeys(c for options in allowed for c in options))

    def total(subset: Sequence[Choice]) -> tuple:
        unproven, loss = 0, 0.0
        for group, options in zip(groups, allowed):
            best = min(_cost(c, group) for c in subset if c in options)
            unproven, loss = unproven + best[0], loss + best[1]
        # Losses are compared in steps of 0.1 %: finer differences are noise, and registers decide.
        return unproven, round(1000 * loss / len(groups)), sum(registers(c) for c in subset), sorted(c.name() for c in subset)

    if len(pool) <= EXACT_CANDIDATES:
        for count in range(1, min(4, len(pool)) + 1):
            fits = [s for s in itertools.combinations(pool, count) if all(any(c in options for c in s) for options in allowed)]
            if fits:
                return list(min(fits, key=total))
    left, taken = list(range(len(groups))), []
    while left:
        best = max(pool, key=lambda c: (sum(c in allowed[i] for i in left), -registers(c), c.name()))
        taken.append(best)
        left = [i for i in left if best not in allowed[i]]
    return taken


def _segments(groups: Sequence[Sequence[Point]], allowed: Sequence[Sequence[Choice]], chosen: Sequence[Choice],
              registers: Callable[[Choice], int]) -> list[Choice]:
    """One of ``chosen`` for each size: the fewest changes along the sizes, then the fewest ranges of a single size, then
    proof, loss and registers. Dynamic programme over (configuration, is this range one size long so far)."""
    State = tuple[tuple, list[Choice]]
    table: dict[tuple[Choice, bool], State] = {}
    for position, (group, options) in enumerate(zip(groups, allowed)):
        grown: dict[tuple[Choice, bool], State] = {}
        for choice in (c for c in chosen if c in options):
            unproven, loss = _cost(choice, group)
            own = (0, 0, unproven, loss, registers(choice), choice.name())
            if position == 0:
                grown[choice, True] = (own, [choice])
                continue
            for (before, single), (cost, path) in table.items():
                change = before != choice
                added = (cost[0] + change, cost[1] + (change and single), cost[2] + unproven, cost[3] + loss, cost[4] + own[4], cost[5] + own[5])
                state = (choice, change)
                if state not in grown or added < grown[state][0]:
                    grown[state] = (added, [*path, choice])
        table = grown
    # A last range of one size counts as single too.
    return min(table.items(), key=lambda item: ((item[1][0][0], item[1][0][1] + item[0][1], *item[1][0][2:])))[1][1]


def _joined(groups: Sequence[Sequence[Point]], picks: Sequence[Choice]) -> list[Segment]:
    out: list[Segment] = []
    for position, (group, choice) in enumerate(zip(groups, picks)):
        tokens = group[0].tokens
        end = boundary(tokens, groups[position + 1][0].tokens) if position + 1 < len(groups) else tokens + 0.5
        if out and out[-1].choice == choice:
            out[-1] = Segment(choice, (*out[-1].points, *group), out[-1].start, end)
        else:
            out.append(Segment(choice, tuple(group), out[-1].end if out else 0.0, end))
    return out


def boundary(low: int, high: int) -> float:
    """Between two sizes, at their geometric middle, half a token off every count: 8 and 16 give 11.5."""
    return min(max(math.floor(math.sqrt(max(low, 0.5) * high)), low), high - 1) + 0.5
