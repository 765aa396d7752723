"""The H200 set: the kernel on one real SM90 GPU, ranks as virtual ranks. ``pytest -m gpu`` runs it all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe_cli.testplan import Case
from tests.proving import describe, plan, prove, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_phase_and_tile_height(ranks: int) -> None:
    """``megamoe test --ranks 1,2,8 --tokens 0,8,48,192 --block-m 32,64,128 --phase all``, one rank count at a time."""
    results = prove("virtual", ranks=ranks, tokens="0,8,48,192", block_m="32,64,128", phase="all")
    assert len(results) == 5 * 4 * 3 and {r.where.split("(")[0] for r in results} == {"virtual"}


def test_small_inputs() -> None:
    assert len(prove("virtual", named=["all"], phase="combine")) >= 12


def test_every_routing_and_the_clamp() -> None:
    prove("virtual", ranks=8, phase="combine", tokens="uneven:130", routing="all", clamp="none,0.5")


@pytest.mark.parametrize("shape", ["flash", "pro", "v3"])
def test_full_size_layers(shape: str) -> None:
    """Uneven token counts up to 512 per rank, power-law routing, clamp on and off. Inputs are made on the GPU; float64
    judges a sample of rows, an independent FP32 reference every row, and float64 on the CPU a few."""
    results = prove("virtual", ranks=8, phase="combine", shape=shape, tokens="uneven:512", routing="powerlaw", clamp="none,10",
                    repeat=3, timeout_s=300)  # fmt: skip
    for result in results:
        assert {"full_rel", "full_bit_equal", "e2e", "e2e_cpu"} <= result.metrics.keys(), result.metrics.keys()


@pytest.mark.parametrize("shape", ["flash", "pro"])
def test_full_size_phases(shape: str) -> None:
    prove("virtual", ranks=8, phase="dispatch,l1,l2", shape=shape, tokens="uneven:192", routing="powerlaw", timeout_s=300)


def test_many_launches_in_a_row_are_repeatable() -> None:
    """Twenty launches with different data in flight at once, each judged, twice over: the same bits."""
    cases = [case.to_dict() for case in plan("virtual", ranks=8, phase="combine", tokens="uneven:64", repeat=20)]
    from megamoe_cli.supervisor import run_cases

    results = run_cases([c | {"id": f"{c['id']}-{n}"} for c in cases for n in range(2)], backend="virtual", ranks=8, timeout_s=120)
    assert [r.message for r in results] == ["", ""]
    assert results[0].metrics["e2e"] == results[1].metrics["e2e"] and results[0].metrics["full_bit_equal"] == results[1].metrics["full_bit_equal"]


def test_a_missing_peer_ends_in_a_readable_fault_and_a_reset_heals_it() -> None:
    """Rank 1 sends its flags to itself; the others give up after their bound and say what they waited for."""
    from megamoe_cli.backends.virtual import open_backend
    from megamoe_cli.buffers import LaunchOptions
    from megamoe_cli.config import KernelConfig
    from megamoe_cli.inputs import make_case
    from megamoe_cli.session import Session
    from megamoe_cli.shapes import Problem, Shape

    problem = Problem.make(Shape(256, 256, 8, 2), 2, 16)
    data = make_case(problem, seed=3)
    with open_backend(2) as backend:
        session = Session(backend, problem, KernelConfig(), "combine", options=LaunchOptions(timeout_ns=300_000_000))
        for rank in range(2):
            session.set_weights(rank, data.weights[rank])
            session.stage(0, rank, data.inputs[rank])
        session.launch(0)
        lost = session.params(0, 1).peer_base
        lost[0] = lost[1]
        broken = session.run(30, snapshot="none", edit={(0, 1): {"peer_base": lost}})
        assert 0 in broken.faults and broken.faults[0].code_name == "wait_timeout"
        assert "rank 0" in broken.faults[0].describe() and "rank 1" in broken.faults[0].describe()
        session.reset()
        session.launch(0)
        healed = session.run(30)
        assert not healed.faults and bool(healed.outputs()[0]["y"][:16].isfinite().all())


def test_too_many_virtual_ranks_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, "-m", "megamoe_cli", "test", "--backend", "virtual", "--ranks", "33"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) <= 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="no host compiler for the emulator")
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_emulator_and_gpu_agree(phase: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    """Same bytes in: dispatch bit for bit; what the tensor cores round differently is stated as a share."""
    from megamoe_cli.judging import agreement

    files = {}
    for backend in ("emulator", "virtual"):
        cases = plan(backend, ranks=4, phase=phase, shape="512x1024x8x2", tokens="24", options={"save": str(tmp_path / backend), "inputs": "cpu"})
        (result,) = run(cases, timeout_s=300)
        assert result.passed, describe(result)
        files[backend] = Path(result.metrics["saved"])
    shares = agreement(files["emulator"], files["virtual"])
    print("bit-equal elements, emulator against GPU:", json.dumps(shares))
    record_property("bit_equal", json.dumps(shares))
    for name in ("rows", "l1_acts", "l1_acts_sf", "l1_topk_weights"):
        assert shares[name] == 1.0, f"{name}: {shares[name]:.4%} equal; dispatch moves bytes and computes nothing"
    if phase == "combine":
        assert shares["y"] > 0.5 and shares["l2_acts"] > 0.9


def under_memcheck(cases: list[Case], ranks: int, folder: Path) -> None:
    """All cases pass in one worker under the vendor's memcheck, which finds nothing."""
    tool = shutil.which("compute-sanitizer") or next(iter(sorted(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")))), None)
    if tool is None:
        pytest.skip("not run: no compute-sanitizer on this machine")
    file = folder / "cases.jsonl"
    file.write_text("".join(json.dumps(case.to_dict() | {"id": f"{n}:{case.id}", "timeout_s": 500}) + "\n" for n, case in enumerate(cases)))
    done = subprocess.run(
        [tool, "--tool", "memcheck", "--report-api-errors", "no",  # cuda-bindings asks the driver for entry points it may lack
         "--error-exitcode", "99", "--target-processes", "all", sys.executable, "-m", "megamoe_cli.worker",
         "--backend", "virtual", "--ranks", str(ranks), "--cases", str(file)], capture_output=True, text=True, timeout=800)  # fmt: skip
    text = done.stdout + done.stderr
    if "ERROR SUMMARY" not in text:
        pytest.skip(f"not run: the tool does not work here: {text.strip().splitlines()[-1] if text.strip() else done.returncode}")
    assert "ERROR SUMMARY: 0 errors" in text and done.returncode == 0, text[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ended = [r for r in results if "status" in r]
    assert len(ended) == len(cases)
    assert [r for r in ended if r["status"] != "pass"] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_compute_sanitizer_memcheck(ranks: int, tmp_path: Path) -> None:
    # Tokens few, waits long: under the tool every access is slow.
    under_memcheck(plan("virtual", ranks=ranks, phase="combine", shape="256x256x4x2", tokens="5", repeat=2, options={"wait_s": 500}), ranks, tmp_path)


def test_the_small_inputs_under_memcheck(tmp_path: Path) -> None:
    """The named small inputs, which the emulator runs race-checked, a worker for each rank count."""
    cases = plan("virtual", named=["all"], phase="combine", options={"wait_s": 500})
    assert len(cases) >= 12
    for ranks in sorted({case.ranks for case in cases}):
        under_memcheck([case for case in cases if case.ranks == ranks], ranks, tmp_path)


def test_the_campaigns_cases_under_memcheck(tmp_path: Path) -> None:
    """The cases by which the campaign's faults are caught, three launches each, pass on the device too."""
    from tests.mutants.cases import REQUESTS

    cases: list[Case] = []
    for name in ("base", "mixed", "overhang", "few", "long", "pair", "narrow", "rescaled", "serial", "warp", "waves"):
        request = {key: value for key, value in REQUESTS[name][1].items() if key != "options"}
        asked = {"ranks": 2, "shape": "256x256x4x2", "config": ["block_m=64", "stages=2"]} | request
        cases += plan("virtual", phase="combine", repeat=3, options={"wait_s": 500}, **asked)
    for ranks in sorted({case.ranks for case in cases}):
        under_memcheck([case for case in cases if case.ranks == ranks], ranks, tmp_path)
