"""The remote tests: ``box`` is a real sshd on loopback, ``megamoe`` runs the real entry point against it."""

from __future__ import annotations

import json
import os
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

    def write(self) -> Path:
        """The settings file, as a user would write it."""
        values = {"host": "box", "path": str(self.path), "python": sys.executable, "host_python": sys.executable, "ssh": self.box.ssh,
                  "lock_dir": str(self.home / "locks"), "timeout": 60, **self.settings}  # fmt: skip
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
        return subprocess.Popen(self.command(*args), env=self.variables(), cwd=self.home, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options)

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
        """Our processes on the far side: those that carry a token of ours, and agents."""
        agents = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and str(self.path).encode() in _cmdline(p)]
        return token_pids(token_of(str(self.state))) + agents

    def assert_nothing_left(self, within: float = 0.0) -> None:
        until = time.monotonic() + within
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        assert left == [], [_cmdline(Path("/proc", str(pid))) for pid in left]

    def fake_python(self, body: str) -> None:
        """Makes ``python`` of the target a program that runs ``body`` (bash) for our command, and the real one else."""
        script = self.home / "far python"
        script.write_text(f'#!/bin/bash\nif [ "$1" = -m ]; then\n{body}\nexit\nfi\nexec "{sys.executable}" "$@"\n')
        script.chmod(0o755)
        self.settings["python"] = str(script)


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
    """A target with an empty folder on the box that all tests of this process share."""
    made = Far(shared_box, tmp_path, tmp_path / "far", {"gpus": "none"})
    yield made
    made.assert_nothing_left(within=20)
