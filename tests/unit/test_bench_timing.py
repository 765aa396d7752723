"""How bench times, with a device made of a clock: order, cold and warm, host lead, medians, who is to blame."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from megamoe_cli.bench import intervals
from megamoe_cli.bench.contender import Contender, ContenderFailed, DeviceLost
from megamoe_cli.bench.measured import ratios
from megamoe_cli.bench.timing import ATTEMPTS, MODES, Plan, Stopwatch, measure, overhead_us
from megamoe_cli.errors import LaunchFault, MegamoeError, TimedOut


class ClockDevice:
    """Time passes as work is enqueued; ``log`` keeps what was. Graphs replay what was captured."""

    def __init__(self, host_us: float = 5.0) -> None:
        self.device_us, self.host_us, self.each_us = 0.0, 0.0, host_us
        self.log: list[tuple] = []
        self.cache: object = None
        self.capturing: list | None = None
        self.hangs = False

    def using(self):
        return contextlib.nullcontext()

    def busy(self, us: float) -> None:
        self.log.append(("busy", us))
        self.device_us += us

    def empty_cache(self) -> None:
        self.log.append(("empty",))
        self.cache = None

    def mark(self) -> float:
        self.log.append(("mark",))
        return self.device_us

    def between_us(self, start: float, stop: float) -> float:
        return stop - start

    def wait(self, timeout_s: float) -> None:
        self.log.append(("wait",))
        if self.hangs:
            raise TimedOut("the device did not finish")

    def capture(self, enqueue):
        self.capturing, kept = [], []
        enqueue()
        kept, self.capturing = self.capturing, None

        def replay() -> None:
            self.log.append(("replay", len(kept)))
            for work in kept:
                work()

        return replay

    def do(self, work) -> None:
        self.host_us += self.each_us
        if self.capturing is not None:
            self.capturing.append(work)
        else:
            work()

    def now_s(self) -> float:
        return self.host_us / 1e6


class Stand(Contender):
    """Takes ``warm_us``, or ``cold_us`` when its weights are not in the cache; its output is the inputs it was given."""

    def __init__(self, device: ClockDevice, name: str, warm_us: float, cold_us: float, ours: bool = False) -> None:
        self.device, self.name, self.warm_us, self.cold_us, self.ours = device, name, warm_us, cold_us, ours
        self.data, self.y, self.noise = -1, torch.zeros(1, 2, dtype=torch.bfloat16), lambda: 0.0
        self.failure: Exception | None = None
        self.launches = 0

    def prepare(self, problem, weights) -> None:
        pass

    def load(self, inputs) -> None:
        self.device.log.append(("load", self.name, inputs))
        self.data = inputs

    def enqueue(self) -> None:
        def work() -> None:
            self.device.log.append(("launch", self.name, self.data))
            self.launches += 1
            self.device.device_us += (self.warm_us if self.device.cache is self else self.cold_us) + self.noise()
            self.device.cache = self
            self.y.fill_(float(self.data))

        if self.failure is not None:
            raise self.failure
        self.device.do(work)

    def output(self) -> torch.Tensor:
        return self.y

    def poison(self) -> None:
        self.device.log.append(("poison", self.name))
        super().poison()


PLAN = Plan(samples=4, warmup=2, in_a_row=3, runs=2)


def pair() -> tuple[ClockDevice, Stand, Stand]:
    device = ClockDevice()
    return device, Stand(device, "ours", 80.0, 100.0, ours=True), Stand(device, "peer", 120.0, 125.0)


def test_times_of_all_modes() -> None:
    device, ours, peer = pair()
    found = measure(device, [ours, peer], list(range(6)), PLAN)
    assert found["ours"].times_us == {"kernel": [80.0] * 4, "cold": [100.0] * 4, "in_a_row": [80.0] * 2, "graph": [80.0] * 2}
    assert found["peer"].times_us["cold"] == [125.0] * 4 and found["peer"].times_us["graph"] == [120.0] * 2


def test_launches_alternate_and_the_order_turns_around() -> None:
    device, ours, peer = pair()
    measure(device, [ours, peer], list(range(5)), Plan(samples=3, warmup=2, modes=("kernel",)))
    timed = []
    for at, entry in enumerate(device.log):
        if entry == ("mark",) and device.log[at + 1][0] == "launch":
            timed.append(device.log[at + 1][1:])
    assert timed == [("ours", 2), ("peer", 2), ("peer", 3), ("ours", 3), ("ours", 4), ("peer", 4)], "same inputs, fresh ones each repeat"


def test_a_kernel_time_follows_a_launch_of_its_own_on_other_inputs() -> None:
    device, ours, peer = pair()
    measure(device, [ours, peer], list(range(6)), Plan(samples=4, warmup=2, modes=("kernel",)))
    start = device.log.index(("busy", 300.0))
    assert device.log[start : start + 8] == [("busy", 300.0), ("load", "ours", 1), ("launch", "ours", 1), ("load", "ours", 2), ("poison", "ours"),
                                             ("mark",), ("launch", "ours", 2), ("mark",)]  # fmt: skip


def test_cold_empties_the_cache_after_everything_else() -> None:
    device, ours, peer = pair()
    measure(device, [ours, peer], list(range(6)), Plan(samples=4, warmup=2, modes=("kernel", "cold")))
    empties = [at for at, entry in enumerate(device.log) if entry == ("empty",)]
    assert len(empties) == 8
    for at in empties:
        assert [entry[0] for entry in device.log[at - 3 : at + 4]] == ["busy", "load", "poison", "empty", "mark", "launch", "mark"]


def test_every_output_was_poisoned_and_is_of_the_last_inputs() -> None:
    device, ours, peer = pair()
    found = measure(device, [ours, peer], list(range(6)), PLAN)
    for timed in found.values():
        assert set(timed.outputs) == set(MODES)
        assert all(y.tolist() == [[5.0, 5.0]] for y in timed.outputs.values())

    class Lazy(Stand):
        """Stops writing its output after the warm-up."""

        def enqueue(self) -> None:
            if self.launches < 2:
                super().enqueue()
            else:
                self.launches += 1
                self.device.do(lambda: setattr(self.device, "device_us", self.device.device_us + 1))

    device = ClockDevice()
    found = measure(device, [Lazy(device, "ours", 1.0, 1.0)], list(range(6)), PLAN)
    assert all(y.isnan().all() for y in found["ours"].outputs.values())


def test_a_graph_holds_all_launches_of_a_run() -> None:
    device, ours, peer = pair()
    measure(device, [ours, peer], list(range(6)), PLAN)
    replays = [entry for entry in device.log if entry[0] == "replay"]
    assert replays == [("replay", 3)] * 8, "2 contenders, 2 runs, one replay ahead of the timed one"


def test_a_host_that_is_late_gets_more_time() -> None:
    device = ClockDevice(host_us=700.0)
    watch = Stopwatch(device, 1.0)
    slow = Stand(device, "peer", 50.0, 60.0)
    slow.load(0)
    assert watch.time_us("peer", lambda: None, slow.enqueue) == 50.0
    assert watch.retaken == 1 and [e[1] for e in device.log if e[0] == "busy"] == [300.0, 1400.0]
    assert watch.time_us("peer", lambda: None, slow.enqueue) == 50.0 and watch.retaken == 1, "remembered"
    device.each_us = 1e6
    with pytest.raises(MegamoeError, match=f"{ATTEMPTS} attempts"):
        watch.time_us("peer", lambda: None, slow.enqueue)


def test_the_overhead_of_two_marks() -> None:
    device = ClockDevice()
    assert overhead_us(device) == 0.0


@pytest.mark.parametrize("failure, fatal", [(RuntimeError("Assertion failed: hidden\nat line 5"), False), (DeviceLost("illegal address"), True)])
def test_a_rivals_failure_names_it(failure: Exception, fatal: bool) -> None:
    device, ours, peer = pair()
    peer.failure = failure
    with pytest.raises(ContenderFailed, match="^peer failed: first launch: ") as caught:
        measure(device, [ours, peer], list(range(6)), PLAN)
    assert caught.value.exit_code == 1 and caught.value.fatal is fatal and "line 5" not in str(caught.value)


def test_a_rival_that_hangs_is_fatal_and_ours_is_raised_as_it_is() -> None:
    device, ours, peer = pair()
    ours.failure = LaunchFault("rank 0 waited")
    with pytest.raises(LaunchFault, match="rank 0 waited"):
        measure(device, [ours, peer], list(range(6)), PLAN)
    ours.failure = RuntimeError("CUDA error: an illegal memory access\nmore")
    with pytest.raises(DeviceLost, match="illegal memory access$"):
        measure(device, [ours, peer], list(range(6)), PLAN)
    device.hangs = True
    with pytest.raises(ContenderFailed, match="did not finish") as caught:
        measure(device, [peer], list(range(6)), PLAN)
    assert caught.value.fatal


def test_estimates_and_ratios() -> None:
    assert intervals.Estimate.of([3.0, 1.0, 2.0]).us == 2.0
    draw = random.Random(0)
    misses = 0
    for _ in range(200):
        found = intervals.Estimate.of([draw.gauss(10, 1) for _ in range(12)])
        misses += not found.low_us <= 10 <= found.high_us
    assert misses <= 20, "about 95 % of the intervals hold the median"
    assert intervals.geomean([0.5, 2.0]) == pytest.approx(1.0)
    with pytest.raises(ValueError):
        intervals.geomean([])
    with pytest.raises(ValueError):
        intervals.Estimate.of([])


def test_ratios_are_of_pairs_so_drift_cancels() -> None:
    """Both drift by a factor of three during the row; ours is always 0.7 of theirs."""
    theirs = [100.0 * (1 + 2 * n / 11) for n in range(12)]
    sides = [{"kernel": intervals.Estimate.of(times)} for times in ([0.7 * us for us in theirs], theirs)]
    found = ratios(*sides)["kernel"]
    assert found["median"] == pytest.approx(0.7) and found["low"] == pytest.approx(0.7) and found["pairs"] == 12
    assert ratios({}, sides[1]) == {}


def test_plan_and_inputs_must_agree() -> None:
    device, ours, _ = pair()
    with pytest.raises(ValueError, match="5 sets of inputs, 6 wanted"):
        measure(device, [ours], list(range(5)), PLAN)
