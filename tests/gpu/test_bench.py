"""``megamoe bench`` on one real SM90 GPU, through the real entry point."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def bench(*words: str, code: int = 0) -> dict:
    done = subprocess.run([sys.executable, "-m", "megamoe_cli", "bench", "--json", *words], capture_output=True, text=True, timeout=550)
    assert done.returncode == code, done.stderr[-3000:]
    return json.loads(done.stdout[done.stdout.index("{") :])  # the public package may print before it


def check_times(times: dict, floor_us: float) -> None:
    """Four times that hang together: nothing beats the floor by more than what L2 may hold, cold is not faster than warm
    by more than noise, a launch in a row or in a graph does not take much longer than one alone."""
    us = {mode: found["us"] for mode, found in times.items()}
    assert set(us) == {"kernel", "cold", "in_a_row", "graph"} and all(value > 0 for value in us.values())
    assert us["cold"] > 0.95 * us["kernel"] and us["cold"] > 0.97 * floor_us
    assert us["in_a_row"] < 1.2 * us["cold"] + 10 and us["graph"] < 1.2 * us["cold"] + 10


def test_ours_alone() -> None:
    document = bench("--shape", "flash", "--tokens", "8,300", "--table", "none")
    assert len(document["rows"]) == 2
    for row in document["rows"]:
        check_times(row["times"], row["floor_us"])
        assert row["low_us"] <= row["kernel_us"] <= row["high_us"] and 0 < row["overhead_us"] < 20
        assert len(row["times"]["kernel"]["times_us"]) == 12


def test_against_separate_kernels() -> None:
    """At one token a chain of launches cannot keep up with one kernel."""
    (row,) = bench("--shape", "flash", "--tokens", "1", "--against", "unfused", "--table", "none")["rows"]
    (rival,) = row["rivals"]
    assert rival["ratios"]["graph"]["median"] < 1 and 0 < rival["difference"][0] < 0.12


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="not run: the public package is not installed")
def test_against_the_public_package() -> None:
    document = bench("--rows", "peer", "--shape", "flash", "--tokens", "8,256", "--against", "peer,unfused-peer")
    assert document["failed"] == [] and document["against"]["peer"]["rows"] == 2
    for row in document["rows"]:
        peer = next(rival for rival in row["rivals"] if rival["name"] == "peer")
        check_times(peer["times"], row["floor_us"])
        assert 0.01 < peer["difference"][0] < 0.06, "it rounds elsewhere, and that is all"
        assert peer["to_reach"] is not None or peer["version"] not in ("0.1.4", "0.2.5")


def test_the_protocols_cost() -> None:
    document = bench("--protocol-cost", "2", "--shape", "512x512x16x2", "--tokens", "256")
    (cost,) = document["costs"]
    assert cost["one"]["us"] > 0 and cost["many"]["us"] > 0 and cost["difference"] <= 0.01
