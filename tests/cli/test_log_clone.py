"""``megamoe log`` as its user has it: a fresh ``git clone`` of this checkout, a test, an entry, a check."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megamoe_cli import paths
from tests.cli.conftest import ROOT

CACHE = paths.cache_dir()  # the real one, before a fixture moves it: these tests are not about compiling
pytestmark = pytest.mark.xdist_group("clone")  # one clone serves all


@dataclass
class Clone:
    path: Path

    def git(self, *words: str) -> str:
        return run_git(self.path, "-c", "user.name=a", "-c", "user.email=a@b", *words)

    def megamoe(self, *words: str) -> subprocess.CompletedProcess:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("MEGAMOE_")} | {"MEGAMOE_CACHE_DIR": str(CACHE)}
        return subprocess.run([sys.executable, "-m", "megamoe_cli", *words], cwd=self.path, env=env, capture_output=True, text=True, timeout=170)

    @property
    def log(self) -> Path:
        return self.path / "docs" / "log.md"


def run_git(where: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(where), *words], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone in which ``megamoe test`` has run. What is not committed here yet becomes a commit there: this code is under test."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("these sources are no git checkout, or git is not installed")
    clone = Clone(tmp_path_factory.mktemp("fresh") / "clone")
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone.path)], check=True, capture_output=True, timeout=60)
    changed = run_git(ROOT, "diff", "--name-only", "HEAD").splitlines() + run_git(ROOT, "ls-files", "--others", "--exclude-standard").splitlines()
    for name in changed:
        (clone.path / name).unlink(missing_ok=True)
        if (ROOT / name).is_file():
            (clone.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone.path / name)
    with open(clone.path / "phases" / "stub.py", "a") as stream:
        stream.write("# one more line\n")
    clone.git("add", "-A")
    clone.git("commit", "-q", "-m", "Stub: one more line")
    ran = clone.megamoe("test", "--ranks", "1", "--phase", "stub", "--tokens", "8", "--backend", "emulator")
    assert ran.returncode == 0, ran.stderr
    return clone


def test_an_entry_is_written_and_proven(tested: Clone) -> None:
    refused = tested.megamoe("log", "--phase", "combine")
    assert refused.returncode == 1 and "phase combine was not run" in refused.stderr and not tested.git("status", "--porcelain", "docs")
    before = tested.log.read_text() if tested.log.is_file() else ""
    logged = tested.megamoe("log", "--phase", "stub", "--ranks", "1", "--request", "one more line", "--next", "l1")
    assert logged.returncode == 0, logged.stderr
    text = tested.log.read_text()[len(before):]
    digest = tested.megamoe("--version").stdout.split()[-1].rstrip(")")
    assert f"`{tested.git('rev-parse', 'HEAD')[:10]}` Stub: one more line; kernel sources `{digest}`" in text
    assert "tree dirty" not in text, "records and caches leave a fresh clone clean"
    assert re.search(r"\*\*Core changes\*\* \(since `[0-9a-f]{10}`\)", text) and "- phases: " in text
    assert "| here | `megamoe test --ranks 1 --phase stub --tokens 8 --backend emulator` | passed (0) |" in text
    assert "| stub | 1 | 8 | 128 | emulator(1 rank x 2 CTAs) | 1 of 1 |" in text
    assert "**Request.** one more line" in text and "emulator only: nothing here is about a GPU" in text
    checked = tested.megamoe("log", "check")
    assert checked.returncode == 0 and "1 proven by records" in checked.stdout and "0 false" in checked.stdout, checked.stdout
    again = tested.megamoe("log")
    assert again.returncode == 5 and "since the last entry" in again.stderr


@pytest.mark.parametrize("old, new", [
    ("| 1 of 1 |", "| 8 of 8 |"), ("| stub | 1 |", "| combine | 8 |"), ("emulator(1 rank x 2 CTAs)", "nvlink(8xH200)"),
    ("passed (0) |", "passed (0) on 8 ranks |"),
])  # fmt: skip
def test_a_claim_changed_by_hand(tested: Clone, old: str, new: str) -> None:
    if not tested.log.is_file() or "one more line" not in tested.log.read_text():
        assert tested.megamoe("log", "--request", "one more line").returncode == 0
    kept = tested.log.read_text()
    head, comment, text = kept.rpartition(" -->\n## ")
    assert old in text
    try:
        tested.log.write_text(head + comment + text.replace(old, new))
        checked = tested.megamoe("log", "check")
        assert checked.returncode == 1 and "FALSE: the text says" in checked.stdout and new.strip("| ").split(" |")[0] in checked.stdout
    finally:
        tested.log.write_text(kept)


def test_an_entry_about_other_sources_is_refused(tested: Clone) -> None:
    file = tested.path / "kernels" / "hw" / "hw.cuh"
    kept = file.read_text()
    try:
        file.write_text(kept + "// another kernel\n")
        run = json.loads(tested.megamoe("log", "list", "--runs", "--json").stdout)["runs"][0]
        stale = tested.megamoe("log", "--run", run["id"], "--file", "other.md")
        assert stale.returncode == 1 and "the kernel sources have changed since the run" in stale.stderr
        assert not (tested.path / "other.md").exists()
    finally:
        file.write_text(kept)
