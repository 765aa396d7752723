"""What a named case says beyond "each run matches": relations between runs and facts about one run.

Each takes (cases, outputs, **arguments of the case file) and returns findings; ``RELATIONS`` names the first phase
whose output it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .casedata import CaseData, PhaseOutput
from .compare import LIMITS, Finding, Report, bit_equal_rows, check_rows, end_to_end_limits, relative_l2
from .reference import dequantize, end_to_end

Cases = Sequence[CaseData]
Outputs = Sequence[PhaseOutput]


def bit_equal(cases: Cases, outputs: Outputs, runs: list[int], ranks: list[int],
              skip: dict[int, list[int]] | None = None) -> list[Finding]:  # fmt: skip
    """y of two runs, byte for byte, on ``ranks``, except tokens ``skip[rank]``."""
    first, second = runs
    findings = []
    for rank in ranks:
        tokens = cases[first].problem.tokens[rank]
        a, b = outputs[first][rank]["y"][:tokens], outputs[second][rank]["y"][:tokens]
        findings += bit_equal_rows(a, b, rank, "runs_differ", tuple((skip or {}).get(rank, ())))
    return findings


def all_bit_equal(cases: Cases, outputs: Outputs) -> list[Finding]:
    """y of every run equals the first's, on all ranks."""
    ranks = list(range(cases[0].problem.ranks))
    return [f for n in range(1, len(cases)) for f in bit_equal(cases, outputs, [0, n], ranks)]


def zero(cases: Cases, outputs: Outputs, run: int, rank: int) -> list[Finding]:
    """y is exactly +0 for all tokens of a rank."""
    y = outputs[run][rank]["y"][: cases[run].problem.tokens[rank]]
    return bit_equal_rows(y, torch.zeros_like(y), rank, "not_zero")


def finite(cases: Cases, outputs: Outputs, run: int, rank: int, token: int) -> list[Finding]:
    row, report = outputs[run][rank]["y"][token].float(), Report()
    if not bool(row.isfinite().all()):
        column = int((~row.isfinite()).nonzero()[0])
        report.add("not_finite", "this row must be finite", rank=rank, token=token, column=column, got=row[column].item())
    return report.findings()


def rows_written(cases: Cases, outputs: Outputs, run: int, rank: int, rows: int) -> list[Finding]:
    """Exactly the first ``rows`` rows of y are results: each differs from the poison, all later ones do not."""
    y, report = outputs[run][rank]["y"], Report()
    written = (y.contiguous().view(torch.uint8) != outputs[run].poison).any(dim=1)
    wrong = written != (torch.arange(len(written), device=written.device) < rows)
    for row in wrong.nonzero().flatten().tolist():
        report.add("rows_written", "whether this row of y was written", rank=rank, token=row, got=bool(written[row]),
                   expected=row < rows)  # fmt: skip
    return report.findings()


def counts(cases: Cases, outputs: Outputs, run: int, rank: int | None = None, values: list[int] | None = None,
           each_rank: list[int] | None = None) -> list[Finding]:  # fmt: skip
    """expert_recv_count_sum of one rank, or the same on each."""
    report, ranks = Report(), range(cases[run].problem.ranks) if rank is None else [rank]
    for r in ranks:
        have, want = outputs[run][r]["expert_recv_count_sum"].tolist(), values if each_rank is None else each_rank
        if have != want:
            report.add("counts", "rows received by the local experts", rank=r, got=str(have), expected=str(want))
    return report.findings()


def close(cases: Cases, outputs: Outputs, runs: list[int], relative_l2: float) -> list[Finding]:
    """Every row of y differs between two runs by at most this relative L2."""
    report, (first, second), limit = Report(), runs, relative_l2
    for rank, tokens in enumerate(cases[first].problem.tokens):
        a, b = (outputs[n][rank]["y"][:tokens] for n in (first, second))
        ratio = _relative(b, a)
        for row in (~(ratio <= limit)).nonzero().flatten().tolist():
            report.add("jump", f"relative L2 between the two runs, limit {limit:g}", rank=rank, token=row,
                       got=float(ratio[row]), expected=0.0)  # fmt: skip
    return report.findings()


_relative = relative_l2  # the argument of ``close`` has the case file's word for it


def near(cases: Cases, outputs: Outputs, run: int, value: float, relative: float) -> list[Finding]:
    """Every element of y, and of the dequantized L2 input where the output has it, is ``value``."""
    case, got, report = cases[run], outputs[run], Report()
    for rank, tokens in enumerate(case.problem.tokens):
        parts = [("y", got[rank]["y"][:tokens].double().cpu())]
        if "l2_acts" in got[rank] and case.problem.ranks == 1:  # one rank, one expert: the first rows of the pool
            rows = int(got[rank]["expert_recv_count_sum"][0])
            acts = dequantize(got[rank]["l2_acts"][:rows].cpu(), got[rank]["l2_acts_sf"][:rows].cpu())
            parts.append(("l2_acts", acts))
        for name, have in parts:
            bad = ~((have - value).abs() <= relative * abs(value))
            for row in bad.any(dim=1).nonzero().flatten().tolist():
                column = int(bad[row].nonzero()[0])
                report.add("not_near", f"{name} is off by more than {relative:g}", rank=rank, token=row, column=column,
                           got=have[row, column].item(), expected=value)  # fmt: skip
    return report.findings()


def as_if_masked(cases: Cases, outputs: Outputs, run: int, expert: int) -> list[Finding]:
    """y is what it would be with the expert's slots masked, within the end-to-end limits."""
    case, report = cases[run], Report()
    inputs = [replace(d, topk_idx=d.topk_idx.masked_fill(d.topk_idx == expert, -1)) for d in case.inputs]
    limits = end_to_end_limits(case.problem.shape.intermediate)
    for rank, reference in enumerate(end_to_end(replace(case, inputs=inputs))):
        y = outputs[run][rank]["y"][: case.problem.tokens[rank]].cpu()
        check_rows(report, "not_as_masked", y, reference.y, lambda r: (rank, r, None),
                   rel=limits.row, cos=limits.cosine)  # fmt: skip
    return report.findings()


RELATIONS: dict[str, tuple[str, Callable[..., list[Finding]]]] = {
    "bit_equal": ("combine", bit_equal), "all_bit_equal": ("combine", all_bit_equal), "zero": ("combine", zero),
    "finite": ("combine", finite), "rows_written": ("combine", rows_written), "counts": ("dispatch", counts),
    "close": ("combine", close), "near": ("combine", near), "as_if_masked": ("combine", as_if_masked),
}  # fmt: skip
