"""The named small cases: all load, build and are legal; a correct run satisfies each, and a wrong one does not."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from megamoe_cli.cases import DEFAULT_PATH, Refusal, load_case, load_cases
from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.oracle.reference import dequantize, end_to_end
from megamoe_cli.oracle.relations import RELATIONS
from tests.unit.phase_simulator import simulate

CASES = load_cases()
RUNNABLE = [c for c in CASES if c.expect == "match"]
IDS = ["S01", "S03", "S04", "S06", "S08", "S10", "S12", "S13", "S14", "S16", "S18", "S19", "S20", "S22", "S24", "S26", "S27", "ROUTER"]


def test_all_cases_are_here():
    assert [c.id for c in CASES] == IDS and all(c.why for c in CASES)
    assert {r["kind"] for c in CASES for r in c.data.get("judge", [])} <= set(RELATIONS)
    assert load_case("S16").id == "S16"
    with pytest.raises(UsageError, match="nearest id: S16"):
        load_case("S166")


def test_missing_or_foreign_file(tmp_path):
    with pytest.raises(EnvironmentUnfit, match="no case file"):
        load_cases(tmp_path / "none.yaml")
    (tmp_path / "x.yaml").write_text("schema: other/1\n")
    with pytest.raises(UsageError, match="not of schema"):
        load_cases(tmp_path / "x.yaml")


@pytest.fixture(scope="module")
def outputs():
    """Builds and simulates a case once for all tests."""
    made: dict = {}

    def make(name: str):
        if name not in made:
            datas = load_case(name).build(reduced=True)
            made[name] = datas, [simulate(d, seed=n) for n, d in enumerate(datas)]
        return made[name][0], copy.deepcopy(made[name][1])

    return make


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda c: c.id)
def test_a_correct_run_satisfies_it(case, outputs):
    datas, got = outputs(case.id)
    for data in datas:
        data.validate()
    assert len({d.problem.capacity for d in datas}) == 1, "one buffer serves all runs"
    assert [str(f) for f in case.judge(datas, got)] == []
    with pytest.raises(ValueError, match="outputs for"):
        case.judge(datas, got[:-1])


@pytest.mark.parametrize("case", [c for c in RUNNABLE if c.id != "S14"], ids=lambda c: c.id)
def test_full_size_builds(case):
    for data in case.build(seed=1):
        data.validate()


def test_sizes_are_the_listed_ones():
    assert [d.problem.tokens for d in load_case("S13").build()] == [
        (n, n) for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
    ]
    assert [d.launches for d in load_case("S04").build()] == [100, 1]
    s14 = load_case("S14")
    assert s14.has_reduced and len(s14.build(reduced=True)) == 3 and len(s14.data["runs"]) == 1 and s14.data["repeat"] == 5
    crossed = load_case("S13").build()[3]
    assert crossed.inputs[0].topk_idx.unique().tolist() == [1] and crossed.inputs[1].topk_idx.unique().tolist() == [0]


# case -> (run, rank, damage to that rank's output, the metric that must show); each breaks only the relation
BROKEN = {
    "S01": (0, 0, lambda v: v["y"].view(torch.int16)[7].fill_(0), "rows_written"),
    "S03": (0, 5, lambda v: v["expert_recv_count_sum"].copy_(torch.tensor([0, 1])), "counts"),
    "S06": (0, 0, lambda v: v["expert_recv_count_sum"][0].fill_(1), "counts"),
    "S08": (1, 3, lambda v: v["y"].view(torch.int16)[15, 255].add_(1), "runs_differ"),
    "S14": (2, 1, lambda v: v["y"].view(torch.int16)[319, 511].add_(1), "runs_differ"),
    "S16": (0, 0, lambda v: v["y"][3, 9].fill_(math.inf), "not_finite"),
    "S18": (0, 1, lambda v: v["y"][15].mul_(1.5), "not_as_masked"),
    "S19": (1, 1, lambda v: v["y"][31].mul_(1.01), "jump"),
    "S20": (0, 0, lambda v: v["y"][3].fill_(0.5), "not_near"),
    "S24": (0, 7, lambda v: v["expert_recv_count_sum"][0].fill_(23), "counts"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_relation_is_found(name, outputs):
    datas, got = outputs(name)
    run, rank, damage, metric = BROKEN[name]
    damage(got[run][rank])
    assert metric in {f.metric for f in load_case(name).judge(datas, got)}
    assert metric not in {f.metric for f in load_case(name).judge(*outputs(name))}


def test_zero_rank(outputs):
    datas, got = outputs("S08")
    got[0][2]["y"].view(torch.int16)[4, 4] = 1
    assert "not_zero" in {f.metric for f in load_case("S08").judge(datas, got)}


def test_relations_wait_for_their_phase(outputs):
    datas, got = outputs("S16")
    got[0][0]["y"].fill_(math.inf)
    assert load_case("S16").judge(datas, got, phase="l2") == []


def test_huge_row_is_where_it_should_be(outputs):
    datas, _ = outputs("S16")
    huge, normal = datas[0].inputs[0], datas[1].inputs[0]
    assert torch.equal(huge.x.view(torch.uint8), normal.x.view(torch.uint8))
    ratio = huge.x_sf / normal.x_sf
    assert bool((ratio[3] / 1e30 - 1).abs().max() < 1e-6) and bool((ratio[[0, 1, 2, 4, 5, 6, 7]] == 1).all())
    assert torch.equal(datas[0].inputs[1].x_sf, datas[1].inputs[1].x_sf)
    undefined = end_to_end(datas[2])[0].overflow
    assert undefined.tolist() == [n == 3 for n in range(8)], "without the clamp exactly this row is undefined"
    assert not end_to_end(datas[0])[0].overflow.any()


def test_power_of_two_scales_would_jump(outputs):
    """S19 does what it is for: weights in [0.5, 1), and the amax just below, then just above 448 * 2^m."""
    datas, _ = outputs("S19")
    for data, below in zip(datas, (True, False)):
        for inputs, reference in zip(data.inputs, end_to_end(data)):
            assert bool((inputs.topk_weights >= 0.4999).all()) and bool((inputs.topk_weights < 1.0001).all())
            power = torch.log2(reference.acts_amax[:, :, 0] / 448)
            off = power - power.round()
            assert bool((off.abs() < 1e-4).all()) and bool(((off < 0) == below).all())


def test_clamp_vector(outputs):
    datas, got = outputs("S20")
    for data, output, value in zip(datas, got, (0.3655, 10.0)):
        assert end_to_end(data)[0].y.float().flatten()[0].item() == pytest.approx(value, rel=4e-3)
        acts = dequantize(output[0]["l2_acts"][:4], output[0]["l2_acts_sf"][:4])
        assert float(acts.max()) == float(acts.min()) == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("refusal", [r for c in CASES for r in c.refusals()], ids=lambda r: r.label)
def test_what_must_be_refused(refusal):
    assert refusal.verdict() is None


@pytest.mark.parametrize("entry", [e for c in CASES for e in c.legal()], ids=lambda e: e[0])
def test_what_must_be_accepted(entry):
    entry[1]()


def test_a_verdict_can_be_bad():
    def refuse():
        raise UsageError("hidden=3 is bad", rule="hidden-multiple")

    assert Refusal("x", "hidden-multiple", ("3",), refuse).verdict() is None
    assert "expected dtype" in Refusal("x", "dtype", (), refuse).verdict()
    assert "lacks ['7']" in Refusal("x", "hidden-multiple", ("7",), refuse).verdict()
    assert "accepted" in Refusal("x", "dtype", (), lambda: None).verdict()
    assert sum(len(c.refusals()) for c in CASES) == 16 and sum(len(c.legal()) for c in CASES) == 7


def test_router():
    case = load_case("ROUTER")
    assert case.check_router() == [] and case.build() == []
    case.data["routing"] = "fixed:0,1,2,3,4,5,6,7"
    assert len(case.check_router()) > 1
    assert DEFAULT_PATH.name == "small_inputs.yaml"
