"""A tuning run in virtual time: the real plan, search, fit and journal, with the scripted device called directly and a clock
that only its costs move. What takes minutes on a GPU takes a second here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megamoe_cli.protocol import CaseResult
from megamoe_cli.tuning import run as tuning
from megamoe_cli.tuning.fake_device import FakeRunner
from megamoe_cli.tuning.journal import Journal, Trial
from megamoe_cli.tuning.lookup import Machine
from megamoe_cli.tuning.measurer import Clock, Measurer
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.run import Request
from megamoe_cli.tuning.schema import Table
from megamoe_cli.tuning.tune_table import measured_table
from megamoe_cli.tuning.tuner import Outcome, Tuner

# What one H200 was seen to take, rounded up.
COSTS = {"start_s": 8.0, "weights_s": 3.0, "load_s": 0.1, "inputs_s": 0.2, "inputs_s_per_token": 1e-4, "trial_s": 0.04}


class Hangs(Exception):
    """The device slept past what a task may take."""


class Cut(Exception):
    """The run is killed here: nothing after this trial happens."""


@dataclass
class Time:
    now: float = 0.0
    limit: float | None = None  # when the task that runs now is killed

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.limit is not None and self.now + seconds > self.limit:
            self.now = self.limit
            raise Hangs
        self.now += seconds


@dataclass
class Group:
    """What the tuner asks, as ``tuning/group.py`` has it, without processes."""

    script: dict[str, Any]
    ranks: int
    time: Time
    starts: int = 0
    log: Any = None
    runner: FakeRunner | None = None

    def ask(self, task: Mapping[str, Any], timeout_s: float) -> CaseResult:
        if self.runner is None:
            self.starts += 1
            self.runner = FakeRunner(self.script, self.ranks, sleep=self.time.sleep)
        self.time.limit = self.time.now + 300.0 + timeout_s
        fault = self.runner._fault(task["task"])
        if fault and fault["kind"] == "hang":
            self.time.limit = self.time.now + timeout_s
        elif fault and fault["kind"] == "fault":
            self.time.sleep(float(task["task"]["wait_s"]))
        try:
            result = self.runner.run(task)
        except Hangs:
            self.restart()
            return CaseResult(str(task["id"]), "hang", message=f"no answer within {timeout_s:g} s", exit_code=124)
        finally:
            self.time.limit = None
        if result.respawn:
            self.restart()
        return result

    def restart(self) -> None:
        self.runner = None


class CutJournal(Journal):
    """Ends the run once it has ``most`` trials."""

    most: int | None = None

    def append(self, trial: Trial) -> None:
        super().append(trial)
        if self.most is not None and len(self.trials) >= self.most:
            raise Cut


@dataclass
class Done:
    plan: Plan
    outcome: Outcome | None
    table: Table | None
    seconds: float
    trials: int
    measurer: Measurer = field(repr=False, default=None)  # type: ignore[assignment]

    def regret(self, script: Mapping[str, Any]) -> dict[int, float]:
        """Tokens -> the pick's true time over that of the best candidate, at every tuned size."""
        device = FakeRunner({**script, "costs": {}}, self.plan.ranks, sleep=lambda seconds: None)
        device._shape = self.plan.shape.as_list()
        assert self.outcome is not None

        def true(choice: Any, tokens: int) -> float:
            return device.mean_us(choice.to_dict(), tokens, self.plan.routing)

        return {t: true(self.outcome.fitted.choice_at(t), t) / min(true(c, t) for c in self.plan.candidates) for t in self.plan.sizes}


class Deaf:
    def trial(self, trial: Trial, replayed: bool) -> None:
        pass


def plan_of(script: Mapping[str, Any], request: Request) -> Plan:
    """The plan of a run on this script's device."""
    machine = Machine(int(script.get("sms", 132)), "fake", "Fake")
    before, tuning.machine_of = tuning.machine_of, lambda request: machine
    try:
        return tuning.make_plan(request)[0]
    finally:
        tuning.machine_of = before


def simulate(script: dict[str, Any], plan: Plan, journal: Path, budget_s: float | None = None, cut: int | None = None) -> Done:
    """Runs the plan to its end, to the end of its budget, or (``cut``) to the moment when the journal has so many trials."""
    time = Time()
    plan = replace(plan, disqualified=set())
    group, record = Group(script, plan.ranks, time), CutJournal(journal)
    record.most = cut
    record.open()
    clock = Clock(budget_s, now=time.read)
    measurer = Measurer(plan, record, group, clock, Deaf())  # type: ignore[arg-type]
    tuner = Tuner(plan, measurer, lambda choice: 0)
    try:
        outcome = tuner.run()
    except Cut:
        return Done(plan, None, None, time.now, measurer.measured, measurer)
    finally:
        record.close()
    table = measured_table(plan, outcome, [{"id": "m1", "aa_noise": outcome.noise_level}], {})
    return Done(plan, outcome, table, time.now, measurer.measured, measurer)
