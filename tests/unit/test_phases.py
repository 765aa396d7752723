"""The phase checks accept a correct run and find every corruption of it, down to one byte in the last row."""

from __future__ import annotations

import copy

import pytest
import torch

from megamoe_cli import phases
from megamoe_cli.errors import UsageError
from megamoe_cli.inputs import make_case
from megamoe_cli.layout import NUM_REGIONS, Layout
from megamoe_cli.oracle.casedata import PhaseOutput
from megamoe_cli.oracle.pool import PoolPlan
from megamoe_cli.shapes import NAMED_SHAPES, Problem, Shape
from tests.unit.phase_simulator import simulate

SEED = 12
ORDER = ["stub", "dispatch", "l1", "l2", "combine"]


@pytest.fixture(scope="module")
def run():
    """Four ranks, uneven counts, one rank without tokens, masked slots; the last expert of the last rank has rows."""
    case = make_case(Problem.make(Shape(256, 256, 16, 3), 4, [9, 0, 17, 6]), "masked:0.2", seed=SEED)
    assert (case.inputs[3].topk_idx[5] >= 0).any() and (case.inputs[2].topk_idx[16] >= 0).any()
    assert (case.inputs[2].topk_idx < 0).all(dim=1).any() and PoolPlan(case).segments(3)[-1].count
    return case, simulate(case, block_m=16)


@pytest.fixture
def got(run):
    """A copy to damage."""
    return copy.deepcopy(run[1])


def test_phases_are_found_in_order():
    assert phases.names() == ORDER and [m.INDEX for m in phases.load_all()] == list(range(5))
    assert phases.load("l2").NAME == "l2"
    with pytest.raises(UsageError, match="nearest name: combine"):
        phases.load("combin")


@pytest.mark.parametrize(("shape", "ranks", "tokens", "routing", "clamp"), [
    (NAMED_SHAPES["tiny"], 8, [3, 0, 5, 8, 1, 2, 7, 4], "uniform", None),
    (NAMED_SHAPES["tiny"], 8, [40, 1, 0, 0, 0, 0, 0, 30], "one-hot-expert:15", 0.5),
    (Shape(384, 128, 6, 3), 2, [5, 140], "powerlaw", 1.0), (Shape(128, 1152, 3, 2), 1, [9], "uniform", None),
    (Shape(128, 128, 9, 2), 3, [4, 4, 4], "remote", None), (Shape(128, 128, 8, 8), 8, [2] * 8, "local", None),
    (Shape(128, 128, 4, 2), 4, [0, 0, 0, 0], "uniform", None), (Shape(128, 128, 4, 2), 2, [3, 3], "masked:1", None),
    (Shape(128, 128, 4, 4), 2, [5, 5], "fixed:1,1,1,0", 2.0), (Shape(256, 256, 8, 4), 4, [7] * 4, "balanced", None),
])  # fmt: skip
@pytest.mark.parametrize("raw", [True, False])
def test_a_correct_run_passes(shape, ranks, tokens, routing, clamp, raw):
    case = make_case(Problem.make(shape, ranks, tokens), routing, seed=5, clamp=clamp)
    case.validate()
    metrics: dict[str, float] = {}
    assert phases.check_upto("combine", case, simulate(case, block_m=32, seed=1, raw=raw), metrics) == []
    assert metrics.get("e2e", 0) < 3e-3 and metrics.get("l1_raw", 0) < 1e-6
    assert ("l1_raw" in metrics) == (raw and sum(tokens) > 0 and routing != "masked:1")


def test_the_order_within_a_source_is_free(run):
    case, _ = run
    a, b = simulate(case, seed=1), simulate(case, seed=2)
    assert not torch.equal(a[0]["token_src_metadata"], b[0]["token_src_metadata"])
    for r in range(4):
        assert torch.equal(a[r]["y"].view(torch.int16), b[r]["y"].view(torch.int16))


def last_row(case, rank: int, expert: int = -1) -> tuple[int, int]:
    """(first, last) pool row of a rank's last expert with rows."""
    segment = [s for s in PoolPlan(case).segments(rank) if s.count][expert]
    return segment.base, segment.base + segment.count - 1


def flip(tensor: torch.Tensor, *index: int) -> None:
    """Changes the lowest bit of one byte of one element."""
    part = tensor[index[0]]
    for i in index[1:]:
        part = part[i]
    part.view(torch.uint8)[...] ^= torch.tensor(1, dtype=torch.uint8)


def hit(findings, metric: str) -> bool:
    return any(f.metric == metric for f in findings)


# name -> (phase, metric, damage(case, got, pool row)); the pool row is the last row of the last expert of the last rank
DAMAGE = {
    "x byte": ("dispatch", "dispatch_x", lambda c, g, p: flip(g[3]["l1_acts"].view(torch.uint8), p, 255)),
    "scale bit": ("dispatch", "dispatch_x_sf", lambda c, g, p: g[3]["l1_acts_sf"][p].mul_(1.0000002)),
    "topk weight": ("dispatch", "dispatch_weight", lambda c, g, p: g[3]["l1_topk_weights"][p].mul_(1.0000002)),
    "count": ("dispatch", "dispatch_count", lambda c, g, p: g[3]["expert_recv_count_sum"][-1].add_(1)),
    "arrival": ("dispatch", "dispatch_arrival", lambda c, g, p: g[3]["l1_arrival_count"][p // 16].sub_(1)),
    "stale arrival": ("dispatch", "dispatch_arrival", lambda c, g, p: g[3]["l1_arrival_count"][-1].add_(1)),
    "wrong slot": ("dispatch", "dispatch_entry", lambda c, g, p: g[3]["token_src_metadata"][p, 2].copy_(
        (g[3]["token_src_metadata"][p, 2] + 1) % 3)),
    "wrong token": ("dispatch", "dispatch_entry", lambda c, g, p: g[3]["token_src_metadata"][p, 1].copy_(
        (g[3]["token_src_metadata"][p, 1] + 1) % 6)),
    "token out of range": ("dispatch", "dispatch_source", lambda c, g, p: g[3]["token_src_metadata"][p, 1].fill_(17)),
    "unwritten metadata": ("dispatch", "dispatch_source", lambda c, g, p: g[3]["token_src_metadata"][p].fill_(-1)),
    "wrong source": ("dispatch", "dispatch_source", lambda c, g, p: g[3]["token_src_metadata"][p, 0].copy_(
        2 if g[3]["token_src_metadata"][p, 0] == 0 else 0)),
    "input changed": ("dispatch", "dispatch_input_changed", lambda c, g, p: flip(g[3]["x"].view(torch.uint8), 5, 0)),
    "raw accumulator": ("l1", "l1_raw", lambda c, g, p: g[3]["l1_raw"][p, 511].mul_(1.5).add_(0.1)),
    "raw NaN": ("l1", "l1_raw_nonfinite", lambda c, g, p: g[3]["l1_raw"][p, 0].fill_(float("nan"))),
    "raw halves swapped": ("l1", "l1_raw", lambda c, g, p: g[3]["l1_raw"][p].copy_(g[3]["l1_raw"][p].roll(256))),
    "act sign": ("l1", "l2_acts_code", lambda c, g, p: g[3]["l2_acts"].view(torch.uint8)[p, 255:].bitwise_xor_(0x80)),
    "act NaN": ("l1", "l2_acts_nan", lambda c, g, p: g[3]["l2_acts"].view(torch.uint8)[p, 3:4].fill_(0x7F)),
    "act never written": ("l1", "l2_acts_nan", lambda c, g, p: g[3]["l2_acts"].view(torch.uint8)[p].fill_(0xFF)),
    "act scale": ("l1", "l2_acts_sf", lambda c, g, p: g[3]["l2_acts_sf"][p, 1].mul_(1.01)),
    "act columns swapped": ("l1", "l2_acts_code", lambda c, g, p: g[3]["l2_acts"].view(torch.uint8)[p].copy_(
        g[3]["l2_acts"].view(torch.uint8)[p].roll(8))),
    "stray slot": ("l2", "l2_stray_write", lambda c, g, p: g[3]["combine"][2, 100, 7].fill_(0)),
    "y row past the end": ("combine", "combine_rest", lambda c, g, p: g[3]["y"][6, 255].fill_(0)),
    "y last capacity row": ("combine", "combine_rest", lambda c, g, p: g[3]["y"][127, 0].fill_(0)),
    "y of an empty rank": ("combine", "combine_rest", lambda c, g, p: g[1]["y"][0, 0].fill_(0)),
    "y one ulp": ("combine", "combine_exact", lambda c, g, p: g[3]["y"].view(torch.int16)[5, 255].add_(1)),
    "y never written": ("combine", "e2e_nonfinite", lambda c, g, p: g[3]["y"].view(torch.int16)[5].fill_(-1)),
    "y negative zero": ("combine", "combine_masked", lambda c, g, p: g[2]["y"][masked_row(c, 2)].fill_(-0.0)),
}  # fmt: skip


def masked_row(case, rank: int) -> int:
    return int((case.inputs[rank].topk_idx < 0).all(dim=1).nonzero()[0])


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(run, got, name):
    phase, metric, damage = DAMAGE[name]
    case, _ = run
    _, row = last_row(case, 3)
    damage(case, got, row)
    findings = phases.load(phase).check(case, got)
    assert hit(findings, metric), [str(f) for f in findings]
    assert all(f.message for f in findings)


def test_findings_name_the_token(run, got):
    case, clean = run
    _, row = last_row(case, 3)
    source, token, slot = clean[3]["token_src_metadata"][row].tolist()
    got[3]["l1_acts"].view(torch.uint8)[row, 77] ^= 1
    (found,) = phases.load("dispatch").check(case, got)
    assert (found.rank, found.token, found.slot, found.column) == (source, token, slot, 77)
    assert found.got != found.expected
    got[source]["combine"][slot, token, 200] += 1
    (found,) = [f for f in phases.load("l2").check(case, got) if f.metric == "l2_row"]
    assert (found.rank, found.token, found.slot, found.column) == (source, token, slot, 200)
    got[2]["y"][16, 33] = 99
    found = [f for f in phases.load("combine").check(case, got) if (f.metric, f.rank) == ("combine_exact", 2) and f.token == 16]
    assert [(f.token, f.column, f.got) for f in found] == [(16, 33, 99.0)]


@pytest.mark.parametrize("sample", [None, 16])
def test_last_row_of_last_expert_of_last_rank(run, got, sample):
    """The classic blind spot of a checker; also with sampled rows."""
    case = copy.copy(run[0])
    case.sample_rows = sample
    _, row = last_row(case, 3)
    source, token, slot = got[3]["token_src_metadata"][row].tolist()
    got[3]["l1_raw"][row, -1] += 1
    got[3]["l2_acts_sf"][row, -1] *= 1.1
    assert hit(phases.load("l1").check(case, got), "l1_raw") and hit(phases.load("l1").check(case, got), "l2_acts_sf")
    fresh = copy.deepcopy(run[1])
    fresh[source]["combine"][slot, token] *= 1.02
    assert hit(phases.load("l2").check(case, fresh), "l2_row")
    fresh = copy.deepcopy(run[1])
    fresh[3]["y"][5] = fresh[3]["y"][5].float().mul(1.1).bfloat16()
    assert hit(phases.load("combine").check(case, fresh), "e2e")


def swap_rows(views: dict, a: int, b: int) -> None:
    for name in ("l1_acts", "l1_acts_sf", "l1_topk_weights", "token_src_metadata", "l2_acts", "l2_acts_sf", "l1_raw"):
        flat = views[name].view(torch.uint8) if views[name].dtype is torch.float8_e4m3fn else views[name]
        flat[[a, b]] = flat[[b, a]].clone()


def test_sources_must_follow_the_rotated_order(run, got):
    """Whole rows exchanged between two sources: every byte agrees with its metadata, only the order is wrong."""
    case, clean = run
    for rank in range(4):
        for segment in PoolPlan(case).segments(rank):
            sources = clean[rank]["token_src_metadata"][segment.base : segment.base + segment.count, 0]
            if len(sources.unique()) > 1:
                swap_rows(got[rank], segment.base, segment.base + segment.count - 1)
                assert hit(phases.load("dispatch").check(case, got), "dispatch_source")
                assert phases.load("l1").check(case, got) == [], "judged by its own rows, l1 is right"
                return
    raise AssertionError("the case must have an expert with two sources")


def test_rows_exchanged_within_a_source_are_fine(run, got):
    case, clean = run
    for rank in range(4):
        for segment in PoolPlan(case).segments(rank):
            sources = clean[rank]["token_src_metadata"][segment.base : segment.base + segment.count, 0].tolist()
            for j in range(len(sources) - 1):
                if sources[j] == sources[j + 1]:
                    swap_rows(got[rank], segment.base + j, segment.base + j + 1)
                    assert phases.check_upto("combine", case, got) == []
                    return
    raise AssertionError("the case must have a source with two rows")


def test_doubled_row_is_found(run, got):
    """One entry twice and another lost: counts, sources and bytes all look right."""
    case, clean = run
    for rank in range(4):
        for segment in PoolPlan(case).segments(rank):
            meta = clean[rank]["token_src_metadata"][segment.base : segment.base + segment.count]
            for j in range(segment.count - 1):
                if meta[j, 0] == meta[j + 1, 0]:
                    for name in ("l1_acts", "l1_acts_sf", "l1_topk_weights", "token_src_metadata"):
                        value = got[rank][name]
                        value = value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value
                        value[segment.base + j] = value[segment.base + j + 1].clone()
                    findings = phases.load("dispatch").check(case, got)
                    assert {f.metric for f in findings} == {"dispatch_entry"} and len(findings) == 2
                    assert sorted((f.got, f.expected) for f in findings) == [(0, 1), (2, 1)]
                    return
    raise AssertionError("the case must have a source with two rows")


def test_each_phase_is_judged_from_its_own_input(run):
    """A wrong but consistent L1 result is L1's fault, not L2's or combine's sum."""
    case, _ = run
    wrong = copy.copy(case)
    wrong.clamp = 0.01
    got = simulate(wrong)
    assert phases.load("dispatch").check(case, got) == [] == phases.load("l2").check(case, got)
    assert hit(phases.load("l1").check(case, got), "l2_acts_sf")
    assert {f.metric for f in phases.load("combine").check(case, got)} <= {"e2e", "e2e_cosine", "e2e_element", "e2e_rank"}


def test_without_raw_the_epilogue_is_still_judged(run, got):
    case, _ = run
    _, row = last_row(case, 3)
    for views in got.ranks:
        views["l1_raw"] = None
    assert phases.load("l1").check(case, got) == []
    got[3]["l2_acts_sf"][row] *= 1.01
    assert hit(phases.load("l1").check(case, got), "l2_acts_sf")


def test_nan_in_a_row_stays_in_it_and_must_show():
    p = Problem.make(NAMED_SHAPES["tiny"], 8, 6)
    case = make_case(p, "uniform", seed=2, clamp=10)
    case.inputs[4].x_sf[2, 1] = float("nan")
    got = simulate(case)
    assert bool(got[4]["y"][2].isnan().all()) and phases.check_upto("combine", case, got) == []
    swallowed = copy.deepcopy(got)
    swallowed[4]["y"][2] = 0
    assert hit(phases.load("combine").check(case, swallowed), "e2e_nonfinite")
    leaked = copy.deepcopy(got)
    leaked[4]["y"][3] = float("nan")
    assert hit(phases.load("combine").check(case, leaked), "e2e_nonfinite")


def test_shared_rows_of_poison_do_not_matter(run, got):
    """Padding rows of the pool may hold anything."""
    case, _ = run
    for rank, views in enumerate(got.ranks):
        used = torch.zeros(views["l1_acts"].shape[0], dtype=torch.bool)
        for s in PoolPlan(case).segments(rank):
            used[s.base : s.base + s.count] = True
        for name in ("l1_acts", "l2_acts"):
            views[name].view(torch.uint8)[~used] = 0x7E
        views["l2_acts_sf"][~used] = 3e38
    assert phases.check_upto("combine", case, got) == []


def test_a_bad_id_counts_as_masked():
    """What a build does with an id it must not follow: drop the slot, and nothing else."""
    case = make_case(Problem.make(NAMED_SHAPES["tiny"], 8, 4), "uniform", seed=2)
    for value in (16, -7, 2**40):
        case.inputs[5].topk_idx[3, 1] = value
        assert phases.check_upto("combine", case, simulate(case)) == []


def stub_output(case, **meta) -> PhaseOutput:
    plan = Layout(case.problem.shape, case.problem.ranks, case.problem.capacity)
    from megamoe_cli import abi

    out = simulate(case)
    tail = [abi.ABI_VERSION, abi.PARAMS_BYTES, plan.pool_rows, plan.total_bytes, 1000, 1000, 0, 4]
    for views in out.ranks:
        views["stub_report"] = torch.tensor([*plan.offsets, *tail], dtype=torch.int64)
    out.meta = meta
    return out


@pytest.mark.parametrize(("word", "value", "metric"), [
    (0, 1024, "stub_report"), (NUM_REGIONS - 1, 7, "stub_report"), (NUM_REGIONS, 99, "stub_report"),
    (NUM_REGIONS + 1, 64, "stub_report"), (NUM_REGIONS + 2, 1, "stub_report"), (NUM_REGIONS + 3, 1, "stub_report"),
    (NUM_REGIONS + 4, 2000, "stub_smem"), (NUM_REGIONS + 6, 512, "stub_smem"), (NUM_REGIONS + 7, 3, "stub_launch"),
])  # fmt: skip
def test_stub_report(word, value, metric):
    case = make_case(Problem.make(NAMED_SHAPES["tiny"], 8, 1))
    got = stub_output(case, grid=4, smem_bytes=1000)
    check = phases.load("stub").check
    assert check(case, got) == []
    got[7]["stub_report"][word] = value
    findings = check(case, got)
    assert findings and {f.metric for f in findings} == {metric} and {f.rank for f in findings} == {7}


def test_stub_views():
    case = make_case(Problem.make(NAMED_SHAPES["tiny"], 8, 1))
    check = phases.load("stub").check
    got = stub_output(case)
    got[2]["l1_acts_sf"] = got[2]["l1_acts_sf"].contiguous()
    got[3]["x_sf"] = got[3]["x_sf"].double()
    got[4]["topk_idx"] = got[4]["topk_idx"][:-1]
    del got[5]["x"]
    got[6]["stub_report"] = None
    text = [str(f) for f in check(case, got)]
    assert len(text) == 5 and [t.split("rank ")[1][0] for t in sorted(text, key=lambda t: t.split("rank ")[1])] == list("23456")
    assert any("stride" in t for t in text) and any("dtype" in t for t in text) and any("missing" in t for t in text)
