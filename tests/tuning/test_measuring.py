"""The GPU's measuring runner with the emulator in the GPU's place and the host's clock as its timer: the real kernel, the
real checks, the real programs. Times mean nothing here; what is asked is which launches ran, on what, and who is caught."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe_cli.backends.emulator import open_backend
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit, LaunchFault, TimedOut
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.tuning.measuring import INPUT_SETS, TuneRunner, floor_us
from megamoe_cli.tuning.schema import Choice

SHAPE = Shape(256, 256, 4, 2)
A, B = Choice(KernelConfig(block_m=32)), Choice(KernelConfig(block_m=64, lag=2))


class Recorder:
    """Hands out one emulator and remembers the programs it ran; ``spoil`` may change a backend's outputs or raise."""

    def __init__(self) -> None:
        self.programs: list[Any] = []
        self.spoil: Any = None

    def __call__(self, ranks: int, **options: Any) -> Any:
        backend = open_backend(ranks, **options)
        real = backend.run

        def run(program: Any, timeout_s: float) -> Any:
            self.programs.append(program)
            result = real(program, 60.0)
            result.launch_ms = {r: [1.0 + r + n for n in range(len(program.launches(r)))] for r in backend.local_ranks}
            if self.spoil:
                self.spoil(program)
            return result

        backend.run = run
        return backend


@pytest.fixture(scope="module")
def shared() -> Any:
    recorder = Recorder()
    runner = TuneRunner("emulator", 2, opener=recorder, device="cpu")
    yield runner, recorder
    runner.backend.close()


@pytest.fixture
def bench(shared: Any) -> Any:
    runner, recorder = shared
    recorder.programs.clear()
    recorder.spoil = None
    return runner, recorder


def task(**more: Any) -> dict[str, Any]:
    return {"id": "t", "task": {"stage": "final", "shape": SHAPE.as_list(), "tokens": 5, "capacity": 128, "routing": "uniform", "seed": 1,
                                "weights_seed": 1, "rounds": 7, "stop_ratio": 0, "a": A.to_dict(), "b": B.to_dict(), **more}}


def launched(program: Any, rank: int = 0) -> list[int]:
    return [launch.kernel.config.block_m for launch in program.launches(rank)]


def test_a_duel_is_interleaved_on_equal_inputs_and_judged(bench) -> None:
    runner, recorder = bench
    result = runner.run(task())
    assert result.passed, result.message
    warm, timed = recorder.programs
    assert launched(warm) == [32, 64, 32, 64]
    assert launched(timed) == [32, 64, 64, 32] * 3 + [32, 64] == launched(timed, 1)
    pairs = result.metrics["pairs"]
    # launch n took 1 + rank + n ms on the scripted clock: the slower rank counts, and a pair keeps its sides apart.
    assert pairs[0] == [2000.0, 3000.0] and pairs[1] == [5000.0, 4000.0] and len(pairs) == 7
    assert 0 <= result.metrics["check"]["a"] < 0.03 and 0 <= result.metrics["check"]["b"] < 0.03
    assert result.metrics["conditions"] == {}, "no NVML here: nothing is claimed"


def test_inputs_change_from_pair_to_pair_and_outputs_are_poisoned(bench) -> None:
    runner, recorder = bench
    runner.run(task())
    sources, fills = [], 0
    for segment in recorder.programs[1].segments(0):
        copies = [op for op in segment if type(op).__name__ == "Copy"]
        sources.append(copies[0].src.data_ptr())
        fills += any(type(op).__name__ == "Fill" and op.byte == 0xFF for op in segment)
    assert fills == 14, "the output is filled before every launch"
    assert sources[::2] == sources[1::2], "both sides of a pair see the same inputs"
    assert len(set(sources)) == INPUT_SETS and all(a != b for a, b in zip(sources[::2], sources[2::2]))


@pytest.mark.parametrize("when", ["before timing", "after timing"])
def test_a_wrong_output_is_caught_before_and_after_timing(bench, when) -> None:
    """A kernel that writes nothing in its last launch leaves the poison; one bad row in one rank is enough."""
    runner, recorder = bench

    def spoil(program: Any) -> None:
        if (len(recorder.programs) == 1) == (when == "before timing"):
            runner._arenas[(5, "uniform", 1)].outputs[0][1][3].view(torch.uint8).fill_(0xFF)

    recorder.spoil = spoil
    result = runner.run(task())
    assert result.status == "fail" and f"a is wrong {when}: rank 1, token 3" in result.message
    assert "pairs" not in result.metrics, "no time is shown for a wrong result"


def test_an_output_saved_from_another_launch_is_caught(bench) -> None:
    """Replaying an old answer, right for its own inputs."""
    runner, recorder = bench
    kept = {}

    def spoil(program: Any) -> None:
        y = runner._arenas[(5, "uniform", 1)].outputs[0][0]
        if len(recorder.programs) == 1:
            kept["y"] = y.clone()
        else:
            y.copy_(kept["y"])

    recorder.spoil = spoil
    assert "wrong after timing" in runner.run(task()).message


def test_a_candidate_that_is_far_behind_stops_after_one_round(bench) -> None:
    runner, recorder = bench
    slow = {rank: [9.0 if n % 2 == 0 else 1.0 for n in range(64)] for rank in (0, 1)}
    runner._launch_ms = lambda run: slow
    try:
        result = runner.run(task(stop_ratio=1.5))
    finally:
        runner._launch_ms = lambda run: run.launch_ms
    assert result.passed and result.metrics["stopped"] and len(result.metrics["pairs"]) == 1
    assert launched(recorder.programs[1]) == [32, 64]


def test_one_buffer_serves_all_sizes_and_kernels(bench, monkeypatch) -> None:
    runner, recorder = bench
    for tokens in (0, 128, 3):
        result = runner.run(task(tokens=tokens, rounds=2, seed=tokens))
        assert result.passed, (tokens, result.message)
    assert list(runner._buffers) == [128] and len(runner._arenas) > 2
    assert len(runner._kernels) == 2, "each variant is loaded once"


def test_inputs_stay_for_a_size_that_comes_again_while_there_is_room(bench, monkeypatch) -> None:
    runner, recorder = bench
    runner._arenas.clear()
    monkeypatch.setattr("megamoe_cli.tuning.measuring.KEPT_BYTES", 1.1e6)
    for tokens in (3, 4, 5, 128, 5):
        assert runner.run(task(tokens=tokens, rounds=1)).passed
    assert [key[0] for key in runner._arenas] == [128, 5], "the oldest go first, and the one in use stays"
    monkeypatch.setattr("megamoe_cli.tuning.measuring.KEPT_BYTES", 0.0)
    assert runner.run(task(tokens=6, rounds=1)).passed and [key[0] for key in runner._arenas] == [6]


@pytest.mark.parametrize(("error", "status", "code"), [
    (LaunchFault("rank 1 gave up"), "fault", 1), (TimedOut("not done"), "hang", 124), (EnvironmentUnfit("no memory"), "error", 3),
    (RuntimeError("bug"), "error", 70)])
def test_whatever_a_candidate_does_is_a_result(bench, error, status, code) -> None:
    runner, recorder = bench

    def spoil(program: Any) -> None:
        raise error

    recorder.spoil = spoil
    result = runner.run(task())
    assert (result.status, result.exit_code) == (status, code) and str(error) in result.message and "pairs" not in result.metrics


def test_an_illegal_candidate_is_a_result_too(bench) -> None:
    runner, _ = bench
    result = runner.run(task(a=Choice(KernelConfig(block_m=48)).to_dict()))
    assert result.status == "error" and "allowed-values" in result.message and result.exit_code == 2


def test_the_machine_is_described(bench) -> None:
    runner, _ = bench
    result = runner.run({"id": "d", "task": {"describe": True}})
    assert result.passed and result.metrics["where"].startswith("emulator(2 ranks") and result.metrics["torch"] == torch.__version__


def test_the_floor_counts_what_was_drawn() -> None:
    from megamoe_cli.oracle.casedata import CaseData, RankInputs

    shape = Shape(7168, 2048, 32, 2)
    problem = Problem.make(shape, 1, 4)

    def case(ids: list[list[int]]) -> CaseData:
        data = RankInputs(torch.zeros(4, 7168).to(torch.float8_e4m3fn), torch.ones(4, 56), torch.tensor(ids), torch.ones(4, 2))
        return CaseData(problem, [data], [])

    one_expert = [[0, -1]] * 4
    eight = [[2 * n, 2 * n + 1] for n in range(4)]
    per_expert = 3 * 7168 * 2048
    assert floor_us(problem, [case(eight)], True) == pytest.approx((8 * per_expert - 50e6) / 4.70e12 * 1e6)
    assert floor_us(problem, [case(one_expert)], True) < 1.0, "one expert's weights may lie in L2"
    assert floor_us(problem, [case(eight), case(one_expert)], True) == floor_us(problem, [case(one_expert)], True), "the easiest draw bounds"
