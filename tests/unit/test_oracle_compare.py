"""The comparisons: each metric finds its kind of damage, and rounding is not damage."""

from __future__ import annotations

import json
import math

import pytest
import torch

from megamoe_cli.oracle.compare import (
    LIMITS, MAX_PER_METRIC, Finding, Report, bit_equal_rows, check_activations, check_bits, check_rank, check_rows, code_order,
    code_share_limit, cosine, end_to_end_limits, is_nan_code, relative_l2,
)
from megamoe_cli.oracle.reference import requantize

torch.set_num_threads(1)  # small operations: more threads only wait for each other, above all under pytest -n


def where(row: int):
    return (1, 10 + row, 0)


def rows(**kwargs):
    def run(got, expected, **more):
        report = Report()
        check_rows(report, "m", got, expected, where, **({"rel": 1e-2} | kwargs | more))
        return report.findings()

    return run


def test_code_order_is_the_order_of_values():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    usable = codes.view(torch.uint8)[~is_nan_code(codes)].view(torch.float8_e4m3fn)
    assert len(usable) == 254
    values, order = usable.float(), code_order(usable)
    rank = values.argsort(stable=True)
    assert (order[rank].diff() >= 0).all() and int(order[rank].diff().max()) == 1
    assert sorted(set(order.tolist())) == list(range(-126, 127)), "both zeros are one"
    assert code_order(torch.tensor([0x00, 0x80, 0x01, 0x81], dtype=torch.uint8)).tolist() == [0, 0, 1, -1]


def test_relative_l2_and_cosine_edges():
    zero, one = torch.zeros(1, 4), torch.ones(1, 4)
    assert relative_l2(zero, zero).item() == 0 and relative_l2(one, zero).item() == math.inf
    assert relative_l2(1.1 * one, one).item() == pytest.approx(0.1, rel=1e-5)
    assert cosine(zero, zero).item() == 1 and cosine(zero, one).item() == 0 and cosine(-one, one).item() == pytest.approx(-1)
    assert cosine(3e38 * one, 2e38 * one).item() == pytest.approx(1)


def test_rows_find_what_they_should():
    gen = torch.Generator().manual_seed(0)
    e = torch.randn(4, 4096, generator=gen).double()
    judge = rows(element=0.03, ulp=2.0**-7)
    assert judge(e.bfloat16(), e) == []
    scaled = e.clone()
    scaled[2] *= 1.02
    assert judge(scaled, e)[0].metric == "m" and {f.token for f in judge(scaled, e)} == {12}
    one = e.clone()
    one[3, 4095] += 0.3
    (found,) = judge(one, e)
    assert (found.metric, found.rank, found.token, found.slot, found.column) == ("m_element", 1, 13, 0, 4095)
    assert found.got == pytest.approx(found.expected + 0.3)
    assert rows()(one, e) == [], "an L2 norm alone hides one element of 4096"
    for bad in (math.nan, math.inf):
        broken = e.clone()
        broken[0, 5] = bad
        (found,) = judge(broken, e)
        assert found.metric == "m_nonfinite" and found.column == 5 and found.expected == e[0, 5].item()
        (found,) = judge(e, broken.where(broken.isfinite(), torch.full_like(e, math.nan)))
        assert found.metric == "m_nonfinite", "a NaN must not be swallowed"
    swapped = e.clone()
    swapped[1, :2048], swapped[1, 2048:] = e[1, 2048:], e[1, :2048]
    assert {f.metric for f in rows(cos=0.999)(swapped, e)} == {"m", "m_cosine"}


def test_rows_out_of_range_and_zero():
    e = torch.ones(1, 8).double()
    e[0, 3] = 1e39
    for fine in (math.inf, math.nan, -math.inf, 3.4e38):
        got = e.clone()
        got[0, 3] = fine
        assert rows()(got, e) == []
    got = e.clone()
    got[0, 3] = 5.0
    assert [f.metric for f in rows()(got, e)] == ["m_nonfinite"]
    zero = torch.zeros(1, 8)
    assert rows()(zero, zero) == [] and len(rows()(zero + 1e-30, zero)) == 1, "zero means zero"


def activations(change=None, n=4, columns=256, acts=None, unclamped=None):
    a = torch.randn(n, columns, generator=torch.Generator().manual_seed(3)).double() if acts is None else acts
    codes, scales = requantize(a)
    got, got_sf = codes.clone(), scales.clone()
    if change:
        change(got.view(torch.uint8), got_sf)
    report = Report()
    counted = check_activations(report, got, got_sf, codes, scales, a, where, unclamped)
    return report.findings(), counted, report.metrics


def test_activations():
    findings, counted, metrics = activations()
    assert findings == [] and counted == (0, 1024) and metrics["l2_acts_sf"] == 0

    def adjacent(codes, sf):
        codes[1, :9] += 1

    findings, counted, _ = activations(adjacent)
    assert findings == [] and counted[0] == 9, "a neighbour is fine, and counted"

    def far(codes, sf):
        codes[2, 200] ^= 0x80  # sign

    findings, _, _ = activations(far)
    assert [(f.metric, f.token, f.column) for f in findings] == [("l2_acts_code", 12, 200)]

    def off_by_one_everywhere(codes, sf):
        codes[3] = torch.where(codes[3] & 0x7F < 0x7E, codes[3] + 1, codes[3])

    assert [f.metric for f in activations(off_by_one_everywhere)[0]] == ["l2_acts_share"]

    def scale(codes, sf):
        sf[0, 1] *= 1.004

    findings, _, _ = activations(scale)
    assert [(f.metric, f.token, f.column) for f in findings] == [("l2_acts_sf", 10, 1)]

    def power_of_two(codes, sf):
        sf.copy_(torch.exp2(sf.log2().ceil()))

    assert {f.metric for f in activations(power_of_two)[0]} == {"l2_acts_sf"}
    for broken in (math.nan, math.inf):
        assert activations(lambda c, s, b=broken: s[0].fill_(b))[0] != []
    assert [f.metric for f in activations(lambda c, s: c[0, :1].fill_(0x7F))[0]] == ["l2_acts_nan"]


def test_activations_near_zero_and_nan():
    a = torch.ones(1, 128).double()
    a[0, 7] = 2.0**-19  # code 0 or 1 of a subnormal: far fewer than the accumulator's error

    def several_codes(codes, sf):
        codes[0, 7] += 5

    assert activations(several_codes, acts=a.clone())[0] == []
    a[0, 9] = math.nan
    assert activations(acts=a.clone())[0] == []

    def swallowed(codes, sf):
        codes[0, 9] = 0

    assert [(f.metric, f.column) for f in activations(swallowed, acts=a.clone())[0]] == [("l2_acts_nan", 9)]
    a[0, 9] = 1e39
    assert activations(swallowed, acts=a.clone())[0] == [], "a group that overflows is not defined"


def test_the_floor_follows_what_a_clamp_cut_off():
    a = torch.full((1, 256), 0.1).double()
    a[0, 7] = 2e-3

    def two_codes(codes, sf):
        codes[0, 7] += 2

    assert [f.metric for f in activations(two_codes, acts=a)[0]] == ["l2_acts_code"]
    assert activations(two_codes, acts=a, unclamped=a * 20)[0] == []
    assert [f.metric for f in activations(two_codes, acts=a, unclamped=a)[0]] == ["l2_acts_code"]


def test_bits():
    report = Report()
    a = torch.tensor([[0.0, 1.0], [math.nan, 2.0]]).bfloat16()
    check_bits(report, "b", a, a.clone(), where)
    assert report.findings() == []
    check_bits(report, "b", a, torch.tensor([[-0.0, 1.0], [math.nan, 2.0]]).bfloat16(), where)
    (found,) = report.findings()
    assert (found.token, found.column) == (10, 0) and "1 of 2" in found.message
    other_nan = a.clone()
    other_nan.view(torch.int16)[1, 0] = 0x7FC1  # a NaN that no conversion makes
    for equal, count in ((True, 0), (False, 1)):
        report = Report()
        check_bits(report, "b", a, other_nan, where, nan_equal=equal)
        assert len(report.findings()) == count
    b = a.clone()
    b[1, 1] = 3
    assert bit_equal_rows(a, a, 2, "x") == [] and bit_equal_rows(a, b, 2, "x", skip=(1,)) == []
    assert [(f.rank, f.token) for f in bit_equal_rows(a, b, 2, "x")] == [(2, 1)]
    assert len(bit_equal_rows(a, a[:1], 2, "x")) == 1


def test_report_is_bounded_and_counts():
    metrics: dict[str, float] = {}
    report = Report(metrics)
    for n in range(100):
        report.add("m", "bad", token=n)
    report.add("other", "bad")
    findings = report.findings()
    assert len(findings) == MAX_PER_METRIC + 2 and "92 more" in findings[MAX_PER_METRIC].message
    report.worst("a", 1.0)
    report.worst("a", 0.5)
    assert metrics == {"a": 1.0}
    report.worst("a", math.nan)
    report.worst("a", 2.0)
    assert math.isnan(metrics["a"]), "NaN does not disappear"


def test_a_report_keeps_what_comes_nearest_to_its_own_limit():
    metrics: dict[str, float] = {}
    report = Report(metrics)
    report.worst("a", 0.02, 0.021)
    report.worst("a", 0.03, 0.04)  # larger, and further from its limit
    assert metrics == {"a": 0.02, "a.limit": 0.021}
    report.worst("a", 0.039, 0.04)
    assert metrics == {"a": 0.039, "a.limit": 0.04}
    report.worst("a", math.nan, 0.1)
    report.worst("a", 0.2, 0.1)
    assert math.isnan(metrics["a"]) and metrics["a.limit"] == 0.1, "NaN does not disappear"


def test_few_samples_average_out_less():
    base = LIMITS["code_share"].value
    assert code_share_limit(False, 0) > code_share_limit(False, 896) > 19 / 896 > base
    assert base < code_share_limit(False, 10**6) < 1.05 * base
    assert code_share_limit(True, 896) > LIMITS["code_share_rescaled"].value
    classic, rescaled = end_to_end_limits(128), end_to_end_limits(128, True)
    assert (classic.row, classic.rank, classic.cosine) == (rescaled.row, rescaled.rank, rescaled.cosine)

    def together(rows: int, error: float, limits) -> bool:
        expected, report = torch.ones(rows, 64), Report()
        check_rank(report, "r", expected * (1 + error), expected, 0, limits)
        return report.findings() == []

    assert together(11, 0.0294, rescaled) and not together(11, 0.0294, classic) and together(11, 0.023, classic)
    for intermediate in (128, 1024, 2048):
        for limits in (end_to_end_limits(intermediate), end_to_end_limits(intermediate, True)):
            assert limits.rank < limits.row, "many rows together are held to less than each, or the check could not fail"
            assert together(1, 0.99 * limits.row, limits) and not together(1, 1.01 * limits.row, limits), "a row alone is held to a row's limit"
            assert together(1000, 0.99 * limits.rank, limits) and not together(1000, 1.01 * limits.rank, limits)


def test_finding_is_readable_and_json():
    finding = Finding(3, 7, 1, 129, math.nan, 0.5, "l2_row", "bad")
    assert json.loads(json.dumps(finding.to_dict(), allow_nan=False))["got"] == "nan"
    assert str(finding) == "l2_row: rank 3, token 7, slot 1, column 129: bad (got nan, expected 0.5)"
    assert str(Finding(None, None, None, None, None, None, "m", "and 3 more")) == "m: all ranks: and 3 more"
    assert all(limit.reason and limit.value > 0 for limit in LIMITS.values())
