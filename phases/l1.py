"""Phase l1: gate/up GEMM, clamp, SwiGLU, routing weight, requantization per 128 of I.

Judged from the pool bytes that dispatch really left: raw accumulators where the build exposes them, then codes and
scales. With raw accumulators the epilogue is judged from *those*, so that the two cannot excuse each other.
"""

from __future__ import annotations

import torch

from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
from megamoe_cli.oracle.compare import LIMITS, Finding, Report, check_activations, check_rows, code_share_limit
from megamoe_cli.oracle.pool import PoolPlan, Row, Segment, read_rows, sampled_segments
from megamoe_cli.oracle.reference import may_overflow, requantize, rows_of, scaled_gemm, swiglu

NAME = "l1"
INDEX = 2
VIEWS = ("l1_raw", "l2_acts", "l2_acts_sf")
_ROWS_AT_ONCE = 4096


def check(case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    report, plan = Report(metrics), PoolPlan(case)
    for rank in range(case.problem.ranks):
        differing = compared = 0
        weights = case.weights[rank]
        for segment, chosen in sampled_segments(case, plan.segments(rank), case.seed + rank):
            rows = read_rows(case, segment, got[rank]["token_src_metadata"])
            for part in chosen.split(_ROWS_AT_ONCE):
                d, n = _check_block(report, case, got, rank, segment, rows.take(part), weights)
                differing, compared = differing + d, compared + n
        if not compared:
            continue
        share = differing / compared
        limit = code_share_limit(case.rescaled, compared)
        report.worst("l2_acts_share", share, limit)
        if share > limit:
            report.add("l2_acts_share", f"share of the {compared} e4m3 codes of this rank's l2_acts that differ, limit {limit:.2%}", rank=rank, got=round(share, 4), expected=0)  # fmt: skip
    return report.findings()


def _check_block(report: Report, case: CaseData, got: PhaseOutput, rank: int, segment: Segment, rows: Row,
                 weights: object) -> tuple[int, int]:  # fmt: skip
    views, device = got[rank], weights.w13.device
    x = rows_of(views["l1_acts"], rows.pool).to(device)
    x_sf = rows_of(views["l1_acts_sf"], rows.pool).to(device)
    lost = may_overflow(x_sf, weights.w13_sf[segment.local])
    if bool(lost.any()):
        kept = (~lost).nonzero().flatten()
        rows, x, x_sf = rows.take(kept.cpu()), rows_of(x, kept), x_sf[kept]
    acc = scaled_gemm(x, x_sf, weights.w13[segment.local], weights.w13_sf[segment.local])
    raw = views.get("l1_raw")
    if raw is not None:
        have = rows_of(raw, rows.pool).to(device)
        check_rows(report, "l1_raw", have, acc, rows.where, rel=LIMITS["l1_rel"].value, what="accumulator row")
        acc = have.double()
    topk_weight = rows_of(views["l1_topk_weights"], rows.pool).to(device)
    exact = swiglu(acc, topk_weight, case.clamp)
    codes, scales = requantize(exact)
    have_codes = rows_of(views["l2_acts"], rows.pool).to(device)
    have_scales = rows_of(views["l2_acts_sf"], rows.pool).to(device)
    unclamped = None if case.clamp is None else swiglu(acc, topk_weight, None)
    return check_activations(report, have_codes, have_scales, codes, scales, exact, rows.where, unclamped, case.rescaled)
