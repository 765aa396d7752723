"""The pipeline of a tuning run: noise, screening, finals, cross measurements, fit, confirmation, validation.

Everything is decided from trials in the journal, so replaying them repeats the decisions: a run may end anywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from megamoe_cli.config import KernelConfig
from megamoe_cli.tuning.fit import Fit, Point, fit
from megamoe_cli.tuning.journal import Trial
from megamoe_cli.tuning.measurer import IncumbentFailed, Measurer, Stop
from megamoe_cli.tuning.paired import Ratio, ratio, verdict
from megamoe_cli.tuning.plan import Plan, visiting_order
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.search import neighbours, search
from megamoe_cli.tuning.validation import Held, HeldOut, validate

SCREEN_SHARE = 0.5  # of a size's time, for screening; the rest for its finals and the cross measurements
CROSS_LIMIT = 8  # configurations that are measured at every size, beside default and incumbents
CONFIRM_ROUNDS = 4  # fits in a row that may still name something unconfirmed
SEARCH_SHARE = 0.72  # of the budget; the rest is for confirmation and validation


@dataclass
class Record:
    """What is known of one configuration at one size and routing: the pairs that count, and what they say."""

    choice: Choice
    tokens: int
    routing: str
    pairs: list[list[float]]
    found: Ratio
    verdict: str
    stage: str
    trials: list[Trial] = field(default_factory=list)


@dataclass
class Outcome:
    """``fitted``: the ranges. ``records``: by (tokens, routing, choice). ``noise``: A/A by size. ``stopped``: why the run
    ended early, or None. ``not_confirmed``: (tokens, choice) whose gain did not repeat in a fresh process."""

    fitted: Fit = field(default_factory=Fit)
    records: dict[tuple[int, str, Choice], Record] = field(default_factory=dict)
    noise: dict[int, float] = field(default_factory=dict)
    base_times: dict[int, list[list[float]]] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    held_out: HeldOut | None = None
    promoted: list[Held] = field(default_factory=list)  # held-out sizes that became points of the fit
    stopped: str | None = None
    not_confirmed: list[tuple[int, Choice]] = field(default_factory=list)
    searched: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def noise_level(self) -> float:
        """The A/A spread of the run as one number: the median over sizes."""
        return statistics.median(self.noise.values()) if self.noise else 0.0


class Tuner:
    """Runs the stages. ``on_stage(text)`` says what comes next; ``registers`` breaks ties."""

    def __init__(self, plan: Plan, measurer: Measurer, registers: Callable[[Choice], int] = lambda choice: 0,
                 on_stage: Callable[[str], None] = lambda text: None) -> None:
        self.plan, self.measurer, self.registers, self.on_stage = plan, measurer, registers, on_stage
        self.out = Outcome()
        self.extra: list[Point] = []  # held-out sizes that became points of the fit
        self.screened: dict[int, dict[KernelConfig, float]] = {}  # tokens -> kernel -> time over the best kernel's there
        self._slice_end: float | None = None

    def run(self) -> Outcome:
        """Never loses what was measured: on Stop the best so far is fitted and marked. An incumbent that turns out to be no
        valid kernel starts everything again without it; what still holds is in the journal."""
        while True:
            try:
                return self._run()
            except IncumbentFailed as failed:
                self.out, self.screened, self.extra = Outcome(notes=[*self.out.notes, str(failed)]), {}, []

    def _run(self) -> Outcome:
        clock = self.measurer.clock
        left = clock.left()
        try:
            self.measurer.clock = replace(clock, deadline=None if left is None else clock.deadline - (1 - SEARCH_SHARE) * left)
            self._search()
        except Stop as stop:
            self.out.stopped = stop.reason
        finally:
            self.measurer.clock = clock
        self._refit()
        if self.out.stopped != "interrupted":
            try:
                self._confirm()
                self.out.held_out = validate(self)
            except Stop as stop:  # the best so far stands, unconfirmed where time ended; the table says partial
                self.out.stopped = stop.reason
                self._refit(self.extra)
        self.out.notes += self.measurer.families.lines()
        return self.out

    def slice_over(self) -> bool:
        """With a budget, each size has its share of what is left for searching: finals come instead of more screening."""
        return self._slice_end is not None and self.measurer.clock.now() >= self._slice_end

    def _start_slice(self, order: Sequence[int], number: int) -> None:
        """Sizes where every kernel is screened get more, and the first of them, which loads all kernels, most."""
        left = self.measurer.clock.left()
        weights = [1 if neighbours(t, order[:n]) else 4 for n, t in enumerate(order)]
        weights[0] = 8
        self._slice_end = None if left is None else \
            self.measurer.clock.now() + SCREEN_SHARE * max(0.0, left) * weights[number] / sum(weights[number:])

    # -- search --------------------------------------------------------------------------------

    def _search(self) -> None:
        order = visiting_order(self.plan.sizes)
        for number, tokens in enumerate(order):
            self.on_stage(f"{tokens} tokens ({number + 1} of {len(order)} sizes): noise of the incumbent")
            if not self._noise(tokens):
                continue
            self.on_stage(f"{tokens} tokens ({number + 1} of {len(order)} sizes): {self.plan.strategy} over {len(self.alive())} candidates")
            self._start_slice(order, number)
            search(self, tokens)
            self.out.searched.add(tokens)
        self._cross()

    def _noise(self, tokens: int) -> bool:
        """A/A: the incumbent against itself. False when the size does not fit on the device."""
        own = self.plan.incumbent(tokens)
        trial = self.measurer.duel("noise", tokens, own, own, self.plan.settings.noise_rounds)
        if not trial.ok:
            self.out.notes.append(f"{tokens} tokens: not measured: {trial.message}")
            return False
        self.out.noise[tokens] = ratio(trial.pairs).half_width
        self.out.base_times[tokens] = trial.pairs
        return True

    def alive(self) -> list[Choice]:
        """Candidates that nothing disqualified."""
        return [c for c in self.plan.candidates if not self.measurer.barred(c)]

    def final(self, tokens: int, choice: Choice) -> Record | None:
        """The decisive measurement before the fit; a second, longer one when the first is unclear. None: it failed."""
        own, settings = self.plan.incumbent(tokens), self.plan.settings
        if choice == own or self.measurer.barred(choice):
            return None
        trials = [self.measurer.duel("final", tokens, choice, own, settings.final_rounds)]
        record = self._record(choice, tokens, trials)
        if record is not None and record.verdict == "unclear":
            trials.append(self.measurer.duel("final-more", tokens, choice, own, 2 * settings.final_rounds))
            record = self._record(choice, tokens, trials)
        return record

    def _record(self, choice: Choice, tokens: int, trials: Sequence[Trial], routing: str | None = None) -> Record | None:
        good = [trial for trial in trials if trial.ok]
        routing = routing or self.plan.routing
        if not good:
            return None
        pairs = [pair for trial in good for pair in trial.pairs]
        found = ratio(pairs)
        noise = self.out.noise.get(tokens, self.out.noise_level)
        record = Record(choice, tokens, routing, pairs, found, verdict(found, noise, self.plan.settings.min_gain), good[-1].stage, list(good))
        self.out.records[tokens, routing, choice] = record
        return record

    def _cross(self) -> None:
        """What is near the best anywhere, and the default, at every size: only what was measured everywhere can have a
        range."""
        names = self._contenders()
        sizes = [t for t in visiting_order(self.plan.sizes) if t in self.out.searched]
        missing = [(t, c) for t in sizes for c in names if (t, self.plan.routing, c) not in self.out.records and c != self.plan.incumbent(t)]
        if missing:
            self.on_stage(f"cross: {len(missing)} measurements, so that {len(names)} configurations are known at all sizes")
        for tokens, choice in missing:
            self.final(tokens, choice)

    def _contenders(self) -> list[Choice]:
        must = list(dict.fromkeys([self.plan.default, *(self.plan.incumbent(t) for t in sorted(self.out.searched))]))
        wins: dict[Choice, list[float]] = {}
        for point in self._points():
            best = point.best()
            for choice, found in point.ratios.items():
                if choice not in point.banned and point.verdicts[choice] == "better" and found.median <= best * (1 + self.plan.settings.tolerance):
                    wins.setdefault(choice, []).append(found.median / best)
        ranked = sorted(wins, key=lambda c: (-len(wins[c]), statistics.fmean(wins[c]), self.registers(c), c.name()))
        return [c for c in dict.fromkeys([*must, *ranked[:CROSS_LIMIT]]) if c not in self.measurer.failed]

    # -- fit and confirmation --------------------------------------------------------------------

    def _points(self) -> list[Point]:
        banned = {tokens: {c for t, c in self.out.not_confirmed if t == tokens} | set(self.measurer.failed) for tokens in self.plan.sizes}
        points = []
        for tokens in sorted(self.out.noise):
            rows = [r for (t, routing, _), r in self.out.records.items() if t == tokens and routing == self.plan.routing]
            points.append(Point(tokens, self.plan.incumbent(tokens), {r.choice: r.found for r in rows}, {r.choice: r.verdict for r in rows},
                                banned.get(tokens, set()), self.plan.routing))
        return points

    def _refit(self, extra: Sequence[Point] = ()) -> None:
        self.extra = list(extra)
        self.out.points = [*self._points(), *extra]
        self.out.fitted = fit(self.out.points, self.plan.settings.tolerance, self.registers)

    def refit(self, extra: Sequence[Point]) -> Fit:
        """The ranges with held-out sizes as points too; what they name is confirmed."""
        self._refit(extra)
        self._confirm(extra)
        return self.out.fitted

    def _confirm(self, extra: Sequence[Point] = ()) -> None:
        """Every pick that is not the incumbent is measured again by processes that searched nothing, on fresh inputs;
        only that number counts. A gain that does not repeat is gone."""
        own_size = {point.tokens for point in self._points()}
        for turn in range(CONFIRM_ROUNDS):
            wanted = [(p.tokens, s.choice) for s in self.out.fitted.segments for p in s.points
                      if p.tokens in own_size and p.routing == self.plan.routing and s.choice != p.incumbent and not self._confirmed(p.tokens, s.choice)]
            if not wanted:
                return
            self.on_stage(f"confirmation in a fresh process: {len(wanted)} picks")
            self.measurer.fresh_processes()
            for tokens, choice in wanted:
                self._confirm_one(tokens, choice)
            self._refit(extra)
        self._only_confirmed(extra)

    def _confirmed(self, tokens: int, choice: Choice) -> bool:
        record = self.out.records.get((tokens, self.plan.routing, choice))
        return record is not None and record.stage.startswith("confirm")

    def _confirm_one(self, tokens: int, choice: Choice) -> None:
        own, settings = self.plan.incumbent(tokens), self.plan.settings
        trials = [self.measurer.duel("confirm", tokens, choice, own, settings.final_rounds)]
        record = self._record(choice, tokens, trials)
        if record is not None and record.verdict == "unclear":
            trials.append(self.measurer.duel("confirm-more", tokens, choice, own, 2 * settings.final_rounds))
            record = self._record(choice, tokens, trials)
        if record is None or record.verdict == "worse":
            self.out.not_confirmed.append((tokens, choice))

    def _only_confirmed(self, extra: Sequence[Point] = ()) -> None:
        """Fits keep naming picks that were never confirmed: those that are not yield to the incumbent."""
        for (tokens, routing, choice), record in list(self.out.records.items()):
            if routing == self.plan.routing and not record.stage.startswith("confirm") and (tokens, choice) not in self.out.not_confirmed:
                self.out.not_confirmed.append((tokens, choice))
        self._refit(extra)
