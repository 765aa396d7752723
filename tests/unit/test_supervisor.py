"""The supervisor against workers that crash, hang, babble and leave children behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import pytest

from megamoe_cli import errors, supervisor
from megamoe_cli.processes import TOKEN, token_pids

FAKE = Path(__file__).with_name("fake_worker.py")


def case(name, do="pass", **options):
    limit = options.pop("timeout_s", None)
    return {"id": name, "options": {"do": do, **options}, "repro": f"megamoe test --only {name}",
            **({"timeout_s": limit} if limit else {})}


@pytest.fixture
def go(tmp_path, monkeypatch):
    """Runs cases on the fake worker; afterwards nothing that any of them started may be alive."""
    pids = tmp_path / "pids"
    pids.touch()
    mark = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, mark)  # tells this test's processes from those of others that run now

    def run(cases, timeout_s=20.0, start="", **kwargs):
        kwargs.setdefault("start_timeout_s", 20.0)
        return supervisor.run_cases(
            cases, backend="fake", ranks=1, timeout_s=timeout_s, worker_command=[sys.executable, str(FAKE)],
            log_dir=tmp_path / "logs", env={"FAKE_PIDS": str(pids), "FAKE_START": start}, **kwargs)

    run.pids = lambda: [int(x) for x in pids.read_text().split()]
    yield run
    left = [p for p in run.pids() if alive(p)]
    assert not left, f"left behind: {left}"
    assert token_pids(mark) == [], "a process with our token is alive"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]


def statuses(results):
    return [(r.id, r.status) for r in results]


def test_all_pass_on_one_worker_and_results_come_at_once(go):
    seen = []
    results = go([case("a"), case("b"), case("c", status="fail")], on_result=lambda r: seen.append((r.id, time.time())))
    assert statuses(results) == [("a", "pass"), ("b", "pass"), ("c", "fail")]
    assert [s[0] for s in seen] == ["a", "b", "c"]
    assert len({r.metrics["pid"] for r in results}) == 1
    assert results.interrupted is None and results[0].repro == "megamoe test --only a"


def test_a_crash_costs_one_case(go):
    results = go([case("a"), case("b", "crash"), case("c")])
    assert statuses(results) == [("a", "pass"), ("b", "crash"), ("c", "pass")]
    assert "SIGSEGV" in results[1].message and results[1].where == "fake(1)"
    assert results[1].stderr[-1] == "case b: crash" and "case a" not in "".join(results[1].stderr)
    assert results[1].repro == "megamoe test --only b"
    assert results[0].metrics["pid"] != results[2].metrics["pid"]


def test_a_plain_exit_keeps_the_last_words(go):
    (result,) = go([case("a", "exit")])
    assert result.status == "crash" and "exited with 7" in result.message and result.stderr[-1] == "device lost"


def test_a_hang_is_killed_and_the_rest_goes_on(go):
    began = time.monotonic()
    results = go([case("a", "hang"), case("b")], timeout_s=1.0)
    assert statuses(results) == [("a", "hang"), ("b", "pass")]
    assert "no answer within 1 s" in results[0].message and results[0].exit_code == 124
    assert 0.9 < results[0].seconds < 5 and time.monotonic() - began < 15


def test_a_case_has_its_own_limit(go):
    results = go([case("a", "hang", timeout_s=0.5), case("b", "slow", seconds=1.0)], timeout_s=10)
    assert statuses(results) == [("a", "hang"), ("b", "pass")]


def test_a_worker_that_ignores_sigterm_dies_with_its_child(go):
    results = go([case("a", "stubborn"), case("b")], timeout_s=1.0)
    assert statuses(results) == [("a", "hang"), ("b", "pass")]
    assert len(go.pids()) == 3  # two workers and the child; the fixture checks that all are gone


def test_a_grandchild_in_another_session_is_ended(go):
    assert statuses(go([case("a", "grandchild"), case("b")])) == [("a", "pass"), ("b", "pass")]
    assert len(go.pids()) == 2


def test_a_death_behind_an_open_pipe_is_seen(go):
    began = time.monotonic()
    results = go([case("a", "orphan"), case("b")], timeout_s=60)
    assert statuses(results) == [("a", "crash"), ("b", "pass")] and time.monotonic() - began < 20


def test_garbage_is_logged_not_believed(go):
    results = go([case("a", "garbage"), case("b")])
    assert statuses(results) == [("a", "pass"), ("b", "pass")]
    log = results.logs[0].read_text()
    assert "[stdout] WARNING: something printed" in log and "excellent" in log


def test_endless_garbage_is_a_hang(go):
    results = go([case("a", "babble"), case("b")], timeout_s=1.5)
    assert statuses(results) == [("a", "hang"), ("b", "pass")]


def test_a_line_without_end_is_a_crash(go, monkeypatch):
    monkeypatch.setattr(supervisor.protocol, "MAX_LINE", 1 << 16)
    results = go([case("a", "endless"), case("b", big=1 << 15)])
    assert statuses(results) == [("a", "crash"), ("b", "pass")] and "a line of more than" in results[0].message


def test_a_case_larger_than_the_pipe_arrives(go):
    big = case("a")
    big["options"]["ids"] = list(range(100_000))
    assert statuses(go([big])) == [("a", "pass")]


def test_compile_time_has_a_limit_of_its_own(go):
    stages = []
    cases = [case("a", "compile", seconds=1.5), case("b", "compile", seconds=0.1, run=30)]
    results = go(cases, timeout_s=1.0, build_timeout_s=10, on_stage=lambda *s: stages.append(s))
    assert statuses(results) == [("a", "pass"), ("b", "hang")] and "during run" in results[1].message
    assert stages[:2] == [("a", "compile"), ("a", "run")]
    (result,) = go([case("c", "compile", seconds=30)], timeout_s=20, build_timeout_s=0.7)
    assert result.status == "hang" and "during compile" in result.message


def test_a_worker_that_asks_for_it_is_replaced(go):
    results = go([case("a", "respawn"), case("b")])
    assert statuses(results) == [("a", "fault"), ("b", "pass")] and len(go.pids()) == 2


def test_jobs_run_side_by_side_and_keep_the_order(go):
    began = time.monotonic()
    results = go([case(str(i), "slow", seconds=1.0 - i / 10) for i in range(4)], jobs=4)
    assert statuses(results) == [(str(i), "pass") for i in range(4)]
    assert len({r.metrics["pid"] for r in results}) == 4 and time.monotonic() - began < 3.5


@pytest.mark.parametrize(("start", "error", "text"), [
    ("fatal", errors.EnvironmentUnfit, "no SM90 GPU"),
    ("die", errors.EnvironmentUnfit, "exited with 1: no such device"),
    ("silent", errors.EnvironmentUnfit, "not ready after 0.7 s"),
])
def test_a_worker_that_cannot_start_is_an_error(go, start, error, text):
    limit = {"start_timeout_s": 0.7} if start == "silent" else {}
    with pytest.raises(error, match=text):
        go([case("a"), case("b")], start=start, **limit)


def test_a_worker_that_leaves_after_hello_does_not_loop(go):
    """Whether it is seen before or after it was given a case, it ends: with an error or with crashes."""
    try:
        assert statuses(go([case("a"), case("b")], start="leave")) == [("a", "crash"), ("b", "crash")]
    except errors.EnvironmentUnfit as error:
        assert "does not start" in str(error)
    assert len(go.pids()) <= 4


def test_an_exception_in_a_callback_leaves_nothing(go):
    def broken(_):
        raise RuntimeError("the terminal went away")

    with pytest.raises(RuntimeError, match="terminal"):
        go([case("a", "grandchild"), case("b", "hang")], on_result=broken)


def test_a_pruned_log_still_has_its_tail(go, tmp_path):
    def prune(result):
        for path in (tmp_path / "logs").iterdir():
            path.unlink()

    results = go([case("a"), case("b", "exit")], on_result=prune)
    assert results[1].stderr[-1] == "device lost"


def test_no_cases_no_worker(go):
    assert go([]) == [] and go.pids() == []


def test_it_works_off_the_main_thread(go):
    out = []
    thread = threading.Thread(target=lambda: out.extend(go([case("a")])))
    thread.start()
    thread.join(30)
    assert statuses(out) == [("a", "pass")]


PARENT = textwrap.dedent("""
    import sys
    from pathlib import Path
    from megamoe_cli import supervisor
    cases = [{"id": str(i), "options": {"do": "slow", "seconds": float(sys.argv[3])}} for i in range(4)]
    got = supervisor.run_cases(cases, backend="fake", ranks=1, timeout_s=60, worker_command=[sys.executable, sys.argv[1]],
                               log_dir=Path(sys.argv[2]), on_result=lambda r: print("result", r.id, flush=True),
                               on_stage=None, jobs=1)
    print("end", [r.id for r in got], got.interrupted, flush=True)
""")


def start_parent(tmp_path, seconds):
    env = dict(os.environ, FAKE_PIDS=str(tmp_path / "pids"), PYTHONPATH=str(Path(supervisor.__file__).parents[1]))
    return subprocess.Popen([sys.executable, "-c", PARENT, str(FAKE), str(tmp_path / "logs"), str(seconds)], env=env,
                            stdout=subprocess.PIPE, text=True, start_new_session=True)


def worker_pids(tmp_path, count=1):
    path = tmp_path / "pids"
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if path.exists() and len(path.read_text().split()) >= count:
            return [int(x) for x in path.read_text().split()]
        time.sleep(0.05)
    raise AssertionError("the worker did not start")


def gone(pids, seconds=5.0):
    until = time.monotonic() + seconds
    while any(alive(p) for p in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_once_finishes_the_current_case(tmp_path):
    parent = start_parent(tmp_path, 1.0)
    pids = worker_pids(tmp_path)
    time.sleep(0.3)
    os.kill(parent.pid, signal.SIGINT)
    out, _ = parent.communicate(timeout=20)
    assert out.splitlines() == ["result 0", f"end ['0'] {int(signal.SIGINT)}"] and gone(pids)


def test_ctrl_c_twice_kills(tmp_path):
    parent = start_parent(tmp_path, 100.0)
    pids = worker_pids(tmp_path)
    time.sleep(0.3)
    os.kill(parent.pid, signal.SIGINT)
    time.sleep(0.6)
    assert parent.poll() is None, "one Ctrl-C waits for the case"
    os.kill(parent.pid, signal.SIGINT)
    out, _ = parent.communicate(timeout=10)
    assert out.splitlines() == [f"end [] {int(signal.SIGINT)}"] and gone(pids)


def test_sigterm_kills_at_once(tmp_path):
    parent = start_parent(tmp_path, 100.0)
    pids = worker_pids(tmp_path)
    time.sleep(0.3)
    os.kill(parent.pid, signal.SIGTERM)
    out, _ = parent.communicate(timeout=10)
    assert out.splitlines() == [f"end [] {int(signal.SIGTERM)}"] and gone(pids)


def test_imports_neither_torch_nor_cupy():
    code = "import sys, megamoe_cli.supervisor; print([m for m in ('torch', 'cupy', 'numpy') if m in sys.modules])"
    env = dict(os.environ, PYTHONPATH=str(Path(supervisor.__file__).parents[1]))
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("stage", ["check", "inputs"])
def test_slow_work_of_the_host_is_no_hang_of_the_kernel(go, stage):
    quick, slow = case("a", "stage", stage=stage, seconds=1.0), case("b", "stage", stage=stage, seconds=60)
    results = go([quick], timeout_s=0.5, host_timeout_s=30.0)
    assert statuses(results) == [("a", "pass")], "it has a limit of its own"
    (result,) = go([slow], timeout_s=0.5, host_timeout_s=1.0)
    assert (result.status, result.exit_code) == ("error", 124)
    assert f"within 1 s during {stage}" in result.message and "raise --timeout above 1" in result.message
    (result,) = go([case("c", "stage", stage="run", seconds=60)], timeout_s=0.5, host_timeout_s=30.0)
    assert result.status == "hang"


def test_the_first_ctrl_c_says_what_happens_now(go, capfd):
    said = []

    def stage(_id, _name):
        if not said:
            os.kill(os.getpid(), signal.SIGINT)

    results = go([case("a", "stage", stage="run", seconds=1.0), case("b")], on_stage=stage, on_interrupt=said.append)
    assert statuses(results) == [("a", "pass")] and results.interrupted == signal.SIGINT
    assert said == ["interrupted: finishing running cases; Ctrl-C again to stop at once"]
