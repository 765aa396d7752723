"""Launch sequences: staging, what is in flight, poison, snapshots, and the parameters each launch is given."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megamoe_cli import abi
from megamoe_cli.abi import ABI_VERSION, PARAMS_BYTES, ParamFlags
from megamoe_cli.buffers import LaunchOptions, dispatch_ctas
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import LaunchFault, UsageError
from megamoe_cli.layout import CONTROL_WORDS, REGIONS
from megamoe_cli.session import Session
from megamoe_cli.shapes import Problem, Shape
from tests.api import scripted
from tests.api.scripted import ScriptedBackend

SHAPE = Shape(256, 128, 8, 2)
PROBLEM = Problem(SHAPE, 2, (3, 5), 16)


def tokens(n: int, value: float = 1.0, shape: Shape = SHAPE) -> SimpleNamespace:
    return SimpleNamespace(
        x=torch.full((n, shape.hidden), 7, dtype=torch.uint8).view(torch.float8_e4m3fn),
        x_sf=torch.full((n, shape.hidden // 128), float(value)), topk_idx=torch.zeros(n, shape.topk, dtype=torch.int64),
        topk_weights=torch.ones(n, shape.topk),
    )  # fmt: skip


def experts(local: int = 4) -> SimpleNamespace:
    h, i = SHAPE.hidden, SHAPE.intermediate
    return SimpleNamespace(
        w13=torch.zeros(local, 2 * i, h, dtype=torch.uint8).view(torch.float8_e4m3fn), w13_sf=torch.ones(local, 2 * i // 128, h // 128),
        w2=torch.zeros(local, h, i, dtype=torch.uint8).view(torch.float8_e4m3fn), w2_sf=torch.ones(local, h // 128, i // 128),
    )  # fmt: skip


def session(script=None, phase: str = "combine", problem: Problem = PROBLEM, **options) -> Session:
    out = Session(ScriptedBackend(problem.ranks, script), problem, KernelConfig(), phase, **options)
    for rank in range(problem.ranks):
        out.set_weights(rank, experts(8 // problem.ranks))
    return out


def staged(s: Session, launches: int = 3) -> Session:
    for launch in range(launches):
        for rank in range(2):
            s.stage(launch, rank, tokens(3 + 2 * rank, 10 * launch + rank + 1))
        s.launch(launch)
    return s


def test_each_launch_has_its_own_data_and_rows_past_the_count_keep_the_poison() -> None:
    result = staged(session()).run()
    assert len(result.launches) == 3 and result.outputs() is result.launches[2]
    for launch in range(3):
        for rank, out in enumerate(result.outputs(launch)):
            y = out["y"]
            assert y.shape == (16, 256) and bool((y[: 3 + 2 * rank] == 10 * launch + rank + 1).all())
            assert bool((y[3 + 2 * rank :].view(torch.int16) == -1).all())
            assert out["fault"] is None and out["tokens"] == 3 + 2 * rank


def test_snapshots_are_of_their_launch() -> None:
    s = staged(session())
    result = s.run(snapshot="all")
    for launch in range(3):
        for rank, out in enumerate(result.outputs(launch)):
            assert out["epoch"] == launch + 1
            assert set(out["l1_arrival_count"].tolist()) == {100 + launch}, "the bank of that launch"
            assert bool((out["x_sf"][: out["tokens"]] == 10 * launch + rank + 1).all())
            assert bool((out["topk_idx"][out["tokens"] :] == -1).all()), "unused rows are masked"
            assert out["expert_recv_count_sum"].tolist() == [out["tokens"]] * 4
            assert out["l1_acts_sf"].stride() == (1, s.layout.pool_rows)
            assert out["combine"].shape == (2, 16, 256) and bool(out["combine"].isnan().all())
    assert "x" not in staged(session()).run(snapshot="none").outputs()[0]
    some = staged(session()).run(snapshot=[0, -1])
    assert ["x" in out[0] for out in some.launches] == [True, False, True]
    with pytest.raises(UsageError, match="snapshot is last, all, none"):
        staged(session()).run(snapshot="first")


def test_snapshots_do_not_change_with_later_runs() -> None:
    s = staged(session(), 1)
    before = s.run().outputs()[0]
    kept = before["x_sf"].clone()
    s.stage(0, 0, tokens(3, 99)), s.stage(0, 1, tokens(5, 98)), s.launch(0)
    s.run()
    assert torch.equal(before["x_sf"].nan_to_num(), kept.nan_to_num())


def test_staged_inputs_are_private_copies() -> None:
    s = session()
    inputs = [tokens(3, 1), tokens(5, 2)]
    for rank in range(2):
        s.stage(0, rank, inputs[rank])
        inputs[rank].x_sf.fill_(77)
    s.launch(0)
    assert bool((s.run().outputs()[1]["y"][:5] == 2).all())


def test_workspace_and_counters_are_never_poisoned() -> None:
    def script(backend, p, grid) -> None:
        seen.append({name: scripted.region(p, name, 8, torch.int32).tolist() for name in ("control", "l1_arrival", "count_flag")})
        scripted.layer(backend, p, grid)

    seen: list[dict] = []
    out = staged(session(script), 1).run().outputs()[0]
    assert all(not any(values) for words in seen for values in words.values())
    assert out["workspace"]["control"][CONTROL_WORDS["epoch"]] == 1
    assert out["workspace"]["l1_arrival"].numel() == 2 * out["l1_arrival_count"].numel()


def test_without_poison_memory_is_left_alone() -> None:
    out = staged(session(poison=False), 1).run().outputs()[0]
    assert not out["y"][3:].any() and not out["l1_acts"].view(torch.uint8).any()


def test_parameters() -> None:
    s = session(options=LaunchOptions(clamp=2.5, fast_math=False, timeout_ns=123, ctas=3), phase="l1", stats=True)
    s.stage(0, 1, tokens(5))
    p = s.params(0, 1)
    layout, backend = s.layout, s.backend
    assert (p.rank, p.num_ranks, p.num_tokens, p.capacity) == (1, 2, 5, 16)
    assert (p.hidden, p.intermediate, p.num_experts, p.topk, p.pool_rows) == (256, 128, 8, 2, layout.pool_rows)
    assert (p.abi_version, p.params_bytes, p.timeout_ns, p.smem_bytes) == (ABI_VERSION, PARAMS_BYTES, 123, s.kernel.smem_bytes)
    assert (p.lag, p.unit_blocks, p.dispatch_ctas) == (s.config.lag, s.config.unit_blocks, 1)
    assert ParamFlags(p.flags) == ParamFlags.HAS_CLAMP and p.clamp == 2.5
    assert list(p.region) == [layout.region_offset[name] for name in REGIONS]
    bases = [s.buffers[rank].memory.data_ptr() for rank in range(2)]
    assert list(p.peer_base)[:2] == bases and not any(list(p.peer_base)[2:])
    assert p.fault == backend.fault_address(1) and p.stats and p.l1_raw and not p.report
    maps = {name: backend.maps[p.tensor_map(name)] for name in ("l1_acts", "l2_acts")}
    assert maps["l1_acts"] == (bases[1] + layout.region_offset["l1_acts"], layout.pool_rows, 256, 64, 128)
    assert maps["l2_acts"] == (bases[1] + layout.region_offset["l2_acts"], layout.pool_rows, 128, 64, 128)
    weights = s._weights[1]
    assert (p.w13, p.w2) == (weights.l1.weight.data_ptr(), weights.l2.weight.data_ptr())
    assert weights.l1.weight.shape == (4, 1, 2, 256, 128) and weights.l2.weight.shape == (4, 1, 1, 256, 128)
    assert (p.ring_rows, p.pool_rows) == (layout.pool_rows, layout.pool_rows)  # the whole pool
    assert ParamFlags(s.params(0, 1, LaunchOptions()).flags) == ParamFlags.FAST_MATH


def test_small_tiles_get_small_boxes() -> None:
    s = Session(ScriptedBackend(2), PROBLEM, KernelConfig(block_m=16), "combine")
    s.set_weights(0, experts()), s.stage(0, 0, tokens(3))
    assert s.backend.maps[s.params(0, 0).tensor_map("l1_acts")][3:] == (16, 128)


def test_stub_report_has_its_size() -> None:
    out = staged(session(phase="stub"), 1).run().outputs()[0]
    assert out["stub_report"].tolist() == [-1] * (len(REGIONS) + 8) and out["l1_raw"] is None


@pytest.mark.parametrize(("entries", "grid", "expected"), [(0, 8, 1), (2048, 8, 1), (2049, 8, 8), (5000, 1, 1)])
def test_dispatch_ctas(entries: int, grid: int, expected: int) -> None:
    assert dispatch_ctas(entries, grid) == expected


def test_a_token_bound_stands_in_for_the_count() -> None:
    problem = Problem(SHAPE, 2, (3, 5), 2000)
    s = session(problem=problem)
    s.stage(0, 0, tokens(3))
    assert s.params(0, 0).dispatch_ctas == 1
    assert s.params(0, 0, LaunchOptions(num_tokens_bound=1500)).dispatch_ctas == 4


def test_edited_parameters_reach_the_kernel() -> None:
    seen = []
    s = staged(session(lambda backend, p, grid: seen.append((p.rank, p.abi_version, grid))), 2)
    s.run(edit={(1, 0): {"abi_version": 9}})
    assert seen == [(0, abi.ABI_VERSION, 4), (1, abi.ABI_VERSION, 4), (0, 9, 4), (1, abi.ABI_VERSION, 4)]
    with pytest.raises(UsageError, match="no field 'abi'"):
        staged(s, 1).run(edit={(0, 0): {"abi": 1}})


def test_faults_are_in_the_result() -> None:
    result = staged(session(lambda b, p, grid: b.raise_fault(p.rank, code=2, index=3, observed=8, expected=8)), 1).run()
    assert set(result.faults) == {0, 1} and result.outputs()[1]["fault"].observed == 8
    with pytest.raises(LaunchFault, match="token 1 slot 1 names expert 8"):
        result.raise_for_faults()


def test_reset_starts_over() -> None:
    s = staged(session(), 2)
    assert s.run().outputs()[0]["epoch"] == 2
    s.reset()
    assert staged(s, 1).run().outputs()[0]["epoch"] == 1


def test_refusals() -> None:
    s = Session(ScriptedBackend(2), PROBLEM, KernelConfig(), "combine")
    with pytest.raises(UsageError, match="nothing to run"):
        s.run()
    with pytest.raises(UsageError, match="17 tokens but the capacity is 16"):
        s.stage(0, 0, tokens(17))
    with pytest.raises(UsageError, match="x_sf is float64; it must be float32"):
        s.stage(0, 0, SimpleNamespace(**{**vars(tokens(2)), "x_sf": torch.ones(2, 2, dtype=torch.float64)}))
    with pytest.raises(UsageError, match="topk_idx is int32; it must be int64"):
        s.stage(0, 0, SimpleNamespace(**{**vars(tokens(2)), "topk_idx": torch.zeros(2, 2, dtype=torch.int32)}))
    with pytest.raises(UsageError, match="w13 has shape"):
        s.set_weights(0, experts(8))
    with pytest.raises(UsageError, match="rank 2 is not driven by this process"):
        s.stage(0, 2, tokens(1))
    s.stage(0, 0, tokens(3))
    with pytest.raises(UsageError, match="launch 0 is not staged on rank 1"):
        s.launch(0)
    s.stage(0, 1, tokens(3))
    with pytest.raises(UsageError, match="rank 0 has no weights"):
        s.launch(0)
    with pytest.raises(UsageError, match="the problem has 2 ranks, the backend 4"):
        Session(ScriptedBackend(4), PROBLEM, KernelConfig(), "combine")
    with pytest.raises(UsageError, match="clamp -1"):
        Session(ScriptedBackend(2), PROBLEM, KernelConfig(), "combine", options=LaunchOptions(clamp=-1))
