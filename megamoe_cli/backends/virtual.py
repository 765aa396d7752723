"""R ranks on one CUDA GPU: each launches on a stream of its own, with few enough CTAs that all ranks are resident at
once. Peer pointers are plain device pointers. The kernel's cross-rank waits are real; only the link is not.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import TYPE_CHECKING, Any

from ..abi import FAULT_BYTES
from ..config import KernelConfig
from ..errors import LaunchFault, TimedOut, UsageError
from .base import Backend, Copy, Fill, Kernel, Launch, Operation, Program, RunResult, check_program
from .sm_share import SmShare

if TYPE_CHECKING:
    import torch

    from ..shapes import Shape

DEFAULT_QUEUES = 8  # hardware queues of a context that was made without CUDA_DEVICE_MAX_CONNECTIONS
MAX_QUEUES = 32
_FAULT_STRIDE = 128  # bytes between fault records: a cache line each
_POLL_S = 0.0005


def open_backend(ranks: int, device: int = 0, ctas: int | None = None, reserve_sms: int = 0, **options: Any) -> VirtualBackend:
    """``ctas``: CTAs per rank at most (default: as many as keep all ranks resident); ``reserve_sms``: SMs left free."""
    if options:
        raise UsageError(f"unknown option {next(iter(options))!r} of the virtual backend", rule="backend-option")
    from .cuda_runtime import CudaRuntime

    return VirtualBackend(ranks, CudaRuntime(device), ctas, reserve_sms)


class VirtualBackend(Backend):
    """See the module. ``cuda`` is a CudaRuntime or a stand-in with its methods."""

    name = "virtual"

    def __init__(self, ranks: int, cuda: Any, ctas: int | None = None, reserve_sms: int = 0) -> None:
        self.cuda, self.gpu = cuda, cuda.gpu
        self.ranks, self.local_ranks = ranks, tuple(range(ranks))
        self.use_share(f"virtual({ranks} on 1x{self.gpu.name})", SmShare(self.gpu.sms, ranks, reserve_sms, ctas))
        if cuda.few_queues and ranks > DEFAULT_QUEUES:
            raise UsageError(
                f"{ranks} ranks need {ranks} hardware queues, and this process made its CUDA context with {DEFAULT_QUEUES}",
                hint=f"set CUDA_DEVICE_MAX_CONNECTIONS={MAX_QUEUES} before anything uses CUDA", rule="co-residency")
        self._streams = [cuda.stream() for _ in range(ranks)]
        # One more record's room at the end: the word that holds the streams until all are filled.
        self._faults = cuda.alloc_pinned(_FAULT_STRIDE * (ranks + 1))
        self._symmetric: dict[str, dict[int, torch.Tensor]] = {}
        self._kernels: dict[tuple[str, int], Any] = {}
        self._broken = ""
        self._running: Program | None = None

    # ---- memory ----

    def alloc(self, rank: int, nbytes: int, *, symmetric: bool, name: str) -> torch.Tensor:
        tensor = self.cuda.alloc(nbytes)
        if symmetric:
            parts = self._symmetric.setdefault(name, {})
            if rank in parts:
                raise ValueError(f"rank {rank} already has a symmetric allocation {name!r}")
            parts[rank] = tensor
        return tensor

    def peer_addresses(self, rank: int, name: str) -> list[int]:
        parts = self._symmetric.get(name, {})
        missing = [r for r in range(self.ranks) if r not in parts]
        if missing:
            raise UsageError(f"rank {missing[0]} has no symmetric allocation {name!r} yet; allocation is collective", rule="collective")
        return [parts[r].data_ptr() for r in range(self.ranks)]

    def fault_address(self, rank: int) -> int:
        return self._faults + rank * _FAULT_STRIDE

    def adopt(self, rank: int, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        if self.cuda.is_here(tensor) and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            return tensor
        memory = self.alloc(rank, tensor.numel() * tensor.element_size(), symmetric=False, name=name)
        copy = memory.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        return self.cuda.encode_tensor_map(address, rows, cols, box_rows, box_cols)

    # ---- kernels ----

    def load(self, config: KernelConfig, phase: str, shape: Shape) -> Kernel:
        from ..compile import build

        return self.load_built(build(phase, config, target="sm_90a", shape=shape, ranks=self.ranks))

    def load_built(self, built: Any) -> Kernel:
        """Loads a cubin and checks that all ranks' CTAs can be resident together."""
        from ..compile.entry import KERNEL_NAME

        key = (str(built.path), built.smem_bytes)
        if key not in self._kernels:
            self._kernels[key] = self.cuda.load(built.path, KERNEL_NAME, built.smem_bytes)
        kernel = Kernel(built.config, built.phase, built.smem_bytes, built.path, built, self._kernels[key])
        self._check_resident(kernel)
        return kernel

    def _check_resident(self, kernel: Kernel) -> None:
        config, ranks = kernel.config, self.ranks
        grid = self.grid(config)  # refuses when not even one cluster per rank fits
        blocks = self.cuda.resident_blocks(kernel.handle, config.threads, kernel.smem_bytes)
        if blocks < 1:
            raise UsageError(f"{config.name()} with {kernel.smem_bytes} bytes of shared memory and {config.threads} threads does "
                             f"not fit on one SM of {self.gpu.name}", rule="co-residency")  # fmt: skip
        if config.cluster > 1:
            fit = self.cuda.resident_clusters(kernel.handle, config.cluster, config.threads, kernel.smem_bytes, grid)
            if self.share.clusters(fit) < 1:
                raise UsageError(f"{ranks} ranks of clusters of {config.cluster} cannot all be resident on {self.where}",
                                 rule="co-residency")  # fmt: skip
            self.fit_clusters(config.cluster, fit)

    # ---- running ----

    def run(self, program: Program, timeout_s: float) -> RunResult:
        if self._broken:
            raise UsageError(f"this backend cannot run any more: {self._broken}", rule="backend-state")
        check_program(self, program)
        result = RunResult()
        for rank in self.local_ranks:
            self.clear_fault(rank)
        self.cuda.synchronize()  # uploads on torch's streams
        start = time.perf_counter()
        self._running = program  # kept when something goes wrong: the device may still write its tensors
        try:
            timing = self._enqueue(program, result)
        except Exception as error:
            self._broken = f"enqueueing failed: {error}"
            raise
        self._wait(start + timeout_s, timeout_s)
        self._running = None
        result.seconds = time.perf_counter() - start
        result.launch_ms = {rank: [self.cuda.elapsed_ms(a, b) for a, b in pairs] for rank, pairs in timing.items()}
        result.span_ms = {rank: self.cuda.elapsed_ms(pairs[0][0], pairs[-1][1]) for rank, pairs in timing.items() if pairs}
        if program.held:
            result.launch_at_ms = {rank: [self.cuda.elapsed_ms(pairs[0][0], a) for a, _ in pairs] for rank, pairs in timing.items()}
        result.faults = self.recorded_faults()
        return result

    def _enqueue(self, program: Program, result: RunResult) -> dict[int, list[tuple[Any, Any]]]:
        """Fills the streams launch by launch. Streams are held until each has its first launch (of a held program: all
        of it), so that ranks start together; later launches follow while the device runs (a full queue blocks the host, but never before every
        rank has what the others wait for)."""
        timing: dict[int, list[tuple[Any, Any]]] = {rank: [] for rank in self.local_ranks}
        segments = [program.segments(rank) for rank in self.local_ranks]
        gate = self._gate(result)
        try:
            for turn, parts in enumerate(itertools.zip_longest(*segments, fillvalue=())):
                for rank, ops in zip(self.local_ranks, parts):
                    for op in ops:
                        self._issue(op, rank, timing[rank])
                if turn == 0 and not program.held:
                    self._open(gate)
        finally:
            self._open(gate)  # also after an error: held streams would never drain
        return timing

    def _gate(self, result: RunResult) -> int:
        from .driver import DriverError

        gate = self._faults + self.ranks * _FAULT_STRIDE
        ctypes.c_uint32.from_address(gate).value = 0
        try:
            for stream in self._streams:
                self.cuda.hold(stream, gate)
        except DriverError as error:
            self._open(gate)
            result.notes.append(f"ranks start as they are enqueued, not together: {error}")
        return gate

    @staticmethod
    def _open(gate: int) -> None:
        ctypes.c_uint32.from_address(gate).value = 1

    def _issue(self, op: Operation, rank: int, timing: list[tuple[Any, Any]]) -> None:
        stream = self._streams[rank]
        if isinstance(op, Launch):
            start, stop = self.cuda.event(), self.cuda.event()
            self.cuda.record(start, stream)
            self.cuda.launch(op.kernel.handle, op.grid, op.kernel.threads, op.params.pack(), op.kernel.smem_bytes, stream)
            self.cuda.record(stop, stream)
            timing.append((start, stop))
        elif isinstance(op, Copy):
            self.cuda.copy(op.dst.data_ptr(), op.src.data_ptr(), op.nbytes, stream)
        else:
            assert isinstance(op, Fill)
            self.cuda.fill(op.dst.data_ptr(), op.byte, op.nbytes, stream)

    def _wait(self, deadline: float, timeout_s: float) -> None:
        """Polls the streams; never blocks in the driver, where no timeout reaches."""
        waiting = list(enumerate(self._streams))
        while waiting:
            try:
                waiting = [(rank, stream) for rank, stream in waiting if not self.cuda.is_done(stream)]
            except Exception as error:  # whatever CUDA reports: the context is gone, the records are not
                self._broken = f"the device failed: {error}"
                faults = self.recorded_faults()
                said = "; ".join(record.describe() for record in faults.values()) or str(error)
                raise LaunchFault(f"{said} [{self._broken}]" if faults else self._broken, faults) from error
            if waiting and time.perf_counter() > deadline:
                ranks = ", ".join(str(rank) for rank, _ in waiting)
                self._broken = f"rank {ranks} did not finish within {timeout_s:g} s"
                faults = self.recorded_faults()
                said = "".join(f"; {record.describe()}" for record in faults.values())
                raise TimedOut(f"{self.where}: {self._broken}{said}")
            if waiting:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """After a timeout nothing is freed: freeing waits for the kernel that does not end. The process must exit."""
        if self._broken:
            return
        self._symmetric.clear()
        self._kernels.clear()
        if self._faults:
            self.cuda.synchronize()
            self.cuda.close()
            self._faults = 0
            self._broken = "it was closed"


assert FAULT_BYTES <= _FAULT_STRIDE
