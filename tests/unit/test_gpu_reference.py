"""The independent FP32 reference against the float64 one, and that it notices damage."""

import pytest
import torch

from megamoe_cli.inputs import make_case
from megamoe_cli.oracle import gpu_reference, reference
from megamoe_cli.oracle.compare import Report, end_to_end_limits
from megamoe_cli.shapes import Problem, Shape


def judge(case, outputs):
    report = Report()
    gpu_reference.compare(case, outputs, limits=end_to_end_limits(case.problem.shape.intermediate), report=report)
    return report


@pytest.mark.parametrize(("routing", "clamp"), [("powerlaw:1.2", None), ("masked:0.5", 0.7), ("one-hot-expert", None)])
def test_the_two_references_agree(routing, clamp):
    case = make_case(Problem.make(Shape(256, 384, 8, 3), 4, (5, 0, 33, 2)), routing, seed=3, clamp=clamp)
    report = judge(case, [r.y for r in reference.end_to_end(case)])
    assert report.findings() == []
    # FP32 sums in another order move a code or a bf16 rounding now and then, no more.
    assert report.metrics["full_rel"] < 0.02 and report.metrics["full_bit_equal"] > 0.7


def test_repeated_experts_count_twice():
    case = make_case(Problem.make(Shape(128, 128, 2, 2), 1, 3), "fixed:1,1", seed=1)
    (got,) = gpu_reference.layer(case)
    (want,) = [r.y for r in reference.end_to_end(case)]
    assert torch.allclose(got.float(), want.float(), rtol=0.02, atol=1e-3) and float(got.float().norm()) > 0


@pytest.mark.parametrize("damage", ["scale", "nan", "swap", "poison"])
def test_damage_is_found(damage):
    case = make_case(Problem.make(Shape(256, 256, 8, 2), 2, (6, 4)), seed=5)
    outputs = [r.y.clone() for r in reference.end_to_end(case)]
    row = outputs[1][2]
    if damage == "scale":
        row.mul_(1.1)
    elif damage == "nan":
        row[17] = float("nan")
    elif damage == "swap":
        row[:128] = row[128:].clone()
    else:
        row.view(torch.int16).fill_(-1)
    found = judge(case, outputs).findings()
    assert [(f.rank, f.token) for f in found if f.token is not None] == [(1, 2)] and {f.rank for f in found} == {1}


def test_what_is_small_in_every_row_is_found_over_the_rank():
    case = make_case(Problem.make(Shape(256, 256, 8, 2), 2, (32, 4)), seed=5)
    outputs = [r.y.clone() for r in reference.end_to_end(case)]
    outputs[0].mul_(1.03)
    assert [(f.metric, f.rank, f.token) for f in judge(case, outputs).findings()] == [("full_rank", 0, None)]


def test_a_masked_row_is_zero_and_its_weight_unread():
    case = make_case(Problem.make(Shape(128, 128, 4, 2), 1, 2), "fixed:-1,-1;0,2")
    (got,) = gpu_reference.layer(case)
    assert not got[0].any() and got[1].isfinite().all()
