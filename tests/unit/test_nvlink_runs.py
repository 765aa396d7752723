"""Whole multi-process runs without a GPU: supervisor -> worker -> rank group -> runner -> NvlinkBackend, where launches
run the model kernel on shared memory. What a rank does wrong, every rank and the user hear."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from megamoe_cli import errors, supervisor
from megamoe_cli.processes import TOKEN, token_pids

FAKE = Path(__file__).with_name("fake_nvlink.py")
ROOT = Path(supervisor.__file__).parents[1]


def case(phase="combine", tokens=(3, 0, 5), **more):
    return {"id": f"{phase}-x", "phase": phase, "shape": [128, 128, 6, 2], "ranks": len(tokens), "tokens": list(tokens),
            "capacity": 128, "routing": "uniform", "clamp": None, "seed": 1, "config": {}, "launches": 2, "timeout_s": 60,
            "options": {}, "repro": "megamoe test ..."} | more


@pytest.fixture
def go(tmp_path, monkeypatch):
    mark = f"megamoe-test-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
    monkeypatch.setenv(TOKEN, mark)  # tells this test's processes from those of others that run now

    def run(cases, fault="", ranks=3, **kwargs):
        env = {"FAKE_FAULT": fault, "FAKE_BLOCKS": mark, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return supervisor.run_cases(cases, backend="nvlink", ranks=ranks, timeout_s=kwargs.pop("timeout_s", 60),
                                    worker_command=[sys.executable, str(FAKE), "--backend", "nvlink", "--ranks", str(ranks)],
                                    log_dir=tmp_path / "logs", env=env, **kwargs)

    run.unlinks = True
    yield run
    assert token_pids(mark) == [], "a rank is left"
    blocks = list(Path("/dev/shm").glob(f"{mark}*"))
    for block in blocks:
        block.unlink(missing_ok=True)
    assert not (blocks and run.unlinks), "shared memory is left"
    assert [p for p in Path("/dev/shm").glob("megamoe-results-*") if not Path("/proc", p.name.split("-")[2]).exists()] == []


def test_phases_pass_on_three_processes_and_rank_0_judges_all(go):
    results = go([case("stub"), case("dispatch"), case("combine", clamp=0.5, routing="masked:0.4"), case("l1")])
    assert [(r.status, r.message) for r in results] == [("pass", "")] * 4
    assert results[2].where == "nvlink(3xmodel)" and "gather" in results[2].stages
    assert "e2e" in results[2].metrics and results[2].metrics["full_bit_equal"]["share"] > 0.5
    assert results[2].metrics["launch_ms"]["ranks"] == {str(rank): [0.25, 0.25] for rank in range(3)}
    assert "NVLink between the ranks' GPUs was not verified" in results[2].metrics["notes"]


def test_named_cases_run_too(go):
    (result,) = go([{"id": "combine-S08", "phase": "combine", "case": "S08", "ranks": 4, "seed": 0, "config": {}, "options": {}}],
                   ranks=4)
    assert result.status == "pass", result.message


def test_bad_input_is_one_usage_error_and_the_group_lives_on(go):
    results = go([case(routing="fixed:0,99"), case(options={"colour": 1}), case()])
    assert [r.status for r in results] == ["error", "error", "pass"]
    assert results[0].exit_code == results[1].exit_code == 2 and "expert id 99" in results[0].message
    assert results[0].message.startswith("rank 0: read the case: ")


@pytest.mark.parametrize(("fault", "status", "text"), [
    ("build:1", "error", "rank 1: build the kernel: no such instruction"),
    ("map:2", "error", "rank 2: map symm0: injected at map"),
    ("host:1", "error", "rank 1 runs on another host than rank 0"),
    ("soft:1", "fault", "rank 1, CTA 0"),
])
def test_one_ranks_failure_is_the_cases(go, fault, status, text):
    """...and the next case gets the same group, or a new one."""
    cases = [case(), case("dispatch")] if fault in ("build:1", "soft:1") else [case()]
    results = go(cases, fault=fault)
    assert [r.status for r in results] == [status] * len(cases)
    assert text in results[0].message, results[0].message
    if status == "fault":
        assert results[0].fault["records"]["1"]["wait"] == "count_flag"


def test_a_trap_on_one_rank_shows_its_record(go):
    go.unlinks = False  # after a device failure nothing is freed; here that leaves the shared memory to its tracker
    (result,) = go([case()], fault="trap:1")
    assert result.status == "fault" and "unspecified launch failure" in result.message
    assert result.fault["records"]["1"]["rank"] == 1


def test_a_hang_on_one_rank_is_its_record_not_silence(go):
    go.unlinks = False
    (result,) = go([case(timeout_s=3.0)], fault="hang:2")
    assert result.status == "hang" and "rank 2 did not finish" in result.message and "waited 5 s" in result.message


def test_a_dying_rank_costs_one_case_and_is_named(go):
    go.unlinks = False
    began = time.monotonic()
    (result,) = go([case()], fault="die:1")
    assert result.status == "crash" and any("rank 1 died with SIGKILL" in line for line in result.stderr)
    assert time.monotonic() - began < 40


def test_a_rank_that_cannot_start_is_said_once(go):
    with pytest.raises(errors.EnvironmentUnfit, match="rank 2: set up this rank: no SM90 GPU") as caught:
        go([case(), case()], fault="gpu:2")
    assert caught.value.hint == "use --backend emulator"


def test_a_slow_rank_is_waited_for(go):
    (result,) = go([case("dispatch")], fault="slow:0")
    assert result.status == "pass"


def test_under_torchrun(tmp_path):
    """Ranks started by torchrun: rank 0 reads --cases and speaks on stdout."""
    import json

    cases = tmp_path / "cases.jsonl"
    cases.write_text(json.dumps(case("dispatch", tokens=(2, 4))) + "\n")
    env = dict(os.environ, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "0",
         "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(FAKE),
         "--backend", "nvlink", "--ranks", "2", "--cases", str(cases)],
        env=env, capture_output=True, text=True, timeout=120)  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    assert [m.get("status") for m in lines if "status" in m] == ["pass"]


