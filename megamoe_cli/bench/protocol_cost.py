"""What the cross-rank protocol costs where no link is involved: one rank holding all experts and T tokens, against R virtual
ranks of the same GPU with T/R tokens each, same tokens, same routing, same weights, equally many SMs in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..backends.base import Backend, Program
from ..config import KernelConfig
from ..errors import UsageError, WrongResult
from ..shapes import Problem, Shape
from .intervals import Estimate

SMS = 128  # of both sides: divides by 2, 4 and 8
LIMIT = 1.15


@dataclass(frozen=True)
class Cost:
    """Of one size: microseconds of both sides, and ``ratio``: many ranks over one (median, low, high, pairs)."""

    shape: str
    tokens: int
    ranks: int
    one: Estimate
    many: Estimate
    ratio: dict[str, float]
    difference: float  # of a row, relative L2, between the two

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"limit": LIMIT, "within": self.ratio["median"] <= LIMIT}


def check(shape: Shape, tokens: Sequence[int], ranks: Sequence[int], sms: int = SMS) -> None:
    """UsageError, before anything runs, for what does not divide."""
    for count in ranks:
        if count < 2 or shape.experts % count or sms % count:
            raise UsageError(f"{count} ranks: it must be at least 2 and divide {shape.experts} experts and {sms} SMs", rule="protocol-cost")
        for size in tokens:
            if size % count:
                raise UsageError(f"{size} tokens do not divide over {count} ranks", rule="protocol-cost")


class Side:
    """One or more ranks on one backend, with weights that are slices of the one rank's."""

    def __init__(self, backend: Backend, shape: Shape, tokens: int, layers: tuple[Any, Any], config: KernelConfig) -> None:
        import torch

        from ..buffers import DeviceWeights, RankBuffer
        from ..layout import layout_for
        from ..weights import LayerWeights

        self.backend, ranks = backend, backend.ranks
        self.problem = Problem.make(shape, ranks, tokens // ranks)
        self.kernel = backend.load(config, "combine", shape)
        layout, name = layout_for(shape, ranks, self.problem.capacity), backend.fresh_name("cost")
        self.buffers = [RankBuffer(backend, layout, rank, name) for rank in range(ranks)]
        per = shape.experts // ranks
        self.weights = [DeviceWeights.adopt(backend, rank, *(LayerWeights(w[rank * per : (rank + 1) * per], s[rank * per : (rank + 1) * per])
                                                             for w, s in layers)) for rank in range(ranks)]  # fmt: skip
        memory = [backend.alloc(rank, tokens // ranks * shape.hidden * 2, symmetric=False, name="y") for rank in range(ranks)]
        self.parts = [part.view(torch.bfloat16).view(-1, shape.hidden) for part in memory]

    @property
    def y(self) -> Any:
        """[T,H] bf16 of all ranks, in their order."""
        import torch

        return torch.cat(self.parts)

    def run(self, inputs: Sequence[Any], timeout_s: float) -> list[float]:
        """Microseconds of each launch on its slowest rank. ``inputs``: of all tokens, one set for each launch."""
        from ..buffers import LaunchOptions, make_params
        from ..layout import INPUT_VIEWS

        program, each, options = Program(self.backend.ranks), self.problem.tokens[0], LaunchOptions()
        grid = self.backend.grid(self.kernel.config)
        for data in inputs:
            for rank, buffer in enumerate(self.buffers):
                rows = slice(rank * each, (rank + 1) * each)
                program.fill(rank, self.parts[rank], 0xFF)
                for name in INPUT_VIEWS:
                    program.copy(rank, buffer.view(name)[:each], getattr(data, name)[rows])
                params = make_params(buffer, self.kernel, self.weights[rank], tokens=each, y=self.parts[rank], grid=grid, options=options)
                program.launch(rank, self.kernel, params, grid)
        done = self.backend.run(program, timeout_s)
        done.raise_for_faults(self.problem.shape.topk)
        return [1e3 * max(times) for times in zip(*done.launch_ms.values())]


def measure_cost(name: str, shape: Shape, tokens: Sequence[int], ranks: Sequence[int], *, config: KernelConfig | None = None,
                 samples: int = 7, seed: int = 0, say: Callable[[str], None] = lambda text: None,
                 opener: Callable[..., Backend] | None = None, device: str = "cuda", sms: int = SMS) -> list[Cost]:  # fmt: skip
    """One Cost per size and rank count. ``shape``: all experts. WrongResult when the two sides disagree or the one rank's
    answer is wrong. ``opener(ranks, ctas=...)`` replaces the backend's."""
    from ..backends.virtual import open_backend

    check(shape, tokens, ranks, sms)
    opener, config = opener or open_backend, config or KernelConfig()
    natural, layers = _weights(shape, seed, device)
    found = []
    for count in ranks:
        with opener(1, ctas=sms) as alone, opener(count, ctas=sms // count) as together:
            for size in tokens:
                one, many = (Side(b, shape, size, layers, config) for b in (alone, together))
                found.append(_compare(name, one, many, natural, samples, seed, device))
                say(f"{name}, {size} tokens, {count} ranks: {found[-1].ratio['median']:.3f}")
    return found


def _weights(shape: Shape, seed: int, device: str) -> tuple[Any, tuple[Any, Any]]:
    """All experts in natural layout, and transformed."""
    from ..inputs import make_weights
    from ..weights import LayerWeights, transform_weights_for_mega_moe_sm90

    natural = make_weights(Problem.make(shape, 1, 1), 0, seed, device)
    layers = transform_weights_for_mega_moe_sm90(LayerWeights(natural.w13, natural.w13_sf), LayerWeights(natural.w2, natural.w2_sf))
    return natural, layers


def _compare(name: str, one: Side, many: Side, natural: Any, samples: int, seed: int, device: str) -> Cost:
    """Runs of two launches each, one side after the other; the second launch of a run is the sample (ranks start the first
    one together by a gate, the second as the first left them)."""
    from ..inputs import make_case
    from ..tuning.paired import ratio
    from .judge import check_ours, difference

    cases = [make_case(one.problem, "uniform", seed, launch=n, device=device, weights=[natural]) for n in range(samples + 1)]
    inputs = [case.inputs[0] for case in cases]
    times: dict[Side, list[float]] = {one: [], many: []}
    for n in range(samples + 1):
        for side in (one, many) if n % 2 == 0 else (many, one):
            measured = side.run([inputs[n - 1], inputs[n]], 120.0)
            if n > 0:  # the first pair warms up
                times[side].append(measured[1])
    check_ours(cases[-1], {"one rank": one.y})
    worst = difference(many.y, one.y)[1]
    if not worst <= 0.01:
        raise WrongResult(f"{name} at {one.problem.tokens[0]} tokens: {len(many.buffers)} ranks and one rank disagree by {worst:.3g} in a row")
    return Cost(name, one.problem.tokens[0], len(many.buffers), Estimate.of(times[one]), Estimate.of(times[many]),
                asdict(ratio(list(zip(times[many], times[one])))), worst)  # fmt: skip
