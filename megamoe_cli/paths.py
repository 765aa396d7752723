"""Where things lie: kernel sources, tuning tables, caches, run records. No torch; nothing is created on import.

In a checkout the top-level folders are used; in a wheel they lie below the package (pyproject.toml maps them).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from pathlib import Path

from megamoe_cli.errors import CACHE_HINT, EnvironmentUnfit

PACKAGE = Path(__file__).resolve().parent
SOURCE_SUFFIXES = (".cuh", ".cu", ".h", ".hpp", ".cpp")


def checkout_root() -> Path | None:
    """The repository this package runs from, or None when it runs from an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "kernels").is_dir() else None


def kernels_dir() -> Path:
    """The folder that holds ``sm90_fp8_mega_moe.cuh`` and its layers; FileNotFoundError when it is missing.
    ``MEGAMOE_KERNELS_DIR`` names another copy (the mutation campaign builds one)."""
    if given := os.environ.get("MEGAMOE_KERNELS_DIR"):
        if not Path(given, "sm90_fp8_mega_moe.cuh").is_file():
            raise FileNotFoundError(f"MEGAMOE_KERNELS_DIR={given} holds no kernel sources")
        return Path(given)
    root = checkout_root()
    folder = root / "kernels" if root else PACKAGE / "_kernels"
    if not folder.is_dir():
        raise FileNotFoundError(f"kernel sources are missing: {folder}")
    return folder


def tuning_dir() -> Path:
    """The folder of the tuner and its ``tables/``."""
    root = checkout_root()
    return root / "tuning" if root else PACKAGE / "tuning"


def user_tables_dir() -> Path:
    """Per-user heuristic tables (measured on this machine by an installed copy); the folder need not exist."""
    try:
        import platformdirs
    except ImportError:
        return _xdg("XDG_DATA_HOME", ".local/share") / "tables"
    return Path(platformdirs.user_data_dir("megamoe", appauthor=False)) / "tables"


def table_dirs() -> list[Path]:
    """Where tables are looked up, first match first: the user's, then those that come with the sources."""
    return [user_tables_dir(), tuning_dir() / "tables"]


def new_tables_dir() -> Path:
    """Where a finished tuning run puts its table: with the sources in a checkout, else with the user's."""
    return tuning_dir() / "tables" if checkout_root() else user_tables_dir()


def results_dir() -> Path:
    """Default home of run records: ``results/`` of the checkout, else of the current directory."""
    return (checkout_root() or Path.cwd()) / "results"


def cache_dir() -> Path:
    """Per-user cache. ``MEGAMOE_CACHE_DIR`` wins; then platformdirs; without it the XDG rule (the same on Linux)."""
    given = os.environ.get("MEGAMOE_CACHE_DIR")
    if given:
        return Path(given).expanduser()
    try:
        import platformdirs
    except ImportError:
        return _xdg("XDG_CACHE_HOME", ".cache")
    return Path(platformdirs.user_cache_dir("megamoe", appauthor=False))


def make_dir(folder: Path) -> Path:
    """Creates a folder of the user's cache; EnvironmentUnfit with what to do when that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentUnfit(f"{folder} cannot be made: {error.strerror}", CACHE_HINT) from None
    return folder


def cupy_env() -> dict[str, str]:
    """For processes that import CuPy: it makes its cache folder on import, and where the home folder is read-only it
    cannot be imported at all. Ours is a place that is known to be writable, and nothing here uses CuPy's kernels."""
    return {} if os.environ.get("CUPY_CACHE_DIR") else {"CUPY_CACHE_DIR": str(cache_dir() / "cupy")}


def user_config_file() -> Path:
    """Per-user settings file (TOML); it need not exist."""
    try:
        import platformdirs
    except ImportError:
        return _xdg("XDG_CONFIG_HOME", ".config") / "config.toml"
    return Path(platformdirs.user_config_dir("megamoe", appauthor=False)) / "config.toml"


def _xdg(variable: str, default: str) -> Path:
    base = os.environ.get(variable)
    return (Path(base) if base else Path.home() / default) / "megamoe"


def kernel_source_digest() -> str:
    """12 hex digits over every kernel source (relative path and bytes): what ``megamoe --version`` shows."""
    folder = kernels_dir()
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in SOURCE_SUFFIXES):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def program() -> str:
    """How the user started us, for commands we print: ``megamoe``, or the interpreter with ``-m megamoe_cli``."""
    if Path(sys.argv[0]).name == "megamoe":
        found = shutil.which("megamoe")
        same = found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0])
        return "megamoe" if same else shlex.quote(_short(sys.argv[0]))
    name = Path(sys.executable).name
    found = shutil.which(name)
    python = name if found == sys.executable else _short(sys.executable)
    return f"{shlex.quote(python)} -m megamoe_cli"


def _short(path: str) -> str:
    """``path`` relative to the current directory where it lies below it."""
    try:
        return str(Path(path).absolute().relative_to(Path.cwd()))
    except ValueError:
        return path
