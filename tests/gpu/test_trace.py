"""Where the cycles go, on one real SM90 GPU: the numbers hang together."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def trace(*words: str) -> dict:
    done = subprocess.run([sys.executable, "-m", "megamoe_cli", "trace", "--json", *words], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_loop_alone_costs_more_with_every_part() -> None:
    rows = trace("--loop")["rows"]
    cycles = {row["part"]: row["cycles"] for row in rows}
    assert list(cycles) == ["products", "promotion", "barriers", "copies"]
    assert 1024 <= cycles["products"] < cycles["promotion"] < 3000 and cycles["copies"] < 4000  # 128x256x128 takes 1,024 at least
    assert all(800 < row["mhz"] < 2100 and 200 < row["tflops"] < 2000 for row in rows)


def test_the_parts_of_a_launch_add_up_to_it() -> None:
    (row,) = trace("--shape", "flash", "--tokens", "128")["rows"]
    for who in ("warpgroup 0", "warpgroup 1"):
        part = row[who]
        total = sum(value for name, value in part.items() if name not in ("tiles", "total"))
        assert 0.9 * part["total"] < total <= 1.02 * part["total"]
