"""The multi-process control plane with real processes: gloo, shared memory as peer memory, injected failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megamoe_cli import rank_group

FAKE = Path(__file__).with_name("fake_rank.py")
ROOT = Path(rank_group.__file__).parents[1]
# The group's parent runs in a process of its own, as it does in the product: it owns signals and children.
PARENT = """
import sys
from megamoe_cli import rank_group
ranks, what, bad = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.exit(rank_group.serve(ranks, lambda r, at: [sys.executable, %r, str(r), str(ranks), at, what, bad], out=1))
""" % str(FAKE)


@pytest.fixture
def group(tmp_path):
    """group(ranks, what, bad) -> (exit code, stderr, {rank: its report}, seconds); checks that nobody is left."""
    def start(ranks, what, bad=-1):
        env = dict(os.environ, FAKE_OUT=str(tmp_path / "out"), PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path))
        return subprocess.Popen([sys.executable, "-c", PARENT, str(ranks), what, str(bad)], env=env, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def reports():
        return {int(p.suffix[1:]): json.loads(p.read_text()) for p in tmp_path.glob("out.*") if p.read_text().strip()}

    def run(ranks, what, bad=-1):
        began = time.monotonic()
        process = start(ranks, what, bad)
        _, err = process.communicate(timeout=100)
        return process.returncode, err, reports(), time.monotonic() - began

    run.start, run.reports = start, reports
    run.keeps_folder = False
    yield run
    left = [r["pid"] for r in reports().values() if alive(r["pid"])]
    assert not left, f"rank processes left behind: {left}"
    assert run.keeps_folder or not list(tmp_path.glob("megamoe-ranks-*")), "the run folder was not removed"


def alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


def test_peers_really_write_into_each_others_memory(group):
    code, err, reports, _ = group(3, "exchange")
    assert code == 0, err
    assert [reports[r]["seen"] for r in range(3)] == [[100, 101, 102]] * 3


@pytest.mark.parametrize("step", ["allocate", "map"])
def test_a_failing_step_is_the_same_error_on_all_ranks(group, step):
    code, _, reports, _ = group(3, f"fail:{step}", bad=1)
    assert code == 0 and len(reports) == 3
    for report in reports.values():
        assert report["error"] == f"rank 1: {step} buffer: injected at {step}"
        assert report["type"] == "EnvironmentUnfit" and report["hint"] == "none"


def test_an_unexpected_exception_is_told_to_all(group):
    _, _, reports, _ = group(2, "raise", bad=0)
    assert [r["error"] for r in reports.values()] == ["rank 0: two: ZeroDivisionError: division by zero"] * 2


def test_ranks_out_of_step_notice_and_say_why(group):
    _, _, reports, seconds = group(3, "skip", bad=2)
    for report in reports.values():
        assert "rank 2: outer: bad input" in report["error"] or "cannot go on" in report["error"]
        assert "rank 0: inner, rank 1: inner, rank 2: outer" in report["broken"]
    assert reports[2]["type"] == "UsageError" and reports[2]["rule"] == "some-rule" and seconds < 60


def test_a_second_and_a_third_init_in_one_process(group):
    code, err, reports, _ = group(2, "twice")
    assert code == 0, err
    for rank in range(2):
        assert reports[rank]["first"] == [0, 1] and reports[rank]["second"] == [0, -1]
        assert reports[rank]["seen"] == [100, 101] and reports[rank]["third"] == [0, 1]


def test_another_size_in_one_process_is_refused(group):
    _, _, reports, _ = group(2, "other-size")
    for rank, report in reports.items():
        assert f"already rank {rank} of 2" in report["error"] and report["rule"] == "process-group"


def test_collect_broadcast_and_a_callers_subgroup(group):
    code, err, reports, _ = group(3, "rest")
    assert code == 0, err
    assert reports[0]["collected"] == [0, 10, 20] and reports[1]["collected"] is None
    assert {r["broadcast"] for r in reports.values()} == {"from 2"}
    assert reports[0]["sub"] == [0, 2, [0, 1]] and reports[1]["sub"] == [1, 2, [0, 1]] and "sub" not in reports[2]


def test_a_rank_that_never_comes(group):
    code, err, reports, seconds = group(2, "no-show", bad=1)
    assert "rank 0 could not meet the other 1 rank(s)" in reports[0]["error"] and seconds < 60
    assert code == 1 and "rank(s) 1 did not end" in err


@pytest.mark.parametrize("what", ["die", "stuck"])
def test_a_death_ends_the_whole_group_within_seconds(group, what):
    code, err, reports, seconds = group(3, what, bad=1)
    assert code == 1 and len(reports) == 3
    assert f"rank 1 {'died with SIGKILL' if what == 'die' else 'exited with 9'}" in err
    assert err.count("megamoe: rank") == 1, "only the first cause is named"


def test_death_to_end_takes_less_than_five_seconds(group):
    process = group.start(3, "stuck", bad=-1)
    until = time.monotonic() + 60
    while len(group.reports()) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    began = time.monotonic()
    os.kill(group.reports()[2]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 5 and "rank 2 died with SIGKILL" in err


def test_a_rank_that_does_not_leave_is_ended(group):
    code, err, _, _ = group(2, "linger", bad=1)
    assert code == 1 and "rank(s) 1 did not end within 5 s" in err


def test_when_the_parent_is_killed_the_ranks_die(group):
    process = group.start(2, "stuck", bad=-1)
    until = time.monotonic() + 60
    while len(group.reports()) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    pids = [r["pid"] for r in group.reports().values()]
    group.keeps_folder = True  # nobody is left to remove it
    process.kill()
    process.communicate(timeout=10)
    until = time.monotonic() + 5
    while any(alive(p) for p in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(alive(p) for p in pids)
