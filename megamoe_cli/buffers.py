"""Typed windows into a rank's symmetric buffer, and the parameters of a launch on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import abi
from .abi import KernelParams, ParamFlags
from .backends.base import Backend, Kernel
from .config import KernelConfig, ring_order
from .errors import UsageError
from .layout import CONTROL_WORDS, REGIONS, Layout, ViewSpec
from .shapes import Shape
from .weights import LayerWeights

# Below this many (token, slot) entries one CTA sends them all: a grid-wide barrier would cost more than it saves.
SINGLE_DISPATCH_ENTRIES = 2048


def typed(memory: torch.Tensor, spec: ViewSpec, bank: int = 0) -> torch.Tensor:
    """The window ``spec`` describes, sharing ``memory`` (uint8, one rank's whole buffer)."""
    start = spec.at(bank)
    flat = memory[start : start + spec.span_bytes].view(getattr(torch, spec.dtype))
    return flat.as_strided(spec.shape, spec.strides)


class RankBuffer:
    """One rank's symmetric buffer on a backend. ``memory``: uint8 [layout.total_bytes]."""

    def __init__(self, backend: Backend, layout: Layout, rank: int, name: str) -> None:
        self.backend, self.layout, self.rank, self.name = backend, layout, rank, name
        self.memory = backend.alloc(rank, layout.total_bytes, symmetric=True, name=name)
        backend.divide(rank, name, [(part, layout.region_offset[part], layout.region_bytes[part]) for part in REGIONS])

    def region(self, name: str) -> torch.Tensor:
        """The raw bytes of a region (both banks where there are two)."""
        start = self.layout.region_offset[name]
        return self.memory[start : start + self.layout.region_bytes[name]]

    def view(self, name: str, bank: int | None = None) -> torch.Tensor:
        """A view by name; of a banked one, the copy that the last completed launch used (reads the epoch word)."""
        spec = self.layout.view(name)
        if spec.bank_bytes and bank is None:
            bank = last_bank(self.epoch())
        return typed(self.memory, spec, bank or 0)

    def epoch(self) -> int:
        """Launches completed on this buffer."""
        return int(self.view("control")[CONTROL_WORDS["epoch"]].item())

    def peers(self) -> list[int]:
        return self.backend.peer_addresses(self.rank, self.name)


def last_bank(epoch: int) -> int:
    """Bank of the last of ``epoch`` completed launches (launch n uses bank n & 1)."""
    return max(epoch - 1, 0) & 1


@dataclass
class DeviceWeights:
    """A rank's transformed weights where its kernel reads them, with the tensors that keep the memory alive."""

    l1: LayerWeights
    l2: LayerWeights

    @classmethod
    def adopt(cls, backend: Backend, rank: int, l1: LayerWeights, l2: LayerWeights) -> DeviceWeights:
        def place(tensor: torch.Tensor, name: str) -> torch.Tensor:
            return backend.adopt(rank, tensor, name=name)

        return cls(LayerWeights(place(l1.weight, "w13"), place(l1.scales, "w13_sf")),
                   LayerWeights(place(l2.weight, "w2"), place(l2.scales, "w2_sf")))  # fmt: skip


@dataclass(frozen=True)
class LaunchOptions:
    """What a launch is told beside its data. ``timeout_ns`` bounds every device-side wait; ``ctas`` None: all that fit."""

    clamp: float | None = None
    fast_math: bool = True
    timeout_ns: int = 5_000_000_000
    ctas: int | None = None
    num_tokens_bound: int | None = None


def dispatch_ctas(entries: int, grid: int) -> int:
    """CTAs that take part in the send side, for ``entries`` = tokens * topk of this rank."""
    return 1 if entries <= SINGLE_DISPATCH_ENTRIES else grid


# From how many rows per expert on a CTA may guess its first tile (KernelConfig.prefetch: 6 K-blocks of 32 KB from each
# of 132 CTAs fill half of an H200's L2): about every expert is going to have rows.
PREFETCH_ROWS_PER_EXPERT = 3


def prefetch_blocks(config: KernelConfig, shape: Shape, tokens: int, ranks: int) -> int:
    """For ``tokens`` on each rank; 0 where an expert is likely to stay without rows."""
    return config.prefetch if tokens * shape.topk * ranks >= PREFETCH_ROWS_PER_EXPERT * shape.experts else 0


def make_params(
    buffer: RankBuffer, kernel: Kernel, weights: DeviceWeights, *, tokens: int, y: torch.Tensor, grid: int,
    options: LaunchOptions, stats: torch.Tensor | None = None, l1_raw: torch.Tensor | None = None,
    stub_report: torch.Tensor | None = None,
) -> KernelParams:  # fmt: skip
    """The KernelParams of one launch on one rank. All tensors are where the kernel can reach them."""
    backend, layout, config, rank = buffer.backend, buffer.layout, kernel.config, buffer.rank
    shape, local, pool = layout.shape, layout.local_experts, layout.pool_rows
    if not 0 <= tokens <= layout.capacity:
        raise UsageError(f"rank {rank} has {tokens} tokens but the capacity is {layout.capacity}", rule="tokens-capacity")
    peers = buffer.peers()
    base = peers[rank]
    lag, unit_blocks = (config.lag, config.unit_blocks) if layout.ring == pool else ring_order(config, layout.ring)
    params = KernelParams(
        y=address(y), w13=address(weights.l1.weight), w2=address(weights.l2.weight), w13_sf=address(weights.l1.scales), w2_sf=address(weights.l2.scales), stats=address(stats),
        l1_raw=address(l1_raw), fault=backend.fault_address(rank), report=address(stub_report),
        timeout_ns=options.timeout_ns, abi_version=abi.ABI_VERSION, params_bytes=abi.PARAMS_BYTES, rank=rank,
        num_ranks=layout.ranks, num_tokens=tokens, capacity=layout.capacity, hidden=shape.hidden,
        intermediate=shape.intermediate, num_experts=shape.experts, topk=shape.topk, pool_rows=pool, ring_rows=layout.ring,
        dispatch_ctas=dispatch_ctas((options.num_tokens_bound or tokens) * shape.topk, grid),
        lag=lag, unit_blocks=unit_blocks, smem_bytes=kernel.smem_bytes,
        prefetch_blocks=prefetch_blocks(config, shape, options.num_tokens_bound or tokens, layout.ranks), stagger=config.stagger, ahead=config.ahead,
    )  # fmt: skip
    flags = ParamFlags.FAST_MATH if options.fast_math else ParamFlags.NONE
    if options.clamp is not None:
        flags |= ParamFlags.HAS_CLAMP
        params.clamp = options.clamp
    if config.tile_order == "wave":
        flags |= ParamFlags.WAVE_ORDER
    if config.tail:
        flags |= ParamFlags.HALVE_TAIL
    params.flags = flags
    params.peer_base[: len(peers)] = peers
    params.local_base = peers[rank]
    params.region[:] = layout.offsets
    for name, cols in (("l1_acts", shape.hidden), ("l2_acts", shape.intermediate)):
        image = backend.encode_tensor_map(base + layout.region_offset[name], layout.ring, cols, min(config.block_m, 64), 128)
        params.set_tensor_map(name, image)
    return params


def address(tensor: torch.Tensor | None) -> int:
    """Device address of a tensor's first element; 0 for None and for empty tensors."""
    return 0 if tensor is None else tensor.data_ptr()
