"""Asks for one trial at a time: from the journal when it is there, else from the measuring group, within the budget.

Every outcome is a recorded trial, a crash as much as a time; a candidate that misbehaved once is never asked again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit, ExitCode, WrongResult
from megamoe_cli.protocol import CaseResult
from megamoe_cli.tuning.group import RankGroup
from megamoe_cli.tuning.journal import Journal, Trial
from megamoe_cli.tuning.paired import usable
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import FLOOR_SLACK, Choice
from megamoe_cli.tuning.space import kernel_key

# What ends a candidate for good, whatever the size: its kernel cannot be trusted. ``invalid`` and ``unfit`` are about the
# timer and the memory; they count where they happened.
DISQUALIFYING = ("wrong", "hang", "crash", "fault", "error", "too-fast", "build-failed")
FIRST = "#1"  # ends the key of a crash that was tried again
BAR = 3  # kernels with one axis value in common that hang, crash or fault, and none that ever worked: the rest is not tried
LOST = ("hang", "crash", "fault")  # each of these costs new processes
SEARCH_STAGES = ("noise", "screen", "second", "launch", "tpe", "final", "final-more")
_OF_STATUS = {"fail": "wrong", "hang": "hang", "crash": "crash", "fault": "fault", "error": "error"}


class Stop(Exception):
    """No further trial is wanted. ``reason``: budget, interrupted, or not measured (with ``--fit-only``)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class IncumbentFailed(Exception):
    """What candidates were to beat is no valid kernel here; the built-in default takes its place, and the search starts again."""


class Watcher(Protocol):
    """Hears every trial, measured or replayed."""

    def trial(self, trial: Trial, replayed: bool) -> None: ...


@dataclass
class Clock:
    """The budget: monotonic seconds at which measuring stops, None for no limit. ``interrupted()``: the user wants out.
    ``closed``: nothing new is measured, only what the journal has is used."""

    deadline: float | None = None
    interrupted: Callable[[], bool] = lambda: False
    closed: bool = False
    now: Callable[[], float] = time.monotonic

    def check(self) -> None:
        if self.closed:
            raise Stop("not measured")
        if self.interrupted():
            raise Stop("interrupted")
        if self.deadline is not None and self.now() >= self.deadline:
            raise Stop("budget")

    def left(self) -> float | None:
        return None if self.deadline is None else self.deadline - self.now()


@dataclass
class Measurer:
    """See the module. ``measured`` and ``replayed`` count trials; ``failed``: candidate -> the trial that disqualified it;
    ``skipped_sizes``: tokens -> why nothing runs there."""

    plan: Plan
    journal: Journal
    group: RankGroup
    clock: Clock
    watcher: Watcher
    candidate_timeout_s: float = 20.0
    retry_failed: bool = False
    machine: str = "m1"
    measured: int = 0
    replayed: int = 0
    failed: dict[Choice, Trial] = field(default_factory=dict)
    skipped_sizes: dict[int, str] = field(default_factory=dict)
    families: Families = field(default_factory=lambda: Families())
    _search_start: int = -1  # the start of the processes in which something was searched last
    _lost_in_a_row: list[Trial] = field(default_factory=list)

    def duel(self, stage: str, tokens: int, a: Choice, b: Choice, rounds: int, *, routing: str | None = None,
             stop_ratio: float = 0.0) -> Trial:
        """The trial of ``a`` beside ``b``. Stop when there is no time; IncumbentFailed when ``b`` is no valid kernel, WrongResult
        when that is the built-in default."""
        task = self.plan.task(stage, tokens, routing or self.plan.routing, a, b, rounds, stop_ratio)
        key = self.plan.key(task)
        known = self.journal.trials.get(key)
        if known is not None and not (self.retry_failed and not known.ok):
            self.replayed += 1
            self._settle(known, a, b)
            self.watcher.trial(known, replayed=True)
            return known
        self.clock.check()
        trial = self._measure(key, task)
        if trial.status == "crash":
            # Someone else may have killed the process (an operator, the memory killer): dying twice is the candidate's doing.
            self.journal.append(replace(trial, key=f"{key}{FIRST}"))
            self.watcher.trial(trial, replayed=False)
            self.clock.check()
            trial = self._measure(key, task)
        self.journal.append(trial)
        self.watcher.trial(trial, replayed=False)
        self._watch(trial, a, b)
        self._settle(trial, a, b)
        return trial

    def barred(self, choice: Choice) -> bool:
        """Not to be measured: it failed, or everything like it did."""
        return choice in self.failed or self.families.barred(choice)

    def fresh_processes(self) -> None:
        """The next task meets processes that searched nothing."""
        if self._search_start == self.group.starts:
            self.group.restart()

    def _measure(self, key: str, task: Mapping[str, Any]) -> Trial:
        began = self.clock.now()
        # Device waits end before the candidate does, so that a fault record is what remains, not a kill.
        bounded = {**task, "wait_s": min(5.0, self.candidate_timeout_s / 4), "run_s": 0.75 * self.candidate_timeout_s}
        result = self.group.ask({"id": key, "task": bounded}, self.candidate_timeout_s)
        trial = trial_of(key, task, result, self.clock.now() - began, self.group.starts)
        trial.machine = self.machine
        self.measured += 1
        if trial.stage in SEARCH_STAGES:
            self._search_start = self.group.starts
        return trial

    def _settle(self, trial: Trial, a: Choice, b: Choice) -> None:
        """What a trial's outcome means for later ones."""
        if trial.ok:
            self.families.worked(a, b)
        elif trial.status == "unfit":
            self.skipped_sizes.setdefault(trial.tokens, trial.message)
        elif a == b or trial.status in DISQUALIFYING:
            blamed = b if trial.check.get("wrong") == "b" else a
            if blamed == self.plan.default:
                raise WrongResult(f"the incumbent {blamed.name()} itself fails at {trial.tokens} tokens: {trial.status}: {trial.message}",
                                  hint="the trial and the last words of the measuring process are in the run's trials.jsonl")
            self.failed.setdefault(blamed, trial)
            self.families.failed(blamed, lost=trial.status in LOST)
            if blamed not in self.plan.disqualified and any(blamed == own for _, own in self.plan.incumbents):
                self.plan.disqualified.add(blamed)
                raise IncumbentFailed(f"the incumbent {blamed.name()} fails at {trial.tokens} tokens ({trial.status}: {trial.message}); the "
                                      f"built-in default takes its place")

    def _watch(self, trial: Trial, a: Choice, b: Choice) -> None:
        """Several failures in a row that cost processes, or one of the built-in default: before anyone is blamed, the incumbent is
        asked whether the device still answers. EnvironmentUnfit when it does not, and what failed in that row counts for nothing."""
        if trial.ok:
            self._lost_in_a_row.clear()
        elif trial.status in LOST:
            self._lost_in_a_row.append(trial)
            if len(self._lost_in_a_row) >= BAR or (a == self.plan.default and a != b):
                self._probe(trial, b)
                self._lost_in_a_row.clear()

    def _probe(self, trial: Trial, own: Choice) -> None:
        task = self.plan.task("probe", trial.tokens, trial.routing, own, own, 1)
        if self._measure(self.plan.key(task), task).ok:
            return
        said = Counter(lost.status for lost in self._lost_in_a_row)
        for lost in self._lost_in_a_row:
            self.journal.append(replace(lost, status="void"))
        raise EnvironmentUnfit(f"{', '.join(f'{count} {status}' for status, count in said.items())} in a row, and then the incumbent too: the "
                               f"device does not answer any more ({trial.message})",
                               hint="what was measured is kept; look at the GPU, then continue with --resume")


class Families:
    """Which kernels and axis values were seen to work, and which only to fail. A kernel that never worked is barred with all its
    launch parameters. What hangs, crashes or faults costs new processes each time, so ``BAR`` such kernels bar everything like
    them, as narrowly as they allow: by all the axis values that they have in common and that never worked."""

    AXES = ("block_m", "block_n", "cluster", "math_threads", "policy", "promotion", "frontend", "order", "split", "stages")

    def __init__(self) -> None:
        self._worked: set[tuple[str, Any]] = set()
        self._good: set[KernelConfig] = set()
        self._bad: set[KernelConfig] = set()
        self._lost: dict[Any, set[tuple[str, Any]]] = {}
        self.bars: list[frozenset[tuple[str, Any]]] = []

    @classmethod
    def _values(cls, choice: Choice) -> set[tuple[str, Any]]:
        return {(axis, getattr(choice.config, axis)) for axis in cls.AXES}

    def worked(self, *choices: Choice) -> None:
        for choice in choices:
            self._worked |= self._values(choice)
            self._good.add(kernel_key(choice.config))

    def failed(self, choice: Choice, lost: bool) -> None:
        values, kernel = self._values(choice), kernel_key(choice.config)
        if kernel not in self._good:
            self._bad.add(kernel)
        if not lost:
            return
        self._lost[kernel] = values
        for value in sorted(values - self._worked, key=str):
            alike = [other for other in self._lost.values() if value in other]
            common = frozenset(set.intersection(*alike) - self._worked)
            if len(alike) >= BAR and common not in self.bars:
                self.bars.append(common)

    def barred(self, choice: Choice) -> bool:
        if self._bad and kernel_key(choice.config) in self._bad:
            return True
        return bool(self.bars) and any(bar <= self._values(choice) for bar in self.bars)

    def lines(self) -> list[str]:
        """Each bar in words."""
        return [f"{', '.join(f'{axis}={value}' for axis, value in sorted(bar))}: {BAR} kernels failed and none worked; the rest was not tried"
                for bar in self.bars]


def trial_of(key: str, task: Mapping[str, Any], result: CaseResult, seconds: float, worker: int) -> Trial:
    """What the measuring process said, judged: a time that cannot be is no result."""
    metrics = result.metrics
    trial = Trial(key, task["stage"], task["tokens"], task["routing"], task["seed"], task["a"], task["b"], "ok",
                  pairs=list(metrics.get("pairs", [])), floor_us=float(metrics.get("floor_us", 0.0) or 0.0), where=result.where,
                  stopped=bool(metrics.get("stopped")), check=dict(metrics.get("check", {})), conditions=dict(metrics.get("conditions", {})),
                  seconds=round(seconds, 4), at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), worker=worker)
    if not result.passed:
        trial.status, trial.message, trial.stderr = _OF_STATUS[result.status], result.message, result.stderr
        if result.status == "error" and result.exit_code == ExitCode.ENVIRONMENT:
            trial.status = "unfit"
        elif result.status == "error" and result.exit_code == ExitCode.BUILD_FAILED:
            trial.status = "build-failed"
    elif not trial.pairs or not usable(trial.pairs):
        trial.status, trial.message = "invalid", "the timer gave times that are not positive numbers"
    else:
        fastest = sorted(pair[0] for pair in trial.pairs)[len(trial.pairs) // 2]
        if fastest < FLOOR_SLACK * trial.floor_us:
            trial.status = "too-fast"
            trial.message = f"{fastest:.4g} us is below the floor of {trial.floor_us:.4g} us: it cannot have done the work"
    return trial
