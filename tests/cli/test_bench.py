"""``megamoe bench`` with a stand-in for the GPU: rounds, baseline, gate, record. (What it measures is a gpu test's business.)"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from megamoe_cli import bench
from megamoe_cli.backends.driver import Gpu
from megamoe_cli.backends.sm_share import SmShare
from megamoe_cli.devlog import journal

ARGS = ("bench", "--shape", "flash", "--tokens", "8,64")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Times of a GPU that takes ``base`` us for any load, with ``noise``; ``where`` is its name."""
    machine = SimpleNamespace(base=100.0, noise=0.004, where="virtual(1 on 1xH200)", measured=0, draw=random.Random(3))

    class FakeBench:
        def __init__(self, shape, seed, reserve_sms=0):
            self.backend = SimpleNamespace(where=SmShare(132, 1, reserve_sms).said(machine.where))

        def measure(self, tokens, config, *, samples, say):
            machine.measured += 1
            times = tuple(machine.base * (1 + machine.draw.gauss(0, machine.noise)) for _ in range(samples))
            middle = sorted(times)[len(times) // 2]
            return bench.Row("x", tokens, middle, min(times), max(times), middle, 50.0, 10.0, samples, 4.0, config.name(), 0.0, times)

        def close(self):
            pass

    monkeypatch.setattr(bench, "Bench", FakeBench)
    monkeypatch.setenv("MEGAMOE_RESULTS_DIR", "out")
    return machine


def record() -> dict:
    path = max(Path("out").glob("*/bench.json"), key=lambda found: found.stat().st_mtime_ns)
    return json.loads(path.read_text())


def test_one_round_without_a_gate(megamoe, gpu) -> None:
    answer = megamoe(*ARGS)
    assert answer.code == 0 and answer.out.splitlines()[-1] == "2 rows on virtual(1 on 1xH200)"
    assert gpu.measured == 2 and [len(row["rounds_us"]) for row in record()["rows"]] == [1, 1]
    (line,) = journal.read(Path("out"))
    assert line["kind"] == "bench" and line["records"][0]["path"].endswith("/bench.json")


def test_the_gate(megamoe, gpu) -> None:
    assert megamoe(*ARGS, "--save-baseline", "base.json").code == 0 and gpu.measured == 6
    gate = (*ARGS, "--baseline", "base.json", "--fail-on-regression", "3%")
    fine = megamoe(*gate)
    assert fine.code == 0 and "gate at 3.0%: 0 slower, 0 unclear, 2 not slower" in fine.err
    gpu.base = 106.0
    slow = megamoe(*gate)
    assert slow.code == 1 and "slower by more than 3.0%" in slow.out and "2 slower" in slow.err
    assert [j["verdict"] for j in record()["gate"]] == ["slower", "slower"] and record()["exit_code"] == 1
    assert megamoe(*gate, "--json").json["limit"] == 0.03
    gpu.base, gpu.noise, gpu.measured = 101.0, 0.2, 0
    noisy = megamoe(*gate)
    assert noisy.code == 6 and gpu.measured > 6, "noise is met with more rounds first"
    assert "one more round" in noisy.err
    without = megamoe(*ARGS, "--baseline", "base.json")
    assert without.code == 0 and "%" in without.out, "without a limit it only tells"


def test_what_does_not_compare_is_refused(megamoe, gpu) -> None:
    gate = ("--fail-on-regression", "3%", "--baseline", "base.json")
    assert megamoe(*ARGS, *gate).code == 2
    megamoe(*ARGS, "--save-baseline", "base.json")
    gpu.measured = 0
    assert "no row for flash at 9 tokens" in megamoe("bench", "--shape", "flash", "--tokens", "9", *gate).err
    assert "seed" in megamoe(*ARGS, "--seed", "4", *gate).err
    assert megamoe(*ARGS, *gate[:1], "300%").code == 2
    assert megamoe(*ARGS, "--rounds", "2", *gate).code == 2
    assert gpu.measured == 0, "refused before anything is measured"
    gpu.where = "virtual(1 on 1xH100)"
    other = megamoe(*ARGS, *gate)
    assert other.code == 2 and "different machines do not compare" in other.err


def test_reserved_sms_are_in_the_record(megamoe, gpu, monkeypatch) -> None:
    assert megamoe(*ARGS, "--save-baseline", "base.json").code == 0 and record()["reserve_sms"] == 0
    answer = megamoe(*ARGS, "--reserve-sms", "4")
    assert answer.code == 0 and answer.out.splitlines()[-1] == "2 rows on virtual(1 on 1xH200, 4 SMs reserved)"
    assert record()["reserve_sms"] == 4 and record()["where"] == "virtual(1 on 1xH200, 4 SMs reserved)"
    assert "do not compare" in megamoe(*ARGS, "--reserve-sms", "4", "--baseline", "base.json").err
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [Gpu(0, "NVIDIA H200", (9, 0), 132, 232448)])
    gpu.measured = 0
    for words, message in ((("--reserve-sms", "132"), "at most 131"), (("--reserve-sms", "-3"), "not in the range"),
                           (("--reserve-sms", "4", "--against", "unfused"), "unfused uses every SM"),
                           (("--reserve-sms", "4", "--protocol-cost", "2"), "no --reserve-sms with it")):  # fmt: skip
        refused = megamoe(*ARGS, *words)
        assert refused.code == 2 and message in refused.err and not gpu.measured, refused.err


def test_an_illegal_configuration_comes_before_a_missing_gpu(megamoe, monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    for text, words in (("block_m=999", "allowed-values"), ("regs_math=256", "register-budget"), ("block_n=128,policy=wide_n", "policy-tile")):
        for more in ((), ("--protocol-cost", "2"), ("--rows", "peer"), ("--ranks", 2)):
            answer = megamoe("bench", "--config", text, "--shape", "flash", "--tokens", 8, *more)
            assert answer.code == 2 and words in answer.err, answer.err
    assert megamoe("bench", "--config", "block_m=64", "--shape", "flash", "--tokens", 8).code == 3
