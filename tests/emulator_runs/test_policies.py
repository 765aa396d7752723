"""Every policy on the emulator: a subset of all legal combinations that holds every pair of choices, through the command
line; scales that rescaling may not divide by; and the same bits from every grid, cluster and order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megamoe_cli import combinations, policy_plan
from megamoe_cli.judging import agreement
from tests.proving import describe, plan, prove, run

ROOT = Path(__file__).resolve().parents[2]


def megamoe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megamoe_cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=170,
                          env=os.environ | {"NO_COLOR": "1"})  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_covering_combinations(tmp_path: Path) -> None:
    """All of them: ``make policies``."""
    done = megamoe("test", "--policy", "covering", "--phase", "combine", "--ranks", "1,2", "--backend", "emulator", "--json",
                   "--results-dir", str(tmp_path))  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    document, found = json.loads(done.stdout), combinations.enumerate_all()
    said = document["combinations"]
    assert said["total"] == found.total and said["legal"] + sum(said["refused"].values()) == said["total"]
    assert said["chosen"] * 2 == said["cases"] == len(document["results"]) and "legal; refused: " in done.stderr
    assert all(result["status"] == "pass" and result["where"].startswith("emulator(") for result in document["results"])


def test_l1_and_l2_of_one_combination_of_each_policy() -> None:
    cases = [case for policy in ("fused", "serial_n", "wide_n", "mma_sync")
             for case in policy_plan.plan(f"{policy},covering", ranks=[2], phases=["l1", "l2"], backend="emulator").cases[:2]]
    bad = [r for r in run(cases, jobs=2) if not r.passed]
    assert not bad, "\n" + "\n".join(describe(r) for r in bad)


def test_bad_requests_are_one_line() -> None:
    for arguments, words in ((["--policy", "wide"], "wide_n"), (["--policy", "all", "--shape", "tiny"], "--shape"), (["--policy", "all", "--sanitize"], "--sanitize")):
        done = megamoe("test", *arguments, "-n")
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") <= 2, done.stderr


# Scales that are zero, tiny, huge, NaN or infinite in a block of weights or a group of a token: as the oracle says, and
# not a bit of any other row changes (tests/data/small_inputs.yaml).
@pytest.mark.parametrize("config", [
    "block_m=64,promotion=rescale", "block_m=32,policy=mma_sync,promotion=rescale", "block_m=64,policy=serial_n",
    pytest.param("block_m=16,math_threads=128,policy=wide_n,promotion=rescale", marks=pytest.mark.long),
    pytest.param("block_m=32,math_threads=128,policy=serial_n,promotion=rescale,block_n=128", marks=pytest.mark.long),
])  # fmt: skip
def test_scales_that_may_not_be_divided_by(config: str) -> None:
    prove("emulator", named=["S26", "S27"], phase="combine", config=[config], jobs=2)


# A tile and a promotion fix the bits: neither the number of CTAs, nor pairs, nor the order of tiles, nor the policy that
# cuts the tile in the same way may change them.
SAME: dict[str, list[dict[str, Any]]] = {
    "block_m=64": [{"ctas": 1}, {"ctas": 4}, {"cluster": 2, "ctas": 4}, {"order": "wave", "lag": 1, "ctas": 2}, {"lag": 1000},
                   {"policy": "serial_n", "lag": 3}, {"frontend": "standard"}, {"tail": 1, "ctas": 3}, {"tail": 1, "cluster": 2, "ctas": 4}],  # fmt: skip
    "block_m=32,promotion=rescale": [{"ctas": 1}, {"ctas": 3}, {"cluster": 2, "ctas": 2}, {"order": "wave", "lag": 0, "unit_blocks": 1},
                                     {"policy": "serial_n", "lag": 2}],  # fmt: skip
    "block_m=128,block_n=128": [{"ctas": 1}, {"ctas": 5}, {"cluster": 2, "ctas": 4}, {"order": "wave", "lag": 2}, {"lag": 0, "unit_blocks": 1}],
    "block_m=16,math_threads=128,policy=wide_n,promotion=rescale": [{"ctas": 1}, {"ctas": 4}, {"cluster": 2, "ctas": 4}, {"order": "wave", "lag": 1}],
}  # fmt: skip


@pytest.mark.parametrize("config", SAME)
def test_the_same_bits_from_every_grid_cluster_and_order(config: str, tmp_path: Path) -> None:
    cases = []
    for number, change in enumerate(SAME[config]):
        words = [config, "stages=2", *(f"{key}={value}" for key, value in change.items() if key != "ctas")]
        options = {"save": str(tmp_path / str(number)), "ctas": change.get("ctas", 2), "schedule": ("fifo", "random")[number % 2]}
        (case,) = plan("emulator", ranks=2, phase="combine", shape="384x256x6x2", tokens="uneven:70", repeat=1, config=words, options=options)
        cases.append(replace(case, id=f"{number}-{case.id}"))
    bad = [r for r in run(cases, jobs=2) if not r.passed]
    assert not bad, "\n" + "\n".join(describe(r) for r in bad)
    files = [path for number in range(len(cases)) for path in sorted((tmp_path / str(number)).glob("*.pt"))]
    assert len(files) == len(cases)
    for change, other in zip(SAME[config][1:], files[1:]):
        shares = agreement(files[0], other)
        assert set(shares.values()) == {1.0} and "y" in shares, (change, shares)
