"""Which runs there are below a results folder, and which of them somebody means. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from megamoe_cli.errors import ExitCode, MegamoeError, UsageError

# record in a run's folder -> kind of run
RECORDS = {"results.json": "test", "bench.json": "bench", "ci.json": "ci", "summary.json": "tune", "ranking.json": "tune", "plan.json": "tune"}
KINDS = ("build", "test", "bench", "ci", "tune", "remote")


class NothingSelected(MegamoeError):
    exit_code = ExitCode.NOTHING_SELECTED


@dataclass
class FoundRun:
    """One run. ``folder``: where its record is, None for one that left only a line in the journal. ``record``: its
    document; ``line``: the journal's; ``problems``: why what it says may be wrong."""

    id: str
    kind: str
    when: datetime
    folder: Path | None = None
    record: dict[str, Any] = field(default_factory=dict)
    line: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def document(self, name: str) -> dict[str, Any]:
        """Another document of its folder; empty when it is not there, or is no document."""
        return _load(self.folder / name)[0] if self.folder else {}

    def get(self, key: str, default: Any = None) -> Any:
        """From the record, else from the journal."""
        return self.record.get(key, self.line.get(key, default))


def _load(path: Path) -> tuple[dict[str, Any], str]:
    """(document, what is wrong with it)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "is not there"
    except (OSError, ValueError) as error:
        return {}, f"cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else ({}, "is no document")


def find_runs(results_dir: Path) -> tuple[list[FoundRun], list[str]]:
    """All runs, oldest first, and what is wrong with the journal. A record that cannot be read is a run with a problem."""
    from megamoe_cli.devlog import journal

    problems: list[str] = []
    try:
        lines = journal.read(results_dir, problems.append)
    except MegamoeError as error:
        lines, problems = [], [str(error)]
    by_id = {line["id"]: line for line in lines}
    digests = {record["path"]: (record["sha256"], line) for line in lines for record in line.get("records") or ()}
    runs = [run for folder in sorted(results_dir.glob("*/")) if (run := _of_folder(folder, by_id, digests, results_dir)) is not None]
    known = {run.id for run in runs} | {line["id"] for _, line in digests.values()}
    runs += [FoundRun(i, line["kind"].split()[0], _time(line.get("started")), None, {}, line) for i, line in by_id.items() if i not in known]
    return sorted(runs, key=lambda run: (run.when, run.id)), problems


def _of_folder(folder: Path, by_id: Mapping[str, Any], digests: Mapping[str, Any], results_dir: Path) -> FoundRun | None:
    name = next((name for name in RECORDS if (folder / name).is_file()), None)
    if name is None:
        return None
    record, wrong = _load(folder / name)
    problems = [f"{folder / name} {wrong}"] if wrong else []
    path = f"{folder.name}/{name}"
    stated, line = digests.get(path, (None, None))
    if stated and not wrong:
        from megamoe_cli.devlog.journal import file_digest

        if file_digest(folder / name) != stated:
            problems.append(f"{folder / name} was changed after the run")
    line = by_id.get(folder.name) or line or {}
    when = _time(record.get("finished")) if record.get("finished") else _time(line.get("started"), folder / name)
    return FoundRun(str(record.get("id") or folder.name), RECORDS[name], when, folder, record, line, problems)


def _time(text: str | None, file: Path | None = None) -> datetime:
    """Of a stamp with its zone (+0000); without one that of the file, or the beginning of time."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z")
    except (ValueError, TypeError):
        return datetime.fromtimestamp(file.stat().st_mtime if file else 0, timezone.utc)


def inner_ids(runs: Sequence[FoundRun]) -> set[str]:
    """Runs that are steps of a ci run."""
    steps = [step for run in runs if run.kind == "ci" for step in _list(run.record.get("steps"))]
    return {str(step["run"]) for step in steps if isinstance(step, Mapping) and step.get("run")}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def select(runs: Sequence[FoundRun], wanted: Sequence[str] = (), *, last: int | None = None, kinds: Sequence[str] = (),
           since: datetime | None = None, everything: bool = False) -> list[FoundRun]:  # fmt: skip
    """Oldest first. ``wanted``: ids, beginnings of ids, or folders; else the last ``last`` (1) runs that left a record and
    are no step of another, after ``kinds`` and ``since``. UsageError for an id that is not there, or means several;
    NothingSelected."""
    if wanted:
        return sorted({id(run): run for text in wanted for run in _named(runs, text)}.values(), key=lambda run: (run.when, run.id))
    steps = inner_ids(runs)
    found = [run for run in runs if (run.kind in kinds if kinds else everything or run.folder is not None)
             and (since is None or run.when >= since) and (everything or run.id not in steps)]
    if not everything:
        found = found[-(last or (len(found) if since is not None else 1)):]
    if not found:
        if not runs:
            raise NothingSelected("there are no runs yet", hint="run something first: megamoe test")
        raise NothingSelected("no run is selected", hint="megamoe report --list")
    return found


def _named(runs: Sequence[FoundRun], text: str) -> list[FoundRun]:
    exact = [run for run in runs if text in (run.id, run.folder.name if run.folder else None)]
    name = Path(text).name if "/" in text else text
    found = exact or [run for run in runs if run.folder is not None and "/" in text and run.folder.resolve() == Path(text).resolve()] or [
        run for run in runs if name and run.id.startswith(name)]
    if len(found) == 1:
        return found
    if not found:
        from megamoe_cli.settings import nearest

        raise UsageError(f"there is no run {text!r}{nearest(text, [run.id for run in runs])}", hint="megamoe report --list", rule="run")
    raise UsageError(f"{text!r} means {len(found)} runs: {found[0].id}, {found[1].id}{', ...' if len(found) > 2 else ''}",
                     hint="give more of the id", rule="run")


_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_since(text: str, now: datetime | None = None) -> datetime:
    """``90m``, ``12h``, ``2d``, ``1w`` ago, or a date: ``2026-01-31``, ``2026-01-31T12:00``. UsageError."""
    now = now or datetime.now(timezone.utc)
    if match := re.fullmatch(r"(\d{1,6})([mhdw])", text):
        return now - timedelta(seconds=int(match[1]) * _UNITS[match[2]])
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since takes 12h, 2d, or a date such as 2026-01-31, not {text!r}", rule="since") from None
    return when if when.tzinfo else when.astimezone()
