"""``megamoe log``: which runs an entry is about, what must hold before it is written, and writing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megamoe_cli import paths
from megamoe_cli.devlog import changes, entry, evidence
from megamoe_cli.devlog.evidence import Refused
from megamoe_cli.devlog.journal import read
from megamoe_cli.errors import ExitCode, MegamoeError, UsageError


class NothingToLog(MegamoeError):
    exit_code = ExitCode.NOTHING_SELECTED


def log_path(given: str | Path | None) -> Path:
    """The log file: given, or docs/log.md of the checkout, or log.md here."""
    root = paths.checkout_root()
    return Path(given) if given else (root / "docs" / "log.md" if root else Path("log.md"))


def logged_runs(path: Path) -> tuple[set[str], str | None]:
    """(ids of the runs that entries are about, commit of the last entry)."""
    if not path.is_file():
        return set(), None
    entries, _ = entry.parse(entry.read_log(path))
    ids = {run["id"] for parsed in entries for run in parsed.entry["evidence"]["runs"]}
    return ids, (entries[-1].entry["evidence"]["source"].get("commit") if entries else None)


def choose(results_dir: Path, path: Path, run_ids: Sequence[str], warn: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """The journal's lines the entry is about: those asked for, or all since the last entry that are about the sources of
    the newest one. Inner steps of a ci run have lines of their own."""
    lines = read(results_dir, warn)
    if run_ids:
        by_id = {line["id"]: line for line in lines}
        unknown = [run for run in run_ids if run not in by_id]
        if unknown:
            raise Refused(f"there was no run {unknown[0]}: the journal in {results_dir} does not have it", hint="megamoe log list --runs")
        return [by_id[run] for run in dict.fromkeys(run_ids)]
    done, _ = logged_runs(path)
    fresh = [line for line in lines if line["id"] not in done]
    if not fresh:
        raise NothingToLog(f"nothing to log: no run in {results_dir}" + (" since the last entry" if lines else ""),
                           hint="run something first: megamoe test")
    last = fresh[-1]["source"]
    same = ("kernel_sources", "commit", "dirty")
    return [line for line in fresh if all(line["source"].get(key) == last.get(key) for key in same)]


def make(results_dir: Path, path: Path, *, run_ids: Sequence[str] = (), phases: Sequence[str] = (), ranks: Sequence[int] = (),
         request: str = "", issues: Sequence[str] = (), next_steps: Sequence[str] = (), warn: Callable[[str], None] = lambda text: None) -> dict[str, Any]:  # fmt: skip
    """The data of a new entry. Refused for what was not run, was changed since, or is about other sources than these."""
    lines = choose(results_dir, path, run_ids, warn)
    proven = evidence.gather(lines, results_dir)
    evidence.require(proven, phases, ranks)
    _, previous = logged_runs(path)
    return entry.build(_new_id(path), proven, _changes(proven["source"], previous), request=request, issues=issues,
                       next_steps=next_steps, now=time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def _changes(source: dict[str, Any], previous: str | None) -> dict[str, Any] | None:
    """What git says, provided that the sources here are those that ran."""
    root, commit = paths.checkout_root(), source.get("commit")
    if root is None or not commit or not changes.known(root, commit):
        return None
    here = paths.kernel_source_digest()
    if source["kernel_sources"] != here:
        raise Refused(f"the kernel sources have changed since the run ({source['kernel_sources']} then, {here} now): what it says is not "
                      "about them", hint="run it again")
    return changes.describe(root, commit, bool(source.get("dirty")), previous)


def _new_id(path: Path) -> str:
    import secrets

    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def find(path: Path, wanted: str | None) -> entry.Parsed:
    """The entry with this id (or the only one that begins so); the last one without an id."""
    if not path.is_file():
        raise UsageError(f"there is no log: {path}", hint="megamoe log writes the first entry", rule="log-entry")
    entries, _ = entry.parse(entry.read_log(path))
    if wanted is None and entries:
        return entries[-1]
    matching = [parsed for parsed in entries if wanted and parsed.id.startswith(wanted)]
    if len(matching) != 1:
        raise UsageError(f"{path} has {'no entry' if not matching else 'several entries'} {wanted or ''}".rstrip(),
                         hint="megamoe log list", rule="log-entry")
    return matching[0]
