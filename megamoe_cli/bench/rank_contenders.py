"""What is timed over several ranks: our kernel, our kernel in another configuration, the public package over the ranks'
process group. Inputs are what an Arena placed: rank -> name -> tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..backends.base import Backend, Kernel, RunResult
from ..buffers import DeviceWeights, LaunchOptions, RankBuffer, make_params
from ..errors import EnvironmentUnfit
from .contender import Contender
from .peer import Peer, load_package

if TYPE_CHECKING:
    import torch

    from ..oracle.casedata import RankWeights
    from ..shapes import Problem
    from .rank_devices import RankDevice

GROUP_TIMEOUT_S = 120.0  # of a collective of the public package's own group
POISON = 0xFF


class OurRanks(Contender):
    """On every rank of this process. All our configurations share buffers and weights; ``ours`` is the one that is judged as
    ours, by name."""

    def __init__(self, name: str, backend: Backend, device: RankDevice, kernel: Kernel, ctas: int | None,
                 buffers: Mapping[int, RankBuffer], weights: Mapping[int, DeviceWeights], outputs: Mapping[int, torch.Tensor]) -> None:  # fmt: skip
        self.name, self.version, self.ours = name, kernel.config.name(), name == "ours"
        self.limits = (0.02, 0.08)
        self.backend, self.device, self.kernel, self.ctas = backend, device, kernel, ctas
        self.buffers, self.weights, self.outputs = buffers, weights, outputs
        self._launches: dict[int, tuple[Any, int]] = {}
        self._tokens: dict[int, int] = {}

    def prepare(self, problem: Problem, weights: RankWeights | None = None) -> None:
        options = LaunchOptions(ctas=self.ctas)
        grid = self.backend.grid(self.kernel.config, options.ctas)
        for rank in self.device.local_ranks:
            tokens, y = problem.tokens[rank], self.outputs[rank]
            params = make_params(self.buffers[rank], self.kernel, self.weights[rank], tokens=tokens, y=y, grid=grid, options=options)
            self._launches[rank], self._tokens[rank] = (params, grid), tokens
            self.backend.clear_fault(rank)

    def load(self, inputs: Any) -> None:
        for rank in self.device.local_ranks:
            for name, tensor in inputs[rank].items():
                self.device.copy(rank, self.buffers[rank].view(name)[: self._tokens[rank]], tensor)

    def poison(self) -> None:
        for rank in self.device.local_ranks:
            self.device.fill(rank, self.outputs[rank], POISON)

    def enqueue(self) -> None:
        for rank, (params, grid) in self._launches.items():
            self.device.launch(rank, self.kernel, params, grid)

    def output(self) -> torch.Tensor:
        """[T,H] bf16 of this process's ranks, one after the other."""
        import torch

        return torch.cat([self.outputs[rank][: self._tokens[rank]] for rank in self.device.local_ranks])

    def check(self) -> None:
        faults = self.backend.recorded_faults()
        if faults:
            RunResult(faults=faults).raise_for_faults()


class RankPeer(Peer):
    """The public package as one rank of its group. Its buffer is symmetric memory over that group, so ``prepare`` is
    collective; what can fail on one rank alone (loading, weights) comes first, in ``load_layers``."""

    def __init__(self, rank: int, ranks: int, package: Any = None, make_group: Callable[[int], Any] | None = None) -> None:
        super().__init__(package or load_package())
        self.rank, self.ranks, self._make_group = rank, ranks, make_group or package_group

    def load_layers(self, weights: RankWeights) -> None:
        self.transform(weights)

    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        self.transform(weights)
        self.meet(problem, weights.w13.device)

    def meet(self, problem: Problem, device: Any) -> None:
        """The buffer, over all ranks. Collective."""
        self._group = self._group or self._make_group(self.ranks)
        self.allocate(problem, device, self.rank)
        if getattr(getattr(self._buffer, "handle", None), "multicast_ptr", 0):
            raise EnvironmentUnfit("torch made a multicast object for the public package although it was told not to; refusing to go on")

    def load(self, inputs: Any) -> None:
        super().load(SimpleNamespace(**inputs[self.rank]))


def package_group(ranks: int) -> Any:
    """A gloo group of all ranks for the package alone: its collectives cannot meet ours. Collective."""
    import torch.distributed as dist

    return dist.new_group(list(range(ranks)), backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
