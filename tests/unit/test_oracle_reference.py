"""The float64 reference against a scalar reading of the contract, and its edge rules one by one."""

from __future__ import annotations

import ast
import math
import struct
from pathlib import Path

import pytest
import torch

import megamoe_cli.oracle
from megamoe_cli.inputs import make_case
from megamoe_cli.oracle.pool import PoolPlan, sample_index, sampled_segments, sampled_tokens
from megamoe_cli.oracle.reference import combine_slots, dequantize, end_to_end, may_overflow, requantize, scaled_gemm, swiglu
from megamoe_cli.shapes import NAMED_SHAPES, Problem, Shape

torch.set_num_threads(1)  # small operations: more threads only wait for each other, above all under pytest -n


def f32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def scalar_layer(case, rank: int, token: int, clamp) -> torch.Tensor:
    """One token, element by element in Python floats: slow, and written from the contract alone."""
    p = case.problem
    h, i, e_l = p.shape.hidden, p.shape.intermediate, p.shape.experts // p.ranks
    data = case.inputs[rank]
    total = [0.0] * h
    x, xs = data.x[token].float().tolist(), data.x_sf[token].tolist()
    for slot in range(p.shape.topk):
        expert = int(data.topk_idx[token, slot])
        if expert < 0:
            continue
        w = case.weights[expert // e_l]
        w13, s13 = w.w13[expert % e_l].float().tolist(), w.w13_sf[expert % e_l].tolist()
        w2, s2 = w.w2[expert % e_l].float().tolist(), w.w2_sf[expert % e_l].tolist()
        weight = float(data.topk_weights[token, slot])
        acts = []
        for n in range(i):
            pair = []
            for row in (n, n + i):
                acc = 0.0
                for b in range(h // 128):
                    acc += xs[b] * s13[row // 128][b] * sum(x[c] * w13[row][c] for c in range(128 * b, 128 * b + 128))
                pair.append(acc)
            g, u = pair
            if clamp is not None:
                g, u = min(g, clamp), max(-clamp, min(u, clamp))
            acts.append(f32(g / (1 + math.exp(-g)) * u * weight))
        codes, scales = [], []
        for b in range(i // 128):
            group = acts[128 * b : 128 * b + 128]
            scale = f32(max(max(map(abs, group)), f32(1e-10)) / 448)
            scales.append(scale)
            codes += torch.tensor([f32(a / scale) for a in group]).to(torch.float8_e4m3fn).float().tolist()
        for m in range(h):
            out = 0.0
            for b in range(i // 128):
                out += scales[b] * s2[m // 128][b] * sum(codes[c] * w2[m][c] for c in range(128 * b, 128 * b + 128))
            total[m] = f32(total[m] + torch.tensor(out, dtype=torch.float32).bfloat16().item())
    return torch.tensor(total).bfloat16()


@pytest.mark.parametrize(("shape", "clamp"), [(Shape(128, 256, 4, 2), None), (Shape(256, 128, 4, 3), 0.5)])
def test_against_scalar_reading(shape, clamp):
    case = make_case(Problem.make(shape, 2, [2, 1]), "uniform", seed=7, clamp=clamp)
    answers = end_to_end(case)
    for rank, token in ((0, 1), (1, 0)):
        want, have = scalar_layer(case, rank, token, clamp).float(), answers[rank].y[token].float()
        assert float((want - have).norm() / want.norm()) < 1e-3 and float((want == have).float().mean()) > 0.97


def test_scaled_gemm_uses_the_right_scale_for_each_block():
    gen = torch.Generator().manual_seed(0)
    a, w = (torch.randn(n, 384, generator=gen).to(torch.float8_e4m3fn) for n in (5, 256))
    sa, sb = torch.rand(5, 3, generator=gen), torch.rand(2, 3, generator=gen)
    full_a = a.double() * sa.double().repeat_interleave(128, 1)
    full_w = w.double() * sb.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(scaled_gemm(a, sa, w, sb), full_a @ full_w.T, rtol=1e-12, atol=1e-12)
    assert scaled_gemm(a[:0], sa[:0], w, sb).shape == (0, 256)


def test_clamp_is_before_silu_and_keeps_nan():
    acc = torch.tensor([[20.0, math.nan, -30.0, 0.5] + [0.5, 1.0, 9.0, math.nan]]).double()
    one = torch.ones(1)
    clamped, free = swiglu(acc, one, 1.0)[0], swiglu(acc, one, None)[0]
    assert clamped[0].item() == pytest.approx(0.36553, abs=1e-5) and free[0].item() == pytest.approx(10.0, abs=1e-6)
    assert bool(clamped[1].isnan()) and bool(clamped[3].isnan())
    assert clamped[2].item() == pytest.approx(-30 * math.exp(-30), rel=1e-6), "gate has no lower clamp"
    assert swiglu(acc, 0.5 * one, None)[0, 0].item() == pytest.approx(5.0, abs=1e-6)
    assert swiglu(torch.tensor([[-1e30, 1.0]]), one, None).item() == 0


def test_requantize_floor_and_continuity():
    codes, scales = requantize(torch.zeros(1, 128).double())
    assert scales.item() == pytest.approx(1e-10 / 448) and not codes.float().any()
    values = torch.rand(3, 256, generator=torch.Generator().manual_seed(1)).double()
    codes, scales = requantize(values)
    assert float((dequantize(codes, scales) - values).norm() / values.norm()) < 0.04
    assert torch.allclose(scales.double(), values.view(3, 2, 128).amax(2) / 448, rtol=1e-6)
    values[1, 200] = math.nan
    codes, again = requantize(values)
    assert torch.equal(again[[0, 2]], scales[[0, 2]]) and bool(again.isfinite().all())
    assert int(codes.float().isnan().sum()) == 1


def test_combine_is_the_sum_in_slot_order():
    """Values with which the order of FP32 additions and the single final rounding are visible."""
    slots = torch.tensor([2.0**24, 1.0, -(2.0**24), 1.0]).view(4, 1, 1).bfloat16()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    assert combine_slots(slots, ids).item() == 1.0  # (2^24 + 1) rounds to 2^24; in other orders the 1 survives
    assert combine_slots(slots.flip(0), ids).item() == 2.0
    assert combine_slots(slots[[0, 2, 1, 3]], ids).item() == 2.0
    fine = torch.tensor([1.0, 2.0**-8, 2.0**-8]).view(3, 1, 1).bfloat16()
    assert combine_slots(fine, ids[:, :3]).item() == 1 + 2.0**-7, "rounding at each step would lose both"
    assert combine_slots(fine[:2], ids[:, :2]).item() == 1.0


def test_masked_slots_are_never_read():
    slots = torch.full((2, 3, 8), float("nan")).bfloat16()
    slots[1, 0] = -0.0
    slots[0, 1] = 3.0
    ids = torch.tensor([[-1, 0], [5, -1], [-1, -1]])
    y = combine_slots(slots, ids)
    assert y[1].tolist() == [3.0] * 8
    assert torch.equal(y[[0, 2]].view(torch.int16), torch.zeros(2, 8, dtype=torch.int16)), "+0, bit for bit"


def test_masked_weight_and_rows_in_the_layer():
    case = make_case(Problem.make(Shape(128, 128, 4, 2), 2, [4, 4]), ["fixed:-1,1;2,-1;-1,-1;0,3", "fixed:-1,-1"], seed=1)
    first, second = end_to_end(case)
    assert bool(first.y.isfinite().all()) and not second.y.any() and not first.y[2].any()
    assert first.y[0].any() and first.y[1].any()


def test_duplicates_sum():
    """ids [1,1] with weights 0.25 and 0.75 are expert 1 with weight 1, but for requantizing twice."""
    p = Problem.make(Shape(128, 1024, 4, 2), 1, 3)
    twice, once = make_case(p, "fixed:1,1", seed=1), make_case(p, "fixed:1,-1", seed=1)
    for case, weights in ((twice, [0.25, 0.75]), (once, [1.0, math.nan])):
        case.inputs[0].topk_weights = torch.tensor([weights] * 3)
    a, b = end_to_end(twice)[0].y.float(), end_to_end(once)[0].y.float()
    assert float((a - b).norm() / b.norm()) < 1e-2


def test_bad_values_stay_in_their_row():
    p = Problem.make(NAMED_SHAPES["tiny"], 8, 6)
    clean = make_case(p, "one-hot-expert:3", seed=2)
    reference = end_to_end(clean)
    for value in (math.nan, math.inf, 1e30):
        case = make_case(p, "one-hot-expert:3", seed=2)
        case.inputs[4].x_sf[2, 1] = value
        got = end_to_end(case)
        for rank in range(8):
            keep = [t for t in range(6) if (rank, t) != (4, 2)]
            assert torch.equal(got[rank].y[keep].view(torch.int16), reference[rank].y[keep].view(torch.int16))
        row = got[4]
        assert bool(row.overflow[2]) or (math.isnan(value) and bool(row.y[2].isnan().all()))
        assert not row.overflow[[0, 1, 3, 4, 5]].any()


def test_tiny_scales_give_zero_not_nan():
    case = make_case(Problem.make(NAMED_SHAPES["tiny"], 8, 6), "one-hot-expert:3", seed=2)
    case.weights[1].w13_sf[1], case.weights[1].w2_sf[1] = 1e-23, 1e-23
    assert all(bool(r.y.isfinite().all()) and not r.slots[0].any() for r in end_to_end(case))


def test_overflow_bound():
    sb = torch.full((2, 2), 1e-3)
    sa = torch.tensor([[1.0, 1.0], [1e36, 1.0], [math.nan, 1.0], [math.inf, 0.0]])
    assert may_overflow(sa, sb).tolist() == [False, True, False, True]


def test_chosen_tokens_and_speed_of_grouping():
    case = make_case(Problem.make(NAMED_SHAPES["tiny"], 8, 16), "masked", seed=2)
    everything = end_to_end(case)
    some = end_to_end(case, [torch.tensor([15, 3]) if r % 2 else torch.tensor([], dtype=torch.int64) for r in range(8)])
    for r in range(8):
        assert torch.equal(some[r].y.view(torch.int16), everything[r].y[some[r].tokens].view(torch.int16))
        assert some[r].slots.shape[1] == len(some[r].tokens)


def test_samples_always_hold_the_ends():
    assert sample_index(5, 9, 0).tolist() == [0, 1, 2, 3, 4]
    for seed in range(20):
        index = sample_index(100, 7, seed).tolist()
        assert len(index) == len(set(index)) == 7 and index[0] == 0 and index[-1] == 99 and index == sorted(index)
    case = make_case(Problem.make(Shape(128, 128, 64, 2), 2, 200), "uniform", seed=2)
    case.sample_rows = 24
    for rank in range(2):
        segments = PoolPlan(case).segments(rank)
        chosen = sampled_segments(case, segments, 5)
        assert chosen[0][0].local == 0 and chosen[-1][0].local == 31 and len(chosen) == 3
        assert all(rows[0] == 0 and rows[-1] == s.count - 1 for s, rows in chosen)
        assert 6 <= sum(len(rows) for _, rows in chosen) <= 24
        tokens = sampled_tokens(case, rank)
        assert tokens[-1] == 199 and len(tokens) == 12


def test_pool_plan_by_hand():
    case = make_case(Problem.make(Shape(128, 128, 4, 2), 2, [3, 2]), ["fixed:0,3;1,1;-1,0", "fixed:0,1"], seed=0)
    plan = PoolPlan(case)
    zero, one = plan.segments(0)
    assert (zero.base, zero.count, one.base, one.count) == (0, 4, 128, 4)
    assert [(src, e.tolist()) for src, e in zero.sources] == [(0, [0, 5]), (1, [0, 2])]
    assert [(src, e.tolist()) for src, e in one.sources] == [(0, [2, 3]), (1, [1, 3])]
    two, three = plan.segments(1)
    assert (two.count, three.base, three.count) == (0, 0, 1), "an empty expert takes no rows"
    assert [(src, e.tolist()) for src, e in three.sources] == [(1, []), (0, [1])], "own rank first"


def test_the_judge_imports_nothing_it_judges():
    allowed = {"shapes", "routing", "errors", "casedata", "compare", "reference", "pool", "oracle", "inputs"}
    for path in Path(megamoe_cli.oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("megamoe_cli")):
                assert (node.module or "").split(".")[-1] in allowed, f"{path.name} imports {node.module}"
            elif isinstance(node, ast.Import):
                assert not any(a.name.startswith("megamoe_cli") for a in node.names)
