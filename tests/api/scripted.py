"""A backend whose "kernel" is a Python function: for testing what surrounds a launch, not the kernel.

Memory is ordinary CPU memory and all addresses are real, so the function sees exactly what a kernel would be told. The
default script does a little of what a launch does: y row t is filled with x_sf[t, 0] (so stale or mixed-up inputs
show), the arrival bank of the epoch gets ``100 + epoch``, receive counts and statistics get the token count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megamoe_cli.abi import FAULT_BYTES, FaultRecord, KernelParams
from megamoe_cli.backends.base import Backend, Copy, Fill, Kernel, Launch, Program, RunResult, check_program
from megamoe_cli.config import KernelConfig, resolve
from megamoe_cli.layout import CONTROL_WORDS, REGIONS, smem_bytes

Script = Callable[["ScriptedBackend", KernelParams, int], None]


class ScriptedBackend(Backend):
    name, where = "scripted", "scripted"

    def __init__(self, ranks: int, script: Script | None = None, ctas: int = 4) -> None:
        self.ranks, self.local_ranks, self.max_ctas_per_rank = ranks, tuple(range(ranks)), ctas
        self.script = script or layer
        self.symmetric: dict[str, dict[int, torch.Tensor]] = {}
        self.faults = torch.zeros(ranks * FAULT_BYTES, dtype=torch.uint8)
        self.maps: dict[bytes, tuple[int, ...]] = {}
        self.launched: list[tuple[int, int]] = []  # (rank, grid)
        self.diagnostics: list[dict[str, Any]] = []
        self.allocations = 0

    def alloc(self, rank: int, nbytes: int, *, symmetric: bool, name: str) -> torch.Tensor:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.allocations += 1
        if symmetric:
            self.symmetric.setdefault(name, {})[rank] = tensor
        return tensor

    def peer_addresses(self, rank: int, name: str) -> list[int]:
        return [self.symmetric[name][r].data_ptr() for r in range(self.ranks)]

    def fault_address(self, rank: int) -> int:
        return self.faults.data_ptr() + rank * FAULT_BYTES

    def adopt(self, rank: int, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        return tensor

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        image = len(self.maps).to_bytes(8, "little").ljust(128, b"m")
        self.maps[image] = (address, rows, cols, box_rows, box_cols)
        return image

    def load(self, config: KernelConfig, phase: str, shape: Any) -> Kernel:
        config = resolve(config, shape, self.ranks)
        return Kernel(config, phase, smem_bytes(config, shape, self.ranks), Path("scripted.so"))

    def run(self, program: Program, timeout_s: float) -> RunResult:
        check_program(self, program)
        for rank in self.local_ranks:
            self.clear_fault(rank)
        segments = [program.segments(rank) for rank in self.local_ranks]
        for turn in range(max(map(len, segments))):
            for rank in self.local_ranks:
                for op in segments[rank][turn] if turn < len(segments[rank]) else ():
                    self._do(rank, op)
        return RunResult(faults=self.recorded_faults(), diagnostics=list(self.diagnostics))

    def _do(self, rank: int, op: object) -> None:
        if isinstance(op, Copy):
            ctypes.memmove(op.dst.data_ptr(), op.src.data_ptr(), op.nbytes)
        elif isinstance(op, Fill):
            ctypes.memset(op.dst.data_ptr(), op.byte, op.nbytes)
        else:
            assert isinstance(op, Launch)
            self.launched.append((rank, op.grid))
            self.script(self, op.params, op.grid)

    def raise_fault(self, rank: int, **fields: int) -> None:
        record = bytes(FaultRecord(rank=rank, **fields))
        ctypes.memmove(self.fault_address(rank), record, FAULT_BYTES)


def read(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A writable tensor over raw memory."""
    size = count * torch.empty(0, dtype=dtype).element_size()
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def region(params: KernelParams, name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    return read(params.peer_base[params.rank] + params.region[REGIONS.index(name)], count, dtype)


def layer(backend: ScriptedBackend, p: KernelParams, grid: int) -> None:
    control = region(p, "control", 256, torch.int32)
    epoch = int(control[CONTROL_WORDS["epoch"]])
    n, groups, local = p.num_tokens, p.hidden // 128, p.num_experts // p.num_ranks
    if n:
        x_sf = region(p, "x_sf", n * groups, torch.float32).view(n, groups)
        read(p.y, n * p.hidden, torch.bfloat16).view(n, p.hidden)[:] = x_sf[:, :1].to(torch.bfloat16)
    bank = p.pool_rows // 16
    region(p, "l1_arrival", 2 * bank, torch.int32).view(2, bank)[epoch & 1] = 100 + epoch
    region(p, "recv_count_sum", local, torch.int32)[:] = n
    if p.stats:
        read(p.stats, local, torch.int32).add_(n)
    control[CONTROL_WORDS["epoch"]] = epoch + 1
