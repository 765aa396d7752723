"""``bench --ranks``: what is counted, what is timed and on what, who is caught; the emulator or a model in the GPU's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe_cli.backends.emulator import open_backend
from megamoe_cli.bench.link import Traffic, facts, mean_traffic, rows_between, traffic
from megamoe_cli.bench.over_ranks import shortened
from megamoe_cli.bench.rank_devices import RankWatch
from megamoe_cli.bench.ranks_runner import RanksRunner
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import MegamoeError
from megamoe_cli.routing import route
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.tuning.schema import Choice

SHAPE = Shape(256, 256, 4, 2)


# -- traffic and floors ------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["uniform", "masked:0.4", "local", "remote", "powerlaw"])
def test_traffic_is_what_a_brute_count_finds(routing: str) -> None:
    problem = Problem(Shape(512, 256, 12, 3), 3, (5, 0, 7), 128)
    ids = [route(routing, problem, rank, 3)[0] for rank in range(3)]
    want = [dict.fromkeys(("dispatch_in", "dispatch_out", "combine_in", "combine_out"), 0) for _ in range(3)]
    for source, own in enumerate(ids):
        for row in own.tolist():
            for expert in row:
                if expert < 0 or expert // 4 == source:
                    continue
                there = 512 * 1 + 4 * 4 + 4 + 4  # codes, four scales, routing weight, list entry
                want[expert // 4]["dispatch_in"] += there
                want[source]["dispatch_out"] += there
                want[expert // 4]["combine_out"] += 512 * 2
                want[source]["combine_in"] += 512 * 2
    found = traffic(problem, rows_between(problem, ids))
    assert found == [Traffic(**each) for each in want]
    assert sum(each.into for each in found) == sum(each.out for each in found)
    if routing == "local":
        assert all(each.into == each.out == 0 for each in found)
    elif routing != "powerlaw":
        assert found[1].dispatch_in > 0 and found[1].dispatch_out == 0, "a rank without tokens still serves its experts"


def test_traffic_is_a_mean_over_the_draws() -> None:
    problem = Problem.make(SHAPE, 2, 1)
    away, home = torch.tensor([[2, 3]]), torch.tensor([[0, 1]])
    none, all_ = [home, torch.tensor([[2, 3]])], [away, torch.tensor([[2, 3]])]
    (first, second) = mean_traffic(problem, [none, all_])
    assert first.dispatch_out == second.dispatch_in == 2 * (256 + 8 + 8) / 2 and first.combine_in == second.combine_out == 512.0


def test_floors_are_the_slowest_ranks_and_a_shared_gpu_is_no_link() -> None:
    shape = Shape(7168, 2048, 32, 2)
    problem = Problem.make(shape, 2, 4)
    ids = [torch.tensor([[0, 1]] * 4), torch.tensor([[16, 17], [18, 19], [20, 21], [22, 0]])]
    expert = 3 * 7168 * 2048 / 4.70e12 * 1e6
    linked, shared = facts(problem, [ids], "nvlink"), facts(problem, [ids], "virtual")
    assert linked["weight_floor_us"] == pytest.approx(7 * expert) and shared["weight_floor_us"] == pytest.approx(9 * expert)
    assert linked["floors_us"][0][0] == pytest.approx(2 * expert)
    row, back = 7168 + 56 * 4 + 8, 2 * 7168
    assert (linked["link"]["busiest_rank"], linked["link"]["in_bytes"], linked["link"]["out_bytes"]) == (0, row, back), "one (token, slot)"
    assert linked["link"]["floor_us"] == pytest.approx(back / 450e9 * 1e6) and linked["link"]["is_link"]
    assert shared["link"]["floor_us"] is None and not shared["link"]["is_link"]


# -- what is timed, on the emulator ------------------------------------------------------------------


class Recorder:
    """One emulator with a scripted clock: launch n of a program starts at 10 n ms and takes 1 + rank ms."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.spoil: Any = None

    def __call__(self, ranks: int, **options: Any) -> Any:
        backend = open_backend(ranks, **options)
        real = backend.run

        def run(program: Any, timeout_s: float) -> Any:
            self.programs.append(program)
            result, count = real(program, 60.0), len(program.launches(0))
            result.launch_ms = {rank: [1.0 + rank] * count for rank in backend.local_ranks}
            result.launch_at_ms = {rank: [10.0 * n for n in range(count)] for rank in backend.local_ranks}
            if self.spoil:
                self.spoil(program)
            return result

        backend.run = run
        return backend


@pytest.fixture(scope="module")
def shared() -> Any:
    recorder = Recorder()
    runner = RanksRunner("emulator", 2, opener=recorder, device="cpu")
    yield runner, recorder
    runner.backend.close()


@pytest.fixture
def bench(shared: Any) -> Any:
    runner, recorder = shared
    recorder.programs.clear()
    recorder.spoil = None
    return runner, recorder


def task(**more: Any) -> dict[str, Any]:
    return {"id": "t", "task": {"shape": SHAPE.as_list(), "tokens": 5, "capacity": 128, "routing": "uniform", "seed": 1, "weights_seed": 1,
                                "choice": Choice(KernelConfig(block_m=32)).to_dict(), "against": [], "samples": 3, "in_a_row": 3, "runs": 2, **more}}


def test_a_sample_is_a_launch_that_the_ranks_began_together(bench) -> None:
    runner, recorder = bench
    result = runner.run(task())
    assert result.passed, result.message
    said = result.metrics
    assert said["contenders"]["ours"]["times"] == {"kernel": [[1000.0, 2000.0]] * 3, "in_a_row": [[21000.0 / 3, 22000.0 / 3]] * 2}
    timed = recorder.programs[3:]  # one is judged first, two warm up
    assert [len(p.launches(rank)) for p in timed for rank in (0, 1)] == [2] * 6 + [4] * 4
    assert all(p.held for p in timed)
    for program in timed[:3]:
        kinds = [[type(op).__name__ for op in segment] for segment in program.segments(1)]
        assert kinds == [["Copy"] * 4 + ["Launch"], ["Copy"] * 4 + ["Fill", "Launch"]]
    sources = [[op.src.data_ptr() for op in p.ops[0] if type(op).__name__ == "Copy"][::4] for p in timed[:3]]
    assert all(before != own for before, own in sources) and len({own for _, own in sources}) == 3, "no launch sees what the one before saw"
    assert not said["failed"] and "streams of their own" in said["graphs"] and said["link"]["is_link"] is False
    assert 0 <= said["worst_relative"] < 0.03


def test_another_configuration_is_interleaved_on_the_same_buffer(bench) -> None:
    runner, recorder = bench
    result = runner.run(task(against=["config:block_m=64"], modes=["kernel"]))
    assert result.passed and result.metrics["graphs"] == "not asked for", result.message
    blocks = [p.launches(0)[-1].kernel.config.block_m for p in recorder.programs]
    assert blocks == [32, 64, 32, 32, 64, 64, 32, 64, 64, 32, 32, 64]
    assert list(result.metrics["contenders"]) == ["ours", "config:block_m=64"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_our_wrong_output_has_no_times(bench, when) -> None:
    runner, recorder = bench

    def spoil(program: Any) -> None:
        if (len(recorder.programs) == 1) == (when == "before"):
            runner._arenas[(5, "uniform", 1)].outputs[0][1][3].view(torch.uint8).fill_(0xFF)

    recorder.spoil = spoil
    result = runner.run(task())
    assert result.status == "fail" and f"ours is wrong {when} timing" in result.message and "rank 1, token 3" in result.message
    assert "contenders" not in result.metrics


def test_launches_that_differ_in_one_bit_are_found(bench) -> None:
    runner, recorder = bench

    def spoil(program: Any) -> None:
        if len(program.launches(0)) == 4:  # of in_a_row
            runner._arenas[(5, "uniform", 1)].outputs[0][0].view(torch.int16)[0, 0] += 1

    recorder.spoil = spoil
    assert "differ in some bits (in_a_row against kernel)" in runner.run(task()).message


def test_a_rivals_wrong_output_costs_its_column(bench) -> None:
    runner, recorder = bench

    def spoil(program: Any) -> None:
        if program.launches(0)[-1].kernel.config.block_m == 64:
            address = program.launches(0)[-1].params.y
            fill = [op for op in program.ops[0] if type(op).__name__ == "Fill" and op.dst.data_ptr() == address][-1]
            fill.dst.view(torch.uint8).fill_(0xFF)

    recorder.spoil = spoil
    result = runner.run(task(against=["config:block_m=64"], modes=["kernel"]))
    assert result.passed and list(result.metrics["contenders"]) == ["ours"]
    assert "output wrong" in result.metrics["failed"]["config:block_m=64"]


class TwoHosts:
    """Rank 0 of two; the other host needs ``slow_us`` to enqueue a piece. A piece takes 50 us here, 60 there."""

    local_ranks, graphs = (0,), ""

    def __init__(self, slow_us: float) -> None:
        self.slow_us, self.leads, self.names = slow_us, [], []

    def busy(self, us: float) -> None:
        self.leads.append(us)

    def mark(self) -> int:
        return 0

    def now_s(self) -> float:
        return 0.0

    def wait(self, timeout_s: float) -> None:
        pass

    def local_us(self, start: int, stop: int) -> dict[int, float]:
        return {0: 50.0}

    def agree(self, name: str, value: Any) -> list[Any]:
        self.names.append(name)
        return [value, None if value is None else (self.slow_us, {1: 60.0})]


def test_ranks_take_a_piece_again_together() -> None:
    """One host was too slow for the spin: nobody keeps the time, and the spin becomes longer on all ranks alike."""
    device, stages = TwoHosts(700.0), []
    watch = RankWatch(device, 5.0, {"ours": SimpleNamespace(check=lambda: None)}, stages.append)  # type: ignore[arg-type, dict-item]
    assert watch.time_us(("ours", "kernel"), lambda: None, lambda: None) == 60.0
    assert device.leads == [300.0, 1400.0] and watch.retaken == 1 and watch.by_rank == {("ours", "kernel"): [[50.0, 60.0]]}
    assert device.names == ["begin ours kernel", "end ours kernel"] * 2 and stages == ["run ours"]
    with pytest.raises(MegamoeError, match="no usable time in 6 attempts: the host took 90000 us"):
        RankWatch(TwoHosts(90_000.0), 5.0, {"ours": SimpleNamespace(check=lambda: None)}).time_us(("ours", "kernel"), lambda: None, lambda: None)  # type: ignore[arg-type, dict-item]


def test_the_emulator_itself_takes_no_times() -> None:
    runner = RanksRunner("emulator", 2, device="cpu")
    assert "takes no times" in runner.run(task()).message
    runner.backend.close()


def test_the_reason_is_said_once() -> None:
    assert shortened("peer", "rank 1: measure: peer failed: kernel: rank 1: measure: peer failed: kernel: RuntimeError: x\nmore") == "kernel: RuntimeError: x"
    assert shortened("peer", "no answer within 12 s") == "no answer within 12 s"
