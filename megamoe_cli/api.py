"""The host API: one fused expert-parallel FP8 MoE layer on SM90, with the names and shapes serving code expects.

    world = LocalWorld(8)                                   # or a torch.distributed process group, one rank per process
    buf = get_symm_buffer_for_sm90_mega_moe(world[rank], num_experts, max_tokens, topk, hidden, intermediate)
    l1, l2 = transform_weights_for_mega_moe_sm90((w13, w13_sf), (w2, w2_sf))
    buf.x[:n].copy_(x); buf.x_sf[:n].copy_(x_sf); buf.topk_idx[:n].copy_(idx); buf.topk_weights[:n].copy_(weights)
    fp8_mega_moe(y, l1, l2, buf)                            # y bfloat16 [n, hidden]
    world.synchronize()                                     # LocalWorld only: runs what was recorded

All bad input raises UsageError with one line that names the rule, before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from .backends.sm_share import check_reserve, reserve_from_environment
from .buffers import LaunchOptions, RankBuffer
from .compile.entry import check_phase
from .config import KernelConfig
from .errors import UsageError
from .layout import BASE_VIEWS, EXTRA_VIEWS, TOKEN_ALIGNMENT, layout_for, round_up
from .session import Session, SessionResult
from .shapes import Shape, check_activation, check_clamp, check_shape, check_tensor, dtype_name
from .weights import LayerWeights, check_transformed, layer_pair, transform_weights_for_mega_moe_sm90
from .table_picks import TablePicks
from .worlds import API_TIMEOUT_S, BufferRequest, Call, GroupWorld, LocalRank, LocalWorld, overlap, raise_pending_fault

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .backends.base import Kernel

__all__ = [
    "LaunchOptions", "LayerWeights", "LocalRank", "LocalWorld", "Session", "SessionResult", "SymmBuffer", "fp8_mega_moe",
    "get_symm_buffer_for_sm90_mega_moe", "get_symm_buffer_size_for_sm90_mega_moe", "get_token_alignment_for_sm90_mega_moe",
    "transform_weights_for_mega_moe_sm90",
]  # fmt: skip

# Two spellings of one contract: activations scaled per token and 128 columns, weights per 128x128 block.
RECIPES = ((128, 128, 128), (1, 128, 128))

_group_worlds: WeakKeyDictionary[Any, GroupWorld] = WeakKeyDictionary()


def get_token_alignment_for_sm90_mega_moe() -> int:
    """Rows to which buffer capacities are rounded up: 128."""
    return TOKEN_ALIGNMENT


def get_symm_buffer_size_for_sm90_mega_moe(
    num_ranks: int, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int, intermediate_hidden: int,
    use_fp8_dispatch: bool = True, activation: str = "swiglu",
) -> int:  # fmt: skip
    """Bytes of one rank's symmetric buffer, capacity rounded up to 128 tokens. UsageError for an illegal shape."""
    shape, capacity = _check_sizes(num_ranks, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden,
                                   use_fp8_dispatch, activation)  # fmt: skip
    return layout_for(shape, num_ranks, capacity).total_bytes


def get_symm_buffer_for_sm90_mega_moe(
    group: ProcessGroup | LocalRank, num_experts: int, num_max_tokens_per_rank: int, num_topk: int, hidden: int,
    intermediate_hidden: int, use_fp8_dispatch: bool = True, activation: str = "swiglu", *,
    config: KernelConfig | None = None, phase: str = "combine", reserve_sms: int | None = None,
) -> SymmBuffer:  # fmt: skip
    """Allocates this rank's symmetric buffer, zeroed, and readies the kernel. Collective over the group.

    ``num_max_tokens_per_rank`` (the same on all ranks) is rounded up to 128. ``config`` picks the kernel variant; without
    one the heuristic table of the running GPU does, for each call by its ``num_tokens_bound`` (else the capacity), and
    every variant it may pick is built here (``MEGAMOE_TABLE``: auto, none, or a file; picks are logged to ``megamoe``).
    ``phase``: a partial build. ``reserve_sms``: SMs of each GPU that launches of this group leave to other kernels, so that
    one of those cannot hang a grid (default: ``MEGAMOE_RESERVE_SMS``, else 0; of several buffers of a group the most
    counts). UsageError for illegal sizes or configurations and where ranks disagree.
    """
    _check_group(group)
    if reserve_sms is not None:
        _check_integer("reserve_sms", reserve_sms)
    reserve = reserve_from_environment() if reserve_sms is None else check_reserve(reserve_sms)
    if config is not None and not isinstance(config, KernelConfig):
        raise UsageError(f"config is a {type(config).__name__}; it must be a KernelConfig", rule="config-syntax")
    shape, capacity = _check_sizes(group.size(), num_experts, num_max_tokens_per_rank, num_topk, hidden,
                                   intermediate_hidden, use_fp8_dispatch, activation)  # fmt: skip
    picks = TablePicks.of(_world_of(group).backend, shape, group.size(), capacity) if config is None else None
    chosen = config or (picks.choice(capacity).config if picks else KernelConfig())
    variants = tuple(c for c in picks.configs() if c != chosen) if picks else ()
    request = BufferRequest(shape, num_max_tokens_per_rank, capacity, chosen, check_phase(phase), variants, reserve)
    return SymmBuffer(group, request, picks)


class SymmBuffer:
    """One rank's buffer and its typed views (C capacity, P rows of the activation pool, R ranks, E_l local experts, K top-k).

    Inputs: ``x`` e4m3 [C,H], ``x_sf`` f32 [C,H/128], ``topk_idx`` int64 [C,K] (-1 = masked), ``topk_weights`` f32 [C,K].
    After a launch: ``l1_acts`` e4m3 [P,H], ``l1_acts_sf`` f32 [P,H/128] strides (1,P), ``l2_acts`` e4m3 [P,I],
    ``l2_acts_sf`` f32 [P,I/128] strides (1,P); from the dispatch phase on ``l1_topk_weights`` f32 [P],
    ``expert_recv_count_sum`` int32 [E_l], ``l1_arrival_count`` int32 [P/16] (entry b: rows arrived in pool rows
    [b*BLOCK_M, (b+1)*BLOCK_M) in the last launch) and ``token_src_metadata`` int32 [P,3] (source rank, token, slot).

    With phase ``combine`` P is at most 24,576 (``layout.RING_ROWS``): a larger pool goes round in so many places, so after
    a launch with more rows these views hold the last of them. Partial phases keep the whole pool.
    """

    def __init__(self, group: ProcessGroup | LocalRank, request: BufferRequest, picks: TablePicks | None = None) -> None:
        self.group, self.request, self.picks = group, request, picks
        self.world = _world_of(group)
        self.rank = group.rank()
        self._buffer, self.kernel = self.world.allocate(self.rank, request)
        self._kernels = {request.config: self.kernel, **self.world.load_variants(request)}
        self.layout = self._buffer.layout

    def kernel_for(self, bound: int | None) -> tuple[Kernel, int | None]:
        """(kernel, CTAs or None for as many as fit) of a call with this ``num_tokens_bound``. A dictionary lookup: nothing
        is built, and ranks that agree on the bound agree on the kernel."""
        if self.picks is None:
            return self.kernel, None
        choice = self.picks.choice(self.layout.capacity if bound is None else bound)
        return self._kernels[choice.config], choice.ctas or None

    @property
    def buffer(self) -> torch.Tensor:
        """The raw memory, uint8 [bytes]."""
        return self._buffer.memory

    @property
    def rank_buffer(self) -> RankBuffer:
        return self._buffer

    @property
    def num_experts(self) -> int:
        return self.layout.shape.experts

    @property
    def num_topk(self) -> int:
        return self.layout.shape.topk

    @property
    def hidden(self) -> int:
        return self.layout.shape.hidden

    @property
    def intermediate_hidden(self) -> int:
        return self.layout.shape.intermediate

    @property
    def num_max_tokens_per_rank(self) -> int:
        """The capacity C: what was asked for, rounded up to 128."""
        return self.layout.capacity

    @property
    def num_bytes(self) -> int:
        return self.layout.total_bytes

    def __getattr__(self, name: str) -> torch.Tensor:
        # Views are made on access: the arrival counts depend on the last launch.
        if name in BASE_VIEWS or name in EXTRA_VIEWS:
            if name in EXTRA_VIEWS and self.request.phase == "stub":
                raise UsageError(f"the stub phase produces no {name}; it exists from the dispatch phase on", rule="view")
            return self._buffer.view(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *BASE_VIEWS, *EXTRA_VIEWS]

    def check(self) -> None:
        """LaunchFault when a completed launch recorded a fault on this rank (does not wait for running ones)."""
        raise_pending_fault(self._buffer.backend, self._buffer)

    def reset(self) -> None:
        """Zeroes the buffer and forgets faults: needed after any LaunchFault, on every rank before any launches again
        (until then a call on the buffer raises the fault again).

        On a process group it is collective and waits for the device. UsageError while recorded calls wait to be run.
        """
        self.world.reset(self._buffer)


def fp8_mega_moe(
    y: torch.Tensor, l1_weights: Sequence[torch.Tensor], l2_weights: Sequence[torch.Tensor], sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: torch.Tensor | None = None, recipe: tuple[int, int, int] = (128, 128, 128),
    activation: str = "swiglu", activation_clamp: float | None = None, fast_math: bool = True,
    num_tokens_bound: int | None = None,
) -> None:  # fmt: skip
    """The layer on ``n = y.shape[0]`` tokens of this rank, read from the buffer's input views. Collective.

    ``y`` bfloat16 [n, H], written. ``l1_weights``, ``l2_weights``: what ``transform_weights_for_mega_moe_sm90`` gave.
    ``cumulative_local_expert_recv_stats`` int32 [E_l]: this launch's receive counts are added. ``num_tokens_bound``
    (n <= bound <= capacity, the same on all ranks) chooses the schedule only. ``recipe`` (128,128,128) and (1,128,128)
    are the same contract. Expert ids are checked on the device: an id outside [-1, E) drops its slot and leaves a
    fault, which the next call, ``check`` or ``synchronize`` raises.
    """
    if not isinstance(sym_buffer, SymmBuffer):
        raise UsageError(f"sym_buffer is a {type(sym_buffer).__name__}; get one from get_symm_buffer_for_sm90_mega_moe", rule="dtype")
    shape, layout = sym_buffer.layout.shape, sym_buffer.layout
    if not isinstance(y, torch.Tensor) or y.dim() != 2:
        raise UsageError(f"y must be a bfloat16 tensor [n, {shape.hidden}]", rule="tensor-shape")
    tokens = y.shape[0]
    check_tensor("y", y.dtype, y.shape, (tokens, shape.hidden), y.stride())
    _check_written("y", y, sym_buffer)
    if tokens > layout.capacity:
        raise UsageError(f"y has {tokens} tokens but the buffer's capacity is {layout.capacity}", rule="tokens-capacity")
    l1, l2 = layer_pair("l1_weights", l1_weights), layer_pair("l2_weights", l2_weights)
    check_transformed(l1, l2, layout.local_experts, shape.hidden, shape.intermediate)
    stats = cumulative_local_expert_recv_stats
    if stats is not None:
        if not isinstance(stats, torch.Tensor):
            raise UsageError(f"cumulative_local_expert_recv_stats is a {type(stats).__name__}; it must be an int32 tensor "
                             f"[{layout.local_experts}] or None", rule="tensor-shape")  # fmt: skip
        _check_written("cumulative_local_expert_recv_stats", stats, sym_buffer)
        check_tensor("cumulative_local_expert_recv_stats", stats.dtype, stats.shape, (layout.local_experts,), stats.stride())
    _check_recipe(recipe)
    _check_activation(activation)
    check_clamp(activation_clamp)
    if not isinstance(fast_math, bool):
        raise UsageError(f"fast_math must be True or False, got {type(fast_math).__name__} {fast_math!r}", rule="fast-math")
    if num_tokens_bound is not None:
        _check_integer("num_tokens_bound", num_tokens_bound)
    if num_tokens_bound is not None and not tokens <= num_tokens_bound <= layout.capacity:
        raise UsageError(f"num_tokens_bound={num_tokens_bound} is outside {tokens} (tokens of this rank) .. {layout.capacity} "
                         f"(capacity)", rule="tokens-capacity")  # fmt: skip
    timeout_s = getattr(sym_buffer.world, "timeout_s", API_TIMEOUT_S)
    kernel, ctas = sym_buffer.kernel_for(num_tokens_bound)
    options = LaunchOptions(
        clamp=None if activation_clamp is None else float(activation_clamp), fast_math=fast_math, timeout_ns=round(timeout_s * 1e9), ctas=ctas, num_tokens_bound=num_tokens_bound,
    )  # fmt: skip
    sym_buffer.world.submit(sym_buffer.rank_buffer, kernel, Call(y, l1, l2, stats, options))


def _check_sizes(ranks: int, experts: int, max_tokens: int, topk: int, hidden: int, intermediate: int,
                 use_fp8_dispatch: bool, activation: str) -> tuple[Shape, int]:  # fmt: skip
    for name, value in (("num_ranks", ranks), ("num_experts", experts), ("num_max_tokens_per_rank", max_tokens),
                        ("num_topk", topk), ("hidden", hidden), ("intermediate_hidden", intermediate)):  # fmt: skip
        _check_integer(name, value)
    shape = Shape(hidden, intermediate, experts, topk)
    check_shape(shape, ranks)
    if max_tokens < 1:
        raise UsageError(f"num_max_tokens_per_rank={max_tokens}; at least 1 is needed", rule="capacity-equal")
    if not use_fp8_dispatch:
        raise UsageError("use_fp8_dispatch=False: this kernel dispatches e4m3 activations only", rule="weight-format")
    _check_activation(activation)
    return shape, round_up(max_tokens, TOKEN_ALIGNMENT)


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"{name} must be an integer, got {type(value).__name__} {value!r}", rule="integer")


def _check_group(group: object) -> None:
    if not callable(getattr(group, "rank", None)) or not callable(getattr(group, "size", None)):
        raise UsageError(f"group is a {type(group).__name__}; it must be a torch.distributed process group or a rank of a "
                         f"LocalWorld, such as world[0]", rule="process-group")  # fmt: skip


def _check_written(name: str, tensor: torch.Tensor, buf: SymmBuffer) -> None:
    """What a launch writes lies beside the buffer, not in it, and belongs to no gradient graph."""
    if tensor.device != buf.buffer.device:
        raise UsageError(f"{name} is on {tensor.device}; it must be on {buf.buffer.device}, as the buffer", rule="device")
    if tensor.requires_grad:
        raise UsageError(f"{name} requires a gradient; the layer has no backward pass and writes {name} in place", rule="no-grad")
    if overlap(tensor, buf.buffer):
        raise UsageError(f"{name} lies in the symmetric buffer, which the launch itself uses", rule="overlap")


def _check_activation(activation: object) -> None:
    if not isinstance(activation, str):
        raise UsageError(f"activation must be a name, got {dtype_name(type(activation))}", rule="activation")
    check_activation(activation)


def _check_recipe(recipe: object) -> None:
    if isinstance(recipe, (tuple, list)) and tuple(recipe) in RECIPES:
        return
    known = " and ".join(map(str, RECIPES))
    raise UsageError(f"recipe {recipe!r} is unknown; {known} are accepted, and mean the same", rule="recipe")


def _world_of(group: ProcessGroup | LocalRank) -> LocalWorld | GroupWorld:
    if isinstance(group, LocalRank):
        return group.world
    if group not in _group_worlds:
        _group_worlds[group] = GroupWorld(group)
    return _group_worlds[group]
