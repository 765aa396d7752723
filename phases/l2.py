"""Phase l2: down projection, one BF16 row for each (token, slot), written to the owner's combine slots.

Judged from the ``l2_acts`` bytes that the expert's rank really produced.
"""

from __future__ import annotations

import torch

from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
from megamoe_cli.oracle.compare import LIMITS, Finding, Report, check_rows
from megamoe_cli.oracle.pool import PoolPlan, Row, read_rows, sampled_segments
from megamoe_cli.oracle.reference import may_overflow, rows_of, scaled_gemm

NAME = "l2"
INDEX = 3
VIEWS = ("combine",)
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_ROWS_AT_ONCE = 4096


def check(case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    report, plan = Report(metrics), PoolPlan(case)
    for rank in range(case.problem.ranks):
        weights, views = case.weights[rank], got[rank]
        device = weights.w2.device
        for segment, chosen in sampled_segments(case, plan.segments(rank), case.seed + rank):
            rows = read_rows(case, segment, views["token_src_metadata"]).take(chosen)
            rows = rows.take(rows.valid.nonzero().flatten())  # dispatch reports the others
            for part in torch.arange(len(rows)).split(_ROWS_AT_ONCE):
                some = rows.take(part)
                acts = rows_of(views["l2_acts"], some.pool).to(device)
                scales = rows_of(views["l2_acts_sf"], some.pool).to(device)
                kept = (~may_overflow(scales, weights.w2_sf[segment.local])).nonzero().flatten()
                some, acts, scales = some.take(kept.cpu()), rows_of(acts, kept), scales[kept]
                expected = scaled_gemm(acts, scales, weights.w2[segment.local], weights.w2_sf[segment.local])
                check_rows(report, "l2_row", _slot_rows(got, some).to(device), expected, some.where,
                           rel=LIMITS["l2_rel"].value, element=LIMITS["l2_element"].value,
                           ulp=LIMITS["bf16_ulp"].value, largest=BF16_MAX, what="combine slot")  # fmt: skip
    if got.combine_poisoned:
        _check_unwritten(report, case, got)
    return report.findings()


def _slot_rows(got: PhaseOutput, rows: Row) -> torch.Tensor:
    """[n,H] bf16 (CPU): for each row, the combine slot its owner holds."""
    first = got[0]["combine"]
    out = torch.empty(len(rows), first.shape[2], dtype=first.dtype)
    for source in rows.rank.unique().tolist():
        mine = (rows.rank == source).nonzero().flatten()
        combine = got[source]["combine"]
        out[mine] = combine[rows.slot[mine].to(combine.device), rows.token[mine].to(combine.device)].cpu()
    return out


def _check_unwritten(report: Report, case: CaseData, got: PhaseOutput) -> None:
    """Slots that belong to nobody (masked, or past the token count) still hold the poison."""
    for rank in range(case.problem.ranks):
        combine, data = got[rank]["combine"], case.inputs[rank]
        touched = (combine.contiguous().view(torch.uint8) != got.poison).any(dim=2)  # [K,C]
        free = torch.ones_like(touched)
        free[:, : data.tokens] = (data.live_ids(case.problem.shape.experts) < 0).T.to(free.device)
        for slot, token in (touched & free).nonzero().tolist():
            report.add("l2_stray_write", "a combine slot that no expert owns was written", rank=rank, token=token, slot=slot)
