"""The layer in float64 over the same quantized bytes, as the numerics contract states it.

The pieces (``scaled_gemm``, ``swiglu``, ``requantize``, ``combine_slots``) are what phases are judged with, from the
bytes the phase before produced; ``end_to_end`` chains them from the inputs. Work is grouped by expert and done on the
device that holds the weights. Imports nothing of the kernel side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .casedata import CaseData, RankWeights

BLOCK = 128
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
F32_MAX = torch.finfo(torch.float32).max
_ROWS_AT_ONCE = 4096  # bounds the float64 accumulators (4096 x 6144 x 8 bytes = 200 MB)


def scaled_gemm(a: torch.Tensor, sa: torch.Tensor, w: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    """sum over blocks kb of sa[m,kb] * sb[n/128,kb] * (a[m,kb block] . w[n,kb block]), float64 [M,N].

    a [M,K] e4m3, sa [M,K/128] f32, w [N,K] e4m3, sb [N/128,K/128] f32; all on one device. The form matters only for
    NaN and infinities: the sum of codes is taken first, then scaled, as the kernel does.
    """
    rows, depth = a.shape
    total = torch.zeros(rows, w.shape[0], dtype=torch.float64, device=w.device)
    sa, sb = sa.double(), sb.double()
    for kb in range(depth // BLOCK):
        part = slice(kb * BLOCK, (kb + 1) * BLOCK)
        block = a[:, part].to(torch.float64) @ w[:, part].to(torch.float64).T
        total += block * (sa[:, kb, None] * sb[:, kb].repeat_interleave(BLOCK))
    return total


def may_overflow(sa: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    """Rows [M] of a scaled GEMM whose FP32 sum could leave the format's range somewhere on the way (by an upper bound:
    every code 448). A sum that passes through infinity depends on its order, so such a row is not defined."""
    worst = sa.double().abs() @ sb.double().abs().amax(0) * (BLOCK * E4M3_MAX**2)
    return worst > F32_MAX / 2  # False for NaN: a NaN scale must give NaN


def swiglu(acc: torch.Tensor, weight: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """acc [M,2I] (gate columns, then up columns), weight [M] -> silu(min(g,c)) * clip(u,-c,c) * weight, float64 [M,I].

    NaN stays NaN through the clamp, which comes before SiLU.
    """
    gate, up = acc.double().chunk(2, dim=1)
    if clamp is not None:
        gate = torch.minimum(gate, gate.new_tensor(clamp))  # torch's minimum and clamp hand NaN on
        up = up.clamp(-clamp, clamp)
    return gate * torch.sigmoid(gate) * up * weight.double()[:, None]


def requantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [M,I] -> codes [M,I] e4m3 and scales [M,I/128] f32: scale = max(amax,1e-10)/448, continuous.

    Rounded to FP32 first, as an FP32 kernel would hold them; a NaN does not raise its group's amax.
    """
    rows, columns = values.shape
    groups = values.float().reshape(rows, columns // BLOCK, BLOCK)
    amax = groups.abs().where(~groups.isnan(), groups.new_zeros(())).amax(2)
    scale = amax.clamp_min(AMAX_FLOOR) / E4M3_MAX
    codes = (groups / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.reshape(rows, columns), scale


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [M,N] e4m3, scales [M,N/128] -> float64 [M,N]."""
    return codes.to(torch.float64) * scales.double().repeat_interleave(BLOCK, dim=1)


def combine_slots(slots: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """slots [K,T,H] bf16, topk_idx [T,K] -> y [T,H] bf16, bit for bit what the kernel must give.

    FP32 accumulator that starts at +0 and takes unmasked slots in ascending order; a masked slot is never read, so a
    fully masked row is exactly +0.
    """
    total = torch.zeros(slots.shape[1:], dtype=torch.float32, device=slots.device)
    taken = (topk_idx >= 0).to(slots.device)
    for k in range(slots.shape[0]):
        total = torch.where(taken[:, k, None], total + slots[k].float(), total)
    return total.to(torch.bfloat16)


@dataclass
class ExpertResult:
    """One expert's rows: activations float64 [n,I] before, codes and scales after requantization, out float64 [n,H],
    overflow [n] bool: something on the way left FP32's range, so the row is not defined."""

    activations: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor
    overflow: torch.Tensor


def run_expert(weights: RankWeights, local: int, x: torch.Tensor, x_sf: torch.Tensor, topk_weight: torch.Tensor,
               clamp: float | None) -> ExpertResult:  # fmt: skip
    """Local expert ``local`` on rows x [n,H] e4m3, x_sf [n,H/128], topk_weight [n]; on the weights' device."""
    device = weights.w13.device
    x, x_sf, topk_weight = x.to(device), x_sf.to(device), topk_weight.to(device)
    acc = scaled_gemm(x, x_sf, weights.w13[local], weights.w13_sf[local])
    activations = swiglu(acc, topk_weight, clamp)
    codes, scales = requantize(activations)
    out = scaled_gemm(codes, scales, weights.w2[local], weights.w2_sf[local])
    overflow = (activations.abs() > 0.99 * F32_MAX).any(1)
    overflow |= may_overflow(x_sf, weights.w13_sf[local]) | may_overflow(scales, weights.w2_sf[local])
    return ExpertResult(activations, codes, scales, out, overflow)


@dataclass
class RankReference:
    """The reference's answer for some tokens of one rank.

    tokens [n] int64 (which rows), y [n,H] bf16, slots [K,n,H] bf16 (0 where masked), acts_amax [n,K,I/128] float64
    (amax of the L2 input, per group), overflow [n] bool: FP32's range was left, so the row is not defined.
    """

    tokens: torch.Tensor
    y: torch.Tensor
    slots: torch.Tensor
    acts_amax: torch.Tensor
    overflow: torch.Tensor


def rows_of(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``tensor[index]`` for any dtype (torch cannot index e4m3 on every device), in the index's order."""
    index = index.to(tensor.device)
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8)[index].view(torch.float8_e4m3fn)
    return tensor[index]


def end_to_end(case: CaseData, tokens: Sequence[torch.Tensor] | None = None) -> list[RankReference]:
    """The whole layer from the inputs, for all tokens or for ``tokens[r]`` (row numbers) of each rank r."""
    p = case.problem
    h, i, topk = p.shape.hidden, p.shape.intermediate, p.shape.topk
    chosen = [torch.arange(p.tokens[r]) for r in range(p.ranks)] if tokens is None else [t.cpu() for t in tokens]
    ids = torch.cat([case.inputs[r].live_ids(p.shape.experts).cpu()[chosen[r]] for r in range(p.ranks)])  # [N,K] over all ranks
    device = case.inputs[0].x.device  # of several ranks' devices, the first gathers

    def gather(name: str) -> torch.Tensor:
        return torch.cat([rows_of(getattr(case.inputs[r], name), chosen[r]).to(device) for r in range(p.ranks)])

    x_sf, weight = gather("x_sf"), gather("topk_weights")
    x = torch.cat([rows_of(case.inputs[r].x, chosen[r]).view(torch.uint8).to(device) for r in range(p.ranks)])
    total = ids.shape[0]
    slots = torch.zeros(topk, total, h, dtype=torch.bfloat16)
    amax = torch.zeros(total, topk, i // BLOCK, dtype=torch.float64)
    overflow = torch.zeros(total, dtype=torch.bool)

    entries = ids.flatten().argsort(stable=True)  # entry = row * K + slot, grouped by expert; masked first
    counts = torch.bincount(ids.flatten() + 1, minlength=p.shape.experts + 1).tolist()
    start = counts[0]
    for expert in range(p.shape.experts):
        mine, start = entries[start : start + counts[expert + 1]], start + counts[expert + 1]
        if not len(mine):
            continue
        weights = case.weights[p.owner(expert)]
        for part in mine.split(_ROWS_AT_ONCE):
            row, slot = part // topk, part % topk
            at = row.to(device)
            result = run_expert(weights, expert % p.experts_per_rank, x[at].view(torch.float8_e4m3fn), x_sf[at],
                                weight[at, slot.to(device)], case.clamp)  # fmt: skip
            slots[slot, row] = result.out.float().bfloat16().cpu()
            acts = result.activations.reshape(len(part), i // BLOCK, BLOCK)
            amax[row, slot] = acts.abs().amax(2).cpu()
            overflow[row[result.overflow.cpu()]] = True
    y = combine_slots(slots, ids)
    out, first = [], 0
    for r in range(p.ranks):
        part = slice(first, first + len(chosen[r]))
        first = part.stop
        out.append(RankReference(chosen[r], y[part], slots[:, part], amax[part], overflow[part]))
    return out
