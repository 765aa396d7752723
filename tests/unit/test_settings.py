"""Settings: precedence, origins, and one clear line for every way a file or a variable can be wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megamoe_cli import paths, settings
from megamoe_cli.errors import UsageError
from megamoe_cli.settings import KEYS, Settings


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty configuration folder; returns where the user file would be."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    file = paths.user_config_file()
    file.parent.mkdir(parents=True)
    return file


def test_precedence_and_origins(home: Path, tmp_path: Path) -> None:
    project = tmp_path / "repo" / "pyproject.toml"
    project.parent.mkdir()
    project.write_text("[tool.other]\nranks = 1\n[tool.megamoe]\nranks = 2\nseed = 2\n")
    home.write_text("ranks = 3\nseed = 3\nshape = 'pro'\n")
    below = project.parent / "a" / "b"
    below.mkdir(parents=True)
    loaded = Settings.load(environ={"MEGAMOE_RANKS": "4", "MEGAMOE_UNRELATED": "x"}, start=below)
    assert [loaded.get(key) for key in ("ranks", "seed", "shape", "clamp")] == ["4", 2, "pro", None]
    assert [loaded.origin(key) for key in ("ranks", "seed", "shape", "clamp")] == [
        "env MEGAMOE_RANKS", str(project), str(home), "default"]
    assert loaded.get("clamp", "none") == "none"
    assert loaded.default_map(iter(["seed", "shape", "bogus"])) == {"seed": 2, "shape": "pro"}
    assert loaded.files == [home, project]


def test_files_can_be_left_out_or_replaced(home: Path, tmp_path: Path) -> None:
    home.write_text("ranks = 3\n")
    assert Settings.load(environ={}, start=tmp_path).get("ranks") == "3"
    assert Settings.load(environ={}, start=tmp_path, use_files=False).get("ranks") is None
    assert Settings.load(environ={"MEGAMOE_RANKS": "5"}, use_files=False).get("ranks") == "5"
    other = tmp_path / "other.toml"
    other.write_text("seed = 1\n")
    loaded = Settings.load(other, environ={}, start=tmp_path)
    assert (loaded.get("seed"), loaded.get("ranks")) == (1, None)


def test_a_pyproject_without_our_table_is_passed_over(home: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.megamoe]\nseed = 9\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert Settings.load(environ={}, start=inner).get("seed") == 9


def test_an_empty_variable_is_not_set(home: Path, tmp_path: Path) -> None:
    assert Settings.load(environ={"MEGAMOE_RANKS": ""}, start=tmp_path).get("ranks") is None


@pytest.mark.parametrize("text, expected", [
    ("ranks = [1, 2, 8]", {"ranks": "1,2,8"}), ("ranks = 8", {"ranks": "8"}), ("block-m = [64]", {"block_m": "64"}),
    ("config = {stages = 3, policy = 'fused'}", {"config": "stages=3,policy=fused"}),
    ("clamp = 10", {"clamp": "10"}), ("timeout = 2", {"timeout": 2.0}), ("seed = '7'", {"seed": 7}),
])
def test_values_of_files(home: Path, tmp_path: Path, text: str, expected: dict) -> None:
    home.write_text(text + "\n")
    loaded = Settings.load(environ={}, start=tmp_path)
    assert {key: value.value for key, value in loaded.values.items()} == expected


@pytest.mark.parametrize("text, words", [
    ("rank = 8", ["'rank'", "'ranks'"]), ("seed = 'x'", ["seed", "'x'", "integer"]), ("seed = true", ["seed", "True"]),
    ("seed = [1]", ["seed", "one number"]), ("timeout = 'long'", ["timeout", "number"]),
    ("color = 'blue'", ["blue", "always"]), ("seed = ", ["TOML"]), ("[tool]\nmegamoe = 3", ["table"]),
])
def test_bad_files_name_the_file(home: Path, tmp_path: Path, text: str, words: list[str]) -> None:
    home.write_text(text + "\n")
    with pytest.raises(UsageError) as caught:
        Settings.load(environ={}, start=tmp_path)
    message = str(caught.value)
    assert str(home) in message and all(word in message for word in words), message


def test_bad_variables_name_the_variable(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="MEGAMOE_SEED: 'x' is not an integer"):
        Settings.load(environ={"MEGAMOE_SEED": "x"}, start=tmp_path)


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing.toml"):
        Settings.load(tmp_path / "missing.toml", environ={})
    with pytest.raises(UsageError, match="cannot be read"):
        Settings.load(tmp_path, environ={})


def test_without_a_toml_parser_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 without tomli."""
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", None)
    file = tmp_path / "s.toml"
    file.write_text("seed = 1\n")
    with pytest.raises(UsageError, match="tomli") as caught:
        Settings.load(file, environ={})
    assert "--no-config" in caught.value.hint
    # A machine that has no settings needs no parser.
    assert Settings.load(environ={}, start=tmp_path).get("seed") is None


def test_tomli_is_used_where_tomllib_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = type(sys)("tomli")
    stand_in.load = lambda stream: {"seed": len(stream.read())}
    stand_in.TOMLDecodeError = ValueError
    monkeypatch.setitem(sys.modules, "tomllib", None)
    monkeypatch.setitem(sys.modules, "tomli", stand_in)
    file = tmp_path / "s.toml"
    file.write_text("abc")
    assert Settings.load(file, environ={}).get("seed") == 3


def test_paths_without_platformdirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA container may lack it; the folders are the same."""
    monkeypatch.delenv("MEGAMOE_CACHE_DIR", raising=False)
    for variable in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    pytest.importorskip("platformdirs")
    for environ in ({}, {"XDG_CONFIG_HOME": str(tmp_path / "c"), "XDG_CACHE_HOME": str(tmp_path / "k")}):
        for key, value in environ.items():
            monkeypatch.setenv(key, value)
        with_it = paths.user_config_file(), paths.cache_dir()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "platformdirs", None)
            assert (paths.user_config_file(), paths.cache_dir()) == with_it
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "mine"))
    assert paths.cache_dir() == tmp_path / "mine"


def test_every_setting_is_an_option_somewhere() -> None:
    """A setting no command reads would be accepted and do nothing."""
    from megamoe_cli.cli.build_cmd import build_command
    from megamoe_cli.cli.main import cli
    from megamoe_cli.cli.test_cmd import test_command

    options = {p.name for command in (cli, build_command, test_command) for p in command.params}
    assert set(KEYS) - options == set()
    assert set(settings.COLORS) == {"auto", "always", "never"}
