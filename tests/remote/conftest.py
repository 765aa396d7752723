"""The remote tests: ``box`` is a real sshd on loopback, ``megamoe`` runs the real entry point against it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megamoe_cli.processes import token_pids
from megamoe_cli.remote.commands import client_name
from megamoe_cli.remote.far_processes import token_of
from megamoe_cli.settings import KEYS
from tests.remote.sshd_box import Box, missing

ROOT = Path(__file__).resolve().parents[2]
# The shortest run there is.
STUB = ("test", "--ranks", "1", "--phase", "stub", "--tokens", "8", "--backend", "emulator")


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Far:
    """One target on the box. ``path``: its folder there; ``settings``: more keys of the target."""

    box: Box
    home: Path
    path: Path
    settings: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    # How long the sleepers of this test sleep: a number nobody else uses, to find them by.
    clients: list[subprocess.Popen] = field(default_factory=list)
    nap: str = field(default_factory=lambda: f"300.{secrets.randbelow(10**9):09d}")

    def write(self) -> Path:
        """The settings file, as a user would write it."""
        values = {"host": "box", "path": str(self.path), "python": sys.executable, "host_python": sys.executable, "ssh": self.box.ssh,
                  "lock_dir": str(self.home / "locks"), "timeout": 60, "grace": 1, **self.settings}  # fmt: skip
        env = values.pop("env", {})
        lines = ["[tool.megamoe.remote.far]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        lines += ["[tool.megamoe.remote.far.env]", *(f"{key} = {json.dumps(value)}" for key, value in env.items())]
        path = self.home / "megamoe.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-m", "megamoe_cli", "--config-file", str(self.write()), "remote", *args]

    def variables(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_") or k == "MEGAMOE_CACHE_DIR"}
        return {**kept, "PYTHONPATH": str(ROOT), "MEGAMOE_RESULTS_DIR": str(self.home / "results"), **self.environ}

    def start(self, *args: str, **options: Any) -> subprocess.Popen:
        self.clients.append(subprocess.Popen(
            self.command(*args), env=self.variables(), cwd=self.home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, **options))
        return self.clients[-1]

    def run(self, *args: str, timeout: float = 100) -> Answer:
        process = self.start(*args)
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return Answer(process.returncode, out, err)

    @property
    def state(self) -> Path:
        return self.path / client_name()

    def processes(self) -> list[int]:
        """Our processes on the far side: those that carry a token of ours, agents, and this test's sleepers."""
        signs = (f"{self.path}/".encode(), self.nap.encode())
        mine = os.getpid(), *(p.pid for p in self.clients)
        others = [int(p.name) for p in Path("/proc").iterdir()
                  if p.name.isdigit() and int(p.name) not in mine and any(sign in _cmdline(p) for sign in signs)]
        return token_pids(token_of(str(self.state))) + others

    def command_lines(self) -> list[bytes]:
        return [_cmdline(Path(f"/proc/{pid}")) for pid in self.processes()]

    def assert_nothing_left(self, within: float = 0.0, but: bytes = b"nothing") -> None:
        """``but``: how command lines of processes begin that may be there."""
        def find() -> list[int]:
            return [pid for pid in self.processes() if not _cmdline(Path(f"/proc/{pid}")).startswith(but)]

        until = time.monotonic() + within
        while (left := find()) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == [], [_cmdline(Path("/proc", str(pid))) for pid in left]

    def fake_python(self, body: str) -> Path:
        """Makes ``python`` of the target a program that runs ``body`` (bash) for our command, and the real one else.
        ``$UP`` in it: a file to make when the far side is at work; its path is returned."""
        up = self.home / "up"
        body = f'UP="{up}"\n{body}'
        script = self.home / "far python"
        script.write_text(f'#!/bin/bash\nif [ "$1" = -m ]; then\n{body}\nexit\nfi\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        self.settings["python"] = str(script)
        self.settings.setdefault("build_timeout", 0)  # it runs no kernel
        return up

    def stubborn(self) -> str:
        """A command that does not want to end: deaf to signals, with children in another session and without a name."""
        return (f"trap '' TERM HUP INT\nsetsid sleep {self.nap}1 &\nenv -i setsid sleep {self.nap}2 &\nsleep {self.nap}3 &\n"
                f"echo at work >&2\ntouch \"$UP\"\nsleep {self.nap}4")


def _cmdline(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true answer of ``what``."""
    until = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < until, f"nothing after {seconds} s"
        time.sleep(0.02)
    return answer


def runs_in(far: Far) -> list[Path]:
    """The run folders that came back."""
    return sorted(p for p in (far.home / "results").iterdir() if p.is_dir())


def record_of_end(far: Far) -> dict:
    (path,) = wait_for(lambda: list((far.state / "jobs").glob("*/end.json")))
    return json.loads(path.read_text())


def started(far: Far, body: str | None = None) -> subprocess.Popen:
    """A client whose far command is at work."""
    up = far.fake_python(far.stubborn() if body is None else body)
    client = far.start(*STUB)
    wait_for(up.exists)
    assert len(far.processes()) >= 4
    return client


def error_of(err: str) -> str:
    return next(line for line in err.splitlines() if line.startswith("error: "))


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        monkeypatch.delenv("MEGAMOE_" + key.upper(), raising=False)
    monkeypatch.delenv("MEGAMOE_REMOTE", raising=False)


def make_box(folder: Path, **options: Any) -> Box:
    if reason := missing():
        pytest.skip(reason)
    return Box(folder, **options).set_up().start()


@pytest.fixture(scope="session")
def shared_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    box = make_box(tmp_path_factory.mktemp("box"))
    yield box
    box.stop()


@pytest.fixture
def far(shared_box: Box, tmp_path: Path) -> Iterator[Far]:
    """A target with an empty folder on the box that all tests of this process share, through one connection."""
    yield from checked(Far(shared_box, tmp_path, tmp_path / "far", {"gpus": "none", "ssh": shared_box.shared_ssh}))


@pytest.fixture
def lone(shared_box: Box, tmp_path: Path) -> Iterator[Far]:
    """The same with a connection for every command, which can be broken."""
    yield from checked(Far(shared_box, tmp_path, tmp_path / "far", {"gpus": "none"}))


def checked(made: Far) -> Iterator[Far]:
    yield made
    try:
        made.assert_nothing_left(within=20)
    finally:
        for pid in made.processes():  # of a test that failed
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 1 MiB, or of as many as the test's parameter says."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = f"size={getattr(request, 'param', 1)}m"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "megamoe-test", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {done.stderr.strip()}; test_a_file_that_cannot_grow stands in")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
