"""Tuning tests see neither the settings nor the tables of the person who runs them. In the place of the latter, and
of those that ship, lookups find a baseline of the tests' own: what ships is asked by the tests about it only (``as_shipped``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megamoe_cli import paths
from megamoe_cli.cli.main import main
from megamoe_cli.settings import KEYS
from tests.tuning.rig import Answer, Rig
from tests.tuning.tables_at_hand import OWN, OWN_NAME, saved


TABLE_DIRS = paths.table_dirs


@pytest.fixture(scope="session")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's data folder with one table."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        saved(OWN, paths.user_tables_dir() / OWN_NAME)
    return folder


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_data: Path) -> None:
    for key in KEYS:
        monkeypatch.delenv("MEGAMOE_" + key.upper(), raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(own_data))
    monkeypatch.setattr(paths, "table_dirs", lambda: [paths.user_tables_dir()])
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lookups find the tables that ship, and nothing else."""
    monkeypatch.setattr(paths, "table_dirs", TABLE_DIRS)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "no-data"))


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
