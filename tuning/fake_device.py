"""A device that is a script: seeded times with noise, planted winners, and candidates that misbehave on cue.

The tuner's tests run the whole pipeline on it, processes and faults included. A sample depends on the script's seed and
the task's key only, so a run that was interrupted anywhere and resumed measures exactly what an undisturbed one does.
Tables made on it match backend ``fake``: they answer for no GPU.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.protocol import CaseResult

KINDS = ("hang", "crash", "exit", "stubborn", "wrong", "raise", "nan", "negative", "too-fast", "unfit", "fault")


class FakeRunner:
    """``script``: ``sms``, ``name``, ``seed``, ``noise`` (relative, of each sample), ``drift`` (shared by a pair),
    ``base_us``, ``us_per_token``, ``sleep_s``; ``effects``: [{match, from, to, routing, stages, factor}]; ``faults``: [{match,
    tokens, stage, rank, kind}]. ``match`` is a part of a choice's fields; absent keys match everything."""

    def __init__(self, script: Mapping[str, Any], ranks: int, control: Any = None,
                 on_stage: Callable[[str, str], None] | None = None) -> None:
        self.script, self.ranks, self.control = script, ranks, control
        self.rank = 0 if control is None else control.rank
        self.on_stage = on_stage or (lambda *_: None)
        self.where = f"fake({ranks} on 1x{script.get('name', 'fake')})"
        for fault in script.get("faults", []):
            if fault.get("kind") not in KINDS:
                raise UsageError(f"the fake device knows no fault {fault.get('kind')!r} (faults: {', '.join(KINDS)})", rule="fake")

    @classmethod
    def load(cls, path: str, ranks: int, control: Any, on_stage: Callable[[str, str], None]) -> FakeRunner:
        return cls(read_script(path), ranks, control, on_stage)

    def run(self, case: Mapping[str, Any]) -> CaseResult:
        """One task. Ranks answer together: what one of them does wrong is the whole group's result."""
        task, key = case["task"], str(case["id"])
        result = CaseResult(key, "pass", where=self.where)
        if task.get("describe"):
            result.metrics = {"gpu": self.script.get("name", "fake"), "sms": self.script.get("sms", 132), "where": self.where, "driver": "none"}
            return result
        self.on_stage(key, "run")
        time.sleep(float(self.script.get("sleep_s", 0)))
        fault = self._fault(task)
        kind = fault.get("kind") if fault and fault.get("rank", 0) == self.rank else None
        try:
            self._misbehave(kind)
            pairs, stopped = self._pairs(key, task)
        except RuntimeError as error:
            pairs, stopped = [], False
            result.status, result.message, result.exit_code = "error", f"internal: RuntimeError: {error}", int(ExitCode.BUG)
        floor = 0.5 * self.base(task["tokens"])
        if self.control is not None:  # the slowest rank counts, and a rank that is gone ends the group here
            every = self.control.gather((kind, pairs))
            kind = next((other for other, _ in every if other), None)
            pairs = [[max(p[side] for p in group) for side in (0, 1)] for group in zip(*(own for _, own in every))]
        result.metrics = {"pairs": _spoiled(pairs, kind, floor), "floor_us": floor, "check": {"a": 0.001, "b": 0.001}, "stopped": stopped,
                          "conditions": {"sm_mhz": [1980, 1980], "throttle": [], "others": 0}}
        if kind == "wrong":
            result.status, result.message, result.exit_code = "fail", "rank 0, token 3: planted wrong output", int(ExitCode.NO)
        elif kind == "unfit":
            result.status, result.message, result.exit_code = "error", "cannot allocate 9.99 GiB", int(ExitCode.ENVIRONMENT)
        elif kind == "fault":
            result.status, result.message, result.respawn = "fault", "rank 1 gave up waiting: planted", True
        return result

    def base(self, tokens: int) -> float:
        return float(self.script.get("base_us", 50.0)) + tokens * float(self.script.get("us_per_token", 0.25))

    def mean_us(self, choice: Mapping[str, Any], tokens: int, routing: str, stage: str = "") -> float:
        """The time without noise."""
        value = self.base(tokens)
        for effect in self.script.get("effects", []):
            low, high = effect.get("from", 0), effect.get("to", math.inf)
            if low <= tokens < high and effect.get("routing", routing) == routing and stage in effect.get("stages", [stage]) and _matches(effect.get("match", {}), choice):
                value *= effect["factor"]
        return value

    def _pairs(self, key: str, task: Mapping[str, Any]) -> tuple[list[list[float]], bool]:
        noise, drift = float(self.script.get("noise", 0.01)), float(self.script.get("drift", 0.03))
        draw = random.Random(f"{self.script.get('seed', 0)}/{key}/{self.rank}")
        means = [self.mean_us(task[side], task["tokens"], task["routing"], task["stage"]) for side in ("a", "b")]
        pairs: list[list[float]] = []
        for n in range(task["rounds"]):
            shared = math.exp(draw.gauss(0, drift))
            pairs.append([round(mean * shared * math.exp(draw.gauss(0, noise)), 4) for mean in means])
            if n == 0 and task.get("stop_ratio") and pairs[0][0] / pairs[0][1] > task["stop_ratio"]:
                return pairs, True
        return pairs, False

    def _fault(self, task: Mapping[str, Any]) -> Mapping[str, Any] | None:
        for fault in self.script.get("faults", []):
            if (fault.get("tokens", task["tokens"]) == task["tokens"] and fault.get("stage", task["stage"]) == task["stage"]
                    and _matches(fault.get("match", {}), task["a"])):
                return fault
        return None

    def _misbehave(self, kind: str | None) -> None:
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == "exit":
            print("device lost", file=sys.stderr, flush=True)
            os._exit(7)
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "stubborn":  # ignores what it can and leaves a child in another session
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            time.sleep(3600)
        elif kind == "raise":
            raise RuntimeError("planted")


def read_script(path: str) -> dict[str, Any]:
    """UsageError when it is no JSON object."""
    try:
        value = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"the fake device's script {path} cannot be read: {error}", rule="fake") from None
    if not isinstance(value, dict):
        raise UsageError(f"the fake device's script {path} must be an object", rule="fake")
    return value


def _matches(wanted: Mapping[str, Any], choice: Mapping[str, Any]) -> bool:
    return all(choice.get(key, 0) == value for key, value in wanted.items())


def _spoiled(pairs: list[list[float]], kind: str | None, floor: float) -> list[list[float]]:
    if kind == "nan":
        return [[math.nan, b] for _, b in pairs]
    if kind == "negative":
        return [[-3.0, b] for _, b in pairs]
    if kind == "too-fast":
        return [[floor / 4, b] for _, b in pairs]
    return pairs
