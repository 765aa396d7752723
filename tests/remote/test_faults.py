"""What goes wrong between two machines, against a real sshd: after each fault nothing of ours runs on the far side, and
the user is told in one line what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from megamoe_cli.remote.commands import client_name
from tests.remote.conftest import Far, make_box, wait_for

TEST = ("test", "--ranks", "1", "--phase", "stub", "--backend", "emulator")


def record_of_end(far: Far) -> dict:
    (path,) = wait_for(lambda: list((far.state / "jobs").glob("*/end.json")))
    return json.loads(path.read_text())


def started(far: Far, body: str | None = None) -> subprocess.Popen:
    """A client whose far command is at work."""
    up = far.fake_python(far.stubborn() if body is None else body)
    client = far.start(*TEST)
    wait_for(up.exists)
    assert len(far.processes()) >= 4
    return client


def error_of(err: str) -> str:
    return next(line for line in err.splitlines() if line.startswith("error: "))


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


def test_time_is_up(far: Far) -> None:
    """The command's own limit ends it, inside; the client's is later and never needed."""
    far.settings["timeout"] = 10
    far.fake_python(far.stubborn())
    answer = far.run(*TEST)
    assert answer.code == 124
    assert "the 4 s of the command are over" in answer.err and "at work" in answer.err
    assert record_of_end(far)["reason"] == "time limit"
    far.assert_nothing_left()


def test_time_is_up_and_the_innermost_fault_is_shown(far: Far) -> None:
    """A case that hangs is found by the limit inside the command's; the record and the screen name it."""
    far.settings |= {"timeout": 24, "env": {"MEGAMOE_CACHE_DIR": os.environ.get("MEGAMOE_CACHE_DIR", "")} if "MEGAMOE_CACHE_DIR" in os.environ else {}}
    answer = far.run("test", "--ranks", "1", "--phase", "combine", "--shape", "flash", "--tokens", "600", "--backend", "emulator",
                     "--timeout", "2")  # fmt: skip
    assert answer.code in (1, 124), answer.err
    assert "no answer within 2 s" in answer.out and "hang" in answer.out
    (folder,) = [p for p in (far.home / "results").iterdir() if p.is_dir()]
    kept = json.loads((folder / "results.json").read_text())
    assert kept["results"][0]["status"] == "hang"
    far.assert_nothing_left()


def test_a_case_may_not_outlive_its_command(far: Far) -> None:
    answer = far.run(*TEST, "--timeout", "55")
    assert answer.code == 2 and "has 50 s on far" in error_of(answer.err)
    assert not far.path.exists()


def test_a_changed_host_key(tmp_path: Path) -> None:
    box = make_box(tmp_path / "box")
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    box.stop()
    box.new_host_key()
    box.start()
    answer = far.run(*TEST)
    box.stop()
    assert answer.code == 3 and "host key of box is not the one ssh knows" in error_of(answer.err)
    assert "ssh-keygen -R" in answer.err
    assert not far.path.exists(), "nothing may be sent to a machine that is not the one"


def test_a_box_that_is_not_there(far: Far) -> None:
    answer = far.run("--host", "127.0.0.1.invalid", *TEST)
    assert answer.code == 3 and "there is no host 127.0.0.1.invalid" in error_of(answer.err)


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "megamoe-test", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}; test_a_file_that_cannot_grow stands in")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def test_a_full_disk(far: Far, small_disk: Path) -> None:
    far.path = small_disk / "far"
    answer = far.run(*TEST)
    assert answer.code == 3 and error_of(answer.err) == "error: far: the disk is full; sync stopped"
    assert "hint: free some space" in answer.err
    far.assert_nothing_left()


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """The same without mounting: no file over there may be longer than 5 KiB."""
    box = make_box(tmp_path / "box", file_size_limit=5)
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    answer = far.run(*TEST)
    box.stop()
    assert answer.code == 3, answer.err
    assert error_of(answer.err) == "error: far: the disk is full; sync stopped"
    far.assert_nothing_left(within=10)


@pytest.mark.parametrize("name", ["with space", "it's \"quoted\" $HOME", "größe;ls", "-dash"])
def test_names_that_shells_stumble_over(far: Far, name: str) -> None:
    far.path = far.home / name / "far"
    far.fake_python('printf "%s|" "$@"; echo')
    answer = far.run(*TEST, "-k", "a 'b' \"c\" $(touch x) ü")
    assert answer.code == 0, answer.err
    assert answer.out == "-m|megamoe_cli|test|--ranks|1|--phase|stub|--backend|emulator|-k|a 'b' \"c\" $(touch x) ü|--timeout|20|\n"
    assert (far.path / client_name() / "tree" / "kernels").is_dir()
    assert sorted(p.name for p in far.path.iterdir()) == [".megamoe-remote", client_name()]


def german(folder: Path) -> Path:
    """A German locale that really is one, made here: its charset is not UTF-8."""
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE.ISO-8859-1")], capture_output=True)
    if made.returncode != 0:
        pytest.skip("localedef has no sources for de_DE here")
    return folder


@pytest.mark.parametrize("name", ["de_DE.ISO-8859-1", "xx_YY.UTF-8", "POSIX"])
def test_another_language(tmp_path: Path, name: str) -> None:
    """Here and there: a German one, one that is not installed, and none."""
    places = {"LOCPATH": str(german(tmp_path))} if name.startswith("de") else {}
    environ = {"LC_ALL": name, "LANG": name, "LANGUAGE": "de", **places}
    box = make_box(tmp_path / "box", environment=environ)
    far = Far(box, tmp_path, tmp_path / "größe", {"gpus": "none"}, {**environ, "PYTHONUTF8": "1"})
    far.fake_python("python - <<'EOF'\nEOF\nprintf 'größe %s\\n' \"$LC_ALL\"; exit 1")
    answer = far.run(*TEST)
    assert (answer.code, answer.out) == (1, "größe C.UTF-8\n"), answer.err
    far.settings["python"] = "/no/such/python"
    again = far.run(*TEST)
    box.stop()
    assert again.code == 3 and "/no/such/python" in error_of(again.err)
    far.assert_nothing_left(within=10)
