"""Who may use which SMs: the one rule, and that every way in obeys it (backends: test_virtual.py, test_nvlink_parts.py)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megamoe_cli import api
from megamoe_cli.backends import sm_share
from megamoe_cli.backends.emulator import EmulatorBackend, open_backend
from megamoe_cli.backends.sm_share import SmShare, check_case, reserve_from_environment
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError
from tests.unit.fake_cuda import H200


def test_the_rule() -> None:
    for sms, ranks, reserve in ((132, 1, 0), (132, 1, 131), (132, 8, 20), (78, 3, 5), (2, 1, 1)):
        ctas = SmShare(sms, ranks, reserve).ctas
        assert ctas >= 1 and ctas * ranks + reserve <= sms < (ctas + 1) * ranks + reserve, "all that fit, and no more"
    assert SmShare(132, 8, 4).clusters(66) == 7 and SmShare(132, 8, 100).clusters(66) == 0
    assert SmShare(132, 2, 1).said("virtual(2 on 1xH200)") == "virtual(2 on 1xH200, 1 SM reserved)"
    assert SmShare(132, 2).said("virtual(2 on 1xH200)") == "virtual(2 on 1xH200)"


def test_the_emulated_machine_has_as_many_sms_as_ctas() -> None:
    backend = EmulatorBackend(2, ctas=4, reserve_sms=3)
    assert backend.grid(KernelConfig()) == 1 and backend.grid(KernelConfig(), 4) == 1
    assert backend.where == "emulator(2 ranks x 4 CTAs, 3 SMs reserved)"
    with pytest.raises(UsageError, match="the device has 4, so at most 3"):
        open_backend(2, ctas=4, reserve_sms=4)


@pytest.mark.parametrize(("backend", "ranks", "options", "cluster", "words"), [
    ("emulator", 2, {"reserve_sms": 2}, 1, "the device has 2"), ("emulator", 2, {"reserve_sms": 1}, 2, "less than a cluster of 2"),
    ("emulator", 1, {"ctas": 1}, 2, "ctas=1: a cluster has 2"), ("emulator", 1, {"ctas": 1}, 1, ""), ("emulator", 1, {"resident_ctas": 1}, 2, "resident_ctas=1"),
    ("emulator", 1, {"ctas": 1, "mix": "block_m=64;cluster=2+block_m=64"}, 1, "ctas=1: a cluster has 2"), ("virtual", 1, {"ctas": 2}, 2, ""),
    ("emulator", 2, {"reserve_sms": 3, "ctas": 4}, 1, ""), ("virtual", 8, {"reserve_sms": 125}, 1, "8 ranks cannot be resident"),
    ("virtual", 8, {"reserve_sms": 124}, 1, ""), ("virtual", 8, {"reserve_sms": 117}, 2, "leaves 1 of 132 SMs for each rank"),
    ("virtual", 8, {"reserve_sms": 5, "ctas": 16}, 1, "16 CTAs per rank"), ("nvlink", 8, {"reserve_sms": 131}, 1, ""),
    ("nvlink", 8, {"reserve_sms": 132}, 1, "at most 131"), ("processes", 3, {"reserve_sms": 131}, 1, "2 ranks cannot be resident"),
    ("virtual", 8, {}, 1, ""),
])  # fmt: skip
def test_cases_are_checked_before_anything_starts(backend: str, ranks: int, options: dict, cluster: int, words: str) -> None:
    config = KernelConfig(cluster=cluster)
    if not words:
        return check_case(backend, ranks, config, options, [H200, H200])
    with pytest.raises(UsageError, match=words):
        check_case(backend, ranks, config, options, [H200, H200])


def test_the_environment_of_the_api() -> None:
    assert reserve_from_environment({}) == 0 and reserve_from_environment({sm_share.VARIABLE: "7"}) == 7
    for text, words in (("four", "MEGAMOE_RESERVE_SMS: 'four'"), ("-2", "negative")):
        with pytest.raises(UsageError, match=words):
            reserve_from_environment({sm_share.VARIABLE: text})


def buffers(world: api.LocalWorld, **more: object) -> list[api.SymmBuffer]:
    return [api.get_symm_buffer_for_sm90_mega_moe(world[rank], 4, 16, 2, 256, 256, phase="stub", config=KernelConfig(stages=2), **more)
            for rank in range(world.ranks)]  # fmt: skip


def grids(world: api.LocalWorld, bufs: list[api.SymmBuffer], monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Of what ``synchronize`` launches."""
    shape, found = bufs[0].layout.shape, []
    l1 = api.LayerWeights(torch.zeros(2, 512, 256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(2, 4, 2))
    l2 = api.LayerWeights(torch.zeros(2, 256, 256, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(2, 2, 2))
    pair = api.transform_weights_for_mega_moe_sm90(l1, l2)
    for buf in bufs:
        buf.topk_idx.fill_(-1)
        api.fp8_mega_moe(torch.zeros(3, shape.hidden, dtype=torch.bfloat16), *pair, buf)
    run = world.backend.run

    def spy(program, timeout_s):  # noqa: ANN001, ANN202
        found.extend(launch.grid for rank in range(world.ranks) for launch in program.launches(rank))
        return run(program, timeout_s)

    monkeypatch.setattr(world.backend, "run", spy)
    world.synchronize()
    return set(found)


def test_the_api_takes_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sm_share.VARIABLE, raising=False)
    with api.LocalWorld(2, "emulator") as world:
        bufs = buffers(world)
        assert grids(world, bufs, monkeypatch) == {2}
        with pytest.raises(UsageError, match="at most 1"):
            buffers(world, reserve_sms=2)
    with api.LocalWorld(2, "emulator") as world:
        assert grids(world, buffers(world, reserve_sms=1), monkeypatch) == {1}
    monkeypatch.setenv(sm_share.VARIABLE, "1")
    with api.LocalWorld(2, "emulator") as world:
        assert grids(world, buffers(world), monkeypatch) == {1}
    with api.LocalWorld(2, "emulator") as world:
        assert grids(world, buffers(world, reserve_sms=0), monkeypatch) == {2}, "what the caller says wins"
        for bad, words in (("1", "must be an integer"), (-1, "negative")):
            with pytest.raises(UsageError, match=words):
                buffers(world, reserve_sms=bad)


def test_measuring_processes_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the tuner's plan to the runner that opens the backend, also where each rank is a process."""
    from megamoe_cli import worker
    from megamoe_cli.tuning import tune_worker
    from megamoe_cli.tuning.measuring import TuneRunner

    opened: list[dict] = []
    runner = TuneRunner("virtual", 2, opener=lambda ranks, **options: opened.append(options) or SimpleNamespace(), device="cpu", reserve_sms=3)
    assert runner.backend is not None and opened == [{"reserve_sms": 3}]
    heard: list[tuple] = []
    monkeypatch.setattr(worker, "main", lambda rest, make_runner, program: heard.append((rest, program[3:])) or 0)
    tune_worker.main(["--reserve-sms", "3", "--fake", "f.json", "--backend", "processes", "--ranks", "2"])
    assert heard == [(["--backend", "processes", "--ranks", "2"], ("--fake", "f.json", "--reserve-sms", "3"))]


def test_ranks_need_not_agree_on_their_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the reserve rests on: 4 CTAs on one rank and 1 on the other give the bits of equal grids, with and without
    sending by all CTAs (more entries than ``SINGLE_DISPATCH_ENTRIES``, by the bound)."""
    from megamoe_cli.inputs import make_case
    from megamoe_cli.shapes import Problem, Shape

    case = make_case(Problem.make(Shape(256, 256, 4, 2), 2, (40, 7), 1152), seed=1)
    got: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for grids_of in ((4, 4), (4, 1)):
        with api.LocalWorld(2, EmulatorBackend(2, ctas=4)) as world:
            bufs = [api.get_symm_buffer_for_sm90_mega_moe(rank, 4, 1152, 2, 256, 256, config=KernelConfig(stages=2)) for rank in world.members]
            outputs = []
            for bound in (None, 1152):
                for rank, buf in enumerate(bufs):
                    data = case.inputs[rank]
                    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
                        getattr(buf, name)[: data.tokens].copy_(getattr(data, name))
                    pair = api.transform_weights_for_mega_moe_sm90((case.weights[rank].w13, case.weights[rank].w13_sf),
                                                                   (case.weights[rank].w2, case.weights[rank].w2_sf))  # fmt: skip
                    outputs.append(torch.zeros(data.tokens, 256, dtype=torch.bfloat16))
                    api.fp8_mega_moe(outputs[-1], *pair, buf, num_tokens_bound=bound)
            turn = iter(grids_of * 2)  # synchronize asks launch by launch, rank by rank
            monkeypatch.setattr(world.backend, "grid", lambda config, requested=None: next(turn))
            world.synchronize()
            got[grids_of] = outputs
    for same, uneven in zip(got[4, 4], got[4, 1]):
        assert same.abs().sum() > 0 and torch.equal(same, uneven)
