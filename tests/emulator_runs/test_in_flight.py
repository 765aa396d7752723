"""Launches in flight on one buffer: other token counts each time, none on some ranks; other configurations on different
launches; the same sequence again and again, as a captured graph replays it."""

from __future__ import annotations

import pytest

from megamoe_cli import testplan
from tests.proving import plan, prove, run

ADVERSARIAL = {"schedule": "random", "completion": "lazy"}
MIX = "block_m=64+frontend=standard;block_m=32"


def test_token_counts_that_vary_from_launch_to_launch() -> None:
    results = prove("emulator", ranks=3, phase="dispatch,combine", shape="256x256x6x2", tokens="uneven:40", repeat=5, seeds=2, jobs=2,
                    config=["block_m=64", "stages=2"], options=ADVERSARIAL | {"vary_tokens": True, "snapshot": "all"})  # fmt: skip
    assert len(results) == 4


def test_varied_counts_differ_and_leave_ranks_without_tokens() -> None:
    from megamoe_cli.case_plan import read_case

    (case,) = plan("emulator", ranks=3, phase="combine", shape="256x256x6x2", tokens="40", repeat=6, options={"vary_tokens": True})
    counts = [data.problem.tokens for data in read_case(case.to_dict(), device="cpu", slow=True).datas]
    assert counts[0] == (40, 40, 40) and len(set(counts)) == 6
    assert sum(0 in each for each in counts[1:]) == 5 and all(max(each) <= 128 for each in counts)


@pytest.mark.slow
def test_different_configurations_on_different_launches() -> None:
    """Tile heights and warp layouts change between launches; counters of one block size are cleared for the next."""
    options = ADVERSARIAL | {"mix": MIX, "vary_tokens": True, "snapshot": "all"}
    prove("emulator", ranks=2, phase="combine", shape="256x256x4x2", tokens="60", repeat=6, seeds=2, jobs=2, options=options)


@pytest.mark.slow
def test_a_sequence_that_is_replayed() -> None:
    """Nine launches, three data sets: what the last round leaves is judged, launch by launch."""
    (case,) = plan("emulator", ranks=3, phase="combine", shape="256x256x6x2", tokens="25", config=["block_m=64", "stages=2"],
                   options=ADVERSARIAL | {"replay": 3, "vary_tokens": True, "snapshot": "all", "races": True, "skew": "late:any"})  # fmt: skip
    (result,) = run([case])
    assert result.passed, result.message


def test_the_mix_is_checked_before_anything_runs() -> None:
    (case,) = plan("emulator", ranks=2, phase="combine", tokens="4", options={"mix": "block_m=48"})
    (result,) = run([case])
    assert result.exit_code == 2 and "block_m=48 is not one of" in result.message


def test_commands_spell_all_of_it() -> None:
    request = testplan.Request(ranks="2", phase="combine", tokens="4", backend="emulator",
                               options=ADVERSARIAL | {"mix": MIX, "vary_tokens": True, "replay": 2, "skew": "slow:0"})  # fmt: skip
    (case,) = testplan.expand(request)
    words = case.repro()
    assert "--mix block_m=64,frontend=standard --mix block_m=32" in words and "--vary-tokens" in words and "--replay 2" in words
    assert "--skew slow:0 " in words and "--schedule random --completion lazy" in words and "--sanitize" not in words


@pytest.mark.slow
def test_a_short_soak() -> None:
    """What tests/gpu/test_soak.py does two thousand times, here a few dozen times under a random schedule."""
    from megamoe_cli.backends.emulator import EmulatorBackend
    from megamoe_cli.config import KernelConfig
    from megamoe_cli.shapes import Problem, Shape
    from tests.soak import soak

    problem = Problem.make(Shape(256, 128, 6, 2), 3, (20, 0, 33))
    config = KernelConfig(block_m=64, stages=2)
    with EmulatorBackend(3, schedule="random", completion="lazy", slow=(0, 8, 0)) as backend:
        assert soak(backend, problem, config, 60, seed=0, delay_bytes=4096, mix=[KernelConfig(block_m=32), KernelConfig(block_m=64, frontend="standard")]) == 60
