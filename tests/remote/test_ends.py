"""Ways a run ends early, against a real sshd: the connection, the client, the agent. After each of them nothing of ours runs
on the far side, not even a command that is deaf to signals and hides its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.remote.conftest import STUB, Far, error_of, make_box, record_of_end, runs_in, started, wait_for


def test_a_dropped_connection(lone: Far) -> None:
    client = started(lone)
    lone.box.drop_connections()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3
    assert "connection broke" in error_of(err)
    assert "processes there were ended" in err or "nothing of it is left there" in err
    lone.assert_nothing_left()  # at once: the client has looked


def test_what_was_recorded_before_the_connection_broke_comes_back(lone: Far) -> None:
    client = started(lone, f'mkdir "$MEGAMOE_RESULTS_DIR/r1"; echo "{{}}" > "$MEGAMOE_RESULTS_DIR/r1/results.json"\n{lone.stubborn()}')
    lone.box.drop_connections()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3 and "connection broke" in error_of(err), err
    (folder,) = runs_in(lone)
    assert json.loads((folder / "remote.json").read_text())["end"]["exit"] != 0
    lone.assert_nothing_left()


def test_a_connection_that_breaks_while_files_are_sent(lone: Far) -> None:
    lone.settings["rsync"] = "rsync --rsync-path='kill -9 $PPID; sleep 1; rsync'"
    answer = lone.run(*STUB)
    assert answer.code == 3 and "connection broke" in error_of(answer.err), answer.err
    lone.assert_nothing_left(within=10)


def test_a_dropped_connection_of_a_box_that_stays_away(tmp_path: Path) -> None:
    """Nobody can reconnect to clean up: the far side does it alone."""
    box = make_box(tmp_path / "box")
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    client = started(far)
    box.stop()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3 and "the far side ends the job by itself" in err
    far.assert_nothing_left(within=15)
    assert record_of_end(far)["reason"] == "the client is gone"


def test_a_killed_client(lone: Far) -> None:
    """SIGKILL: no handler of ours runs, here or there; its ssh notices, and so does the far side."""
    client = started(lone)
    client.kill()
    client.communicate(timeout=60)
    lone.assert_nothing_left(within=15)
    assert record_of_end(lone)["reason"] == "the client is gone"


def test_a_terminated_client(lone: Far) -> None:
    client = started(lone)
    client.terminate()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 143, err
    lone.assert_nothing_left()


def test_a_sleeping_laptop(lone: Far) -> None:
    """The connection stays open and nobody is at its other end."""
    lone.settings["silence"] = 2
    client = started(lone)
    os.killpg(client.pid, signal.SIGSTOP)
    try:
        lone.assert_nothing_left(within=20, but=b"ssh -F")  # that one is here, and stopped
        assert record_of_end(lone)["reason"] == "no sign of life from the client for 2 s"
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate(timeout=20)


def test_a_killed_agent(lone: Far) -> None:
    """The guard does what the agent cannot do any more."""
    client = started(lone)
    (path,) = (lone.state / "jobs").glob("*/job.json")
    os.kill(json.loads(path.read_text())["agent"], signal.SIGKILL)
    client.communicate(timeout=60)
    assert client.returncode not in (0, 1)
    lone.assert_nothing_left()
    assert record_of_end(lone)["reason"] == "the agent was killed"


def test_a_killed_guard(lone: Far) -> None:
    """The other way round."""
    client = started(lone)
    (path,) = (lone.state / "jobs").glob("*/job.json")
    agent = json.loads(path.read_text())["agent"]
    os.kill(int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    client.communicate(timeout=60)
    assert client.returncode not in (0, 1)
    lone.assert_nothing_left(within=15)
    assert record_of_end(lone)["reason"] == "signal SIGTERM"


def test_guard_and_agent_killed_in_one_blow(lone: Far) -> None:
    """As the kernel does when memory is short. The command ends with them; what hid from it is found by the next run."""
    client = started(lone, f'exec >/dev/null 2>&1\nsetsid sleep {lone.nap}1 &\ntouch "$UP"\nsleep {lone.nap}2 & sleep {lone.nap}3')
    (path,) = (lone.state / "jobs").glob("*/job.json")
    agent = json.loads(path.read_text())["agent"]
    guard = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGSTOP)  # so that it cannot do anything for its child any more
    os.kill(agent, signal.SIGKILL)
    os.kill(guard, signal.SIGKILL)
    client.communicate(timeout=60)
    assert client.returncode not in (0, 1)
    wait_for(lambda: not any(b"far python -m" in line for line in lone.command_lines()))
    lone.fake_python("echo ran")
    again = lone.run(*STUB)
    assert again.out == "ran\n", again.err
    lone.assert_nothing_left()


def test_ctrl_c_while_files_are_sent(lone: Far) -> None:
    """Neither side of the copying stays."""
    up = lone.home / "up"
    lone.settings["rsync"] = f"rsync --rsync-path='touch {up}; exec sh -c \"cat > /dev/null; exit\" {lone.nap}'"
    client = lone.start(*STUB)
    wait_for(up.exists)
    assert lone.processes()
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=60)
    assert client.returncode == 130
    lone.assert_nothing_left(within=10)


def test_ctrl_c_once_lets_the_command_finish(lone: Far) -> None:
    client = started(lone, f'trap "echo finishing; exit 130" INT\ntouch "$UP"\nsleep {lone.nap}1 & sleep {lone.nap}2 & sleep {lone.nap}3 & wait')
    client.send_signal(signal.SIGINT)
    out, err = client.communicate(timeout=60)
    assert (client.returncode, out) == (130, "finishing\n"), err
    lone.assert_nothing_left()


def test_ctrl_c_twice_ends_it(lone: Far) -> None:
    client = started(lone)
    client.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.5)
    assert len(lone.processes()) >= 4, "once does not end it"
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 130, err
    assert err.splitlines()[-3:] == ["interrupt passed on; once more ends the job", "ending the job",
                                     "interrupted: the job on far was ended; nothing of it is left there"]
    assert record_of_end(lone)["reason"] == "stopped by the client"
    lone.assert_nothing_left()
