"""Random but realistic quantized inputs, all from one seed.

Activations: normal values with a few outlier channels and a magnitude of each token's own, quantized per token and
128 columns with a continuous scale. Weights: e4m3 codes distributed like a quantized normal, drawn directly (never a
float tensor of their size), with 128x128 block scales spread over two octaves, so that a scale read from the wrong
block shows. Magnitudes are such that gate and up accumulators are of order 1.

Everything but the ids can be generated on a GPU; the same (seed, device type) gives the same bytes, another device
type gives other bytes of the same kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .errors import UsageError
from .oracle.casedata import CaseData, RankInputs, RankWeights
from .routing import Routing, route, seeded_generator
from .shapes import SCALE_BLOCK, Problem

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10  # a row of zeros gets this amax: scale > 0, codes 0, never 0/0
_CHUNK = 1 << 26  # weight codes drawn at a time: bounds the temporaries to a few hundred MB
_OUTLIER_SHARE = 64  # one channel in so many is an outlier


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Saturating conversion: anything above 448 (infinities too) becomes +-448, NaN stays NaN. e4m3 has no infinity,
    and an unclamped conversion of 480 or more gives NaN on some torch versions."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T,N] float -> codes [T,N] e4m3 and scales [T,N/128] f32; value ~ code * scale, scale = max(amax,1e-10)/448.

    N must be a multiple of 128 (UsageError). A NaN makes its element NaN and leaves the rest of the group usable.
    """
    rows, columns = values.shape
    if columns % SCALE_BLOCK:
        raise UsageError(f"cannot quantize {columns} columns in groups of 128", rule="hidden-multiple")
    groups = values.float().reshape(rows, columns // SCALE_BLOCK, SCALE_BLOCK)
    scale = groups.abs().nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max).amax(2).clamp_min(AMAX_FLOOR)
    scale = scale / E4M3_MAX
    return to_e4m3(groups / scale[..., None]).reshape(rows, columns), scale.contiguous()


def make_tokens(problem: Problem, rank: int, seed: int, launch: int = 0,
                device: str | torch.device = "cpu") -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One rank's x [T,H] e4m3 and x_sf [T,H/128] f32."""
    tokens, hidden = problem.tokens[rank], problem.shape.hidden
    gen = seeded_generator(seed, "x", launch, rank, device=device)
    values = torch.randn(tokens, hidden, generator=gen, device=device)
    values *= torch.exp2(4 * torch.rand(tokens, 1, generator=gen, device=device) - 2)
    outliers = torch.randperm(hidden, generator=seeded_generator(seed, "outliers"))[: hidden // _OUTLIER_SHARE]
    values[:, outliers.to(device)] *= 6
    return quantize_rows(values)


def _code_table(device: str | torch.device) -> torch.Tensor:
    """65536 e4m3 codes (as uint8) at the quantiles of a normal whose largest is 448: all codes, zeros and subnormals
    included, as often as a quantized normal has them."""
    values = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    return to_e4m3((values * (E4M3_MAX / values.max())).float()).view(torch.uint8).to(device)


def _codes(shape: tuple[int, ...], gen: torch.Generator, device: str | torch.device) -> torch.Tensor:
    total = math.prod(shape)
    out, table = torch.empty(total, dtype=torch.uint8, device=device), _code_table(device)
    for start in range(0, total, _CHUNK):
        n = min(_CHUNK, total - start)
        # one 64-bit draw is four indices: several times faster than one draw for each code
        words = torch.empty(-(-n // 4), dtype=torch.int64, device=device).random_(-(2**63), None, generator=gen)
        index = words.view(torch.int16)[:n].int() + 32768
        torch.index_select(table, 0, index, out=out[start : start + n])
    return out.view(shape).view(torch.float8_e4m3fn)


def _block_scales(shape: tuple[int, ...], fan_in: int, gen: torch.Generator, device: str | torch.device) -> torch.Tensor:
    table = _code_table("cpu").view(torch.float8_e4m3fn).float()
    base = 1 / (fan_in**0.5 * float(table.square().mean().sqrt()))
    return base * torch.exp2(2 * torch.rand(shape, generator=gen, device=device) - 1)


def make_weights(problem: Problem, rank: int, seed: int, device: str | torch.device = "cpu") -> RankWeights:
    """One rank's experts; depends on (sizes, rank, seed), not on tokens or launch."""
    h, i, e = problem.shape.hidden, problem.shape.intermediate, problem.experts_per_rank
    gen = seeded_generator(seed, "weights", rank, device=device)
    b = SCALE_BLOCK
    return RankWeights(
        w13=_codes((e, 2 * i, h), gen, device),
        w13_sf=_block_scales((e, 2 * i // b, h // b), h, gen, device),
        w2=_codes((e, h, i), gen, device),
        w2_sf=_block_scales((e, h // b, i // b), i, gen, device),
    )


class LazyWeights(Sequence[RankWeights]):
    """All ranks' weights, generated when asked for and kept for the last ``keep`` ranks only."""

    def __init__(self, problem: Problem, seed: int, device: str | torch.device = "cpu", keep: int = 1) -> None:
        self._args, self._keep = (problem, seed, device), keep
        self._kept: dict[int, RankWeights] = {}

    def __len__(self) -> int:
        return self._args[0].ranks

    def __getitem__(self, rank: int) -> RankWeights:  # type: ignore[override]
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if rank not in self._kept:
            while len(self._kept) >= self._keep:
                self._kept.pop(next(iter(self._kept)))
            problem, seed, device = self._args
            self._kept[rank] = make_weights(problem, rank, seed, device)
        return self._kept[rank]


def make_rank_inputs(problem: Problem, rank: int, routing: str | Routing, seed: int, launch: int = 0,
                     device: str | torch.device = "cpu") -> RankInputs:  # fmt: skip
    """One rank's tokens and ids; the ids come from the CPU generator whatever the device."""
    x, x_sf = make_tokens(problem, rank, seed, launch, device)
    ids, weights = route(routing, problem, rank, seed, launch)
    return RankInputs(x, x_sf, ids.to(device), weights.to(device))


def make_case(problem: Problem, routing: str | Routing | Sequence[str] = "uniform", seed: int = 0, *,
              clamp: float | None = None, fast_math: bool = True, launch: int = 0, device: str | torch.device = "cpu",
              weights: Sequence[RankWeights] | None = None, label: str = "") -> CaseData:  # fmt: skip
    """All ranks' inputs and weights. ``routing``: one recipe, or a list with one for each rank. ``launch`` changes
    tokens and ids but not the weights (for several launches on one buffer). Pass ``weights`` to share them."""
    per_rank = [routing] * problem.ranks if isinstance(routing, (str, Routing)) else list(routing)
    if weights is None:
        weights = [make_weights(problem, r, seed, device) for r in range(problem.ranks)]
    inputs = [make_rank_inputs(problem, r, per_rank[r], seed, launch, device) for r in range(problem.ranks)]
    return CaseData(problem, inputs, weights, clamp, fast_math, label=label, seed=seed)
