"""Work that outlives the connection: background jobs, and searches in slices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

from tests.remote.conftest import STUB, Far, runs_in, wait_for


def test_background_job(far: Far) -> None:
    """Started, seen, protected from a second run, attached to; its results come back with its exit code."""
    far.settings["gpus"] = "1"
    go = far.home / "go"
    up = far.fake_python(f'echo begun; touch "$UP"; while ! [ -e "{go}" ]; do sleep 0.05; done\n'
                         'mkdir "$MEGAMOE_RESULTS_DIR/r1"; echo \'{"id": "r1"}\' > "$MEGAMOE_RESULTS_DIR/r1/results.json"; echo over; exit 6')
    begun = far.run("--detach", *STUB)
    assert begun.code == 0, begun.err
    job = begun.out.strip()
    wait_for(up.exists)
    status = far.run("status", "--json").json
    assert [(j["job"], j["state"]) for j in status["jobs"]] == [(job, "running")]
    assert os.getpgid(status["jobs"][0]["group"]) == status["jobs"][0]["group"], "the process group of the command"
    assert status["locks"]["gpu1"]["what"].startswith("megamoe test"), "the lock outlives the connection"
    second = far.run(*STUB)
    assert second.code == 3 and f"job {job} of this checkout still runs" in second.err and "remote attach" in second.err
    assert far.run("reap").out.startswith("far: nothing was left"), "it is not a leftover"
    following = far.start("attach")
    wait_for(lambda: any(b" follow " in line for line in far.command_lines()))
    go.touch()
    out, err = following.communicate(timeout=60)
    assert (following.returncode, out) == (6, "begun\nover\n"), err
    assert [p.name for p in runs_in(far)] == ["r1"]
    assert far.run("attach", job).out == "begun\nover\n", "an ended job can be looked at again"


def test_letting_go_of_a_background_job_and_cancelling_it(far: Far) -> None:
    far.fake_python(far.stubborn())
    job = far.run("--detach", *STUB).out.strip()
    following = far.start("attach", job)
    wait_for(lambda: any(b" follow " in line for line in far.command_lines()))
    time.sleep(0.3)
    following.send_signal(signal.SIGINT)
    _, err = following.communicate(timeout=60)
    assert following.returncode == 130 and f"job {job} goes on" in err
    assert far.run("status", "--json").json["jobs"][0]["state"] == "running"
    cancelled = far.run("cancel", job)
    assert cancelled.code == 0 and f"job {job}: " in cancelled.out and "processes ended" in cancelled.out
    far.assert_nothing_left()
    assert far.run("attach", job).code == 143
    assert far.run("attach", "20200101-000000-test-0000").code == 2


def test_a_search_in_slices(far: Far) -> None:
    """Each keeps the limit of one command and continues the run of the one before; results come back once, at the end."""
    up = far.fake_python('echo "${@:3}" >> "$UP"; n=$(wc -l < "$UP"); [ $n -lt 4 ] || exit 0\n'
                         'mkdir -p "$MEGAMOE_RESULTS_DIR/r1"; cp "$UP" "$MEGAMOE_RESULTS_DIR/r1/calls"; [ $n = 2 ] && exit 124; exit 6')
    answer = far.run("tune", "--slices", "--static", "--shape", "tiny")
    assert answer.code == 0, answer.err
    assert up.read_text().splitlines() == ["tune --static --shape tiny --budget 25s", *["tune --resume last --budget 25s"] * 3]
    assert len((far.home / "results" / "r1" / "calls").read_text().splitlines()) == 3, "also when the last slice had nothing to add"
    assert json.loads((far.home / "results" / "r1" / "remote.json").read_text())["end"]["exit"] == 0
    assert far.run("tune", "--slices", "--budget", "3m").code == 2
    assert far.run("tune", "-o", "table.yaml").code == 2


def test_a_search_in_the_background_can_be_continued(far: Far) -> None:
    """Only what the job worked on comes back, each with the story of its own job."""
    old = far.state / "tune-results" / "r0"
    old.mkdir(parents=True)
    (far.path / ".megamoe-remote").touch()
    (old / "summary.json").write_text("{}")
    far.fake_python('mkdir -p "$MEGAMOE_RESULTS_DIR/r1"; echo "${@:3}" >> "$MEGAMOE_RESULTS_DIR/r1/calls"; exit 6')
    assert far.run("tune", "--static", "--shape", "tiny").code == 6, "started, followed, fetched"
    assert far.run("tune", "--resume", "last").code == 6
    assert (far.home / "results" / "r1" / "calls").read_text() == "tune --static --shape tiny\ntune --resume last\n"
    assert [p.name for p in runs_in(far)] == ["r1"]
    steps = [step["what"] for step in json.loads((far.home / "results" / "r1" / "remote.json").read_text())["steps"]]
    assert steps[:2] == ["prepare", "sync"] and "attach" in steps, "how it was sent, too"


def terminal(far: Far) -> tuple[subprocess.Popen, int]:
    """A shell over there in a terminal here: the client and our end of it."""
    ours, theirs = os.openpty()
    shell = subprocess.Popen(far.command("shell"), env={**far.variables(), "TERM": "dumb"}, cwd=far.home, stdin=theirs,
                             stdout=theirs, stderr=theirs, start_new_session=True)  # fmt: skip
    far.clients.append(shell)
    os.close(theirs)
    return shell, ours


def test_a_shell_that_stays_open(far: Far) -> None:
    """Other commands run beside it and do not end it; when its terminal goes, it goes with all that it started."""
    far.settings["env"] = {"MY_SIGN": "here"}
    shell, ours = terminal(far)
    os.write(ours, f"(trap '' HUP; sleep {far.nap}1 >/dev/null 2>&1 &); trap '' HUP; touch \"{far.home}/$MY_SIGN\"\n".encode())
    wait_for((far.home / "here").exists)
    far.fake_python("echo ran")
    answer = far.run(*STUB)
    assert answer.out == "ran\n" and "ended" not in answer.err, answer.err
    (kept,) = (job for job in far.run("status", "--json").json["jobs"] if job["state"] == "running")
    assert kept["interactive"] and kept["processes"] >= 2
    os.killpg(shell.pid, signal.SIGKILL)
    os.close(ours)
    shell.wait(30)
    far.assert_nothing_left(within=15)


def test_a_shell_in_a_terminal(far: Far) -> None:
    """What one leaves running in it is ended with it."""
    shell, ours = terminal(far)
    os.write(ours, f"pwd; (trap '' HUP; sleep {far.nap}1 >/dev/null 2>&1 &); sleep {far.nap}2 >/dev/null 2>&1 & exit\n".encode())
    heard = b""
    while shell.poll() is None:
        try:
            heard += os.read(ours, 4096)
        except OSError:  # the terminal is gone
            break
    os.close(ours)
    assert shell.wait(30) == 0
    assert f"{far.state}/tree".encode() in heard
    far.assert_nothing_left()
