"""Our kernel as a contender: launched through the virtual backend's runtime, on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..backends.base import Kernel, RunResult
from ..buffers import DeviceWeights, LaunchOptions, RankBuffer, make_params
from ..config import KernelConfig
from ..layout import INPUT_VIEWS, layout_for
from ..weights import LayerWeights, transform_weights_for_mega_moe_sm90
from .contender import Contender, bytes_of

if TYPE_CHECKING:
    import torch

    from ..oracle.casedata import RankInputs, RankWeights
    from ..shapes import Problem


def torchs_stream(cuda: Any) -> Any:
    """torch's current stream as CuPy's: what a torch graph captures."""
    return cuda.cupy.cuda.ExternalStream(cuda.torch.cuda.current_stream(cuda.device).cuda_stream)


class Ours(Contender):
    """``backend``: an open VirtualBackend of one rank. ``stream``: of its ``cuda``, where launches go."""

    name, ours = "ours", True

    def __init__(self, backend: Any, stream: Callable[[Any], Any] = torchs_stream) -> None:
        self.backend, self._stream = backend, stream
        self._config, self._ctas = KernelConfig(), None
        self._natural: RankWeights | None = None
        self._weights: DeviceWeights | None = None
        self._buffers: dict[int, RankBuffer] = {}  # by capacity: the backend gives symmetric memory back at its end only
        self._launch: tuple[Kernel, bytes, int] | None = None

    def configure(self, config: KernelConfig, ctas: int | None = None) -> None:
        """Of the next ``prepare``. ``ctas``: of the grid, None for as many as fit."""
        self._config, self._ctas = config, ctas

    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        import torch

        shape = problem.shape
        self.keep(weights)
        assert self._weights is not None
        if problem.capacity not in self._buffers:
            layout = layout_for(shape, 1, problem.capacity)
            self._buffers[problem.capacity] = RankBuffer(self.backend, layout, 0, self.backend.fresh_name("bench"))
        kernel = self.backend.load(self._config, "combine", shape)
        self.version = kernel.config.name()
        tokens, options = problem.tokens[0], LaunchOptions(ctas=self._ctas)
        grid = self.backend.grid(kernel.config, options.ctas)
        self._tokens, self._buffer = tokens, self._buffers[problem.capacity]
        memory = self.backend.alloc(0, tokens * shape.hidden * 2, symmetric=False, name="y")
        self._y = memory.view(torch.bfloat16).view(tokens, shape.hidden)
        params = make_params(self._buffer, kernel, self._weights, tokens=tokens, y=self._y, grid=grid, options=options)
        self._launch = (kernel, params.pack(), grid)
        self.backend.clear_fault(0)

    def keep(self, weights: RankWeights) -> None:
        """Transforms the weights, once for each object."""
        if self._natural is not weights:
            pair = transform_weights_for_mega_moe_sm90(LayerWeights(weights.w13, weights.w13_sf), LayerWeights(weights.w2, weights.w2_sf))
            self._natural, self._weights = weights, DeviceWeights.adopt(self.backend, 0, *pair)

    def load(self, inputs: RankInputs) -> None:
        for name in INPUT_VIEWS:
            bytes_of(self._buffer.view(name)[: self._tokens]).copy_(bytes_of(getattr(inputs, name)))

    def enqueue(self) -> None:
        assert self._launch is not None
        kernel, packed, grid = self._launch
        cuda = self.backend.cuda
        cuda.launch(kernel.handle, grid, kernel.threads, packed, kernel.smem_bytes, self._stream(cuda))

    def output(self) -> torch.Tensor:
        return self._y

    def check(self) -> None:
        faults = self.backend.recorded_faults()
        if faults:
            RunResult(faults=faults).raise_for_faults()

    def close(self) -> None:
        self._weights = self._natural = self._launch = None
        self._buffers.clear()


class Variant(Ours):
    """Our kernel in another configuration, beside ``main`` and on its weights and buffers. Judged as a rival, but within
    our own limits: it computes the same sums."""

    ours, limits = False, (0.02, 0.08)

    def __init__(self, name: str, config: KernelConfig, main: Ours) -> None:
        super().__init__(main.backend, main._stream)
        self.name, self._main = name, main
        self.configure(config)

    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        self._main.keep(weights)
        self._natural, self._weights, self._buffers = weights, self._main._weights, self._main._buffers
        super().prepare(problem, weights)

    def close(self) -> None:
        self._buffers = {}
        super().close()
