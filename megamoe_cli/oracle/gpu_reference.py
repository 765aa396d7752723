"""A second, independent answer for whole full-size layers: dequantize, then ordinary FP32 matrix products.

The float64 reference recomputes a sample of rows; this one does every row, on the GPU that holds the weights, in
plain torch: weights and activations become FP32 matrices (scales multiplied in first, not per 128 of K), cuBLAS
multiplies them with TF32 off. It shares no arithmetic with ``reference.py``, so a mistake common to the
kernel and to one reference shows in the other. One expert at a time; memory is one expert in FP32 plus the slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .casedata import CaseData
from .compare import EndToEndLimits, Report, bits, check_rank, cosine, relative_l2

_ROWS = 8192  # rows of one expert at a time: bounds the FP32 accumulators (8192 x 6144 x 4 = 200 MB)


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Matrix products in real FP32: TF32 keeps 10 mantissa bits, coarser than what is judged."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _widen_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [N,K] e4m3, scales [N/128,K/128] f32 -> FP32 [N,K], each 128x128 block times its scale."""
    n, k = codes.shape
    out = codes.to(torch.float32)
    out.view(n // 128, 128, k // 128, 128).mul_(scales[:, None, :, None])
    return out


def _widen_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """codes [M,K] e4m3, scales [M,K/128] f32 -> FP32 [M,K]."""
    m, k = codes.shape
    return (codes.to(torch.float32).view(m, k // 128, 128) * scales[..., None]).view(m, k)


def layer(case: CaseData, device: torch.device | str | None = None) -> list[torch.Tensor]:
    """The whole layer for every token: y [T,H] bf16 per rank, on ``device`` (default: where the weights are)."""
    problem = case.problem
    topk, hidden = problem.shape.topk, problem.shape.hidden
    device = torch.device(device) if device is not None else case.weights[0].w13.device
    ids = [data.topk_idx.to(device) for data in case.inputs]
    slots = [torch.zeros(t, topk, hidden, dtype=torch.bfloat16, device=device) for t in problem.tokens]
    with exact_fp32():
        for owner in range(problem.ranks):
            weights = case.weights[owner]
            for local in range(problem.experts_per_rank):
                expert = owner * problem.experts_per_rank + local
                if any(bool((rank_ids == expert).any()) for rank_ids in ids):
                    _expert(case, weights, local, expert, ids, slots, device)
    return [_sum_slots(slots[r], ids[r]) for r in range(problem.ranks)]


def _expert(case: CaseData, weights: object, local: int, expert: int, ids: Sequence[torch.Tensor],
            slots: Sequence[torch.Tensor], device: torch.device) -> None:  # fmt: skip
    """Adds one expert's rows to the slots of every rank."""
    w13 = _widen_blocks(weights.w13[local].to(device), weights.w13_sf[local].to(device))
    w2 = _widen_blocks(weights.w2[local].to(device), weights.w2_sf[local].to(device))
    half = w13.shape[0] // 2
    for rank, rank_ids in enumerate(ids):
        token, slot = (rank_ids == expert).nonzero(as_tuple=True)
        for part_t, part_s in zip(token.split(_ROWS), slot.split(_ROWS)):
            data = case.inputs[rank]
            codes = data.x.to(device).view(torch.uint8)[part_t].view(torch.float8_e4m3fn)
            x = _widen_rows(codes, data.x_sf.to(device)[part_t])
            gate, up = x @ w13[:half].T, x @ w13[half:].T
            if case.clamp is not None:
                gate, up = gate.clamp(max=case.clamp), up.clamp(-case.clamp, case.clamp)
            acts = torch.nn.functional.silu(gate) * up * data.topk_weights.to(device)[part_t, part_s, None]
            groups = acts.view(len(part_t), half // 128, 128)
            scale = groups.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(2, keepdim=True)
            scale = scale.clamp_min(1e-10) / 448.0
            codes = (groups / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            slots[rank][part_t, part_s] = ((codes.to(torch.float32) * scale).view_as(acts) @ w2.T).to(torch.bfloat16)


def _sum_slots(slots: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """slots [T,K,H] bf16, ids [T,K] -> FP32 sum over the unmasked slots in order, as BF16 [T,H]."""
    total = torch.zeros(slots.shape[0], slots.shape[2], dtype=torch.float32, device=slots.device)
    for k in range(slots.shape[1]):
        used = ids[:, k] >= 0
        total[used] += slots[used, k].float()
    return total.to(torch.bfloat16)


def compare(case: CaseData, outputs: Sequence[torch.Tensor], *, limits: EndToEndLimits, report: Report, device: torch.device | str | None = None) -> None:  # fmt: skip
    """Every row of ``outputs[r]`` ([>=T,H] bf16) against :func:`layer`; findings and worst numbers go to ``report``.

    Metrics: full_rel and full_cosine_loss (worst row), full_bit_equal (share of elements with the same 16 bits).
    """
    unequal = total = 0
    for rank, want in enumerate(layer(case, device)):
        got = outputs[rank][: case.problem.tokens[rank]].to(want.device)
        if not len(got):
            continue
        relative, cosines = relative_l2(got, want), cosine(got, want)
        report.worst("full_rel", float(relative.nan_to_num(nan=torch.inf).max()))
        report.worst("full_cosine_loss", 1 - float(cosines.nan_to_num(nan=-1.0).min()))
        # Written so that NaN fails.
        for token in (~((relative <= limits.row) & (cosines >= limits.cosine))).nonzero().flatten().tolist():
            error = (got[token].float() - want[token].float()).abs()
            column = int(error.nan_to_num(nan=torch.inf).argmax())
            report.add("full_reference", f"relative L2 {float(relative[token]):.3g} (limit {limits.row:g}), cosine "
                       f"{float(cosines[token]):.5f} (limit {limits.cosine:g}) against the FP32 reference of every row",
                       rank=rank, token=token, column=column, got=float(got[token, column]),
                       expected=float(want[token, column]))
        check_rank(report, "full_rank", got, want, rank, limits)
        unequal += int((bits(got) != bits(want)).sum())
        total += got.numel()
    if total:
        report.metrics["full_bit_equal"] = 1.0 - unequal / total
