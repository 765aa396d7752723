"""What every backend is: memory of R ranks, kernels, and stream programs to run on them.

A *program* is one ordered list of operations per rank, executed in stream order with no host synchronisation between,
so any number of launches can be in flight. Importing this module imports neither torch nor cupy.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..abi import FAULT_BYTES, FaultRecord, KernelParams
from ..errors import LaunchFault, UsageError
from .sm_share import SmShare

if TYPE_CHECKING:
    import torch

    from ..config import KernelConfig
    from ..shapes import Shape


@dataclass
class Kernel:
    """A built variant, ready to launch. ``config`` is resolved (stages and registers filled in).

    ``smem_bytes``: dynamic shared memory of the launch. ``path``: the cubin, or the emulator's shared object.
    ``build``: what the compiler reported (backend-independent, may be None). ``handle``: backend-specific.
    """

    config: KernelConfig
    phase: str
    smem_bytes: int
    path: Path
    build: Any = None
    handle: Any = field(default=None, repr=False)

    @property
    def threads(self) -> int:
        return self.config.threads


@dataclass(frozen=True)
class Copy:
    dst: torch.Tensor
    src: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.dst.numel() * self.dst.element_size()


@dataclass(frozen=True)
class Fill:
    dst: torch.Tensor
    byte: int
    undefined: bool = False

    @property
    def nbytes(self) -> int:
        return self.dst.numel() * self.dst.element_size()


@dataclass(frozen=True)
class Launch:
    kernel: Kernel
    params: KernelParams
    grid: int


Operation = Copy | Fill | Launch


class Program:
    """Operations per rank. Holds references to every tensor it names, so their memory outlives the run.

    ``held``: virtual ranks start only once the whole program is in their queues (a few hundred operations at most), so
    that no launch waits for the host; times are of such programs.
    """

    held = False

    def __init__(self, ranks: int) -> None:
        self.ops: list[list[Operation]] = [[] for _ in range(ranks)]

    @property
    def ranks(self) -> int:
        return len(self.ops)

    def __bool__(self) -> bool:
        return any(self.ops)

    def launches(self, rank: int) -> list[Launch]:
        return [op for op in self.ops[rank] if isinstance(op, Launch)]

    def copy(self, rank: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Bytes of ``src`` to ``dst``; both dense, on the rank's device, of equal size. Empty copies are dropped."""
        size = dst.numel() * dst.element_size()
        if size != src.numel() * src.element_size():
            raise ValueError(f"copy of {src.numel() * src.element_size()} bytes into {size}")
        if not (_dense(dst) and _dense(src)):
            raise ValueError("copies are byte copies: both tensors must be dense")
        if size:
            self.ops[rank].append(Copy(dst, src))

    def fill(self, rank: int, tensor: torch.Tensor, byte: int, *, undefined: bool = False) -> None:
        """Every byte of a dense tensor to ``byte``. ``undefined``: nobody may use it before someone writes it (the
        emulator reports who does)."""
        if not 0 <= byte <= 255:
            raise ValueError(f"{byte} is not a byte")
        if not _dense(tensor):
            raise ValueError("fills are byte fills: the tensor must be dense")
        if tensor.numel():
            self.ops[rank].append(Fill(tensor, byte, undefined))

    def launch(self, rank: int, kernel: Kernel, params: KernelParams, grid: int) -> None:
        """``params`` is copied; ``grid`` is a positive multiple of the cluster size."""
        if grid < 1 or grid % kernel.config.cluster:
            raise UsageError(f"a grid of {grid} CTAs is not a positive multiple of the cluster size "
                             f"{kernel.config.cluster}", rule="cluster-grid")  # fmt: skip
        self.ops[rank].append(Launch(kernel, KernelParams.from_buffer_copy(params), grid))

    def segments(self, rank: int) -> list[list[Operation]]:
        """The rank's operations cut after each launch; what follows the last launch is one more segment."""
        parts: list[list[Operation]] = [[]]
        for op in self.ops[rank]:
            parts[-1].append(op)
            if isinstance(op, Launch):
                parts.append([])
        return parts if parts[-1] else parts[:-1]


def _dense(tensor: torch.Tensor) -> bool:
    """Elements fill their span in some order (a transposed MN-major view is dense too)."""
    step = 1
    for extent, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda pair: pair[1]):
        if extent == 1:
            continue
        if stride != step:
            return tensor.numel() == 0
        step *= extent
    return True


@dataclass
class RunResult:
    """What a run left behind.

    ``faults``: ranks whose device recorded one. ``diagnostics``: the emulator's findings (dicts with kind, text, file,
    line, rank, cta, warp, seed). ``launch_ms[rank][n]``: device time of launch n (GPU only; never from the emulator);
    ``launch_at_ms``: when it started, counted from the rank's first one (of held programs).
    ``seconds``: host wall time. ``notes``: what the user should know about how it ran.
    """

    faults: dict[int, FaultRecord] = field(default_factory=dict)
    diagnostics: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    launch_ms: dict[int, list[float]] = field(default_factory=dict)
    launch_at_ms: dict[int, list[float]] = field(default_factory=dict)
    span_ms: dict[int, float] = field(default_factory=dict)  # rank -> from its first launch's start to its last one's end
    notes: list[str] = field(default_factory=list)

    @property
    def report(self) -> str | None:
        """The diagnostics as text, one paragraph each; None when there are none."""
        return "\n".join(str(d.get("report") or d["text"]) for d in self.diagnostics) or None

    def raise_for_faults(self, topk: int | None = None) -> None:
        """LaunchFault with one sentence per faulted rank (the earliest give-up first)."""
        if self.faults:
            first = sorted(self.faults.values(), key=lambda r: r.at_ns)
            raise LaunchFault("; ".join(r.describe(topk) for r in first), dict(self.faults))


class Backend(ABC):
    """R ranks, of which this process drives ``local_ranks``. Use as a context manager or call ``close``.

    ``name`` is emulator, virtual, processes or nvlink; ``where`` says the same with numbers for people, such as
    ``virtual(8 on 1xNVIDIA H200)``. Ranks are 0..ranks-1.
    """

    name: str
    where: str
    ranks: int
    local_ranks: tuple[int, ...]
    max_ctas_per_rank: int
    share: SmShare  # what ``max_ctas_per_rank`` follows from

    @abstractmethod
    def alloc(self, rank: int, nbytes: int, *, symmetric: bool, name: str) -> torch.Tensor:
        """Zeroed uint8 [nbytes] (256-byte aligned), on the rank's device; CPU memory on the emulator.

        Symmetric allocations are readable and writable by all ranks; every rank must make the same ones in the same
        order (in a process backend they are collective).
        """

    @abstractmethod
    def peer_addresses(self, rank: int, name: str) -> list[int]:
        """Addresses of every rank's symmetric allocation ``name`` as ``rank`` maps them (after all ranks made it)."""

    @abstractmethod
    def fault_address(self, rank: int) -> int:
        """Where the rank's 64-byte FaultRecord lies: memory that device and host reach at one address (pinned, mapped,
        unified addressing). ``run`` clears and reads it."""

    @abstractmethod
    def adopt(self, rank: int, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        """``tensor`` where the rank's kernel can read it: itself when it is there already, else a dense copy."""

    @abstractmethod
    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        """128 bytes: row-major e4m3 [rows, cols] at a device address, 128-byte swizzle, out of bounds reads zero."""

    @abstractmethod
    def load(self, config: KernelConfig, phase: str, shape: Shape) -> Kernel:
        """Builds (or finds in the cache) and loads a variant; refuses one that cannot be co-resident here."""

    @abstractmethod
    def run(self, program: Program, timeout_s: float) -> RunResult:
        """Executes a program and waits. TimedOut when it is not done in time; the backend is unusable after that."""

    def divide(self, rank: int, name: str, parts: Sequence[tuple[str, int, int]]) -> None:
        """Says what lies where in the symmetric allocation ``name``: (part, offset, bytes). The emulator then knows the
        parts' bounds and names them in reports; elsewhere it means nothing."""

    def grid(self, config: KernelConfig, requested: int | None = None) -> int:
        """CTAs of a launch: what was asked for, at most what fits per rank, a multiple of the cluster size."""
        limit = self.max_ctas_per_rank // config.cluster * config.cluster
        if requested is None:
            wanted = limit
        else:
            wanted = min(requested, limit) // config.cluster * config.cluster
        if wanted < 1:
            raise UsageError(
                f"no CTAs to launch: {'as many as fit' if requested is None else requested} requested, "
                f"{self.max_ctas_per_rank} fit per rank on {self.where}, clusters of {config.cluster}", rule="co-residency")
        return wanted

    def use_share(self, place: str, share: SmShare) -> None:
        """Sets ``share``, and with it ``max_ctas_per_rank`` and ``where`` (``place``, and what is reserved)."""
        most = min([share.ctas, *(share.clusters(fit) * size for size, fit in self._clusters().items())])
        self._place, self.share, self.where, self.max_ctas_per_rank = place, share, share.said(place), most

    def fit_clusters(self, size: int, resident: int) -> None:
        """Of clusters of ``size`` CTAs ``resident`` fit on the empty device: GPCs with an odd number of SMs leave one
        unused, so these may be fewer than the SM count suggests. From now on they bound the grid."""
        self._clusters()[size] = min(resident, self._clusters().get(size, resident))
        self.use_share(self._place, self.share)

    def _clusters(self) -> dict[int, int]:
        return self.__dict__.setdefault("_resident_clusters", {})

    def leave_sms(self, reserve: int) -> None:
        """Launches from here on leave at least ``reserve`` SMs of each device to other kernels; the most anybody asked for
        counts. UsageError when no CTA of a rank would stay."""
        if reserve and reserve > self.share.reserve:
            self.use_share(self._place, replace(self.share, reserve=reserve))

    def fresh_name(self, prefix: str) -> str:
        """A name no allocation has yet; the same on all ranks, since they allocate in the same order."""
        taken: dict[str, int] = self.__dict__.setdefault("_taken_names", {})
        taken[prefix] = taken.get(prefix, 0) + 1
        return f"{prefix}{taken[prefix] - 1}"

    def enqueue(self, rank: int, kernel: Kernel, params: KernelParams, grid: int) -> None:
        """Launches at once on the caller's current stream (process backends; what a CUDA graph captures)."""
        raise UsageError(f"{self.name} runs whole programs; record the call and synchronize its LocalWorld", rule="enqueue")

    def read_fault(self, rank: int) -> FaultRecord:
        """The rank's record as it stands now; does not wait for the device."""
        return FaultRecord.from_bytes(ctypes.string_at(self.fault_address(rank), FAULT_BYTES))

    def clear_fault(self, rank: int) -> None:
        ctypes.memset(self.fault_address(rank), 0, FAULT_BYTES)

    def recorded_faults(self) -> dict[int, FaultRecord]:
        """Records of the local ranks that hold one."""
        records = {rank: self.read_fault(rank) for rank in self.local_ranks}
        return {rank: record for rank, record in records.items() if record}

    def close(self) -> None:
        """Frees memory and modules. Idempotent."""

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_program(backend: Backend, program: Program) -> None:
    """The program fits the backend: rank count, grids, and equally many launches on every local rank."""
    if program.ranks != backend.ranks:
        raise UsageError(f"a program of {program.ranks} ranks on a backend of {backend.ranks}", rule="ranks-limit")
    counts = [len(program.launches(rank)) for rank in backend.local_ranks]
    if len(set(counts)) > 1:
        raise UsageError("ranks do not launch equally often: " + launch_counts(counts) +
                         "; the kernel is collective", rule="collective")  # fmt: skip
    for rank in backend.local_ranks:
        for launch in program.launches(rank):
            if launch.grid > backend.max_ctas_per_rank:
                raise UsageError(f"rank {rank} asks for {launch.grid} CTAs; {backend.max_ctas_per_rank} fit per rank on "
                                 f"{backend.where}", rule="co-residency")  # fmt: skip


def launch_counts(counts: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
