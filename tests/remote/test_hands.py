"""What a user, or the machine here, does to a run: Ctrl-C, input, a killed ssh, a client that stops for a while, a closed
terminal. Every end has one clear line and an exit code that says the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megamoe_cli.devlog import journal
from tests.remote.conftest import STUB, Far, error_of, started, wait_for


def ssh_of(client: subprocess.Popen, words: bytes) -> int:
    """The local ssh (or rsync) of a client whose command line has ``words``."""
    def find() -> list[int]:
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                parent = int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1])
                line = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
            if parent == client.pid and words in line:
                found.append(int(entry))
        return found

    return wait_for(find)[0]


def test_a_killed_ssh(lone: Far) -> None:
    """Not ours to be silent about: one line, exit 3, the far side is cleaned over a new connection, the journal says the same."""
    client = started(lone)
    os.kill(ssh_of(client, b"--job="), signal.SIGKILL)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3, err
    assert "ssh on this machine was ended by SIGKILL during run after " in error_of(err)
    assert "processes there were ended" in error_of(err) or "nothing of it is left there" in error_of(err)
    lone.assert_nothing_left()
    line = journal.read(lone.home / "results")[-1]
    assert line["exit_code"] == 3
    codes = {step["what"]: step["exit_code"] for step in line["remote"]["steps"]}
    assert codes["run"] == 137 and codes["reap"] == 0


def test_a_killed_ssh_of_a_command_of_ones_own(lone: Far) -> None:
    client = lone.start("shell", "sleep", lone.nap)
    pid = ssh_of(client, b"--job=")
    wait_for(lambda: any(lone.nap.encode() in line and b"timeout" not in line for line in lone.command_lines()))
    os.kill(pid, signal.SIGKILL)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3 and "was ended by SIGKILL" in error_of(err), err
    lone.assert_nothing_left()


def test_a_killed_ssh_of_somebody_who_only_looks(lone: Far) -> None:
    """The job is not theirs to end."""
    lone.fake_python(lone.stubborn())
    job = lone.run("--detach", *STUB).out.strip()
    client = lone.start("attach", job)
    wait_for(lambda: any(b" follow " in line for line in lone.command_lines()))
    os.kill(ssh_of(client, b"follow"), signal.SIGKILL)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3 and "was ended by SIGKILL during attach" in error_of(err) and f"job {job} goes on there" in error_of(err)
    assert lone.run("cancel", job).code == 0


def test_a_killed_rsync(lone: Far) -> None:
    up = lone.home / "up"
    lone.settings["rsync"] = f"rsync --rsync-path='touch {up}; exec sh -c \"cat > /dev/null; exit\" {lone.nap}'"
    client = lone.start(*STUB)
    wait_for(up.exists)
    os.kill(ssh_of(client, b"--rsync-path"), signal.SIGKILL)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3 and "rsync on this machine was ended by SIGKILL during sync" in error_of(err), err


def test_ctrl_c_in_a_command_of_ones_own(lone: Far) -> None:
    """Something is said at once, and at the end."""
    client = lone.start("shell", "sleep", lone.nap)
    wait_for(lambda: any(line.startswith(b"sleep ") for line in lone.command_lines()))
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 130, err
    assert err.splitlines()[-2:] == ["interrupt passed on; once more ends the job",
                                     "interrupted: the job on far ended; nothing of it is left there"]


def test_time_is_up_in_a_command_of_ones_own(lone: Far) -> None:
    answer = lone.run("--timeout", "12", "shell", "sleep", lone.nap)
    assert answer.code == 124 and error_of(answer.err) == "error: far: the 4.8 s of the command are over", answer.err


def test_a_client_that_was_stopped_and_goes_on(lone: Far) -> None:
    """The far side has ended the job in the meantime: that is said."""
    lone.settings["silence"] = 2
    client = started(lone)
    os.kill(client.pid, signal.SIGSTOP)
    try:
        lone.assert_nothing_left(within=20, but=b"ssh -F")
    finally:
        os.kill(client.pid, signal.SIGCONT)
    _, err = client.communicate(timeout=60)
    assert client.returncode in (137, 143), err
    assert error_of(err) == "error: far: the far side ended the job: no sign of life from the client for 2 s"


@pytest.mark.parametrize("what", ["run", "sync"])
def test_a_closed_terminal(lone: Far, what: str) -> None:
    """SIGHUP: nothing of ours stays here either."""
    if what == "run":
        client = started(lone)
    else:
        up = lone.home / "up"
        lone.settings["rsync"] = f"rsync --rsync-path='touch {up}; exec sh -c \"cat > /dev/null; exit\" {lone.nap}'"
        client = lone.start(*STUB)
        wait_for(up.exists)
    child = ssh_of(client, b"--job=" if what == "run" else b"--rsync-path")
    client.send_signal(signal.SIGHUP)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 143 and err.splitlines()[-1] == "terminated", err
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    lone.assert_nothing_left(within=10)


# ---- input ----


def shell_with(far: Far, data: bytes, *words: str) -> tuple[int, bytes, bytes]:
    client = subprocess.Popen(far.command("shell", *words), env=far.variables(), cwd=far.home, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    far.clients.append(client)
    out, err = client.communicate(data, timeout=100)
    return client.returncode, out, err


def test_input_reaches_a_command_of_ones_own(far: Far) -> None:
    """Bytes of any kind, more than any buffer holds, unchanged."""
    data = bytes(range(256)) * 4096 + b"no newline at the end"
    code, out, err = shell_with(far, data, "cat")
    assert (code, out == data, err.count(b"input")) == (0, True, 0), err


def test_a_command_that_does_not_read_its_input(far: Far) -> None:
    code, out, err = shell_with(far, b"x" * 3_000_000, "sh", "-c", "exec <&-; sleep 0.5; echo over; exit 7")
    assert (code, out) == (7, b"over\n"), err


def test_without_input_there_is_none(far: Far) -> None:
    assert far.run("shell", "cat").out == "", "/dev/null here is /dev/null there"


def test_an_interrupt_gets_past_input_that_nobody_reads(lone: Far) -> None:
    client = subprocess.Popen(lone.command("shell", "sleep", lone.nap), env=lone.variables(), cwd=lone.home, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    lone.clients.append(client)
    assert client.stdin is not None
    client.stdin.write(b"x" * 50_000)
    client.stdin.flush()
    wait_for(lambda: any(line.startswith(b"sleep ") for line in lone.command_lines()))
    time.sleep(0.5)
    client.send_signal(signal.SIGINT)
    client.wait(60)
    assert client.returncode == 130
    client.communicate()


# ---- variables ----


def test_values_of_variables_are_seen_by_nobody_else(lone: Far) -> None:
    """Not in a command line here or there, not in what -n prints, not in a record; the file that carried them is gone."""
    secret = "s3cret-%s" % lone.nap
    lone.settings["env"] = {"MY_TOKEN": secret}
    go = lone.home / "go"
    up = lone.fake_python(f'echo "$MY_TOKEN $OTHER" > "$UP.part"; mv "$UP.part" "$UP"; while ! [ -e "{go}" ]; do sleep 0.05; done; mkdir '
                          '"$MEGAMOE_RESULTS_DIR/r1"; echo \'{"id": "r1"}\' > "$MEGAMOE_RESULTS_DIR/r1/results.json"')
    plan = lone.run("-n", *STUB)
    assert plan.code == 0 and secret not in plan.out and "--private=MY_TOKEN" in plan.out and "/private/" in plan.out
    assert secret not in lone.run("-n", "shell", "true").out
    client = lone.start("--env", f"OTHER={secret}2", *STUB)
    wait_for(up.exists)
    assert up.read_text() == f"{secret} {secret}2\n"
    here = b"\0".join(b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) for pid in lone.processes())
    assert b"--job=" in here and secret.encode() not in here
    assert list((lone.state / "private").iterdir()) == [], "read and removed"
    assert oct((lone.state / "private").stat().st_mode)[-3:] == "700"
    go.touch()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 0, err
    kept = [p for folder in (lone.home / "results", lone.state / "jobs") for p in folder.rglob("*") if p.is_file()]
    assert any(p.name == "remote.json" for p in kept) and any(p.name == "journal.jsonl" for p in kept)
    assert [p for p in kept if secret.encode() in p.read_bytes()] == []
    assert "OTHER=***" in journal.read(lone.home / "results")[-1]["command"]


def test_variables_travel_in_a_file_of_mode_0600(lone: Far) -> None:
    lone.settings["env"] = {"MY_TOKEN": "x y"}
    lone.settings["host_python"] = str(lone.home / "slow python")  # the lock: it stands before the agent
    (lone.home / "slow python").write_text(f'#!/bin/sh\nstat -c %a "{lone.state}"/private/*.json > "{lone.home}/modes"\nexec python3 "$@"\n')
    (lone.home / "slow python").chmod(0o755)
    answer = lone.run("shell", "sh", "-c", "echo $MY_TOKEN")
    assert (answer.code, answer.out) == (0, "x y\n"), answer.err
    assert (lone.home / "modes").read_text() == "600\n"


def test_variables_of_a_background_job(far: Far) -> None:
    far.settings["env"] = {"MY_TOKEN": "x y"}
    up = far.fake_python('echo "$MY_TOKEN" > "$UP"')
    assert far.run("--detach", *STUB).code == 0
    wait_for(lambda: up.exists() and up.read_text())
    assert up.read_text() == "x y\n"
    assert json.loads(far.run("status", "--json").out)["jobs"][0]["job"]
