"""Tuning tests see neither the settings nor the tables of the person who runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megamoe_cli.cli.main import main
from megamoe_cli.settings import KEYS
from tests.tuning.rig import Answer, Rig


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in KEYS:
        monkeypatch.delenv("MEGAMOE_" + key.upper(), raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def megamoe(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line in this process."""

    def run(*args: object) -> Answer:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Answer(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A scripted device; afterwards nothing that it started may be alive."""
    made = Rig(tmp_path / "rig")
    yield made
    assert made.alive() == [], "left behind"
