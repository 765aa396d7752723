"""Settings and where each came from: flag > environment ``MEGAMOE_*`` > ``[tool.megamoe]`` > user file > default.

Files are read once, at start-up, and only when they exist; every value is checked there, so that a typing error in a
file is one clear line (exit 2) naming the file, not a strange failure later. No torch, no rich.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli.errors import UsageError
from megamoe_cli.paths import user_config_file

if TYPE_CHECKING:
    from megamoe_cli.remote.targets import Target

COLORS = ("auto", "always", "never")


@dataclass(frozen=True)
class Value:
    """A setting and its origin: ``flag``, ``env MEGAMOE_X``, a file's path, or ``default``."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Key:
    """One setting. ``kind``: int, float, text, list (comma-separated text; TOML arrays are joined), choice."""

    kind: str
    help: str
    choices: tuple[str, ...] = ()


# Names are those of the command-line options (dashes become underscores).
KEYS: dict[str, Key] = {
    "ranks": Key("list", "rank counts, such as 1,2,8"),
    "phase": Key("list", "phases, or all"),
    "tokens": Key("list", "tokens per rank, one run each"),
    "shape": Key("text", "named shape or HxIxExK"),
    "block_m": Key("list", "BLOCK_M values"),
    "config": Key("list", "kernel configuration, KEY=VAL,..."),
    "routing": Key("list", "routing patterns, or all"),
    "clamp": Key("text", "activation clamp, or none"),
    "seed": Key("int", "first seed"),
    "seeds": Key("int", "how many seeds"),
    "repeat": Key("int", "launches in a row on one buffer"),
    "backend": Key("text", "auto, emulator, virtual, nvlink or processes"),
    "timeout": Key("float", "seconds one case may take"),
    "reserve_sms": Key("int", "SMs of each GPU left to other kernels"),
    "table": Key("text", "heuristic table: auto, none, or a file"),
    "results_dir": Key("text", "where run records go"),
    "color": Key("choice", "when to colour output", COLORS),
}


def _convert(name: str, raw: Any, origin: str) -> Any:
    key = KEYS[name]
    where = f"{name} (from {origin})" if not origin.startswith("env ") else origin[4:]
    if key.kind == "list":
        if isinstance(raw, (list, tuple)):
            return ",".join(str(item) for item in raw)
        if isinstance(raw, Mapping):
            return ",".join(f"{k}={v}" for k, v in raw.items())
        return str(raw)
    if isinstance(raw, bool) or isinstance(raw, (list, tuple, Mapping)):
        raise UsageError(f"{where}: expected one {'number' if key.kind in ('int', 'float') else 'value'}, got {raw!r}")
    if key.kind == "int":
        try:
            return int(str(raw))
        except ValueError:
            raise UsageError(f"{where}: {raw!r} is not an integer") from None
    if key.kind == "float":
        try:
            return float(raw)
        except ValueError:
            raise UsageError(f"{where}: {raw!r} is not a number") from None
    if key.kind == "choice" and str(raw) not in key.choices:
        raise UsageError(f"{where}: {raw!r} is not one of {', '.join(key.choices)}")
    return str(raw)


def nearest(name: str, known: Any) -> str:
    """``"; did you mean 'x'?"`` or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def load_toml(path: Path) -> dict[str, Any]:
    """Parsed TOML. Python 3.10 has no parser of its own: tomli is used there when it is installed."""
    try:
        import tomllib
    except ImportError:
        try:
            import tomli as tomllib
        except ImportError:
            raise UsageError(
                f"{path} cannot be read: Python 3.10 has no TOML parser and tomli is not installed",
                hint="install tomli, use Python 3.11, or pass --no-config",
            ) from None
    try:
        with open(path, "rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"settings file {path} cannot be read: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def find_project_file(start: Path) -> Path | None:
    """The nearest ``pyproject.toml`` at or above ``start`` that has a ``[tool.megamoe]`` table."""
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        try:
            # A text look first: most projects have no such table, and then no TOML parser is needed.
            if "[tool.megamoe" in path.read_text(encoding="utf-8", errors="replace"):
                return path
        except OSError:
            continue
    return None


@dataclass
class Settings:
    """Merged settings below the flags. ``values`` holds only what was given somewhere."""

    values: dict[str, Value] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    # The ``remote`` tables of the files: other machines, by name (megamoe_cli/remote/targets.py).
    remotes: dict[str, Target] = field(default_factory=dict)
    default_remote: str = ""

    @classmethod
    def load(
        cls,
        config_file: Path | None = None,
        use_files: bool = True,
        environ: Mapping[str, str] | None = None,
        start: Path | None = None,
    ) -> Settings:
        """Reads user file, project file (or ``config_file`` in place of both) and the environment.

        Raises UsageError for an unknown key, a bad value, or an unreadable file that was asked for.
        """
        environ = os.environ if environ is None else environ
        loaded = cls()
        if config_file is not None:
            loaded._take_file(config_file, load_toml(config_file))
        elif use_files:
            user = user_config_file()
            if user.is_file():
                loaded._take_file(user, load_toml(user))
            project = find_project_file(start or Path.cwd())
            if project:
                loaded._take_file(project, load_toml(project), need_table=True)
        for name in KEYS:
            variable = "MEGAMOE_" + name.upper()
            if environ.get(variable, "") != "":
                origin = f"env {variable}"
                loaded.values[name] = Value(_convert(name, environ[variable], origin), origin)
        loaded.default_remote = environ.get("MEGAMOE_REMOTE") or loaded.default_remote
        return loaded

    def _take_file(self, path: Path, document: dict[str, Any], need_table: bool = False) -> None:
        tool = document.get("tool")
        table = tool.get("megamoe") if isinstance(tool, Mapping) else None
        if table is None:
            table = {} if need_table or path.name == "pyproject.toml" else document
        if not isinstance(table, Mapping):
            raise UsageError(f"{path}: tool.megamoe must be a table")
        for raw_name, raw in table.items():
            name = raw_name.replace("-", "_")
            if name == "remote":
                from megamoe_cli.remote.targets import check_tables

                targets, default = check_tables(raw, str(path))
                self.remotes.update(targets)
                self.default_remote = default or self.default_remote
                continue
            if name not in KEYS:
                raise UsageError(f"{path}: unknown setting {raw_name!r}{nearest(name, KEYS)}")
            self.values[name] = Value(_convert(name, raw, str(path)), str(path))
        self.files.append(path)

    def get(self, name: str, default: Any = None) -> Any:
        """The value below the flags, or ``default``."""
        found = self.values.get(name)
        return default if found is None else found.value

    def origin(self, name: str) -> str:
        """Where ``get(name)`` comes from."""
        found = self.values.get(name)
        return "default" if found is None else found.origin

    def default_map(self, parameters: Any) -> dict[str, Any]:
        """The part that a click command with these parameter names takes as its defaults."""
        wanted = set(parameters)
        return {name: value.value for name, value in self.values.items() if name in wanted}
