"""``megamoe test --sanitize`` and ``megamoe fuzz`` through the command line, on the kernel as it is and on one with a
fault switched on: what is reported, with what seed, and how small it gets."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe_cli.seed_campaign import LEAST_PER_CELL, policies
from tests.mutants.campaign import patched_kernels
from tests.mutants.cases import campaign_case

ROOT = Path(__file__).resolve().parents[2]


def megamoe(tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGAMOE_RESULTS_DIR": str(tmp_path / "results"), **environ}
    return subprocess.run([sys.executable, "-m", "megamoe_cli", *words], capture_output=True, text=True, env=env, timeout=170)


@pytest.mark.slow
def test_the_kernel_is_clean_under_mixed_schedules(tmp_path: Path) -> None:
    done = megamoe(tmp_path, "test", "--sanitize", "--phase", "dispatch,combine", "--seeds", "4", "--config", "block_m=64,stages=2", "--json", "-j", "2")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    commands = [result["repro"] for result in json.loads(done.stdout)["results"]]
    assert len(commands) == 8 and all("--ranks 2 " in each and " --sanitize " in each for each in commands)
    for turn in ("random --completion lazy", "pct --completion lazy", "random --completion random", "pct --completion random"):
        assert sum(f"--schedule {turn}" in each for each in commands) == 2


@pytest.mark.slow
def test_a_share_of_the_seed_campaign(tmp_path: Path) -> None:
    """``make seeds`` is 200; here the last phase under every policy, eight seeds each."""
    count = LEAST_PER_CELL * len(policies())
    done = megamoe(tmp_path, "test", "--sanitize", "--campaign", str(count), "--phase", "combine", "-q", "-j", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    assert f"{count} passed, 0 failed" in done.stdout


@pytest.mark.slow
def test_a_fault_is_reported_in_full_and_made_small(tmp_path: Path) -> None:
    """M401: rows are published without release. No value is wrong; the report must say who, where, what and which seed."""
    faulty = {"MEGAMOE_KERNELS_DIR": str(patched_kernels())}
    words = shlex.split(campaign_case("base", 3, mutant=401).repro().partition("megamoe_cli ")[2])
    done = megamoe(tmp_path, *words, "--ranks", "2", "-j", "2", **faulty)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    report = next(line for line in done.stdout.splitlines() if "emulator_race" in line)
    assert "kernels/roles/load_acts.cuh:" in report and "kernels/roles/dispatch_pull.cuh:" in report, "the places of both accesses"
    assert "(tma 0)" in report and "(dispatch " in report, "the roles of both"
    assert "rank " in report and "CTA " in report and "(seed 3)" in report
    assert any(region in report for region in ("l1_acts of rank", "l1_acts_sf of rank", "l1_topk_weights of rank")), report
    (small,) = [line for line in done.stdout.splitlines() if line.startswith("  smallest: ")]
    # Nothing is left of the case but what the fault needs: a row, and the warps of one CTA.
    assert "--ranks 1 --phase combine --shape 128x128x1x1 --tokens 1 " in small and "--repeat 1 " in small and "ctas=1" in small
    again = megamoe(tmp_path, *shlex.split(small.partition("megamoe_cli ")[2]), "--no-shrink", **faulty)
    assert again.returncode == 1 and "emulator_race" in again.stdout
    clean = megamoe(tmp_path, *shlex.split(small.partition("megamoe_cli ")[2].replace("--option mutant=401", "")), **faulty)
    assert clean.returncode == 0, "the twin of the smallest case passes"


@pytest.mark.slow
def test_the_fuzz_corpus_and_one_group_of_random_cases(tmp_path: Path) -> None:
    done = megamoe(tmp_path, "fuzz", "--minutes", "0", "--json", "-j", "2")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout)
    lines = [line for line in (ROOT / "tests" / "data" / "fuzz_corpus.jsonl").read_text().splitlines() if line.strip()]
    assert answer["passed"] == len(lines) and answer["failed"] == 0


def test_fuzz_keeps_what_fails_and_refuses_a_broken_corpus(tmp_path: Path) -> None:
    broken = tmp_path / "corpus.jsonl"
    broken.write_text('{"case": 1}\n')
    done = megamoe(tmp_path, "fuzz", "--minutes", "0", "--corpus", str(broken))
    assert done.returncode == 2 and "corpus.jsonl line 1 is no case" in done.stderr
    assert megamoe(tmp_path, "fuzz", "--minutes", "0", "--no-corpus").returncode == 5
    assert megamoe(tmp_path, "fuzz", "--corpus", str(tmp_path / "no" / "where")).returncode == 2
