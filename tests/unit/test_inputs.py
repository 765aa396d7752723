"""Quantized inputs: the saturating quantizer, and data that looks like a layer's."""

from __future__ import annotations

import pytest
import torch

from megamoe_cli.errors import UsageError
from megamoe_cli.inputs import LazyWeights, make_case, make_tokens, make_weights, quantize_rows, to_e4m3
from megamoe_cli.oracle.compare import is_nan_code
from megamoe_cli.shapes import NAMED_SHAPES, Problem, Shape

torch.set_num_threads(1)  # small operations: more threads only wait for each other, above all under pytest -n

TINY = NAMED_SHAPES["tiny"]


@pytest.mark.parametrize(("value", "want"), [
    (447.0, 448.0), (448.0, 448.0), (463.0, 448.0), (464.0, 448.0), (479.0, 448.0), (480.0, 448.0), (1e9, 448.0),
    (float("inf"), 448.0), (-480.0, -448.0), (-float("inf"), -448.0), (431.0, 416.0), (0.0, 0.0), (2.0**-9, 2.0**-9),
    (2.0**-11, 0.0),
])  # fmt: skip
def test_conversion_saturates(value, want):
    assert to_e4m3(torch.tensor([value])).float().item() == want


def test_conversion_keeps_nan():
    assert bool(is_nan_code(to_e4m3(torch.tensor([float("nan"), -float("nan")]))).all())


def test_quantizer_special_rows():
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(0))
    values[1] = 0
    values[2] *= 1e30
    values[3, 7] = float("nan")
    values[4, 130] = float("inf")
    values[5] *= 1e-30
    codes, scales = quantize_rows(values)
    assert codes.dtype is torch.float8_e4m3fn and scales.shape == (6, 2) and scales.dtype is torch.float32
    assert bool(scales.isfinite().all()) and bool((scales > 0).all())
    assert torch.equal(scales[1], torch.full((2,), 1e-10) / 448) and not codes[1].float().any()
    assert torch.equal(scales[5], scales[1]) and not codes[5].float().any(), "below the floor: zero, not noise"
    nan = is_nan_code(codes)
    assert int(nan.sum()) == 1 and bool(nan[3, 7])
    assert codes[4, 130].float().item() == 448.0
    for row in (0, 2):
        back = codes[row].double() * scales[row].double().repeat_interleave(128)
        assert float((back - values[row]).norm() / values[row].double().norm()) < 0.04
        assert codes[row].float().abs().view(2, 128).amax(1).tolist() == [448.0, 448.0]


def test_scales_are_continuous():
    """A change of 1e-4 in a row changes its scale by 1e-4, also across a power of two."""
    row = torch.rand(1, 128) * 0.5
    row[0, 0] = 448 * 2.0**-5 * (1 - 5e-5)
    ratio = quantize_rows(row * (1 + 1e-4))[1] / quantize_rows(row)[1]
    assert abs(float(ratio) - 1.0001) < 1e-6
    with pytest.raises(UsageError, match="200 columns"):
        quantize_rows(torch.zeros(1, 200))


def test_tokens_look_like_activations():
    p = Problem.make(Shape(1024, 128, 4, 1), 2, 64)
    x, scales = make_tokens(p, 0, seed=1)
    assert x.shape == (64, 1024) and scales.shape == (64, 8)
    assert not is_nan_code(x).any() and (x.float().abs().view(64, 8, 128).amax(2) == 448).all()
    per_row = (x.float() * scales.repeat_interleave(128, dim=1)).norm(dim=1)
    assert per_row.max() / per_row.min() > 4, "tokens differ in magnitude"
    assert len(scales.unique()) > 500, "scales are continuous"
    log = scales.log2()
    assert not torch.equal(log, log.round())


def test_weights_use_the_format_and_vary_by_block():
    p = Problem.make(Shape(512, 384, 6, 2), 2, 4)
    w = make_weights(p, 1, seed=3)
    assert w.w13.shape == (3, 768, 512) and w.w13_sf.shape == (3, 6, 4)
    assert w.w2.shape == (3, 512, 384) and w.w2_sf.shape == (3, 4, 3)
    for codes in (w.w13, w.w2):
        assert not is_nan_code(codes).any() and codes.float().abs().max() == 448
        assert len(codes.view(torch.uint8).unique()) > 230 and abs(float(codes.float().mean())) < 2
    assert len(w.w13_sf.unique()) == w.w13_sf.numel() and w.w13_sf.max() / w.w13_sf.min() > 2
    assert not torch.equal(w.w13.view(torch.uint8)[0], w.w13.view(torch.uint8)[1])
    case = make_case(p, seed=3)
    a = case.inputs[0].x.float() * case.inputs[0].x_sf.repeat_interleave(128, dim=1)
    b = w.w13[0].float() * w.w13_sf[0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert 0.1 < float((a @ b.T).std()) < 10, "gate and up are of order 1"


def test_everything_comes_from_the_seed():
    p = Problem.make(TINY, 8, [3, 0, 5, 8, 1, 2, 7, 4])
    a, b = make_case(p, "powerlaw", seed=1), make_case(p, "powerlaw", seed=1)
    a.validate()
    for r in range(8):
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            assert torch.equal(getattr(a.inputs[r], name).view(torch.uint8), getattr(b.inputs[r], name).view(torch.uint8))
        assert torch.equal(a.weights[r].w13.view(torch.uint8), b.weights[r].w13.view(torch.uint8))
        assert torch.equal(a.weights[r].w2_sf, b.weights[r].w2_sf)
    other = make_case(p, "powerlaw", seed=2)
    later = make_case(p, "powerlaw", seed=1, launch=1, weights=a.weights)
    assert not torch.equal(a.inputs[0].x.view(torch.uint8), other.inputs[0].x.view(torch.uint8))
    assert not torch.equal(a.inputs[0].x.view(torch.uint8), later.inputs[0].x.view(torch.uint8))
    assert not torch.equal(a.inputs[3].x.view(torch.uint8)[:3], a.inputs[0].x.view(torch.uint8))
    # a rank's data does not depend on how many tokens the others have
    fewer = make_case(Problem.make(TINY, 8, [3, 0, 0, 0, 0, 0, 0, 4]), "uniform", seed=1)
    same = make_case(p, "uniform", seed=1)
    assert torch.equal(fewer.inputs[7].x.view(torch.uint8), same.inputs[7].x.view(torch.uint8))
    assert torch.equal(fewer.inputs[7].topk_idx, same.inputs[7].topk_idx)


def test_lazy_weights_equal_eager_ones():
    p = Problem.make(TINY, 8, 1)
    lazy = LazyWeights(p, seed=4, keep=2)
    assert len(lazy) == 8
    for r in (0, 7, 0, 3):
        assert torch.equal(lazy[r].w13.view(torch.uint8), make_weights(p, r, 4).w13.view(torch.uint8))
    assert len(lazy._kept) == 2
    with pytest.raises(IndexError):
        lazy[8]


def test_validate_finds_wrong_tensors():
    p = Problem.make(TINY, 2, [3, 2])
    for field, bad, rule in (
        ("topk_idx", lambda t: t.int(), "dtype"), ("x_sf", lambda t: t.to(torch.uint8), "dtype"),
        ("x", lambda t: t.float(), "dtype"), ("x_sf", lambda t: t[:, :1].contiguous(), "tensor-shape"),
        ("x_sf", lambda t: t.T.contiguous().T, "tensor-stride"), ("topk_idx", lambda t: t + 15, "expert-id"),
    ):  # fmt: skip
        case = make_case(p, "fixed:1,2", seed=1)
        setattr(case.inputs[1], field, bad(getattr(case.inputs[1], field)))
        with pytest.raises(UsageError) as caught:
            case.validate()
        assert caught.value.rule == rule


@pytest.mark.gpu
def test_generation_on_the_device():
    p = Problem.make(Shape(1024, 512, 8, 2), 2, 16)
    case = make_case(p, "uniform", seed=1, device="cuda")
    assert case.weights[0].w13.is_cuda and case.inputs[0].x.is_cuda
    case.validate()
    assert torch.equal(case.inputs[1].topk_idx.cpu(), make_case(p, "uniform", seed=1).inputs[1].topk_idx)
