"""Where things lie: regions and views of a symmetric buffer, and the shared-memory plan of a CTA. No torch.

The device states the same formulae a second time (``kernels/layout/symmetric_buffer.cuh`` and ``shared_plan.cuh``);
the stub phase and the tests compare the two. Sizes are bytes, offsets are bytes from the start of a rank's buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .errors import UsageError

if TYPE_CHECKING:
    from .config import KernelConfig
    from .shapes import Shape

MAX_RANKS = 32
MAX_TOPK = 32
TOKEN_ALIGNMENT = 128  # rows an expert's pool segment is aligned to
ARRIVAL_GRANULARITY = 16  # smallest BLOCK_M: sizes the arrival counters
REGION_ALIGNMENT = 1024
# Rows of the activation pool that a buffer for whole launches keeps in memory; the rest goes round (Layout.ring).
RING_ROWS = 24576
SMEM_LIMIT = 232448  # dynamic shared memory a block can opt in to on SM90 (227 KiB)
SCALE_GROUP = 128

# The enum Region of params.cuh, in its order.
REGIONS = (
    "control", "count_flag", "done_flag", "recv_count", "recv_list", "send_count", "l1_arrival", "l2_arrival",
    "pool_free", "recv_count_sum", "metadata", "x", "x_sf", "topk_idx", "topk_weights", "l1_acts", "l1_acts_sf", "l1_topk_weights",
    "l2_acts", "l2_acts_sf", "combine",
)  # fmt: skip
NUM_REGIONS = len(REGIONS)

# The enum ControlWord: index of a 32-bit word in the control region.
CONTROL_WORDS = {
    "epoch": 0, "abort": 32, "count_barrier": 64, "list_barrier": 96, "done_barrier": 128, "fault_claim": 160,
    "tile_counter": 192,
}  # fmt: skip

INPUT_VIEWS = ("x", "x_sf", "topk_idx", "topk_weights")
BASE_VIEWS = INPUT_VIEWS + ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
EXTRA_VIEWS = ("l1_topk_weights", "expert_recv_count_sum", "l1_arrival_count", "token_src_metadata")
VIEWS = BASE_VIEWS + EXTRA_VIEWS

# A public view name -> the region that holds it, where the two differ.
_VIEW_REGION = {"expert_recv_count_sum": "recv_count_sum", "l1_arrival_count": "l1_arrival", "token_src_metadata": "metadata"}
_ITEM_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


def round_up(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def pool_rows(shape: Shape, ranks: int, capacity: int) -> int:
    """P: every row a rank can receive (K per token, duplicates are legal), each expert's segment rounded up to 128."""
    local = shape.experts // ranks
    return round_up(ranks * capacity * shape.topk + local * (TOKEN_ALIGNMENT - 1), TOKEN_ALIGNMENT)


@dataclass(frozen=True)
class ViewSpec:
    """A typed window into a rank's buffer. ``strides`` count elements; ``offset`` and ``bank_bytes`` are bytes.

    ``dtype`` is the name of a torch dtype. A view with ``bank_bytes`` exists twice: launch ``epoch`` uses the copy at
    ``offset + (epoch & 1) * bank_bytes``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    bank_bytes: int = 0

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def span_bytes(self) -> int:
        """Bytes from the first to the last element (every view covers its span densely)."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * self.item_bytes

    def at(self, bank: int) -> int:
        """Byte offset of the copy that launches of parity ``bank`` use."""
        return self.offset + (bank & 1) * self.bank_bytes


@dataclass(frozen=True)
class Layout:
    """One rank's symmetric buffer. Legal (shape, ranks, capacity) are assumed: ``shapes.py`` holds the rules.

    ``ring``: rows of the activation pool that there is memory for, a multiple of 128; pool row r lies in place r % ring.
    0, or as many as the pool has: the whole pool, whose views stay readable after a launch.
    """

    shape: Shape
    ranks: int
    capacity: int
    ring: int = 0
    local_experts: int = field(init=False)
    pool_rows: int = field(init=False)
    region_bytes: dict[str, int] = field(init=False, compare=False, repr=False)
    region_offset: dict[str, int] = field(init=False, compare=False, repr=False)
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        s, ranks, c = self.shape, self.ranks, self.capacity
        if not 1 <= ranks <= MAX_RANKS:
            raise UsageError(f"ranks must be 1..{MAX_RANKS}, got {ranks}", rule="ranks-limit")
        if s.experts % ranks:
            raise UsageError(f"experts must be divisible by ranks: {s.experts} experts, {ranks} ranks", rule="experts-divisible")
        if c < 1:
            raise UsageError(f"capacity must be at least 1 token per rank, got {c}", rule="capacity-equal")
        local = s.experts // ranks
        p = pool_rows(s, ranks, c)
        if p >= 1 << 31:
            raise UsageError(
                f"the activation pool would have {p} rows; tensor-map coordinates are 32-bit signed: "
                f"lower the capacity ({c}) or the ranks ({ranks})", rule="index-range")
        if self.ring < 0 or self.ring % TOKEN_ALIGNMENT:
            raise UsageError(f"a ring of {self.ring} rows: it must be a multiple of {TOKEN_ALIGNMENT}", rule="ring")
        h, i, k, g = s.hidden, s.intermediate, s.topk, min(self.ring or p, p)
        object.__setattr__(self, "ring", g)
        counters = 2 * (p // ARRIVAL_GRANULARITY) * 4
        sizes = dict(zip(REGIONS, (
            256 * 4, MAX_RANKS * 4, MAX_RANKS * 4, 2 * ranks * local * 4, ranks * c * k * 4, 2 * s.experts * 4,
            counters, counters, 2 * (p // TOKEN_ALIGNMENT) * 4, local * 4, g * 3 * 4,
            c * h, c * (h // SCALE_GROUP) * 4, c * k * 8, c * k * 4,
            g * h, (h // SCALE_GROUP) * g * 4, g * 4, g * i, (i // SCALE_GROUP) * g * 4, k * c * h * 2,
        ), strict=True))  # fmt: skip
        offsets, at = {}, 0
        for name in REGIONS:
            offsets[name] = at
            at += round_up(sizes[name], REGION_ALIGNMENT)
        for name, value in (("local_experts", local), ("pool_rows", p), ("region_bytes", sizes),
                            ("region_offset", offsets), ("total_bytes", at)):
            object.__setattr__(self, name, value)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Region offsets in the order of the enum Region: what KernelParams.region holds."""
        return tuple(self.region_offset[name] for name in REGIONS)

    def region_of(self, name: str) -> str:
        """The region that holds a view (regions are views of that name themselves)."""
        region = _VIEW_REGION.get(name, name)
        if region not in self.region_offset:
            raise UsageError(f"unknown buffer view {name!r}; views are {', '.join(VIEWS)}", rule="view")
        return region

    def view(self, name: str) -> ViewSpec:
        """The spec of a public view (``VIEWS``) or, for diagnosis, of any region by its own name."""
        region = self.region_of(name)
        dtype, shape, strides, bank_bytes = self._form(region)
        return ViewSpec(name, dtype, shape, strides, self.region_offset[region], bank_bytes)

    def views(self, names: tuple[str, ...] = VIEWS) -> dict[str, ViewSpec]:
        return {name: self.view(name) for name in names}

    def _form(self, region: str) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
        s, c, p, ranks, local = self.shape, self.capacity, self.pool_rows, self.ranks, self.local_experts
        h, i, k = s.hidden, s.intermediate, s.topk
        arrivals, segments, p = p // ARRIVAL_GRANULARITY, p // TOKEN_ALIGNMENT, self.ring
        rows = {
            "control": ("int32", (256,)), "count_flag": ("int32", (MAX_RANKS,)), "done_flag": ("int32", (MAX_RANKS,)),
            "recv_count": ("int32", (2, ranks, local)), "recv_list": ("int32", (ranks, c * k)),
            "send_count": ("int32", (s.experts,)), "l1_arrival": ("int32", (arrivals,)), "l2_arrival": ("int32", (arrivals,)),
            "pool_free": ("int32", (segments,)), "recv_count_sum": ("int32", (local,)), "metadata": ("int32", (p, 3)),
            "x": ("float8_e4m3fn", (c, h)), "x_sf": ("float32", (c, h // SCALE_GROUP)),
            "topk_idx": ("int64", (c, k)), "topk_weights": ("float32", (c, k)),
            "l1_acts": ("float8_e4m3fn", (p, h)), "l1_acts_sf": ("float32", (p, h // SCALE_GROUP)),
            "l1_topk_weights": ("float32", (p,)),
            "l2_acts": ("float8_e4m3fn", (p, i)), "l2_acts_sf": ("float32", (p, i // SCALE_GROUP)),
            "combine": ("bfloat16", (k, c, h)),
        }  # fmt: skip
        dtype, shape = rows[region]
        if region in ("l1_acts_sf", "l2_acts_sf"):
            strides: tuple[int, ...] = (1, p)  # MN-major: consecutive rows are adjacent
        else:
            strides = row_major(shape)
        banked = region in ("send_count", "l1_arrival", "l2_arrival", "pool_free")
        return dtype, shape, strides, self.region_bytes[region] // 2 if banked else 0


def layout_for(shape: Shape, ranks: int, capacity: int, phase: str = "combine") -> Layout:
    """The buffer of an ordinary launch: a ring of ``RING_ROWS``. Partial phases keep the whole pool for their views."""
    return Layout(shape, ranks, capacity, RING_ROWS if phase == "combine" else 0)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


# ---- shared memory of a CTA ----

TILE_SLOTS = 4
ROW_DEPTH = 2  # staging buffers per dispatch warp, unless the configuration says otherwise
ROW_CHUNK_MAX = 4096  # bytes of a row staged at a time


def row_chunk(hidden: int) -> int:
    """Bytes of a token row that a dispatch warp stages at a time: equal chunks of at most 4096, 128-byte aligned."""
    return round_up(ceil_div(hidden, ceil_div(hidden, ROW_CHUNK_MAX)), 128)


def smem_plan(config: KernelConfig, shape: Shape, ranks: int, stages: int | None = None) -> dict[str, int]:
    """Bytes of each part of the dynamic shared memory, in order. Does not check the limit.

    ``stages`` overrides ``config.stages``; one of the two must be positive.
    """
    depth = stages or config.stages
    if depth < 1:
        raise UsageError("the pipeline needs at least 1 stage to have a shared-memory plan", rule="stages")
    local = shape.experts // ranks
    a_rows = max(config.block_m, 64)  # WGMMA reads 64 rows
    row_depth = getattr(config, "row_depth", 0) or ROW_DEPTH
    pulls = config.dispatch_warps * row_depth
    return {
        "a": depth * a_rows * 128,
        "b": depth * config.block_n * 128,
        "sfa": depth * max(config.block_m, 32) * 4,
        "carry": config.math_threads * config.sums * 4 if config.promotion == "rescale" else 0,
        "amax": 2 * config.column_parts * a_rows * 4,
        "side": round_up(TILE_SLOTS * config.block_m * 12, 128),
        "ring_and_barriers": round_up(TILE_SLOTS * 16 + 8 * (2 * depth + 2 * TILE_SLOTS + pulls + 1), 128),
        "rows": pulls * row_chunk(shape.hidden),
        "row_prefix": round_up(4 * (local * ranks + 1), 16),
        "list_base": round_up(4 * local * ranks, 16),
        "pool_base": round_up(4 * (local + 1), 16),
        "counts": round_up(4 * local, 16),
        "active": round_up(4 * (2 * local + 1), 16),
        "send": 2 * round_up(4 * local * ranks, 16),
        "broadcast": 64,
    }


def smem_bytes(config: KernelConfig, shape: Shape, ranks: int) -> int:
    """Dynamic shared memory of the launch in bytes; ``stages == 0`` means as many stages as fit (at least 2).

    Only the sum: it may exceed ``SMEM_LIMIT``, which the configuration predicate judges. ``require_smem`` raises.
    """
    stages = config.stages
    if not stages:
        from .config import largest_stages

        stages = largest_stages(config, shape, ranks) or 2
    return sum(smem_plan(config, shape, ranks, stages).values())


def require_smem(config: KernelConfig, shape: Shape, ranks: int) -> int:
    """``smem_bytes``, or UsageError when a block may not own that much (232448 bytes)."""
    total = smem_bytes(config, shape, ranks)
    if total > SMEM_LIMIT:
        raise UsageError(
            f"shared memory: {config.stages or 2} stages of {config.block_m}x{config.block_n} need {total} bytes, "
            f"a block may own {SMEM_LIMIT}", hint="use fewer stages or a smaller tile", rule="shared-memory")
    return total
