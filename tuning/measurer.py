"""Asks for one trial at a time: from the journal when it is there, else from the measuring group, within the budget.

Every outcome is a recorded trial, a crash as much as a time; a candidate that misbehaved once is never asked again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megamoe_cli.errors import EnvironmentUnfit, ExitCode, WrongResult
from megamoe_cli.protocol import CaseResult
from megamoe_cli.tuning.group import RankGroup
from megamoe_cli.tuning.journal import Journal, Trial
from megamoe_cli.tuning.paired import usable
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import Choice

# What ends a candidate for good, whatever the size: its kernel cannot be trusted. ``invalid`` and ``unfit`` are about the
# timer and the memory; they count where they happened.
DISQUALIFYING = ("wrong", "hang", "crash", "fault", "error", "too-fast", "build-failed")
FLOOR_SLACK = 0.9  # a time below this share of the floor cannot be one
FIRST = "#1"  # ends the key of a crash that was tried again
GIVE_UP = 4  # failures in a row of different candidates, with no success between: the device is gone, not the candidates
_OF_STATUS = {"fail": "wrong", "hang": "hang", "crash": "crash", "fault": "fault", "error": "error"}


class Stop(Exception):
    """No further trial is wanted. ``reason``: budget, interrupted, or not measured (with ``--fit-only``)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


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

    def check(self) -> None:
        if self.closed:
            raise Stop("not measured")
        if self.interrupted():
            raise Stop("interrupted")
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise Stop("budget")

    def left(self) -> float | None:
        return None if self.deadline is None else self.deadline - time.monotonic()


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
    _lost_in_a_row: Counter[str] = field(default_factory=Counter)
    _seconds: list[float] = field(default_factory=list)

    def duel(self, stage: str, tokens: int, a: Choice, b: Choice, rounds: int, *, routing: str | None = None,
             stop_ratio: float = 0.0) -> Trial:
        """The trial of ``a`` beside ``b``. Stop when there is no time; WrongResult when the incumbent itself fails."""
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
        self._settle(trial, a, b)
        self.watcher.trial(trial, replayed=False)
        self._give_up(trial)
        return trial

    def seconds_per_trial(self) -> float | None:
        """Of the recent ones."""
        recent = self._seconds[-50:]
        return sum(recent) / len(recent) if recent else None

    def _measure(self, key: str, task: Mapping[str, Any]) -> Trial:
        began = time.monotonic()
        # Device waits end before the candidate does, so that a fault record is what remains, not a kill.
        bounded = {**task, "wait_s": min(5.0, self.candidate_timeout_s / 4), "run_s": 0.75 * self.candidate_timeout_s}
        result = self.group.ask({"id": key, "task": bounded}, self.candidate_timeout_s)
        trial = trial_of(key, task, result, time.monotonic() - began, self.group.starts)
        trial.machine = self.machine
        self.measured += 1
        self._seconds.append(trial.seconds)
        return trial

    def _settle(self, trial: Trial, a: Choice, b: Choice) -> None:
        """What a trial's outcome means for later ones."""
        if trial.ok:
            return
        if trial.status == "unfit":
            self.skipped_sizes.setdefault(trial.tokens, trial.message)
        elif a == b:
            raise WrongResult(f"the incumbent {a.name()} itself fails at {trial.tokens} tokens: {trial.status}: {trial.message}",
                              hint="the trial and the last words of the measuring process are in the run's trials.jsonl")
        elif trial.status in DISQUALIFYING:
            self.failed.setdefault(a, trial)

    def _give_up(self, trial: Trial) -> None:
        if trial.ok:
            self._lost_in_a_row.clear()
        elif trial.status in ("hang", "crash", "fault"):
            self._lost_in_a_row[trial.status] += 1
            if sum(self._lost_in_a_row.values()) >= GIVE_UP:
                said = ", ".join(f"{count} {status}" for status, count in self._lost_in_a_row.items())
                raise EnvironmentUnfit(f"{said} in a row: the device does not answer any more ({trial.message})",
                                       hint="what was measured is kept; look at the GPU, then continue with --resume")


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
