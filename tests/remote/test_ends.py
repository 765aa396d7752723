"""Ways a run ends early, against a real sshd: the connection, the client, the agent. After each of them nothing of ours runs
on the far side, not even a command that is deaf to signals and hides its children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.remote.conftest import Far, error_of, make_box, record_of_end, started


def test_a_dropped_connection(far: Far) -> None:
    client = started(far)
    far.box.drop_connections()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 3
    assert "connection broke" in error_of(err)
    assert "processes there were ended" in err or "nothing of it is left there" in err
    far.assert_nothing_left()  # at once: the client has looked


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


def test_a_killed_client(far: Far) -> None:
    """SIGKILL: no handler of ours runs, here or there; its ssh notices, and so does the far side."""
    client = started(far)
    client.kill()
    client.communicate(timeout=60)
    far.assert_nothing_left(within=15)
    assert record_of_end(far)["reason"] == "the client is gone"


def test_a_terminated_client(far: Far) -> None:
    client = started(far)
    client.terminate()
    _, err = client.communicate(timeout=60)
    assert client.returncode == 143, err
    far.assert_nothing_left()


def test_a_sleeping_laptop(far: Far) -> None:
    """The connection stays open and nobody is at its other end."""
    far.settings["silence"] = 2
    client = started(far)
    os.killpg(client.pid, signal.SIGSTOP)
    try:
        far.assert_nothing_left(within=20, but=b"ssh -F")  # that one is here, and stopped
        assert record_of_end(far)["reason"] == "no sign of life from the client for 2 s"
    finally:
        os.killpg(client.pid, signal.SIGKILL)
        client.communicate(timeout=20)


def test_a_killed_agent(far: Far) -> None:
    """The guard does what the agent cannot do any more."""
    client = started(far)
    (path,) = (far.state / "jobs").glob("*/job.json")
    os.kill(json.loads(path.read_text())["agent"], signal.SIGKILL)
    client.communicate(timeout=60)
    assert client.returncode not in (0, 1)
    far.assert_nothing_left()
    assert record_of_end(far)["reason"] == "the agent was killed"


def test_a_killed_guard(far: Far) -> None:
    """The other way round."""
    client = started(far)
    (path,) = (far.state / "jobs").glob("*/job.json")
    agent = json.loads(path.read_text())["agent"]
    os.kill(int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    client.communicate(timeout=60)
    assert client.returncode not in (0, 1)
    far.assert_nothing_left(within=15)
    assert record_of_end(far)["reason"] == "signal SIGTERM"


def test_ctrl_c_once_lets_the_command_finish(far: Far) -> None:
    client = started(far, f'trap "echo finishing; exit 130" INT\ntouch "$UP"\nsleep {far.nap}1 & sleep {far.nap}2 & sleep {far.nap}3 & wait')
    client.send_signal(signal.SIGINT)
    out, err = client.communicate(timeout=60)
    assert (client.returncode, out) == (130, "finishing\n"), err
    far.assert_nothing_left()


def test_ctrl_c_twice_ends_it(far: Far) -> None:
    client = started(far)
    client.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        client.wait(0.5)
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=60)
    assert client.returncode == 143, err
    assert record_of_end(far)["reason"] == "stopped by the client"
    far.assert_nothing_left()
