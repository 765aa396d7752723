"""One row of the table: our kernel, and whatever it is compared with, on the same inputs in the same minute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import TimedOut, WrongResult
from ..shapes import Problem, Shape
from .floors import floors_us
from .intervals import Estimate
from .timing import Plan, Timed, measure, overhead_us

if TYPE_CHECKING:
    from ..config import KernelConfig
    from .contender import Contender


@dataclass(frozen=True)
class Rival:
    """Another contender's times of the row. ``ratios``: mode -> ours over its own, pair by pair (median, low, high,
    pairs). ``difference``: of its output from the FP32 reference, relative (whole, worst row)."""

    name: str
    version: str
    times: dict[str, Estimate]
    ratios: dict[str, dict[str, float]]
    difference: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Row:
    """Times in microseconds; ``low``/``high`` bracket the median (binomial, about 95 %). ``kernel_us``: L2 as the launch
    before left it; the others are in ``times`` (see ``timing``)."""

    shape: str
    tokens: int
    kernel_us: float
    low_us: float
    high_us: float
    back_to_back_us: float
    weight_floor_us: float
    tensor_floor_us: float
    samples: int
    active_experts: float
    config: str
    worst_relative: float
    times_us: tuple[float, ...] = ()  # every sample, in the order of its launch
    times: dict[str, Estimate] = field(default_factory=dict)
    rivals: tuple[Rival, ...] = ()
    overhead_us: float = 0.0  # of two marks with nothing between, contained in every time

    @property
    def floor_us(self) -> float:
        return max(self.weight_floor_us, self.tensor_floor_us)

    def to_dict(self) -> dict[str, Any]:
        in_a_row = self.back_to_back_us if self.back_to_back_us == self.back_to_back_us else None  # JSON has no NaN
        return asdict(self) | {"back_to_back_us": in_a_row, "floor_us": self.floor_us, "of_floor": self.floor_us / self.kernel_us,
                               "of_floor_cold": self.floor_us / self.times["cold"].us if "cold" in self.times else None}  # fmt: skip


class Bench:
    """One GPU, one rank; weights of a shape are made once and shared by all contenders. ``against``: their names.
    ``reserve_sms``: SMs that our grid leaves free."""

    def __init__(self, shape: Shape, seed: int = 0, against: Sequence[str] = (), reserve_sms: int = 0) -> None:
        from ..backends.virtual import open_backend
        from ..inputs import make_weights
        from .cuda_device import CudaDevice
        from .ours import Ours
        from .rivals import open_rivals

        self.shape, self.seed = shape, seed
        self.backend = open_backend(1, reserve_sms=reserve_sms)
        self.device: Any = CudaDevice()
        self.where_tensors = "cuda"
        with self.device.using():  # everything on one stream: nothing overtakes what it reads
            self.weights = make_weights(Problem.make(shape, 1, 1), 0, seed, self.where_tensors)
        self.device.wait(60.0)
        self.ours = Ours(self.backend)
        self.rivals: list[Contender] = open_rivals(against, self.device, self.ours)
        self._lost = False

    def close(self) -> None:
        """After the device was lost nothing is freed: freeing would wait for a kernel that does not end."""
        if self._lost:
            return
        for contender in (*self.rivals, self.ours):
            contender.close()
        self.backend.close()

    def measure(self, tokens: int, config: KernelConfig, *, samples: int = 12, warmup: int = 2, in_a_row: int = 10, ctas: int | None = None,
                modes: Sequence[str] | None = None, say: Callable[[str], None] = lambda text: None) -> Row:  # fmt: skip
        """One row of the table. ``ctas``: of the grid, None for as many as fit. UsageError for an illegal configuration,
        WrongResult when our output is wrong, ContenderFailed when another contender fails."""
        from .contender import ContenderFailed, DeviceLost

        try:
            return self._measure(tokens, config, samples, warmup, in_a_row, ctas, modes, say)
        except (TimedOut, DeviceLost):
            self._lost = True
            raise
        except ContenderFailed as failure:
            self._lost = failure.fatal
            raise

    def _measure(self, tokens: int, config: KernelConfig, samples: int, warmup: int, in_a_row: int, ctas: int | None,
                 modes: Sequence[str] | None, say: Callable[[str], None]) -> Row:  # fmt: skip
        from ..inputs import make_case
        from .contender import blame

        plan = Plan(samples=samples, warmup=warmup, in_a_row=in_a_row)
        plan = plan if modes is None else replace(plan, modes=tuple(modes))
        problem = Problem.make(self.shape, 1, tokens)
        self.ours.configure(config, ctas)
        with self.device.using():
            for contender in (self.ours, *self.rivals):
                with blame(contender, "preparation"):
                    contender.prepare(problem, self.weights)
            cases = [make_case(problem, "uniform", self.seed, launch=n, device=self.where_tensors, weights=[self.weights])
                     for n in range(plan.inputs)]
        self.device.wait(plan.wait_s)
        found = measure(self.device, [self.ours, *self.rivals], [case.inputs[0] for case in cases], plan, say)
        say(f"{tokens} tokens: checking the outputs")
        cases[-1].rescaled = config.promotion == "rescale"
        with self.device.using():
            worst, differences = self._judge(cases[-1], found)
            floors = floors_us(self.shape, [c.inputs[0].topk_idx for c in cases[warmup:]])
        return self._row(tokens, found, floors, worst, differences)

    def _judge(self, case: Any, found: dict[str, Timed]) -> tuple[float, dict[str, tuple[float, float]]]:
        from .judge import check_ours, check_rival, reference

        worst = check_ours(case, found[self.ours.name].outputs)
        want = reference(case) if self.rivals else None
        return worst, {rival.name: check_rival(rival, want, found[rival.name].outputs) for rival in self.rivals}

    def _row(self, tokens: int, found: dict[str, Timed], floors: tuple[float, float, float], worst: float,
             differences: dict[str, tuple[float, float]]) -> Row:  # fmt: skip
        times = {name: {mode: Estimate.of(us) for mode, us in timed.times_us.items() if us} for name, timed in found.items()}
        own = times[self.ours.name]
        if "kernel" not in own:
            raise WrongResult("a row without kernel times")
        kernel = own["kernel"]
        rivals = tuple(Rival(r.name, r.version, times[r.name], ratios(own, times[r.name]), differences[r.name]) for r in self.rivals)
        in_a_row = own["in_a_row"].us if "in_a_row" in own else float("nan")
        return Row(self.shape.name, tokens, kernel.us, kernel.low_us, kernel.high_us, in_a_row, floors[0], floors[1], len(kernel.times_us),
                   floors[2], self.ours.version, worst, kernel.times_us, own, rivals, overhead_us(self.device))  # fmt: skip


def ratios(ours: dict[str, Estimate], theirs: dict[str, Estimate]) -> dict[str, dict[str, float]]:
    """Mode -> ours over theirs, of samples taken one after the other on the same inputs."""
    from ..tuning.paired import ratio

    out = {}
    for mode in ours.keys() & theirs.keys():
        found = ratio(list(zip(ours[mode].times_us, theirs[mode].times_us)))
        out[mode] = asdict(found)
    return out
