"""Phase stub: launches, exchanges one flag with every peer, reports what the device believes; produces no data.

The report (``stub_report``, u64 words) is the byte offset of every region, then 8 words: ABI version, bytes of
KernelParams, pool rows, bytes of the symmetric buffer, planned shared memory, shared memory of the launch, alignment
of the shared-memory base (offset modulo 1024), CTAs. Each is a second statement of what the host computed.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe_cli import abi, layout
from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
from megamoe_cli.oracle.compare import Finding, Report

NAME = "stub"
INDEX = 0
VIEWS = ("x", "x_sf", "topk_idx", "topk_weights", "l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf", "stub_report")


def check(case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    """Every rank's report, and the dtype, shape and stride of the 8 views, against the host's layout.

    ``got.meta`` may hold "smem_bytes" and "grid" (the launch's own), which are compared when present.
    """
    report = Report(metrics)
    plan = layout.Layout(case.problem.shape, case.problem.ranks, case.problem.capacity)
    for rank in range(case.problem.ranks):
        _check_views(report, plan, got[rank], rank)
        _check_report(report, plan, got, rank)
    return report.findings()


def _check_views(report: Report, plan: layout.Layout, views: dict[str, Any], rank: int) -> None:
    for name in layout.BASE_VIEWS:
        spec, tensor = plan.view(name), views.get(name)
        if tensor is None:
            report.add("stub_view", f"view {name} is missing", rank=rank)
            continue
        for what, have, want in (
            ("dtype", str(tensor.dtype).removeprefix("torch."), spec.dtype),
            ("shape", tuple(tensor.shape), spec.shape),
            ("stride", tuple(tensor.stride()), spec.strides),
        ):
            if have != want:
                report.add("stub_view", f"view {name} has the wrong {what}", rank=rank, got=str(have), expected=str(want))


def _check_report(report: Report, plan: layout.Layout, got: PhaseOutput, rank: int) -> None:
    words = got[rank].get("stub_report")
    count = layout.NUM_REGIONS + 8
    if words is None or words.numel() < count:
        have = "no" if words is None else words.numel()
        report.add("stub_report", f"the report has {have} words instead of {count}", rank=rank)
        return
    values = [int(word) for word in words.cpu().view(torch.int64).flatten()[:count]]
    expected: dict[str, int] = {f"offset of region {n}": o for n, o in zip(layout.REGIONS, plan.offsets)}
    expected |= {
        "ABI version": abi.ABI_VERSION, "bytes of KernelParams": abi.PARAMS_BYTES, "pool rows": plan.pool_rows,
        "bytes of the symmetric buffer": plan.total_bytes,
    }  # fmt: skip
    for (what, want), value in zip(expected.items(), values):
        if value != want:
            report.add("stub_report", f"the device's {what} differs from the host's", rank=rank, got=value, expected=want)
    planned, launched, misaligned, ctas = values[len(expected) :]
    if planned > launched:
        report.add("stub_smem", "the launch owns less shared memory than the plan needs", rank=rank, got=launched,
                   expected=planned)  # fmt: skip
    if misaligned:
        report.add("stub_smem", "the shared-memory base is not 1024-byte aligned", rank=rank, got=misaligned, expected=0)
    for key, value in (("smem_bytes", launched), ("grid", ctas)):
        want = got.meta.get(key)
        if want is not None and value != want:
            report.add("stub_launch", f"the device's {key} differs from the launch's", rank=rank, got=value, expected=want)
