"""build, test, bench and the API take the table's pick for the running GPU, say so, and can be told otherwise. The table that
they find is the tests' own baseline (conftest.py): 32 rows below 120 tokens, 64 below 480, then 128."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from megamoe_cli import bench as bench_module
from megamoe_cli import inputs
from megamoe_cli.api import LocalWorld, fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, transform_weights_for_mega_moe_sm90
from megamoe_cli.backends.driver import Gpu
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.table_picks import TablePicks
from tests.tuning.tables_at_hand import BIG, MIDDLE, OWN_NAME, SMALL, measured, saved


@pytest.fixture
def gpu(monkeypatch):
    """An H200 is listed by the driver; nothing may run on it."""
    gpus = [Gpu(0, "NVIDIA H200", (9, 0), 132, 232448)]
    for place in ("megamoe_cli.backends.driver.visible_gpus", "megamoe_cli.backends.picking.visible_gpus"):
        monkeypatch.setattr(place, lambda: gpus)
    monkeypatch.delenv("MEGAMOE_TABLE", raising=False)


# -- test ------------------------------------------------------------------------------------------

TEST = ("test", "-n", "--shape", "flash", "--phase", "l1", "--tokens", "8,300,600")


def test_test_takes_the_pick_of_each_size_and_says_why(megamoe, gpu) -> None:
    answer = megamoe(*TEST)
    assert [line.split("-")[4] for line in answer.out.splitlines()] == ["m32", "m64", "m128"]
    said = [line for line in answer.err.splitlines() if line.startswith("config: ")]
    assert len(said) == 3 and OWN_NAME in said[0] and "8 tokens in [0, 120)" in said[0]


def test_the_largest_rank_counts(megamoe, gpu) -> None:
    answer = megamoe("test", "-n", "--shape", "flash", "--phase", "l1", "--ranks", "2", "--tokens-per-rank", "3,700")
    assert "-m128-" in answer.out and "700 tokens in [480, inf)" in answer.err


@pytest.mark.parametrize("more, expected", [
    (("--block-m", "16"), {"m16"}), (("--config", "lag=3"), {"m128"}), (("--table", "none"), {"m128"}), (("--backend", "emulator"), {"m128"})])
def test_what_is_said_by_hand_wins(megamoe, gpu, more, expected) -> None:
    answer = megamoe(*TEST, *more)
    assert {line.split("-")[4] for line in answer.out.splitlines()} == expected and "config: " not in answer.err


def test_without_a_gpu_nothing_changes(megamoe, monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    monkeypatch.setattr("megamoe_cli.backends.picking.visible_gpus", lambda: [])
    answer = megamoe(*TEST)
    assert {line.split("-")[4] for line in answer.out.splitlines()} == {"m128"} and "config: " not in answer.err


def test_the_command_that_reproduces_a_picked_case_names_its_configuration(megamoe, gpu, tmp_path) -> None:
    pick = measured([(1024.5, MIDDLE)], {64: {MIDDLE: 0.9}})
    saved(pick, tmp_path / "t.yaml")
    cases = megamoe("test", "-n", "--json", "--ranks", "1", "--shape", "4096x2048x32x6", "--phase", "l1", "--tokens", "64", "--table",
                    tmp_path / "t.yaml").json["cases"]
    assert [c["config"]["block_m"] for c in cases] == [64] and "--block-m 64" in cases[0]["repro"]


def test_a_table_for_something_else_is_refused_when_it_is_named(megamoe, gpu, tmp_path) -> None:
    saved(measured([(1024.5, MIDDLE)], {64: {MIDDLE: 0.9}}), tmp_path / "t.yaml")
    answer = megamoe(*TEST, "--table", tmp_path / "t.yaml")
    assert answer.code == 2 and "is not for this: " in answer.err
    assert megamoe(*TEST, "--table", "none.yaml").code == 2


def test_the_table_is_a_setting(megamoe, gpu, monkeypatch) -> None:
    monkeypatch.setenv("MEGAMOE_TABLE", "none")
    assert "config: " not in megamoe(*TEST).err


# -- build -----------------------------------------------------------------------------------------


def test_build_makes_every_kernel_a_load_may_need(megamoe, gpu) -> None:
    answer = megamoe("build", "-n", "combine", "--shape", "flash", "--json")
    assert [k["config"]["block_m"] for k in answer.json["kernels"]] == [32, 64, 128]
    assert "3 kernels that the table may pick on this GPU" in answer.err


@pytest.mark.parametrize("more", [("--table", "none"), ("--config", "stages=3"), ("--target", "emulator")])
def test_build_by_hand(megamoe, gpu, more) -> None:
    assert [k["config"]["block_m"] for k in megamoe("build", "-n", "combine", "--json", *more).json["kernels"]] == [128]


# -- bench -----------------------------------------------------------------------------------------


@pytest.fixture
def measured_with(monkeypatch, tmp_path) -> list:
    """A stand-in for the measuring: remembers (tokens, block_m, more)."""
    asked: list = []

    class FakeBench:
        def __init__(self, shape, seed):
            self.backend = SimpleNamespace(where="virtual(1 on 1xH200)")

        def measure(self, tokens, config, *, samples, say, **more):
            asked.append((tokens, config.block_m, more))
            return bench_module.Row("x", tokens, 100.0, 99.0, 101.0, 100.0, 50.0, 10.0, samples, 4.0, config.name(), 0.0, (100.0,) * samples)

        def close(self):
            pass

    monkeypatch.setattr(bench_module, "Bench", FakeBench)
    monkeypatch.setenv("MEGAMOE_RESULTS_DIR", str(tmp_path / "out"))
    return asked


def test_bench_takes_the_pick_of_each_size(megamoe, gpu, measured_with) -> None:
    answer = megamoe("bench", "--shape", "flash", "--tokens", "8,300,600")
    assert answer.code == 0 and measured_with == [(8, 32, {}), (300, 64, {}), (600, 128, {})]
    assert answer.err.count("config: m") == 3
    measured_with.clear()
    megamoe("bench", "--shape", "flash", "--tokens", "8", "--config", "block_m=64")
    megamoe("bench", "--shape", "flash", "--tokens", "8", "--table", "none")
    assert [m for _, m, _ in measured_with] == [64, 128]


def test_a_picks_grid_is_launched(megamoe, gpu, measured_with, tmp_path) -> None:
    from dataclasses import replace

    narrow = replace(MIDDLE, ctas=96)
    table = measured([(1024.5, MIDDLE)], {64: {MIDDLE: 0.9}})
    saved(replace(table, configs={**table.configs, "middle": narrow}), tmp_path / "t.yaml")
    megamoe("bench", "--shape", "flash", "--tokens", "8", "--table", tmp_path / "t.yaml")
    assert measured_with == [(8, 64, {"ctas": 96})]
    (case,) = megamoe("test", "-n", "--json", "--ranks", "1", "--shape", "4096x2048x32x6", "--phase", "l1", "--tokens", "64", "--table",
                      tmp_path / "t.yaml").json["cases"]
    assert case["options"]["launch_ctas"] == 96


# -- API -------------------------------------------------------------------------------------------

SHAPE = Shape(256, 256, 4, 3)
H200 = SimpleNamespace(sms=132, name="NVIDIA H200")


def backend(name: str = "virtual") -> SimpleNamespace:
    return SimpleNamespace(gpu=H200, name=name)


def test_the_api_looks_up_once_and_logs_each_pick(caplog, monkeypatch) -> None:
    monkeypatch.delenv("MEGAMOE_TABLE", raising=False)
    with caplog.at_level(logging.INFO, "megamoe"):
        picks = TablePicks.of(backend(), SHAPE, 2, 1024)
    assert [picks.choice(n).config.block_m for n in (0, 119, 120, 479, 480, 1024)] == [32, 32, 64, 64, 128, 128]
    assert len(picks.lines) == 3 == len(caplog.records) and OWN_NAME in caplog.text
    assert TablePicks.of(backend(), SHAPE, 2, 100).configs() == (picks.choice(0).config,) and picks.choice(0).config.block_m == 32


def test_the_api_without_a_gpu_or_with_tables_off(monkeypatch) -> None:
    assert TablePicks.of(SimpleNamespace(name="emulator"), SHAPE, 2, 128) is None
    monkeypatch.setenv("MEGAMOE_TABLE", "none")
    assert TablePicks.of(backend(), SHAPE, 2, 128) is None


def test_a_measured_table_of_virtual_ranks_is_not_for_real_gpus(tmp_path) -> None:
    from megamoe_cli.tuning.lookup import Machine, Query

    query = Query(Shape(4096, 2048, 256, 6), 8, Machine(132, "virtual", "NVIDIA H200"))
    path = saved(measured([(1024.5, SMALL)], {64: {SMALL: 0.9}}, query=query), tmp_path / "t.yaml").path
    assert TablePicks.of(backend(), query.shape, 8, 1024, str(path)).choice(5) == SMALL
    with pytest.raises(UsageError, match="backend is nvlink"):
        TablePicks.of(backend("nvlink"), query.shape, 8, 1024, str(path))


def test_each_call_runs_the_kernel_of_its_bound(monkeypatch) -> None:
    """On the emulator, told that it is an H200: two bounds, two kernels, one buffer, the same answer."""
    monkeypatch.delenv("MEGAMOE_TABLE", raising=False)
    case = inputs.make_case(Problem(SHAPE, 1, (5,), 640), seed=4)
    with LocalWorld(1, "emulator", seed=3) as world:
        world.backend.gpu = H200
        buf = get_symm_buffer_for_sm90_mega_moe(world[0], 4, 640, 3, 256, 256)
        weights = transform_weights_for_mega_moe_sm90(*(((w := case.weights[0]).w13, w.w13_sf), (w.w2, w.w2_sf)))
        for name in ("x", "x_sf", "topk_idx", "topk_weights"):
            getattr(buf, name)[:5].copy_(getattr(case.inputs[0], name))
        ys = [torch.full((5, 256), torch.nan, dtype=torch.bfloat16) for _ in range(3)]
        for y, bound in zip(ys, (8, 300, None)):
            fp8_mega_moe(y, *weights, buf, num_tokens_bound=bound)
        ran = [item.kernel.config.block_m for item in world._recorded[0]]
        world.synchronize(timeout_s=100)
    assert ran == [32, 64, 128] and BIG.config.block_m == buf.kernel.config.block_m
    for y in ys[1:]:
        assert torch.equal(y, ys[0]), "tiles do not change the numerics"


def test_a_configuration_given_by_hand_is_the_only_one(monkeypatch) -> None:
    with LocalWorld(1, "emulator") as world:
        world.backend.gpu = H200
        buf = get_symm_buffer_for_sm90_mega_moe(world[0], 4, 640, 3, 256, 256, config=KernelConfig(block_m=64))
        assert buf.picks is None and [c.block_m for c in buf._kernels] == [64]
