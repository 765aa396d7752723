"""``megamoe bench --ranks`` through the real entry point: virtual ranks on any SM90 GPU, a GPU per rank where there are several."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.all_gpus, pytest.mark.timeout(600)]


def gpus() -> int:
    from megamoe_cli.backends.driver import visible_gpus

    return sum(gpu.is_sm90 for gpu in visible_gpus())


def bench(*words: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "megamoe_cli", "bench", "--json", "--ranks", "2", "--table", "none", *words], capture_output=True,
                          text=True, timeout=550)  # fmt: skip
    assert done.returncode == code, done.stderr[-3000:] + done.stdout[-1000:]
    return json.loads(done.stdout[done.stdout.index("{") :])


def check_row(row: dict[str, Any]) -> None:
    """Times that hang together: no rank is slower than the slowest, none beats what must be read, in a row is not slower than one."""
    assert len(row["per_rank_us"]) == 2 and max(row["per_rank_us"]) <= row["high_us"] and row["low_us"] <= row["kernel_us"] <= row["high_us"]
    assert row["kernel_us"] > 0.7 * row["floor_us"] and 0 < row["back_to_back_us"] < 1.3 * row["kernel_us"] + 20
    assert row["worst_relative"] < 0.05 and len(row["times"]["kernel"]["times_us"]) == 12


@pytest.mark.parametrize("backend", ["virtual", "nvlink"])
def test_two_ranks(backend: str) -> None:
    if backend == "nvlink" and gpus() < 2:
        pytest.skip(f"{gpus()} SM90 GPU here")
    document = bench("--backend", backend, "--shape", "flash", "--tokens", "8,300", "--against", "config:block_m=64")
    assert len(document["rows"]) == 2 and document["failed"] == [] and document["where"].startswith(f"{backend}(2")
    for row in document["rows"]:
        check_row(row)
        assert row["rivals"][0]["ratios"]["kernel"]["pairs"] == 12
        assert row["link"]["is_link"] == (backend == "nvlink") and (row["graph_us"] is None) == (backend == "virtual")
        if backend == "nvlink":
            # Half of the (token, slot) entries leave the rank; no rate beats the link's.
            there = row["tokens"] * 6 / 2 * (4096 + 4096 // 128 * 4 + 8 + 2 * 4096)
            assert 0.5 * there < row["link"]["in_bytes"] < 1.5 * there and 0 < row["link"]["in_gb_s"] < 450
            assert 0 < row["graph_us"] < 1.3 * row["kernel_us"] + 20


@pytest.mark.skipif(importlib.util.find_spec("deep_gemm") is None, reason="not run: the public package is not installed")
def test_two_ranks_against_the_public_package() -> None:
    if gpus() < 2:
        pytest.skip(f"{gpus()} SM90 GPU here")
    (row,) = bench("--backend", "nvlink", "--shape", "flash", "--tokens", "128", "--against", "peer")["rows"]
    (rival,) = row["rivals"]
    assert rival["name"] == "peer" and 0.01 < rival["difference"][0] < 0.06 and set(rival["times"]) == {"kernel", "in_a_row", "graph"}
