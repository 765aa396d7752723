"""One process per rank: each drives one GPU, peers' buffers are mapped into its address space over NVLink.

``nvlink`` has a GPU per rank; ``processes`` shares GPUs between processes, which then run in time slices (correctness
only). Memory comes from ``peer_memory.py``; the control plane is gloo on the host (``control.py``): no NCCL, no
multicast object.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit, LaunchFault, MegamoeError, TimedOut, UsageError
from .base import Backend, Copy, Kernel, Launch, Program, RunResult, check_program
from .control import Control, host_identity
from .driver import prepare_environment, visible_gpus
from .peer_memory import PeerMemory, choose
from .sm_share import SmShare
from .topology import Topology, judge, seat_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ..config import KernelConfig
    from ..shapes import Shape

POLL_S = 0.0005
# The device-side wait bound starts when a rank's kernel starts, so ranks must start together; how long a rank may
# be late (it compiles, or its container is slow) is not device time.
START_TIMEOUT_S = 300.0


def device_for(rank: int) -> int:
    """Visible CUDA device of a rank when nobody said otherwise: the SM90 GPUs in order, round robin."""
    hopper = [gpu.index for gpu in visible_gpus() if gpu.is_sm90]
    if not hopper:
        raise EnvironmentUnfit("no SM90 GPU is visible to this process", hint="use --backend emulator")
    return hopper[rank % len(hopper)]


def open_backend(ranks: int, *, control: Control | None = None, share_gpu: bool = False, device: int | None = None,
                 peer_memory: str | None = None, ctas: int | None = None, reserve_sms: int = 0) -> NvlinkBackend:  # fmt: skip
    """Collective. ``control`` is this rank's place in the group. ``peer_memory``: auto, symmetric or ipc. ``reserve_sms``:
    SMs of each GPU left free.

    Raises the same error on all ranks when any of them cannot: EnvironmentUnfit for another host, a GPU that is not
    SM90, no peer access, no NVLink, two ranks on one GPU without ``share_gpu``.
    """
    if control is None:
        raise UsageError("nvlink runs one process per rank: start them with the worker, torchrun, or a process group",
                         rule="process-group")  # fmt: skip
    if control.ranks != ranks:
        raise UsageError(f"{ranks} ranks were asked for, the process group has {control.ranks}", rule="ranks-limit")
    prepare_environment()

    def start() -> tuple[Any, Any]:
        from .cuda_runtime import CudaRuntime

        index = device if device is not None else device_for(control.rank)
        return index, CudaRuntime(index)

    index, cuda = control.step("open the GPU", start)
    seats = control.agree("look at the GPU", lambda: seat_of(index, host_identity()))
    topology = control.step("compare the GPUs", lambda: judge(seats, share_gpu))
    from .symm_memory import prepare_environment as prepare_symmetric

    prepare_symmetric(shared_gpu=topology.name == "processes")
    memory = control.step("choose peer memory", lambda: choose(index, peer_memory))
    control.step("agree on peer memory", lambda: _same(control.gather(memory.name)))
    return control.step("share out the SMs", lambda: NvlinkBackend(control, cuda, memory, topology, ctas, reserve_sms))


def backend_for_group(group: ProcessGroup) -> NvlinkBackend:
    """The backend of a caller's process group, on each rank's current CUDA device. Collective over the group.

    This is what ``get_symm_buffer_for_sm90_mega_moe(group, ...)`` stands on. Two ranks on one GPU are accepted.
    """
    import torch

    control = Control.from_group(group)
    def current_gpu() -> int:
        if not torch.cuda.is_available():
            raise EnvironmentUnfit("this process sees no CUDA GPU, and a process group needs one for each rank",
                                   hint="LocalWorld(ranks) runs all ranks in one process, also without a GPU")  # fmt: skip
        return torch.cuda.current_device()

    device = control.step("find the current GPU", current_gpu)
    return open_backend(control.ranks, control=control, share_gpu=True, device=device)


def _same(names: list[str]) -> None:
    for rank, name in enumerate(names):
        if name != names[0]:
            raise EnvironmentUnfit(f"rank {rank} would use {name}, rank 0 {names[0]}; install one torch on all ranks, "
                                   "or set MEGAMOE_PEER_MEMORY")  # fmt: skip


class NvlinkBackend(Backend):
    """One rank's view. ``cuda`` is a CudaRuntime, ``memory`` a PeerMemory, or stand-ins with their methods."""

    def __init__(self, control: Control, cuda: Any, memory: PeerMemory, topology: Topology, ctas: int | None = None,
                 reserve_sms: int = 0) -> None:  # fmt: skip
        self.control, self.cuda, self.memory, self.topology = control, cuda, memory, topology
        self.name = topology.name
        self.ranks, self.rank = control.ranks, control.rank
        self.local_ranks = (control.rank,)
        # Processes on one GPU take turns unless an MPS server lets them run together: then all must fit.
        self.use_share(topology.where, SmShare(cuda.gpu.sms, max(topology.sharing), reserve_sms, ctas))
        self._stream = cuda.stream()
        self._fault = cuda.alloc_pinned(128)
        self._peers: dict[str, list[int]] = {}
        self._symmetric: dict[str, torch.Tensor] = {}
        self._kernels: dict[tuple[str, int], Any] = {}
        self._broken = ""
        self._closed = False

    # ---- memory ----

    def alloc(self, rank: int, nbytes: int, *, symmetric: bool, name: str) -> torch.Tensor:
        self._mine(rank)
        if not symmetric:
            return self.cuda.alloc(nbytes)
        if name in self._peers:
            raise ValueError(f"rank {rank} already has a symmetric allocation {name!r}")
        requests = self.control.agree("compare allocations", lambda: (name, nbytes))
        for other, request in enumerate(requests):
            if request != requests[0]:
                raise UsageError(f"rank {other} allocates {request[1]} bytes for {request[0]}, rank 0 {requests[0][1]} bytes "
                                 f"for {requests[0][0]}; symmetric allocations must be equal", rule="collective")  # fmt: skip
        tensor, addresses = self.memory.allocate(self.control, nbytes, name)
        self._peers[name], self._symmetric[name] = addresses, tensor
        return tensor

    def peer_addresses(self, rank: int, name: str) -> list[int]:
        self._mine(rank)
        if name not in self._peers:
            raise UsageError(f"rank {rank} has no symmetric allocation {name!r} yet; allocation is collective", rule="collective")
        return list(self._peers[name])

    def fault_address(self, rank: int) -> int:
        self._mine(rank)
        return self._fault

    def adopt(self, rank: int, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        if self.cuda.is_here(tensor) and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
            return tensor
        memory = self.alloc(rank, tensor.numel() * tensor.element_size(), symmetric=False, name=name)
        copy = memory.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        return self.cuda.encode_tensor_map(address, rows, cols, box_rows, box_cols)

    def _mine(self, rank: int) -> None:
        if rank != self.rank:
            raise UsageError(f"this process is rank {self.rank}; it does not drive rank {rank}", rule="ranks-limit")

    # ---- kernels ----

    def load(self, config: KernelConfig, phase: str, shape: Shape) -> Kernel:
        """Local, not collective: ranks that build at the same time share the compile cache."""
        from ..compile import build

        return self.load_built(build(phase, config, target="sm_90a", shape=shape, ranks=self.ranks))

    def load_built(self, built: Any) -> Kernel:
        """Loads a cubin and checks that its CTAs can all be resident."""
        from ..compile.entry import KERNEL_NAME

        key = (str(built.path), built.smem_bytes)
        if key not in self._kernels:
            self._kernels[key] = self.cuda.load(built.path, KERNEL_NAME, built.smem_bytes)
        kernel = Kernel(built.config, built.phase, built.smem_bytes, built.path, built, self._kernels[key])
        config = kernel.config
        self.grid(config)
        if self.cuda.resident_blocks(kernel.handle, config.threads, kernel.smem_bytes) < 1:
            raise UsageError(f"{config.name()} with {kernel.smem_bytes} bytes of shared memory and {config.threads} threads does "
                             f"not fit on one SM of {self.cuda.gpu.name}", rule="co-residency")  # fmt: skip
        if config.cluster > 1:
            clusters = self.cuda.resident_clusters(kernel.handle, config.cluster, config.threads, kernel.smem_bytes,
                                                   self.max_ctas_per_rank)  # fmt: skip
            self.fit_clusters(config.cluster, clusters)
            self.grid(config)
        return kernel

    # ---- running ----

    def run(self, program: Program, timeout_s: float) -> RunResult:
        """Collective: ranks meet on the host, then start. Every rank returns when its own stream is done and all
        ranks' are, so buffers may be read and reset afterwards."""
        self._usable()
        check_program(self, program)
        result = RunResult(notes=list(self.topology.notes))
        self.clear_fault(self.rank)
        self.cuda.synchronize()  # uploads on torch's streams
        self.control.barrier(START_TIMEOUT_S)
        start = time.perf_counter()
        pairs = []
        for op in program.ops[self.rank]:
            if isinstance(op, Launch):
                pairs.append((self.cuda.event(), self.cuda.event()))
                self.cuda.record(pairs[-1][0], self._stream)
                self._launch(op.kernel, op.params.pack(), op.grid, self._stream)
                self.cuda.record(pairs[-1][1], self._stream)
            elif isinstance(op, Copy):
                self.cuda.copy(op.dst.data_ptr(), op.src.data_ptr(), op.nbytes, self._stream)
            else:
                self.cuda.fill(op.dst.data_ptr(), op.byte, op.nbytes, self._stream)
        try:
            self.control.step("run", lambda: self._wait(start + timeout_s, timeout_s))
        except MegamoeError as error:
            self._broken = self._broken or str(error)  # also where only another rank's device failed
            raise
        result.seconds = time.perf_counter() - start
        result.launch_ms = {self.rank: [self.cuda.elapsed_ms(a, b) for a, b in pairs]}
        result.faults = self.recorded_faults()
        return result

    def _launch(self, kernel: Kernel, params: bytes, grid: int, stream: Any) -> None:
        self.cuda.launch(kernel.handle, grid, kernel.threads, params, kernel.smem_bytes, stream)

    def _wait(self, deadline: float, timeout_s: float) -> None:
        """Polls; a blocking call would have no timeout and would not see another rank's death."""
        while True:
            try:
                if self.cuda.is_done(self._stream):
                    return
            except Exception as error:  # whatever CUDA reports: the context is gone, the record is not
                self._broken = f"the device failed: {error}"
                faults = self.recorded_faults()
                said = "; ".join(record.describe() for record in faults.values())
                raise LaunchFault(f"{said} [{self._broken}]" if said else self._broken, faults) from error
            if time.perf_counter() > deadline:
                self._broken = f"rank {self.rank} did not finish within {timeout_s:g} s"
                said = "".join(f"; {record.describe()}" for record in self.recorded_faults().values())
                raise TimedOut(f"{self.where}: {self._broken}{said}")
            time.sleep(POLL_S)

    def enqueue(self, rank: int, kernel: Kernel, params: Any, grid: int) -> None:
        """Launches on torch's current stream; no synchronisation, so a CUDA graph can capture it."""
        self._mine(rank)
        self._usable()
        current = self.cuda.torch.cuda.current_stream(self.cuda.device).cuda_stream
        self._launch(kernel, params.pack(), grid, self.cuda.cupy.cuda.ExternalStream(current))

    def _usable(self) -> None:
        if self._broken or self._closed:
            raise UsageError(f"this backend cannot run any more: {self._broken or 'it was closed'}", rule="backend-state")

    def close(self) -> None:
        """Collective when all went well: nobody unmaps what a peer's kernel may still write. After a fault of the
        device or a lost rank nothing is freed (freeing would wait for a kernel that does not end): exit the process."""
        if self._closed:
            return
        self._closed = True
        if self._broken or self.control.broken:
            return
        self.cuda.synchronize()
        self.control.step("stop using peers' memory", lambda: None)
        self._symmetric.clear()
        self._peers.clear()
        self._kernels.clear()
        self.memory.close()
        self.control.step("free peer memory", lambda: None)
        self.cuda.close()
