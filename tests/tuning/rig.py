"""Runs ``megamoe tune`` on a scripted device, in a process of its own, and looks at what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli import paths
from megamoe_cli.processes import TOKEN, token_pids
from tests.tuning.tables_at_hand import OWN, OWN_NAME, saved

ROOT = Path(__file__).resolve().parents[2]
SPACE = """\
schema: megamoe.space/1
spaces:
  default: {block_m: [32, 64, 128], lag: [8, 16]}
"""
# Twice the kernels, for candidates that misbehave.
WIDE = SPACE.replace("lag:", "stages: [0, 3], lag:")
# 32x lag 8 is fastest to 100 tokens, 128x lag 16 above; 64 is always a little slow.
SCRIPT: dict[str, Any] = {
    "name": "Fake", "sms": 132, "seed": 3, "noise": 0.01, "base_us": 50, "us_per_token": 0.25,
    "effects": [{"match": {"block_m": 32, "lag": 8}, "from": 0, "to": 100, "factor": 0.85},
                {"match": {"block_m": 128, "lag": 16}, "from": 100, "factor": 0.9},
                {"match": {"block_m": 64}, "factor": 1.05}],
}


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Rig:
    """One folder with a script, a space, the user's tables and the runs made in it. The tests' own baseline is what is
    to be beaten: the user's comes before those that ship, and a measured table is of no fake device."""

    folder: Path
    script: dict[str, Any] = field(default_factory=lambda: json.loads(json.dumps(SCRIPT)))
    sizes: str = "4,16,64,256"
    space: str = SPACE
    extra: tuple[str, ...] = ()
    token: str = field(default_factory=lambda: f"tune-test-{uuid.uuid4().hex}")

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def table(self) -> Path:
        return self.folder / "table.yaml"

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "fake.json").write_text(json.dumps(self.script))
        (self.folder / "space.yaml").write_text(self.space)
        saved(OWN, self.folder / "data" / "megamoe" / "tables" / OWN_NAME)

    def fresh(self) -> list[str]:
        """Arguments of a new run."""
        self.write()
        return ["tune", "--fake", str(self.folder / "fake.json"), "--rank-of", "8", "--space", f"{self.folder / 'space.yaml'}:default",
                "--tokens", self.sizes, "--seed", "1", *self.common()]

    def again(self, *more: str) -> list[str]:
        """Arguments that continue the last run."""
        return ["tune", "--resume", *more, *self.common()]

    def common(self) -> list[str]:
        return ["--results-dir", str(self.results), "-o", str(self.table), *self.extra]

    def env(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MEGAMOE_")}
        return {**clean, "PYTHONPATH": str(ROOT), TOKEN: self.token, "NO_COLOR": "1", "MEGAMOE_CACHE_DIR": str(self.folder / "cache"),
                "XDG_DATA_HOME": str(self.folder / "data"), "XDG_CONFIG_HOME": str(self.folder / "config")}

    def start(self, args: list[str], prefix: list[str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen([*(prefix or []), sys.executable, "-m", "megamoe_cli", *args], cwd=self.folder, env=self.env(), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, args: list[str], prefix: list[str] | None = None) -> Answer:
        process = self.start(args, prefix)
        out, err = process.communicate(timeout=120)
        return Answer(process.returncode, out, err)

    # -- what is there ---------------------------------------------------------------------------

    def looked_up(self) -> list[Path]:
        """Every file where a lookup of this rig's commands finds tables: the user's, and those that ship."""
        return sorted(p for folder in (self.folder / "data", paths.tuning_dir() / "tables") for p in folder.rglob("*") if p.is_file())

    @property
    def run_folder(self) -> Path:
        (folder,) = self.results.glob("*-tune-*")
        return folder

    def lines(self) -> list[bytes]:
        """Complete lines of the journal."""
        found = list(self.results.glob("*-tune-*/trials.jsonl"))
        return found[0].read_bytes().split(b"\n")[:-1] if found else []

    def trials(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]

    def picks(self) -> list[tuple[int, str]]:
        summary = json.loads((self.run_folder / "summary.json").read_text())
        return [(pick["tokens"], pick["config"]) for pick in summary["picks"]]

    def wait_for_trials(self, count: int, seconds: float = 60.0) -> int:
        """Until the journal has so many lines; how many it has."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if (have := len(self.lines())) >= count:
                return have
            time.sleep(0.01)
        raise AssertionError(f"{len(self.lines())} trials after {seconds} s")

    def wait_for(self, path: Path, seconds: float = 60.0) -> None:
        """Until the file is there."""
        until = time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < until, f"no {path.name} after {seconds} s"
            time.sleep(0.01)

    def alive(self, seconds: float = 5.0) -> list[int]:
        """Processes of this rig that are still there after a grace period."""
        until = time.monotonic() + seconds
        while (left := token_pids(self.token)) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def workers(self) -> list[int]:
        """The measuring processes (not the tuner)."""
        return [pid for pid in token_pids(self.token) if b"tune_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def interrupt(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGINT)
