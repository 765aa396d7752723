"""Kernel times of one rank on one GPU, against the floors of the routing really drawn.

A sample is one launch's own device time (events around it). Every launch has tokens and routing of its own, copied
in before it in stream order; after timing, the outputs of the last launch are compared with an independent FP32
reference on the GPU. Numbers of a run whose check fails are not returned.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from .config import KernelConfig
from .errors import UsageError, WrongResult
from .shapes import Problem, Shape

# Measured ceilings of an H200 (docs/measured.md): HBM into shared memory, and WGMMA with classic promotion.
HBM_BYTES_PER_S = 4.70e12
E4M3_FLOPS = 1565e12


@dataclass(frozen=True)
class Row:
    """Times in microseconds; ``low``/``high`` bracket the median (binomial, about 95 %)."""

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

    @property
    def floor_us(self) -> float:
        return max(self.weight_floor_us, self.tensor_floor_us)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"floor_us": self.floor_us, "of_floor": self.floor_us / self.kernel_us}


def slice_of(shape: Shape, ranks: int) -> Shape:
    """What one rank of ``ranks`` holds, as a problem of its own: E/ranks experts, everything else the same."""
    if ranks < 1 or shape.experts % ranks:
        raise UsageError(f"{shape.experts} experts do not split into {ranks} equal parts", rule="experts-ranks")
    return Shape(shape.hidden, shape.intermediate, shape.experts // ranks, shape.topk)


def floors_us(shape: Shape, ids: Iterable[Any]) -> tuple[float, float, float]:
    """(weights, tensor, active experts): mean over the drawn routings of the bytes of the experts hit over HBM rate, and
    of the rows' FLOPs over the tensor rate."""
    weights, flops, active = [], [], []
    for drawn in ids:
        used = drawn[drawn >= 0]
        hit = int(used.unique().numel())
        active.append(hit)
        weights.append(hit * 3 * shape.intermediate * shape.hidden / HBM_BYTES_PER_S * 1e6)
        flops.append(int(used.numel()) * 6 * shape.intermediate * shape.hidden / E4M3_FLOPS * 1e6)
    return statistics.fmean(weights), statistics.fmean(flops), statistics.fmean(active)


def median_interval(samples: list[float]) -> tuple[float, float]:
    """A distribution-free interval of about 95 % for the median: order statistics n/2 -+ 0.98 sqrt(n)."""
    ordered, n = sorted(samples), len(samples)
    half = 0.98 * n**0.5
    low, high = int(n / 2 - half), int(n / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, n - 1)]


class Bench:
    """One GPU, one rank; weights of a shape are made once."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        from .backends.virtual import open_backend
        from .inputs import make_weights

        self.shape, self.seed = shape, seed
        self.backend = open_backend(1)
        self.weights = make_weights(Problem.make(shape, 1, 1), 0, seed, "cuda")

    def close(self) -> None:
        self.backend.close()

    def measure(self, tokens: int, config: KernelConfig, *, samples: int = 12, warmup: int = 3, in_a_row: int = 10, ctas: int | None = None,
                say: Callable[[str], None] = lambda text: None) -> Row:  # fmt: skip
        """One row of the table. ``ctas``: of the grid, None for as many as fit. UsageError for an illegal configuration, WrongResult when the check fails."""
        from .buffers import LaunchOptions
        from .inputs import make_case
        from .oracle import gpu_reference
        from .oracle.compare import Report, end_to_end_limits
        from .session import Session

        problem = Problem.make(self.shape, 1, tokens)
        session = Session(self.backend, problem, config, "combine", poison=False, options=LaunchOptions(ctas=ctas))
        session.set_weights(0, self.weights)
        total = warmup + samples
        cases = [make_case(problem, "uniform", self.seed, launch=n, device="cuda", weights=[self.weights]) for n in range(total)]
        for n, case in enumerate(cases):
            session.stage(n, 0, case.inputs[0])
            session.launch(n)
        say(f"{tokens} tokens: {total} launches")
        done = session.run(60.0, snapshot="none", to_cpu=False)
        done.raise_for_faults()
        times = [1e3 * ms for ms in done.run.launch_ms[0][warmup:]]

        report = Report()
        gpu_reference.compare(cases[-1], [done.outputs(-1)[0]["y"]], 
                              limits=end_to_end_limits(self.shape.intermediate), report=report)  # fmt: skip
        findings = report.findings()
        if findings:
            raise WrongResult(f"{self.shape} at {tokens} tokens is wrong, so its time means nothing: {findings[0]}")
        row = self._back_to_back_us(session, total - 1, in_a_row)
        weight_us, tensor_us, active = floors_us(self.shape, [c.inputs[0].topk_idx for c in cases[warmup:]])
        low, high = median_interval(times)
        return Row(self.shape.name, tokens, statistics.median(times), low, high, row, weight_us, tensor_us, len(times), active,
                   session.config.name(), report.metrics.get("full_rel", 0.0), tuple(times))  # fmt: skip

    def _back_to_back_us(self, session: Any, launch: int, count: int) -> float:
        """Mean over ``count`` launches in a row on the inputs that already lie in the buffer; median of 5 such runs."""
        from .backends.base import Program

        spans = []
        for _ in range(5):
            program = Program(1)
            for _ in range(count):
                program.launch(0, session.kernel, session.params(launch, 0), session.grid)
            run = self.backend.run(program, 60.0)
            run.raise_for_faults()
            spans.append(1e3 * run.span_ms[0] / count)
        return statistics.median(spans)
