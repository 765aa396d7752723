"""From what a run left behind to findings and numbers: the phase checks, the references, the tolerances shown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import phases
from .case_plan import Plan
from .oracle import gpu_reference
from .oracle.casedata import CaseData, PhaseOutput
from .oracle.compare import LIMITS, Finding, Report, bits, check_rows, end_to_end_limits
from .oracle.reference import end_to_end

FINDINGS_KEPT = 10
CPU_RANKS = 4  # of a case judged on a GPU: one token on so many ranks is also recomputed in float64 on the CPU


def judge(plan: Plan, outputs: Sequence[PhaseOutput], full: Sequence[bool]) -> tuple[list[Finding], dict[str, Any]]:
    """All findings, and the worst numbers. ``outputs[n]`` is of ``plan.datas[n]``; ``full[n]``: with buffer views."""
    metrics: dict[str, float] = {}
    for n, data in enumerate(plan.datas):
        data.rescaled = plan.configs[n % len(plan.configs)].promotion == "rescale"
    if plan.named is not None:
        findings = plan.named.judge(plan.datas, outputs, plan.phase, metrics)
    else:
        findings = []
        for data, got, views in zip(plan.datas, outputs, full):
            if views:
                findings += phases.check_upto(plan.phase, data, got, metrics)
            else:
                findings += check_y(plan.phase, data, got, metrics)
    if plan.phase == "combine":
        for data, got in zip(plan.datas, outputs):
            findings += _references(plan, data, got, metrics)
        if plan.big and plan.datas[-1].weights[0].w13.is_cuda:
            findings += _on_cpu(plan.datas[-1], outputs[-1], metrics)
    return findings, shown(metrics, plan)


def check_y(phase: str, data: CaseData, got: PhaseOutput, metrics: dict[str, float]) -> list[Finding]:
    """What can be said of a launch whose buffer was used again since: y end to end, and the rows past the count.

    A phase below combine writes no y: it must still hold the poison.
    """
    combine, report = phases.load("combine"), Report(metrics)
    if phase == combine.NAME:
        combine.check_end_to_end(report, data, got)
    for rank, tokens in enumerate(data.problem.tokens):
        y = got[rank]["y"]
        rest = y[tokens if phase == combine.NAME else 0 :]
        touched = (rest.contiguous().view(torch.uint8) != got.poison).any(dim=1)
        for row in touched.nonzero().flatten().tolist():
            report.add("y_rest", "a row of y that is nobody's was written", rank=rank, token=row + len(y) - len(rest))
    return report.findings()


def _references(plan: Plan, data: CaseData, got: PhaseOutput, metrics: dict[str, float]) -> list[Finding]:
    """The independent FP32 reference of every row."""
    report = Report(metrics)
    if plan.full_reference and _finite_inputs(plan, data):
        limits = end_to_end_limits(plan.problem.shape.intermediate, data.rescaled)
        gpu_reference.compare(data, [got[r]["y"] for r in range(data.problem.ranks)], limits=limits, report=report)
    return report.findings()


def _finite_inputs(plan: Plan, data: CaseData) -> bool:
    """Rows that leave FP32's range have no defined result; cases made to have some are judged by float64 alone, which
    knows which rows those are."""
    scales = [i.x_sf for i in data.inputs]
    if plan.named is not None:  # only those change weights, which may be large and made as they are asked for
        scales += [sf for w in data.weights for sf in (w.w13_sf, w.w2_sf)]
    return all(bool((sf.abs() < 1e6).all()) for sf in scales)


class _Experts:
    """A rank's weight tensor, whose experts come to the CPU one at a time as they are asked for."""

    device = torch.device("cpu")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, local: int) -> torch.Tensor:
        return self._tensor[local].cpu()


class _Weights:
    def __init__(self, weights: Any) -> None:
        for name in ("w13", "w13_sf", "w2", "w2_sf"):
            setattr(self, name, _Experts(getattr(weights, name)))


class _LazyCpuWeights(Sequence[Any]):
    def __init__(self, weights: Sequence[Any]) -> None:
        self._weights = weights

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, rank: int) -> Any:  # type: ignore[override]
        return _Weights(self._weights[rank])


def _on_cpu(data: CaseData, got: PhaseOutput, metrics: dict[str, float]) -> list[Finding]:
    """A few tokens in float64 on the CPU, for a case whose every other number came from the GPU's own libraries."""
    busy = [rank for rank, tokens in enumerate(data.problem.tokens) if tokens]
    chosen = set(busy[:: max(1, -(-len(busy) // CPU_RANKS))])
    tokens = [torch.tensor([data.problem.tokens[r] - 1] if r in chosen else [], dtype=torch.int64) for r in range(data.problem.ranks)]
    there = CaseData(data.problem, data.inputs, _LazyCpuWeights(data.weights), data.clamp, data.fast_math, data.label, data.seed)
    report, limits = Report(metrics), end_to_end_limits(data.problem.shape.intermediate)
    for rank, reference in enumerate(end_to_end(there, tokens)):
        y = got[rank]["y"]
        check_rows(report, "e2e_cpu", y[reference.tokens.to(y.device)].cpu(), reference.y,
                   lambda r, rank=rank, at=reference.tokens: (rank, int(at[r]), None), rel=limits.row, cos=limits.cosine,
                   what="y row (float64 on the CPU)")  # fmt: skip
    return report.findings()


def shown(metrics: dict[str, float], plan: Plan) -> dict[str, Any]:
    """Metrics with the tolerance each was held to (where it hangs on the number of rows or codes: ``NAME.limit``); shares of
    equal elements are no errors and have none."""
    e2e = end_to_end_limits(plan.problem.shape.intermediate)
    limits = {
        "l1_raw": LIMITS["l1_rel"].value, "l2_row": LIMITS["l2_rel"].value,
        "e2e": e2e.row, "e2e_cpu": e2e.row, "full_rel": e2e.row,
        **{name: 1 - e2e.cosine for name in ("e2e_cosine_loss", "full_cosine_loss", "e2e_cpu_cosine_loss")},
        **{name.removesuffix(".limit"): limit for name, limit in metrics.items() if name.endswith(".limit")},
    }  # fmt: skip
    out: dict[str, Any] = {}
    for name, value in metrics.items():
        if name.endswith(".limit"):
            continue
        if name.endswith("_equal"):
            out[name] = {"share": value}
        else:
            out[name] = {"value": value, "limit": limits[name]} if name in limits else value
    return out


def first_findings(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [f.to_dict() for f in findings[:FINDINGS_KEPT]]


def save_outputs(folder: str, plan: Plan, got: PhaseOutput) -> Path:
    """Writes what the last launch produced as ``<case id>.pt``: y (valid rows) and, from dispatch on, the pool rows in
    an order that does not depend on atomics (by source rank, token, slot). Compare two with :func:`agreement`."""
    content: dict[str, Any] = {"phase": plan.phase, "ranks": []}
    for rank, tokens in enumerate(plan.datas[-1].problem.tokens):
        views = got[rank]
        entry = {"y": bits(views["y"][:tokens].cpu())} if plan.phase == "combine" else {}
        meta = views.get("token_src_metadata")
        if meta is not None and plan.phase != "stub":
            meta = meta.cpu()
            rows = (meta[:, 0] >= 0).nonzero().flatten()
            keys = (meta[rows, 0].long() << 48) + (meta[rows, 1].long() << 16) + meta[rows, 2].long()
            rows = rows[keys.argsort()]
            entry["rows"] = meta[rows]
            names = ["l1_acts", "l1_acts_sf", "l1_topk_weights"] + ["l2_acts", "l2_acts_sf"] * (plan.phase != "dispatch")
            for name in names:
                entry[name] = bits(views[name].cpu())[rows]
        content["ranks"].append(entry)
    path = Path(folder) / f"{plan.id.replace('/', '_')}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


def agreement(first: str | Path, second: str | Path) -> dict[str, float]:
    """Share of bit-equal elements of each saved tensor, over all ranks, between two files of :func:`save_outputs`."""
    a, b = (torch.load(path, weights_only=True) for path in (first, second))
    equal: dict[str, int] = {}
    total: dict[str, int] = {}
    for left, right in zip(a["ranks"], b["ranks"], strict=True):
        for name in left.keys() & right.keys():
            if left[name].shape != right[name].shape:
                raise ValueError(f"{name} has {tuple(left[name].shape)} elements in one file, {tuple(right[name].shape)} in the other")
            equal[name] = equal.get(name, 0) + int((left[name] == right[name]).sum())
            total[name] = total.get(name, 0) + left[name].numel()
    return {name: equal[name] / total[name] if total[name] else 1.0 for name in sorted(total)}
