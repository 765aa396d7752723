"""A far side that is not as one would like it: no timeout(1), no packages, a talkative shell, a full disk, a sudo that closes
files, another user at work. One clear line and exit 3, or it works."""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from megamoe_cli.remote import commands, hold
from megamoe_cli.remote.far_jobs import Job, all_jobs, prune, stamps
from tests.remote.conftest import ROOT, STUB, Far, error_of, make_box, runs_in, started, wait_for


def engine(far: Far, before: str) -> None:
    """A container runner without containers that does ``before`` (bash) first."""
    script = far.home / "stub engine"
    script.write_text(f'#!/bin/bash\nshift\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nshift\n{before}\nexec "$@"\n')
    script.chmod(0o755)
    far.settings |= {"container": "docker:dev", "engine": shlex.quote(str(script))}


@pytest.mark.parametrize("body, words", [
    ("echo \"timeout: unrecognized option '--foreground'\" >&2; exit 1", "unrecognized option"), ("exit 127", "it fails"),
])  # fmt: skip
def test_a_container_whose_timeout_cannot_end_a_command(far: Far, body: str, words: str) -> None:
    """Some images have another timeout(1). Its usage error would read as a wrong result."""
    folder = far.home / "bin"
    folder.mkdir()
    (folder / "timeout").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "timeout").chmod(0o755)
    engine(far, f'PATH="{folder}:$PATH"')
    answer = far.run(*STUB)
    assert answer.code == 3, answer.err
    assert "container dev has no timeout that ends a command" in error_of(answer.err) and words in error_of(answer.err)


def test_a_python_without_the_packages(far: Far) -> None:
    """Not exit 1, as the traceback of an import would be."""
    script = far.home / "bare python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    far.settings["python"] = str(script)
    answer = far.run(*STUB)
    assert answer.code == 3, answer.err
    assert error_of(answer.err).endswith(" lacks click, rich, pyyaml, numpy, filelock, torch")
    assert "-m pip install click rich pyyaml" in answer.err


def test_packages_that_the_target_brings_along_count(far: Far) -> None:
    """They need not be where the bare interpreter looks."""
    script = far.home / "bare python"
    packages = os.pathsep.join(p for p in sys.path if p.endswith("-packages"))
    script.write_text(f'#!/bin/sh\nif [ "$1" = -m ]; then echo "$PYTHONPATH"; exit; fi\nexec "{sys.executable}" -S "$@"\n')
    script.chmod(0o755)
    far.settings |= {"python": str(script), "env": {"PYTHONPATH": f"{packages}:{far.state}/tree"}}
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (0, f"{packages}:{far.state}/tree\n"), answer.err


def test_a_login_shell_that_talks(tmp_path: Path) -> None:
    """rsync would read it."""
    (tmp_path / "rc").write_text("echo Welcome\n")
    box = make_box(tmp_path / "box", environment={"BASH_ENV": str(tmp_path / "rc")})
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    answer = far.run(*STUB)
    box.stop()
    assert answer.code == 3 and "the login shell there prints something" in error_of(answer.err), answer.err


def test_nothing_has_been_there_yet(far: Far) -> None:
    """A CI job that cleans up after a step that never got so far."""
    assert far.run("status").out == "no jobs\n"
    reaped = far.run("reap", "--all")
    assert (reaped.code, reaped.out) == (0, "far: nothing was left\n"), reaped.err


def test_a_container_whose_user_may_not_write(far: Far) -> None:
    """The folder is the login's; in the container somebody else runs."""
    python = shutil.which("python3", path="/usr/bin")
    if os.geteuid() != 0 or not shutil.which("setpriv") or not python:
        pytest.skip("needs root, setpriv and /usr/bin/python3")
    with tempfile.TemporaryDirectory(prefix="mm-far-") as folder:  # pytest's own folders let nobody in
        os.chmod(folder, 0o755)
        far.path = Path(folder) / "far"
        engine(far, 'set -- setpriv --reuid=65534 --regid=65534 --clear-groups "$@"')
        far.settings["python"] = python
        answer = far.run("shell", "true")
        assert answer.code == 3, answer.err
        assert error_of(answer.err) == f"error: far: cannot write to {far.state}: Permission denied"
        assert "free some space" not in answer.err
        far.assert_nothing_left()


@pytest.mark.parametrize("small_disk", [16], indirect=True)
def test_a_disk_that_fills_up_in_the_middle(far: Far, small_disk: Path) -> None:
    """The exit code needs no disk; the next run cannot even begin, and says why."""
    far.path = small_disk / "far"
    far.fake_python(f'cat /dev/zero > "{small_disk}/all of it" 2>/dev/null; echo done; exit 6')
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (6, "done\n"), answer.err
    assert "end.json: No space left on device" in answer.err
    again = far.run(*STUB)
    assert again.code == 3 and "No space left on device" in error_of(again.err), again.err
    assert f"hint: free some space on box below {far.path}" in again.err, "not: check python, container and path"
    far.assert_nothing_left()


def test_a_lock_outlives_an_engine_that_closes_it(far: Far) -> None:
    """sudo does: it closes all files but the standard ones."""
    far.settings["gpus"] = "3"
    go = far.home / "go"
    engine(far, 'for fd in /proc/self/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || eval "exec $fd>&-"; done')
    up = far.fake_python(f'touch "$UP"; while ! [ -e "{go}" ]; do sleep 0.05; done')
    client = far.start(*STUB)
    wait_for(up.exists)
    assert set(hold.holders_of(str(far.home / "locks"))) == {"gpu3"}
    go.touch()
    client.communicate(timeout=60)
    assert client.returncode == 0 and hold.holders_of(str(far.home / "locks")) == {}


def test_a_client_that_dies_while_it_waits_for_the_box(lone: Far) -> None:
    """It leaves nobody in the queue."""
    lone.settings["gpus"] = "0"
    locks = lone.home / "locks"
    held = hold.acquire(str(locks), "0", {"who": "eve@desk", "what": "x", "since": 0})
    for end, how in (("kill", ()), ("drop", ()), ("kill", ("--detach",))):
        waiting = lone.start("--wait", "5m", *how, *STUB)
        assert waiting.stderr is not None
        while "taken: gpu0 by eve@desk" not in (line := waiting.stderr.readline()):
            assert line
        assert any(b"hold.py" in line for line in lone.command_lines())
        if end == "kill":
            waiting.kill()
        else:
            lone.box.drop_connections()
        waiting.communicate(timeout=60)
        lone.assert_nothing_left(within=15)
    for fd in held:
        os.close(fd)


def test_ctrl_c_while_waiting_for_the_box(far: Far) -> None:
    far.settings["gpus"] = "0"
    held = hold.acquire(str(far.home / "locks"), "0", {"who": "eve@desk", "what": "x", "since": 0})
    waiting = far.start("--wait", "5m", *STUB)
    assert waiting.stderr is not None
    while "taken: " not in (line := waiting.stderr.readline()):
        assert line
    waiting.send_signal(2)
    waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    far.assert_nothing_left()
    for fd in held:
        os.close(fd)


def test_two_checkouts_at_once(far: Far) -> None:
    """The second one learns who has the GPU, and touches nothing of the first; on another GPU it runs."""
    far.settings["gpus"] = "0"
    first = started(far)
    other = far.home / "other checkout"
    for name in ("pyproject.toml", "megamoe_cli", "phases", "tuning", "kernels"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, other / name) if (ROOT / name).is_dir() else (other.mkdir(), copy(ROOT / name, other / name))
    far.fake_python("echo ran")
    mine = commands.client_name()
    far.environ["PYTHONPATH"] = str(other)
    taken = far.run(*STUB)
    assert taken.code == 3 and f"far is taken: gpu0 by {mine} since " in error_of(taken.err), taken.err
    assert far.run("--gpus", "1", *STUB).out == "ran\n"
    assert len([p for p in far.path.iterdir() if p.is_dir()]) == 2
    assert first.poll() is None, "still at work"
    first.terminate()
    first.communicate(timeout=60)
    assert first.returncode == 143


def test_two_machines_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clones of one image: same user, same host name, same folder. One would delete files under the other's run."""
    names = set()
    for text in ("a", "b"):
        (tmp_path / text).write_text(text)
        monkeypatch.setattr(commands, "_MACHINE_ID", (str(tmp_path / "missing"), str(tmp_path / text)))
        names.add(commands.client_name())
    assert len(names) == 2


@pytest.mark.parametrize("code", [75, 126, 127, 255])
def test_codes_of_ones_own_command_that_mean_something_else_to_us(far: Far, code: int) -> None:
    answer = far.run("shell", "sh", "-c", f"echo said; exit {code}")
    assert (answer.code, answer.out) == (code, "said\n"), answer.err


def test_a_program_that_is_not_there(far: Far) -> None:
    assert far.run("shell", "no-such-program").code == 127


def test_through_a_jump_host(far: Far) -> None:
    config = far.box.folder / "config"
    far.settings |= {"host": "inner", "ssh": f"ssh -F {far.home}/config"}
    (far.home / "config").write_text(config.read_text() + config.read_text().replace("Host box\n", "Host inner\n  ProxyJump box\n"))
    far.fake_python("echo ran")
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (0, "ran\n"), answer.err


def test_any_gpu_counts(tmp_path: Path) -> None:
    """A container may be given the third one alone."""
    def look() -> str:
        return subprocess.run(["sh", "-c", commands._LOOK, "sh", str(tmp_path), str(tmp_path / "agent"), "python"], capture_output=True,
                              text=True, check=True, env={**os.environ, "MEGAMOE_DEVICES": str(tmp_path)}).stdout

    (tmp_path / "nvidiactl").touch()
    assert look() == "gpus=0\n"
    (tmp_path / "nvidia3").touch()
    assert look() == "gpus=1\n"


def test_the_lock_runs_on_old_hosts() -> None:
    """It is the host's Python that runs it, not the container's."""
    ast.parse(Path(hold.__file__).read_text(), feature_version=(3, 6))
    assert "from __future__ import annotations" not in Path(hold.__file__).read_text(), "3.7"


def test_jobs_are_in_the_order_of_the_far_clock(tmp_path: Path) -> None:
    """Names have the client's, which may be wrong."""
    for name, began in (("20270101-000000-test-aaaa", 1.0), ("20260101-000000-test-bbbb", 2.0)):
        job = Job(str(tmp_path), name)
        os.makedirs(job.folder)
        job.write("job.json", {"agent": 1, "birth": "never", "started": began})
    assert [job.name[-4:] for job in all_jobs(str(tmp_path))] == ["aaaa", "bbbb"]


def test_what_piles_up_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe_cli.remote import far_jobs

    monkeypatch.setattr(far_jobs, "KEEP_JOBS", 2)
    monkeypatch.setattr(far_jobs, "KEEP_FILES", 3)
    for n in range(5):
        for folder in ("jobs", "tune-results"):
            (tmp_path / folder / f"r{n}").mkdir(parents=True)
            (tmp_path / folder / f"r{n}" / "x").write_text("x")
            os.utime(tmp_path / folder / f"r{n}", (n, n))
        (tmp_path / "prebuilt").mkdir(exist_ok=True)
        (tmp_path / "prebuilt" / f"{n}.cubin").write_text("x")
        os.utime(tmp_path / "prebuilt" / f"{n}.cubin", (n, n))
    prune(str(tmp_path))
    assert {p.name for p in (tmp_path / "tune-results").iterdir()} == {"r3", "r4"} == {p.name for p in (tmp_path / "jobs").iterdir()}
    assert {p.name for p in (tmp_path / "prebuilt").iterdir()} == {"2.cubin", "3.cubin", "4.cubin"}


def test_a_run_folder_that_changed_is_seen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trials.jsonl").write_text("1\n")
    before = stamps(str(tmp_path))
    with open(tmp_path / "b" / "trials.jsonl", "a") as stream:
        stream.write("2\n")
    (tmp_path / "c").mkdir()
    after = stamps(str(tmp_path))
    assert {name for name in after if after[name] != before.get(name)} == {"b", "c"}
    assert stamps(str(tmp_path / "missing")) == {}


def test_records_that_cannot_be_written_here(far: Far) -> None:
    """A record that cannot be put where it belongs here: the exit code stands, and the records can be had later."""
    far.fake_python('mkdir "$MEGAMOE_RESULTS_DIR/r1"; echo \'{"id": "r1"}\' > "$MEGAMOE_RESULTS_DIR/r1/results.json"; exit 1')
    (far.home / "results").mkdir()
    (far.home / "results" / "r1").write_text("in the way")
    answer = far.run(*STUB)
    assert answer.code == 1, answer.err
    assert "warning: results stay on far" in answer.err and "megamoe remote attach " in answer.err
    (far.home / "results" / "r1").unlink()
    job = answer.err.rpartition("megamoe remote attach ")[2].split()[0]
    assert far.run("attach", job).code == 1
    assert (runs_in(far)[0] / "results.json").is_file()
