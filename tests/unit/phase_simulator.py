"""A kernel in plain FP32 torch, written from the contract and sharing no code with the oracle's arithmetic: it fills a
PhaseOutput the way a correct build would (including poison, garbage in padding rows, and an arbitrary order of rows
within one source), so that the checks can be tested, and then corrupted."""

from __future__ import annotations

import torch

from megamoe_cli.layout import Layout
from megamoe_cli.oracle.casedata import CaseData, PhaseOutput

torch.set_num_threads(1)  # small operations: more threads only wait for each other, above all under pytest -n

_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float32": torch.float32, "int64": torch.int64, "int32": torch.int32,
           "bfloat16": torch.bfloat16}  # fmt: skip


def _poisoned(spec) -> torch.Tensor:
    flat = torch.full((spec.span_bytes,), 0xFF, dtype=torch.uint8).view(_DTYPES[spec.dtype])
    if spec.strides[0] == 1 and len(spec.shape) == 2 and spec.shape[1] > 1:
        return flat.view(spec.shape[1], spec.shape[0]).T
    return flat.view(spec.shape)


def _quantize(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = [], []
    for group in a.split(128, dim=1):
        s = torch.clamp(group.abs().nan_to_num(0.0).max(dim=1).values, min=1e-10) / 448
        scales.append(s)
        codes.append(torch.clamp(group / s[:, None], -448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    return torch.cat(codes, 1), torch.stack(scales, 1)


def _gemm(a: torch.Tensor, sa: torch.Tensor, w: torch.Tensor, sb: torch.Tensor) -> torch.Tensor:
    acc = torch.zeros(a.shape[0], w.shape[0])
    for kb in range(sa.shape[1]):
        cols = slice(128 * kb, 128 * kb + 128)
        for nb in range(sb.shape[0]):
            rows = slice(128 * nb, 128 * nb + 128)
            acc[:, rows] += (a[:, cols].float() @ w[rows, cols].float().T) * (sa[:, kb] * sb[nb, kb])[:, None]
    return acc


def simulate(case: CaseData, *, block_m: int = 64, seed: int = 0, raw: bool = True) -> PhaseOutput:
    """All phases on all ranks; every view of the buffer, y with capacity rows, l1_raw unless ``raw`` is False."""
    p, gen = case.problem, torch.Generator().manual_seed(seed)
    plan = Layout(p.shape, p.ranks, p.capacity)
    names = (*plan.views(), "combine")
    ranks: list[dict] = [{n: _poisoned(plan.view(n)) for n in names} for _ in range(p.ranks)]
    topk = p.shape.topk
    for r, views in enumerate(ranks):
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            view, value = views[name], getattr(case.inputs[r], name)
            view[: value.shape[0]] = value
        views["l1_arrival_count"].zero_()
        views["y"] = torch.full((p.capacity, p.shape.hidden * 2), 0xFF, dtype=torch.uint8).view(torch.bfloat16)
        views["l1_raw"] = torch.full((plan.pool_rows, 2 * p.shape.intermediate), float("nan")) if raw else None
        views["fault"] = None
    for r, views in enumerate(ranks):
        base = 0
        for local in range(p.experts_per_rank):
            expert = r * p.experts_per_rank + local
            row = base
            for j in range(p.ranks):
                src = (r + j) % p.ranks
                entries = (case.inputs[src].topk_idx == expert).nonzero().tolist()
                for n in torch.randperm(len(entries), generator=gen).tolist():
                    token, slot = entries[n]
                    views["token_src_metadata"][row] = torch.tensor([src, token, slot], dtype=torch.int32)
                    views["l1_acts"].view(torch.uint8)[row] = case.inputs[src].x.view(torch.uint8)[token]
                    views["l1_acts_sf"][row] = case.inputs[src].x_sf[token]
                    views["l1_topk_weights"][row] = case.inputs[src].topk_weights[token, slot]
                    views["l1_arrival_count"][row // block_m] += 1
                    row += 1
            views["expert_recv_count_sum"][local] = row - base
            if row > base:
                _expert(case, ranks, r, local, slice(base, row))
            base += -(-(row - base) // 128) * 128
    for r, views in enumerate(ranks):
        for token in range(p.tokens[r]):
            total = torch.zeros(p.shape.hidden)
            for slot in range(topk):
                if 0 <= case.inputs[r].topk_idx[token, slot] < p.shape.experts:
                    total += views["combine"][slot, token].float()
            views["y"][token] = total.bfloat16()
    return PhaseOutput(ranks, block_m=block_m, combine_poisoned=True)


def _expert(case: CaseData, ranks: list[dict], r: int, local: int, rows: slice) -> None:
    views, w = ranks[r], case.weights[r]
    acc = _gemm(views["l1_acts"][rows], views["l1_acts_sf"][rows], w.w13[local], w.w13_sf[local])
    if views["l1_raw"] is not None:
        views["l1_raw"][rows] = acc
    half = case.problem.shape.intermediate
    g, u = acc[:, :half], acc[:, half:]
    if case.clamp is not None:  # comparisons are false for NaN, which therefore stays
        c = torch.tensor(float(case.clamp))
        g = torch.where(g > c, c, g)
        u = torch.where(u > c, c, torch.where(u < -c, -c, u))
    a = g / (1 + torch.exp(-g)) * u * views["l1_topk_weights"][rows][:, None]
    codes, scales = _quantize(a)
    views["l2_acts"].view(torch.uint8)[rows] = codes
    views["l2_acts_sf"][rows] = scales
    out = _gemm(views["l2_acts"][rows], views["l2_acts_sf"][rows], w.w2[local], w.w2_sf[local]).bfloat16()
    for value, (src, token, slot) in zip(out, views["token_src_metadata"][rows].tolist()):
        ranks[src]["combine"][slot, token] = value
