"""Are the outputs that were timed right? Ours by the limits of ``megamoe test``; another contender's loosely, because it may
round elsewhere: e4m3 activations rounded with other scales differ by about 4 % (0.039 for a row, power-of-two scales per 64
against continuous ones per 128), while a missing slot of six changes a row by 30 %."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import WrongResult
from .contender import Contender, ContenderFailed

if TYPE_CHECKING:
    import torch


def reference(case: Any) -> torch.Tensor:
    """y [T,H] bf16 of a case of one rank, FP32 arithmetic where the weights are."""
    from ..oracle import gpu_reference

    return gpu_reference.layer(case)[0]


def check_ours(case: Any, outputs: Mapping[str, torch.Tensor]) -> float:
    """Worst relative L2 error of a row. WrongResult says what is wrong. Launches on the same inputs must agree bit by bit,
    so only one mode's output goes through the reference unless they do not."""
    import torch

    from ..oracle import gpu_reference
    from ..oracle.compare import Report, bits, end_to_end_limits

    worst, seen = 0.0, None
    for mode, y in outputs.items():
        if seen is not None and torch.equal(bits(y), bits(seen)):
            continue
        report = Report()
        gpu_reference.compare(case, [y], limits=end_to_end_limits(case.problem.shape.intermediate, case.rescaled), report=report)
        findings = report.findings()
        if findings:
            raise WrongResult(f"{case.problem.shape} at {case.problem.tokens[0]} tokens ({mode}) is wrong, so its time means "
                              f"nothing: {findings[0]}")  # fmt: skip
        if seen is not None:
            raise WrongResult(f"{case.problem.shape} at {case.problem.tokens[0]} tokens: launches on the same inputs differ in some bits ({mode})")
        worst, seen = report.metrics.get("full_rel", 0.0), y
    return worst


def difference(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Relative L2 (of the whole output, of the worst row); infinite where something is not finite."""
    import torch

    from ..oracle.compare import relative_l2

    got, want = got[: want.shape[0]], want.to(got.device)
    whole, rows = (relative_l2(*pair).nan_to_num(nan=torch.inf, posinf=torch.inf) for pair in
                   ((got.flatten()[None], want.flatten()[None]), (got, want)))  # fmt: skip
    return float(whole[0]), float(rows.max())


def check_rival(rival: Contender, want: torch.Tensor | None, outputs: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """The largest ``difference`` of any mode. ContenderFailed beyond the contender's limits."""
    assert want is not None
    worst = (0.0, 0.0)
    for mode, y in outputs.items():
        found = difference(y, want)
        if not (found[0] <= rival.limits[0] and found[1] <= rival.limits[1]):
            raise ContenderFailed(rival.name, f"output wrong ({mode}): relative difference {found[0]:.3g} (limit {rival.limits[0]:g}), "
                                  f"worst row {found[1]:.3g} (limit {rival.limits[1]:g})")  # fmt: skip
        worst = max(worst[0], found[0]), max(worst[1], found[1])
    return worst
