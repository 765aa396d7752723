"""R ranks on the CPU: the kernel's own source on fibers. Memory is ordinary host memory, tensors are CPU tensors.

Its times say nothing about performance. What it finds beside wrong results (deadlocks, races, bounds, ...) is in
``RunResult.diagnostics``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ..abi import FAULT_BYTES, PARAMS_BYTES, pack_tensor_map_image
from ..case_options import check_backend_options
from ..config import KernelConfig
from ..errors import BuildFailed, TimedOut, UsageError
from ..shapes import nearest_name
from .base import Backend, Copy, Kernel, Launch, Program, RunResult, check_program
from .driver import check_map
from .emu_binding import EmuFinding, EmuKernel, EmuOptions, EmuProgram, EmuReport, EmuRuntime
from .sm_share import DEFAULT_CTAS, SmShare

if TYPE_CHECKING:
    from ..shapes import Shape

PER_RANK = frozenset({"start_delay", "slow", "stop_after"})  # options with a value for each rank
_ALIGNMENT = 1024


def open_backend(ranks: int, ctas: int = DEFAULT_CTAS, checked: bool | None = None, reserve_sms: int = 0, **options: Any) -> EmulatorBackend:
    """``ctas``: SMs of each rank's emulated GPU, a CTA each, less ``reserve_sms``. ``checked``: kernels whose plain accesses
    are checked too (default: where ``races`` or ``preempt`` need it). ``options``: the fields of EmuOptions."""
    return EmulatorBackend(ranks, ctas, checked, reserve_sms, **options)


@lru_cache(maxsize=1)
def runtime() -> EmuRuntime:
    """The runtime library: built or found in the cache, loaded once for the life of the process."""
    from ..compile import build_runtime

    return EmuRuntime(build_runtime())


@dataclass(frozen=True)
class _Block:
    """One allocation. ``array`` dies with the last tensor that uses it; then the block is no memory of the emulator's."""

    array: weakref.ref
    address: int
    nbytes: int
    rank: int
    name: str
    symmetric: bool


class EmulatorBackend(Backend):
    name = "emulator"

    def __init__(self, ranks: int, ctas: int = DEFAULT_CTAS, checked: bool | None = None, reserve_sms: int = 0, **options: Any) -> None:
        if ctas < 1:
            raise UsageError(f"{ctas} CTAs per rank; at least 1 is needed", rule="co-residency")
        self.ranks, self.local_ranks = ranks, tuple(range(ranks))
        place = f"emulator({ranks} rank{'s' if ranks > 1 else ''} x {ctas} CTA{'s' if ctas > 1 else ''})"
        self.use_share(place, SmShare(ctas, 1, reserve_sms))
        self.checked = checked
        self.options = EmuOptions()
        self.set_options(**options)
        self.report: EmuReport | None = None  # of the last run
        self._blocks: list[_Block] = []
        self._symmetric: dict[str, dict[int, weakref.ref]] = {}
        self._parts: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        self._kernels: dict[str, EmuKernel] = {}
        self._faults = [self.alloc(rank, FAULT_BYTES, symmetric=False, name="fault") for rank in self.local_ranks]

    def set_options(self, **options: Any) -> None:
        """Changes how later runs are scheduled and checked; kernels loaded before keep their flavour."""
        known = [f.name for f in fields(EmuOptions)]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown emulator option {name!r}; nearest name: {nearest_name(name, known)}", rule="backend-option")
        check_backend_options("emulator", options)
        for name in PER_RANK & options.keys():
            options[name] = tuple(options[name])
        self.options = replace(self.options, **options)

    @property
    def flavour(self) -> str:
        needed = self.options.races or self.options.preempt
        return "checked" if (needed if self.checked is None else self.checked) else "plain"

    # ---- memory ----

    def alloc(self, rank: int, nbytes: int, *, symmetric: bool, name: str) -> torch.Tensor:
        size = max(nbytes, 1)
        whole = numpy.zeros(size + _ALIGNMENT, dtype=numpy.uint8)  # calloc: pages exist once touched
        skip = -whole.ctypes.data % _ALIGNMENT
        array = whole[skip : skip + size]
        known = weakref.ref(array)
        self._blocks.append(_Block(known, array.ctypes.data, size, rank, name, symmetric))
        if symmetric:
            parts = self._symmetric.setdefault(name, {})
            if rank in parts and parts[rank]() is not None:
                raise ValueError(f"rank {rank} already has a symmetric allocation {name!r}")
            parts[rank] = known
        return torch.from_numpy(array)[:nbytes]

    def peer_addresses(self, rank: int, name: str) -> list[int]:
        arrays = [part() if (part := self._symmetric.get(name, {}).get(r)) else None for r in range(self.ranks)]
        for peer, array in enumerate(arrays):
            if array is None:
                raise UsageError(f"rank {peer} has no symmetric allocation {name!r}; allocation is collective", rule="collective")
        return [array.ctypes.data for array in arrays if array is not None]

    def divide(self, rank: int, name: str, parts: Sequence[tuple[str, int, int]]) -> None:
        self._parts[name, rank] = list(parts)

    def fault_address(self, rank: int) -> int:
        return self._faults[rank].data_ptr()

    def adopt(self, rank: int, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        memory = self.alloc(rank, tensor.numel() * tensor.element_size(), symmetric=False, name=name)
        copy = memory.view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor)
        return copy

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        check_map(address, rows, cols, box_rows, box_cols)
        return pack_tensor_map_image(address, rows, cols, cols, box_rows, box_cols)

    # ---- kernels ----

    def load(self, config: KernelConfig, phase: str, shape: Shape) -> Kernel:
        from ..compile import build

        return self.load_built(build(phase, config, target="emulator", shape=shape, ranks=self.ranks, flavour=self.flavour))

    def load_built(self, built: Any) -> Kernel:
        """Loads a kernel library and compares what it says about itself with what the host believes."""
        path = str(built.path)
        if path not in self._kernels:
            loaded = runtime().kernel(built.path)
            for what, theirs, ours in (("parameter bytes", loaded.params_bytes, PARAMS_BYTES),
                                       ("threads", loaded.threads, built.config.threads),
                                       ("cluster size", loaded.cluster, built.config.cluster)):  # fmt: skip
                if theirs != ours:
                    raise BuildFailed(f"{built.path.name} was built for {theirs} {what}, the host expects {ours}")
            self._kernels[path] = loaded
        return Kernel(built.config, built.phase, built.smem_bytes, built.path, built, self._kernels[path])

    # ---- running ----

    def run(self, program: Program, timeout_s: float) -> RunResult:
        """TimedOut when the emulated machine is not done after ``timeout_s`` of wall time; the backend stays usable."""
        check_program(self, program)
        for rank in self.local_ranks:
            self.clear_fault(rank)
        launches = [launch for rank in self.local_ranks for launch in program.launches(rank)]
        emulated = runtime().program(self.ranks)
        try:
            self._describe(emulated, program)
            # The clock jumps in steps that a device-side wait can tell apart from its own limit.
            jump = self.options.jump_ns or min((launch.params.timeout_ns for launch in launches), default=0) // 4
            self.report = emulated.run(replace(self.options, wall_limit_s=timeout_s, jump_ns=jump))
        finally:
            emulated.close()
        report, faults = self.report, self.recorded_faults()
        if report.stats.seconds >= timeout_s and report.kinds() & {"livelock", "stopped"}:
            said = "".join(f"; {record.describe()}" for record in faults.values())
            raise TimedOut(f"{self.where}: not done within {timeout_s:g} s{said}\n{report}")
        return RunResult(faults, [diagnostic(f) for f in report.findings], report.stats.seconds, notes=self._notes())

    def _describe(self, emulated: EmuProgram, program: Program) -> None:
        self._blocks = [block for block in self._blocks if block.array() is not None]
        for block in self._blocks:
            # Allocations are zeroed by contract, and tensors are written by torch, unseen: all bytes count as written.
            parts = self._parts.get((block.name, block.rank)) if block.symmetric else None
            for name, offset, nbytes in parts or [(block.name, 0, block.nbytes)]:
                emulated.add_region(block.address + offset, nbytes, block.rank, name, block.symmetric, True)
        for rank in self.local_ranks:
            for op in program.ops[rank]:
                if isinstance(op, Launch):
                    roles = warp_roles(op.kernel.config)
                    emulated.launch(rank, op.kernel.handle, op.params.pack(), op.grid, op.kernel.smem_bytes, roles)
                elif isinstance(op, Copy):
                    emulated.copy(rank, op.dst.data_ptr(), op.src.data_ptr(), op.nbytes)
                else:
                    emulated.fill(rank, op.dst.data_ptr(), op.byte, op.nbytes)
                    if op.undefined:
                        emulated.undefine(rank, op.dst.data_ptr(), op.nbytes)

    def _notes(self) -> list[str]:
        if self.options.mutant == 0 or self.report is None:
            return []
        return [f"mutant {self.options.mutant} reached {self.report.stats.mutant_hits} times"]

    def close(self) -> None:
        for kernel in self._kernels.values():
            kernel.close()
        self._kernels.clear()
        self._symmetric.clear()


def warp_roles(config: KernelConfig) -> list[str]:
    """The role of each warp of a CTA, for reports: ``dispatch 0``, ``tma 1``, ``math0 3``."""
    return [f"{role.name} {warp - role.warps[0]}" for role in config.roles() for warp in range(*role.warps)]


def diagnostic(finding: EmuFinding) -> dict[str, Any]:
    """A finding as plain data; ``report`` is the whole of it in words."""
    return {**asdict(finding), "chain": list(finding.chain), "report": str(finding)}
