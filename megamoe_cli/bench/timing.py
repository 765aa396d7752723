"""How a row is timed. Knows nothing of CUDA: a ``Device`` marks times, keeps busy, empties its cache, captures graphs.

Four times of a launch, each of all contenders in turn (their order reversed from repeat to repeat), each repeat on tokens
and routing of its own that are copied in first:

    kernel    one launch between two marks; L2 is as the same contender's launch on the repeat before left it
    cold      the same after L2 was filled with other data, inputs included
    in_a_row  n launches between two marks, over n
    graph     n launches in one graph, replayed between two marks, over n

Before each timed piece the device is kept busy until the host has enqueued all of it, so that no launch waits for the
host; a piece for which that was not long enough is thrown away and taken again with more time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import MegamoeError
from .contender import Contender, blame

MODES = ("kernel", "cold", "in_a_row", "graph")
FIRST_LEAD_US = 300.0
MOST_LEAD_US = 50_000.0
ATTEMPTS = 6


class Device(Protocol):
    """The machine. All but ``wait`` and ``now_s`` enqueue, in order."""

    def using(self) -> AbstractContextManager[Any]: ...
    def busy(self, us: float) -> None: ...  # does nothing for at least so long
    def empty_cache(self) -> None: ...  # afterwards L2 holds clean lines of nobody's
    def mark(self) -> Any: ...
    def between_us(self, start: Any, stop: Any) -> float: ...
    def wait(self, timeout_s: float) -> None: ...  # TimedOut, DeviceLost
    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]: ...  # -> replay
    def now_s(self) -> float: ...


@dataclass(frozen=True)
class Plan:
    """``samples``: repeats of kernel and cold; ``runs``: of in_a_row and graph, of ``in_a_row`` launches each.
    ``first_s``: limit of a contender's very first launch (it may compile), ``wait_s`` of every other piece."""

    samples: int = 12
    warmup: int = 2
    in_a_row: int = 10
    runs: int = 5
    modes: tuple[str, ...] = MODES
    first_s: float = 300.0
    wait_s: float = 60.0

    @property
    def inputs(self) -> int:
        """Different sets of tokens that ``measure`` wants."""
        return self.warmup + self.samples


@dataclass
class Timed:
    """Microseconds per launch of each mode, in order; and the output that the last launch of the mode left."""

    times_us: dict[str, list[float]] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


class Stopwatch:
    """Times pieces of work. Remembers how long the host needs for each kind."""

    def __init__(self, device: Device, wait_s: float) -> None:
        self.device, self.wait_s = device, wait_s
        self.retaken = 0
        self._lead_us: dict[Any, float] = {}

    def time_us(self, kind: Any, setup: Callable[[], None], body: Callable[[], None]) -> float:
        """Device time of ``body``, with ``setup`` enqueued ahead of it."""
        device, took = self.device, 0.0
        for _ in range(ATTEMPTS):
            lead = self._lead_us.get(kind, FIRST_LEAD_US)
            began = device.now_s()
            device.busy(lead)
            setup()
            start = device.mark()
            body()
            stop = device.mark()
            took = (device.now_s() - began) * 1e6
            device.wait(self.wait_s)
            us = device.between_us(start, stop)
            if took <= lead and us > 0:  # event times can come out as 0 where timers are virtualised
                return us
            self.retaken += 1
            self._lead_us[kind] = min(max(lead, 2 * took), MOST_LEAD_US)
        raise MegamoeError(f"no usable time in {ATTEMPTS} attempts: the host took {took:.0f} us to enqueue it")


def overhead_us(device: Device, samples: int = 5) -> float:
    """What two marks with nothing between them read: part of every time, taken off none."""
    found = []
    with device.using():
        for _ in range(samples):
            device.busy(FIRST_LEAD_US)
            start, stop = device.mark(), device.mark()
            device.wait(60.0)
            found.append(device.between_us(start, stop))
    return sorted(found)[len(found) // 2]


def measure(device: Device, contenders: Sequence[Contender], inputs: Sequence[Any], plan: Plan,
            say: Callable[[str], None] = lambda text: None, watch: Stopwatch | None = None) -> dict[str, Timed]:  # fmt: skip
    """Times prepared contenders on ``plan.inputs`` sets of inputs. Outputs are of the last set, in every mode. ``watch``:
    another way to take a time (of several ranks)."""
    if len(inputs) != plan.inputs:
        raise ValueError(f"{len(inputs)} sets of inputs, {plan.inputs} wanted")
    timed, watch = inputs[plan.warmup :], watch or Stopwatch(device, plan.wait_s)
    found = {contender.name: Timed({mode: [] for mode in plan.modes}) for contender in contenders}
    with device.using():
        for contender in contenders:
            for n, data in enumerate(inputs[: plan.warmup] or inputs[:1]):
                with blame(contender, "first launch" if n == 0 else "warm-up"):
                    contender.load(data)
                    contender.launch()
                    device.wait(plan.first_s if n == 0 else plan.wait_s)
                    contender.check()
        say(f"{', '.join(c.name for c in contenders)}: warm")
        _one_by_one(device, watch, contenders, inputs[max(plan.warmup - 1, 0) :], plan, found)
        if "in_a_row" in plan.modes:
            _several(watch, "in_a_row", contenders, timed, plan, found, {c.name: c.launch for c in contenders}, plan.in_a_row)
        if "graph" in plan.modes:
            _several(watch, "graph", contenders, timed, plan, found, _graphs(device, contenders, plan), 1)
    say(f"{watch.retaken} pieces taken again")
    return found


def _one_by_one(device: Device, watch: Stopwatch, contenders: Sequence[Contender], inputs: Sequence[Any], plan: Plan,
                found: dict[str, Timed]) -> None:  # fmt: skip
    """kernel and cold. ``inputs[0]`` is what the launch before the first timed one ran on."""
    modes = [mode for mode in ("kernel", "cold") if mode in plan.modes]
    inputs = inputs if len(inputs) > plan.samples else [inputs[0], *inputs]
    for n, (before, data) in enumerate(zip(inputs, inputs[1:])):
        order = contenders if n % 2 == 0 else contenders[::-1]
        for mode in modes:
            for contender in order:

                def setup(contender: Contender = contender, mode: str = mode, before: Any = before, data: Any = data) -> None:
                    if mode == "kernel":
                        contender.load(before)
                        contender.launch()
                    contender.load(data)
                    contender.poison()
                    if mode == "cold":
                        device.empty_cache()

                with blame(contender, mode):
                    found[contender.name].times_us[mode].append(watch.time_us((contender.name, mode), setup, contender.launch))
                    contender.check()
                    if n == plan.samples - 1:
                        found[contender.name].outputs[mode] = contender.output().clone()


def _graphs(device: Device, contenders: Sequence[Contender], plan: Plan) -> dict[str, Callable[[], None]]:
    graphs = {}
    for contender in contenders:

        def several(contender: Contender = contender) -> None:
            for _ in range(plan.in_a_row):
                contender.enqueue()

        with blame(contender, "graph capture"):
            graphs[contender.name] = device.capture(several)
    return graphs


def _several(watch: Stopwatch, mode: str, contenders: Sequence[Contender], timed: Sequence[Any], plan: Plan, found: dict[str, Timed],
             steps: dict[str, Callable[[], None]], count: int) -> None:  # fmt: skip
    """``count`` steps between two marks; one step ahead of them, so that the first is like the others."""
    for n in range(plan.runs):
        data = timed[(n - plan.runs) % len(timed)]  # the last run has the last inputs
        for contender in contenders if n % 2 == 0 else contenders[::-1]:
            step = steps[contender.name]

            def setup(contender: Contender = contender, data: Any = data, step: Callable[[], None] = step) -> None:
                contender.load(data)
                contender.poison()
                step()

            def body(step: Callable[[], None] = step) -> None:
                for _ in range(count):
                    step()

            with blame(contender, mode):
                us = watch.time_us((contender.name, mode), setup, body)
                contender.check()
                found[contender.name].times_us[mode].append(us / plan.in_a_row)
                if n == plan.runs - 1:
                    found[contender.name].outputs[mode] = contender.output().clone()
