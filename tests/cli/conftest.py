"""CLI tests see no settings of the person who runs them, and may run cases on a fake supervisor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megamoe_cli import paths, supervisor, testplan
from megamoe_cli.cli.main import main
from megamoe_cli.protocol import CaseResult
from megamoe_cli.settings import KEYS

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("stub", "dispatch", "l1", "l2", "combine")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in KEYS:
        monkeypatch.delenv("MEGAMOE_" + key.upper(), raising=False)
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "results_dir", lambda: tmp_path / "results")  # the journal of the checkout is not for tests
    monkeypatch.chdir(tmp_path)


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def megamoe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line in this process."""

    def run(*args: str) -> Answer:
        capsys.readouterr()
        code = main(list(args))
        captured = capsys.readouterr()
        return Answer(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def megamoe_process() -> Callable[..., Answer]:
    """Runs a command line through the real entry point, in a process of its own, from a folder that is not the checkout."""

    def run(*args: str, code: str | None = None, **environ: str) -> Answer:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "megamoe_cli"]
        done = subprocess.run([*command, *args], capture_output=True, text=True, env=env, timeout=60)
        return Answer(done.returncode, done.stdout, done.stderr)

    return run


@dataclass
class FakeSupervisor:
    """Answers every case with what ``verdict`` says (default: pass); remembers what it was asked."""

    verdict: Callable[[dict], dict] = lambda case: {}
    cases: list[dict] = field(default_factory=list)
    calls: list[dict] = field(default_factory=list)
    interrupted: int | None = None
    stop_after: int | None = None

    def run_cases(self, cases: Any, *, on_result: Any = None, on_stage: Any = None, **rest: Any) -> Any:
        self.calls.append(rest)
        results = []
        for case in cases:
            if self.stop_after is not None and len(self.cases) >= self.stop_after:
                break
            data = case.to_dict()
            self.cases.append(data)
            on_stage(data["id"], "compile")
            answer = {"id": data["id"], "status": "pass", "where": "emulator", "seconds": 0.25, "kernel": {},
                      "metrics": {}, **self.verdict(data)}
            answer.setdefault("exit_code", 0 if answer["status"] == "pass" else 1)
            results.append(CaseResult.from_dict(answer))
            on_result(results[-1])
        return supervisor.CaseResults(results, self.interrupted)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, phases: None) -> FakeSupervisor:
    made = FakeSupervisor()
    monkeypatch.setattr(supervisor, "run_cases", made.run_cases)
    return made


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is under test here, not the folder it finds the phases in."""
    monkeypatch.setattr(testplan, "phase_names", lambda: PHASES)
