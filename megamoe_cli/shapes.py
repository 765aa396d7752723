"""Layer shapes, problems, and every rule a shape must obey. No torch: this is reached by ``megamoe --help``.

A *shape* is what the model fixes (H, I, E, K); a *problem* adds what the deployment fixes (ranks, tokens per
rank, buffer capacity). Each broken rule raises ``UsageError`` with one line, the numbers in it, and the nearest
legal value where there is one; ``error.rule`` is the rule's stable name (see ``RULES``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from .errors import UsageError

SCALE_BLOCK = 128  # elements of K that share one scale, and rows of a weight block
MAX_RANKS = 32  # one NVLink domain; also the width of a warp-wide flag poll
MAX_TOPK = 32
POOL_ALIGNMENT = 128  # rows an expert's pool segment is aligned to
INT32_LIMIT = 2**31  # pool rows, and token*K+slot, are 32-bit on the device

RULES = {
    "shape-name": "a shape is a known name or HxIxExK with positive integers",
    "hidden-multiple": "hidden is a multiple of 128",
    "intermediate-multiple": "intermediate is a multiple of 128",
    "experts-divisible": "experts is a multiple of ranks",
    "ranks-limit": "1 <= ranks <= 32",
    "topk-range": "1 <= topk <= min(32, experts)",
    "tokens-per-rank": "one non-negative token count for each rank",
    "tokens-capacity": "no rank has more tokens than the buffer's capacity",
    "capacity-equal": "the capacity is positive and the same on all ranks",
    "index-range": "pool rows and token*topk+slot fit in 31 bits",
    "dtype": "each tensor has the one dtype of the numerics contract",
    "tensor-shape": "each tensor has the shape of the numerics contract",
    "tensor-stride": "each tensor has the stride of the numerics contract",
    "weight-format": "weights are e4m3 with float32 scales per 128x128 block",
    "architecture": "code is generated for sm_90a",
    "activation": "the activation is swiglu",
    "expert-id": "every expert id is -1 (masked) or in [0, experts)",
    "routing-name": "a routing is a known generator, optionally name:argument",
    "clamp": "an activation clamp is a finite number >= 0",
}


def nearest_name(name: str, choices: Iterable[str]) -> str:
    """The choice that looks most like ``name`` (never empty: there is always a most similar one)."""
    pool = list(choices)
    return max(pool, key=lambda c: (difflib.SequenceMatcher(None, name.lower(), c.lower()).ratio(), c))


@dataclass(frozen=True)
class Shape:
    """What the model fixes. Not validated on construction; ``check_shape`` is the judge."""

    hidden: int
    intermediate: int
    experts: int
    topk: int

    def __str__(self) -> str:
        return f"{self.hidden}x{self.intermediate}x{self.experts}x{self.topk}"

    @property
    def name(self) -> str:
        """Its known name, or HxIxExK."""
        return next((n for n, s in NAMED_SHAPES.items() if s == self), str(self))

    def as_list(self) -> list[int]:
        """``[H, I, E, K]``, the spelling of the worker protocol."""
        return [self.hidden, self.intermediate, self.experts, self.topk]


NAMED_SHAPES: dict[str, Shape] = {
    "tiny": Shape(256, 256, 16, 2),  # two experts on each of 8 ranks, two scale groups everywhere
    "flash": Shape(4096, 2048, 256, 6),
    "pro": Shape(7168, 3072, 384, 6),
    "v3": Shape(7168, 2048, 256, 8),
}


@dataclass(frozen=True)
class Problem:
    """One run's sizes. ``tokens[r]`` is rank r's token count (may be 0, may differ); ``capacity`` is C, the rows
    of every rank's input views. Not validated on construction; ``check_problem`` is the judge."""

    shape: Shape
    ranks: int
    tokens: tuple[int, ...]
    capacity: int

    @classmethod
    def make(cls, shape: Shape, ranks: int, tokens: int | Sequence[int], capacity: int | None = None) -> Problem:
        """Broadcasts one token count to all ranks; without a capacity, the largest count rounded up to 128."""
        counts = (tokens,) * max(ranks, 0) if isinstance(tokens, int) else tuple(tokens)
        return cls(shape, ranks, counts, default_capacity(counts) if capacity is None else capacity)

    @property
    def experts_per_rank(self) -> int:
        return self.shape.experts // self.ranks

    @property
    def pool_rows(self) -> int:
        """P: rows of the activation pool of one rank, large enough for every token of every rank."""
        rows = self.ranks * self.capacity * self.shape.topk + self.experts_per_rank * (POOL_ALIGNMENT - 1)
        return align(rows, POOL_ALIGNMENT)

    def owner(self, expert: int) -> int:
        """The rank an expert lives on."""
        return expert // self.experts_per_rank


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def default_capacity(tokens: Sequence[int]) -> int:
    """Smallest multiple of 128 that holds every rank's tokens (at least 128)."""
    return max(align(max(tokens, default=0), POOL_ALIGNMENT), POOL_ALIGNMENT)


def parse_shape(text: str) -> Shape:
    """``flash`` or ``4096x2048x256x6``. Raises UsageError (rule shape-name) with the nearest name."""
    key = text.strip().lower()
    if key in NAMED_SHAPES:
        return NAMED_SHAPES[key]
    if re.fullmatch(r"-?\d+(x-?\d+)*", key):
        numbers = [int(part) for part in key.split("x")]
        if len(numbers) != 4:
            raise UsageError(
                f"shape '{text}' has {len(numbers)} numbers; HxIxExK needs 4 (hidden, intermediate, experts, topk)",
                rule="shape-name",
            )
        for name, value in zip(("hidden", "intermediate", "experts", "topk"), numbers):
            if value < 0:
                raise UsageError(f"shape '{text}': {name}={value} is negative; HxIxExK needs positive numbers", rule="shape-name")
        return Shape(*numbers)
    raise UsageError(
        f"unknown shape '{text}'; nearest name: {nearest_name(key, NAMED_SHAPES)} "
        f"(names: {', '.join(NAMED_SHAPES)}; or HxIxExK such as 256x256x16x2)",
        rule="shape-name",
    )


def _nearest_multiples(value: int, unit: int) -> str:
    below, above = value // unit * unit, value // unit * unit + unit
    return f"{below} or {above}" if below > 0 else f"{above}"


def legal_rank_counts(experts: int) -> list[int]:
    """Rank counts that split ``experts`` evenly, within one NVLink domain."""
    return [r for r in range(1, MAX_RANKS + 1) if experts % r == 0]


def _nearest_ranks(experts: int, ranks: int) -> str:
    legal = legal_rank_counts(experts)
    below = [r for r in legal if r < ranks][-1:]
    above = [r for r in legal if r > ranks][:1]
    return " or ".join(str(r) for r in below + above)


def check_shape(shape: Shape, ranks: int | None = None) -> None:
    """All rules that need no token counts; the rank rules only when ``ranks`` is given."""
    h, i, e, k = shape.hidden, shape.intermediate, shape.experts, shape.topk
    for rule, name, value in (("hidden-multiple", "hidden", h), ("intermediate-multiple", "intermediate", i)):
        if value <= 0 or value % SCALE_BLOCK:
            why = "is not positive" if value <= 0 else f"= {value // SCALE_BLOCK}*128 + {value % SCALE_BLOCK}"
            raise UsageError(
                f"{name}={value} {why}; it must be a multiple of 128 (nearest: {_nearest_multiples(value, 128)})",
                rule=rule,
            )
    if e < 1:
        raise UsageError(f"experts={e}; at least 1 is needed", rule="experts-divisible")
    limit = min(MAX_TOPK, e)
    if not 1 <= k <= limit:
        raise UsageError(
            f"topk={k} is outside 1..min(32, experts={e}) (nearest: {min(max(k, 1), limit)})", rule="topk-range"
        )
    if ranks is not None:
        if not 1 <= ranks <= MAX_RANKS:
            raise UsageError(
                f"ranks={ranks} is outside 1..32, one NVLink domain (nearest: {min(max(ranks, 1), MAX_RANKS)})",
                rule="ranks-limit",
            )
        if e % ranks:
            raise UsageError(
                f"experts={e} does not divide evenly over ranks={ranks} "
                f"(nearest legal rank counts: {_nearest_ranks(e, ranks)})",
                rule="experts-divisible",
            )


def check_capacities(capacities: Sequence[int]) -> None:
    """``capacities[r]`` is what rank r asked for; all must be equal and positive."""
    for rank, capacity in enumerate(capacities):
        if capacity != capacities[0]:
            raise UsageError(
                f"capacity differs between ranks: {capacities[0]} on rank 0, {capacity} on rank {rank}; "
                f"use one value everywhere (nearest: {max(capacities)})",
                rule="capacity-equal",
            )
    if capacities and capacities[0] < 1:
        raise UsageError(f"capacity={capacities[0]}; at least 1 row is needed", rule="capacity-equal")


def check_problem(problem: Problem, capacities: Sequence[int] | None = None) -> None:
    """Every shape rule. ``capacities`` (one per rank) replaces ``problem.capacity`` where ranks were asked
    separately; raises UsageError for the first rule broken."""
    check_shape(problem.shape, problem.ranks)
    if len(problem.tokens) != problem.ranks:
        raise UsageError(
            f"{len(problem.tokens)} token counts for {problem.ranks} ranks; give one for each rank", rule="tokens-per-rank"
        )
    check_capacities([problem.capacity] * problem.ranks if capacities is None else capacities)
    for rank, count in enumerate(problem.tokens):
        if count < 0:
            raise UsageError(f"rank {rank} has {count} tokens; a count is never negative", rule="tokens-per-rank")
        if count > problem.capacity:
            raise UsageError(
                f"rank {rank} has {count} tokens but the capacity is {problem.capacity} "
                f"(nearest capacity: {default_capacity(problem.tokens)})",
                rule="tokens-capacity",
            )
    if problem.pool_rows >= INT32_LIMIT:
        raise UsageError(
            f"capacity={problem.capacity} with ranks={problem.ranks}, topk={problem.shape.topk} needs "
            f"{problem.pool_rows} pool rows; the device counts rows in 31 bits",
            rule="index-range",
        )


# dtype names as torch prints them, without the prefix "torch."
DTYPES: Mapping[str, str] = {
    "x": "float8_e4m3fn", "x_sf": "float32", "topk_idx": "int64", "topk_weights": "float32",
    "w13": "float8_e4m3fn", "w13_sf": "float32", "w2": "float8_e4m3fn", "w2_sf": "float32", "y": "bfloat16",
    "cumulative_local_expert_recv_stats": "int32",
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """``torch.int32``, ``numpy`` types and plain names to one spelling: ``int32``."""
    return str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")


def check_dtype(name: str, dtype: object) -> None:
    """``name`` is a key of ``DTYPES``; values are never reinterpreted or converted silently."""
    got, want = dtype_name(dtype), DTYPES[name]
    if got != want:
        raise UsageError(f"{name} is {got}; it must be {want}", rule="dtype")


def check_tensor(name: str, dtype: object, shape: Sequence[int], want_shape: Sequence[int],
                 stride: Sequence[int] | None = None, want_stride: Sequence[int] | None = None) -> None:  # fmt: skip
    """dtype by name, exact shape, and stride (default: contiguous row-major; dimensions of size 1 are free)."""
    check_dtype(name, dtype)
    if tuple(shape) != tuple(want_shape):
        raise UsageError(f"{name} has shape {tuple(shape)}; it must be {tuple(want_shape)}", rule="tensor-shape")
    if stride is None or 0 in shape:
        return
    want = list(want_stride) if want_stride is not None else row_major(want_shape)
    if any(n > 1 and s != w for n, s, w in zip(shape, stride, want)):
        raise UsageError(f"{name} has stride {tuple(stride)}; it must be {tuple(want)}", rule="tensor-stride")


def row_major(shape: Sequence[int]) -> list[int]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= n
    return stride[::-1]


def check_weight_format(name: str) -> None:
    """Only e4m3 (also spelled fp8_e4m3, float8_e4m3fn); anything else is refused before loading."""
    if name.lower() not in ("e4m3", "fp8_e4m3", "float8_e4m3fn"):
        raise UsageError(f"weight format '{name}' has no SM90 kernel here; the only one is e4m3", rule="weight-format")


def check_architecture(name: str | int) -> str:
    """Returns ``sm_90a``; plain 90 lacks WGMMA and setmaxnreg, other generations have no such kernel."""
    digits = str(name).lower().removeprefix("sm_").removeprefix("sm")
    if digits == "90a":
        return "sm_90a"
    why = "it lacks WGMMA and setmaxnreg" if digits == "90" else "the kernel is SM90 code"
    raise UsageError(f"architecture '{name}' cannot be a target: {why} (nearest: sm_90a)", rule="architecture")


def check_activation(name: str) -> None:
    if name != "swiglu":
        raise UsageError(f"activation '{name}' is unknown (nearest: swiglu, the only one)", rule="activation")


def check_clamp(clamp: float | None) -> None:
    """``None`` means no clamp; NaN, infinities and negative limits are refused."""
    if clamp is not None and (isinstance(clamp, bool) or not isinstance(clamp, Real)):
        raise UsageError(f"activation clamp {clamp!r} is a {type(clamp).__name__}; it must be a number or None", rule="clamp")
    if clamp is not None and not 0 <= clamp < float("inf"):
        raise UsageError(f"activation clamp {clamp} is not a finite number >= 0", rule="clamp")
