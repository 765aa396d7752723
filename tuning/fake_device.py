"""A device that is a script: seeded times with noise, planted winners, and candidates that misbehave on cue.

The tuner's tests run the whole pipeline on it, processes and faults included. A sample depends on the script's seed and
the task only, so a run that was interrupted anywhere and resumed measures exactly what an undisturbed one does.
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

from megamoe_cli.backends.sm_share import SmShare
from megamoe_cli.config import LAUNCH_FIELDS
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.protocol import CaseResult

KINDS = ("hang", "crash", "exit", "stubborn", "wrong", "raise", "nan", "negative", "too-fast", "unfit", "fault")


class FakeRunner:
    """``script``: ``sms``, ``name``, ``seed``, ``noise`` (relative, of each sample), ``drift`` (shared by a pair),
    ``base_us``, ``us_per_token`` (or ``model``: true, the static model's times), ``sleep_s``; ``effects``: [{match, from, to,
    routing, stages, factor}]; ``landscape``: spread of a smooth random factor of each axis value over the sizes; ``faults``:
    [{match, match_b (the incumbent), tokens, stage, rank, kind}]; ``costs``: see ``_spend``. ``match`` is a part of a choice's fields; absent keys match
    everything. ``running``: a file that is touched when a trial begins. ``sleep`` is how time passes."""

    def __init__(self, script: Mapping[str, Any], ranks: int, control: Any = None,
                 on_stage: Callable[[str, str], None] | None = None, sleep: Callable[[float], None] = time.sleep,
                 reserve_sms: int = 0) -> None:
        self.script, self.ranks, self.control, self._sleep = script, ranks, control, sleep
        self._waves: dict[tuple[str, Any], tuple[float, float, float]] = {}
        self._models: dict[Any, float] = {}
        self._held: set[Any] = set()  # what the process made already: weights, inputs, kernels
        self.rank = 0 if control is None else control.rank
        self.on_stage = on_stage or (lambda *_: None)
        self.share = SmShare(int(script.get("sms", 132)), ranks, reserve_sms)
        self.where = self.share.said(f"fake({ranks} on 1x{script.get('name', 'fake')})")
        for fault in script.get("faults", []):
            if fault.get("kind") not in KINDS:
                raise UsageError(f"the fake device knows no fault {fault.get('kind')!r} (faults: {', '.join(KINDS)})", rule="fake")
        sleep(float(script.get("costs", {}).get("start_s", 0.0)))

    @classmethod
    def load(cls, path: str, ranks: int, control: Any, on_stage: Callable[[str, str], None], reserve_sms: int = 0) -> FakeRunner:
        return cls(read_script(path), ranks, control, on_stage, reserve_sms=reserve_sms)

    def run(self, case: Mapping[str, Any]) -> CaseResult:
        """One task. Ranks answer together: what one of them does wrong is the whole group's result."""
        task, key = case["task"], str(case["id"])
        result = CaseResult(key, "pass", where=self.where)
        if task.get("describe"):
            result.metrics = {"gpu": self.script.get("name", "fake"), "sms": self.script.get("sms", 132), "where": self.where, "driver": "none"}
            return result
        self.on_stage(key, "run")
        if self.script.get("running"):
            Path(self.script["running"]).touch()
        self._sleep(float(self.script.get("sleep_s", 0)))
        fault = self._fault(task)
        kind = fault.get("kind") if fault and fault.get("rank", 0) == self.rank else None
        try:
            self._misbehave(kind)
            pairs, stopped = self._pairs(task)
        except RuntimeError as error:
            pairs, stopped = [], False
            result.status, result.message, result.exit_code = "error", f"internal: RuntimeError: {error}", int(ExitCode.BUG)
        self._spend(task, pairs)
        floor = 0.5 * self.base(task["tokens"]) if not self.script.get("model") else 1.0
        if self.control is not None:  # the slowest rank counts, and a rank that is gone ends the group here
            every = self.control.gather((kind, pairs))
            kind = next((other for other, _ in every if other), None)
            pairs = [[max(p[side] for p in group) for side in (0, 1)] for group in zip(*(own for _, own in every))]
        result.metrics = {"pairs": _spoiled(pairs, kind, floor), "floor_us": floor, "check": {"a": 0.001, "b": 0.001}, "stopped": stopped,
                          "conditions": {"sm_mhz": [1980, 1980], "throttle": [], "others": 0}}
        if kind == "wrong":
            side = "b" if "match_b" in (self._fault(task) or {}) else "a"
            result.status, result.message, result.exit_code = "fail", f"{side} is wrong: rank 0, token 3: planted", int(ExitCode.NO)
            result.metrics["check"] = {"wrong": side}
        elif kind == "unfit":
            result.status, result.message, result.exit_code = "error", "cannot allocate 9.99 GiB", int(ExitCode.ENVIRONMENT)
        elif kind == "fault":
            result.status, result.message, result.respawn = "fault", "rank 1 gave up waiting: planted", True
        return result

    def base(self, tokens: int) -> float:
        return float(self.script.get("base_us", 50.0)) + tokens * float(self.script.get("us_per_token", 0.25))

    def mean_us(self, choice: Mapping[str, Any], tokens: int, routing: str, stage: str = "") -> float:
        """The time without noise."""
        value = self._model_us(choice, tokens) if self.script.get("model") else self.base(tokens)
        value *= self._landscape(choice, tokens)
        for effect in self.script.get("effects", []):
            low, high = effect.get("from", 0), effect.get("to", math.inf)
            if low <= tokens < high and effect.get("routing", routing) == routing and stage in effect.get("stages", [stage]) and _matches(effect.get("match", {}), choice):
                value *= effect["factor"]
        return value

    def _model_us(self, choice: Mapping[str, Any], tokens: int) -> float:
        from megamoe_cli.shapes import Shape
        from megamoe_cli.tuning.schema import Choice
        from megamoe_cli.tuning.static_model import facts

        key = (tokens, *_kernel(choice))
        if key not in self._models:
            self._models[key] = facts(Choice.from_dict(choice), Shape(*self._shape), self.ranks, int(self.script.get("sms", 132)), tokens).model_us
        return self._models[key]

    def _landscape(self, choice: Mapping[str, Any], tokens: int) -> float:
        """A smooth factor over the sizes: each axis value has a wave of its own, launch parameters a small one."""
        spread, total = float(self.script.get("landscape", 0.0)), 0.0
        for axis, value in choice.items() if spread else ():
            if not axis.startswith("regs_"):
                if (axis, value) not in self._waves:
                    draw = random.Random(f"{self.script.get('landscape_seed', 0)}/{axis}={value}")
                    height = draw.gauss(0, spread / 5 if axis in LAUNCH_FIELDS else spread)
                    self._waves[axis, value] = (height, draw.uniform(2, 4), draw.uniform(0, 6.28))
                height, period, phase = self._waves[axis, value]
                total += height * math.cos(math.log2(max(tokens, 1)) / period + phase)
        return math.exp(total)

    def _spend(self, task: Mapping[str, Any], pairs: list[list[float]]) -> None:
        """Lets the time pass that a GPU would take, by ``costs`` (seconds): ``start_s`` of a process, ``weights_s`` once,
        ``load_s`` for each kernel, ``inputs_s`` and ``inputs_s_per_token`` (of all ranks) for each set of inputs, ``trial_s``."""
        costs = self.script.get("costs")
        if not costs:
            return
        inputs = costs.get("inputs_s", 0.0) + self.ranks * task["tokens"] * costs.get("inputs_s_per_token", 0.0)
        kernels = [("kernel", *_kernel(task[side])) for side in ("a", "b")]
        spent = costs.get("trial_s", 0.0)
        for what, seconds in [("weights", costs.get("weights_s", 0.0)), ((task["tokens"], task["routing"], task["seed"]), inputs),
                              *((kernel, costs.get("load_s", 0.0)) for kernel in kernels)]:
            spent += 0.0 if what in self._held else seconds
            self._held.add(what)
        # Four launches are judged before any is timed.
        spent += 1e-6 * (sum(sum(pair) for pair in pairs) + 2 * sum(pairs[0]) if pairs else 0.0)
        self._sleep(spent)

    def _pairs(self, task: Mapping[str, Any]) -> tuple[list[list[float]], bool]:
        noise, drift = float(self.script.get("noise", 0.01)), float(self.script.get("drift", 0.03))
        # By the task, not by the trial's key: the key names the kernel's sources too, and an edit there is no other draw.
        what = {name: value for name, value in task.items() if name not in ("wait_s", "run_s")}
        draw = random.Random(f"{self.script.get('seed', 0)}/{json.dumps(what, sort_keys=True)}/{self.rank}")
        self._shape = task["shape"]
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
                    and _matches(fault.get("match", {}), task["a"]) and _matches(fault.get("match_b", {}), task["b"])):
                return fault
        return None

    def _misbehave(self, kind: str | None) -> None:
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == "exit":
            print("device lost", file=sys.stderr, flush=True)
            os._exit(7)
        elif kind == "hang":
            self._sleep(3600)
        elif kind == "stubborn":  # ignores what it can and leaves a child in another session
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            time.sleep(3600)
        elif kind == "raise":
            raise RuntimeError("planted")


def _kernel(choice: Mapping[str, Any]) -> tuple[Any, ...]:
    """What is compiled of a choice."""
    return tuple(value for key, value in sorted(choice.items()) if key not in (*LAUNCH_FIELDS, "ctas"))


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
