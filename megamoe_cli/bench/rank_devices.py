"""The machine of several ranks as ``timing`` sees it, and how a time is taken on it.

A launch waits for all ranks, so a time must not contain a rank that came late: every timed piece begins with a launch that
is not timed, which the ranks leave together. The time of a piece is the slowest rank's.

``StreamDevice`` is one rank of several processes, each with a GPU and torch's stream. ``ProgramDevice`` is all ranks in one
process: what is enqueued becomes a program, which the backend runs when somebody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from ..backends.base import Backend, Kernel, Program
from ..errors import MegamoeError, UsageError
from .timing import ATTEMPTS, FIRST_LEAD_US, MOST_LEAD_US, Device, Stopwatch

if TYPE_CHECKING:
    import torch

    from ..abi import KernelParams
    from .contender import Contender


class RankDevice(Device, Protocol):
    """``local_ranks``: what this process enqueues for. ``graphs``: why it captures none; empty when it does."""

    local_ranks: tuple[int, ...]
    graphs: str

    def copy(self, rank: int, dst: torch.Tensor, src: torch.Tensor) -> None: ...
    def fill(self, rank: int, tensor: torch.Tensor, byte: int) -> None: ...
    def launch(self, rank: int, kernel: Kernel, params: KernelParams, grid: int) -> None: ...
    def local_us(self, start: Any, stop: Any) -> dict[int, float]: ...  # rank -> between two marks
    def agree(self, name: str, value: Any) -> list[Any]: ...  # of every process; none goes on before all are here


class StreamDevice:
    """``gpu``: a CudaDevice, or what stands in for it."""

    graphs = ""

    def __init__(self, backend: Backend, control: Any, gpu: Any = None) -> None:
        from .cuda_device import CudaDevice

        self.backend, self.control = backend, control
        self.gpu = gpu or CudaDevice()
        self.local_ranks = backend.local_ranks

    def using(self) -> AbstractContextManager[Any]:
        return self.gpu.using()

    def busy(self, us: float) -> None:
        self.gpu.busy(us)

    def empty_cache(self) -> None:
        self.gpu.empty_cache()

    def mark(self) -> Any:
        return self.gpu.mark()

    def between_us(self, start: Any, stop: Any) -> float:
        return self.gpu.between_us(start, stop)

    def wait(self, timeout_s: float) -> None:
        self.gpu.wait(timeout_s)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        return self.gpu.capture(enqueue)

    def now_s(self) -> float:
        return self.gpu.now_s()

    def copy(self, rank: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        from .contender import bytes_of

        bytes_of(dst).copy_(bytes_of(src))

    def fill(self, rank: int, tensor: torch.Tensor, byte: int) -> None:
        from .contender import bytes_of

        bytes_of(tensor).fill_(byte)

    def launch(self, rank: int, kernel: Kernel, params: KernelParams, grid: int) -> None:
        self.backend.enqueue(rank, kernel, params, grid)

    def local_us(self, start: Any, stop: Any) -> dict[int, float]:
        return {self.local_ranks[0]: self.gpu.between_us(start, stop)}

    def agree(self, name: str, value: Any) -> list[Any]:
        return self.control.agree(name, lambda: value)


class ProgramDevice:
    """A mark is a number of launches; times are the backend's, of a program that is held until it is all enqueued."""

    graphs = "virtual ranks launch on streams of their own in one process, which one graph does not capture"

    def __init__(self, backend: Backend) -> None:
        self.backend, self.local_ranks = backend, backend.local_ranks
        self._program = self._fresh()
        self._done: Any = None

    def _fresh(self) -> Program:
        program = Program(self.backend.ranks)
        program.held = True
        return program

    def using(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def busy(self, us: float) -> None:
        """Nothing: the program is held until the host is done with it."""

    def empty_cache(self) -> None:
        raise UsageError("caches are not emptied over several ranks", rule="times")

    def mark(self) -> Any:
        return len(self._program.launches(self.local_ranks[0]))

    def between_us(self, start: Any, stop: Any) -> float:
        return max(self.local_us(start, stop).values())

    def wait(self, timeout_s: float) -> None:
        """Runs what was enqueued."""
        if self._program:
            program, self._program = self._program, self._fresh()
            self._done = self.backend.run(program, timeout_s)
            self._done.raise_for_faults()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        raise UsageError(self.graphs, rule="times")

    def now_s(self) -> float:
        return 0.0  # the host is never in a time here

    def copy(self, rank: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._program.copy(rank, dst, src)

    def fill(self, rank: int, tensor: torch.Tensor, byte: int) -> None:
        self._program.fill(rank, tensor, byte)

    def launch(self, rank: int, kernel: Kernel, params: KernelParams, grid: int) -> None:
        self._program.launch(rank, kernel, params, grid)

    def local_us(self, start: Any, stop: Any) -> dict[int, float]:
        if not self._done or not self._done.launch_at_ms:
            raise MegamoeError(f"{self.backend.where} takes no times")
        at, took = self._done.launch_at_ms, self._done.launch_ms
        return {rank: 1e3 * (at[rank][stop - 1] + took[rank][stop - 1] - at[rank][start]) for rank in self.local_ranks}

    def agree(self, name: str, value: Any) -> list[Any]:
        return [value]


class RankWatch(Stopwatch):
    """Takes a piece's time on all ranks at once; they keep it or take it again together. ``by_rank``: (contender, mode) ->
    one list of microseconds, by rank, for each time taken. ``on_stage`` hears whose turn it is."""

    def __init__(self, device: RankDevice, wait_s: float, contenders: Mapping[str, Contender],
                 on_stage: Callable[[str], None] = lambda stage: None) -> None:  # fmt: skip
        super().__init__(device, wait_s)
        self.by_rank: dict[Any, list[list[float]]] = {}
        self._contenders, self._on_stage = contenders, on_stage

    def time_us(self, kind: Any, setup: Callable[[], None], body: Callable[[], None]) -> float:
        device: Any = self.device
        name, host_us = f"{kind[0]} {kind[1]}", 0.0
        self._on_stage(f"run {kind[0]}")
        for _ in range(ATTEMPTS):
            lead = self._lead_us.get(kind, FIRST_LEAD_US)
            device.agree(f"begin {name}", None)
            began = device.now_s()
            device.busy(lead)
            setup()
            start = device.mark()
            body()
            stop = device.mark()
            took = (device.now_s() - began) * 1e6
            device.wait(self.wait_s)
            self._contenders[kind[0]].check()  # before the others hear that all is well
            every = device.agree(f"end {name}", (took, device.local_us(start, stop)))
            host_us = max(host for host, _ in every)
            us = {rank: time for _, part in every for rank, time in part.items()}
            if host_us <= lead and min(us.values()) > 0:
                self.by_rank.setdefault(kind, []).append([us[rank] for rank in sorted(us)])
                return max(us.values())
            self.retaken += 1
            self._lead_us[kind] = min(max(lead, 2 * host_us), MOST_LEAD_US)
        raise MegamoeError(f"no usable time in {ATTEMPTS} attempts: the host took {host_us:.0f} us to enqueue it")
