"""Phase combine: all-rank barrier, FP32 sum of a token's slots in ascending order, BF16 out.

``y`` is bit-exact from the combine slots really produced, rows past the token count keep the caller's bytes, and the
whole layer is judged end to end from the inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
from megamoe_cli.oracle.compare import LIMITS, Finding, Report, check_bits, check_rank, check_rows, end_to_end_limits
from megamoe_cli.oracle.pool import sampled_tokens
from megamoe_cli.oracle.reference import combine_slots, end_to_end

NAME = "combine"
INDEX = 4
VIEWS = ("y",)
BF16_MAX = float(torch.finfo(torch.bfloat16).max)
_ROWS_AT_ONCE = 2048  # bounds the float64 copies that a comparison makes


def check(case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    report = Report(metrics)
    for rank in range(case.problem.ranks):
        _check_exact(report, case, got[rank], rank)
        _check_rest(report, case, got, rank)
    check_end_to_end(report, case, got)
    return report.findings()


def _check_exact(report: Report, case: CaseData, views: dict[str, Any], rank: int) -> None:
    data = case.inputs[rank]
    if not data.tokens:
        return
    ids = data.live_ids(case.problem.shape.experts)
    expected = combine_slots(views["combine"][:, : data.tokens], ids)
    have = views["y"][: data.tokens]
    check_bits(report, "combine_exact", have, expected.to(have.device), lambda r: (rank, r, None),
               what="y row (from its combine slots)", nan_equal=True)  # fmt: skip
    masked = (ids < 0).all(dim=1).cpu().nonzero().flatten()
    zero = have[masked.to(have.device)]
    check_bits(report, "combine_masked", zero, torch.zeros_like(zero), lambda r: (rank, int(masked[r]), None),
               what="y row (all slots masked)")  # fmt: skip


def _check_rest(report: Report, case: CaseData, got: PhaseOutput, rank: int) -> None:
    """Rows tokens..capacity still hold the poison."""
    y, tokens, capacity = got[rank]["y"], case.problem.tokens[rank], case.problem.capacity
    if y.shape[0] != capacity:
        report.add("combine_rest", "y must be handed over with all capacity rows", rank=rank, got=y.shape[0], expected=capacity)
        return
    touched = (y[tokens:].contiguous().view(torch.uint8) != got.poison).any(dim=1)
    for row in touched.nonzero().flatten().tolist():
        report.add("combine_rest", "a row past the token count was written", rank=rank, token=tokens + row)


def check_end_to_end(report: Report, case: CaseData, got: PhaseOutput) -> None:
    """y against the float64 layer; rows whose activations leave FP32's range are not defined and not judged."""
    limits = end_to_end_limits(case.problem.shape.intermediate, case.rescaled)
    tokens = [sampled_tokens(case, rank) for rank in range(case.problem.ranks)]
    for rank, reference in enumerate(end_to_end(case, tokens)):
        y = got[rank]["y"]
        for judged in (~reference.overflow).nonzero().flatten().split(_ROWS_AT_ONCE):
            index = reference.tokens[judged]
            check_rows(report, "e2e", y[index.to(y.device)].cpu(), reference.y[judged],
                       lambda r, index=index: (rank, int(index[r]), None), rel=limits.row,
                       element=LIMITS["e2e_element"].value * limits.row, ulp=LIMITS["bf16_ulp"].value,
                       cos=limits.cosine, largest=BF16_MAX, what="y row")  # fmt: skip
        judged = ~reference.overflow & ~reference.y.isnan().any(dim=1)
        check_rank(report, "e2e_rank", y[reference.tokens[judged].to(y.device)].cpu(), reference.y[judged], rank, limits)
