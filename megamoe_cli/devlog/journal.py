"""``results/journal.jsonl``: one line for every build, test, bench, ci and remote run, appended when it ends.

A line carries the digest of its own content, of the line before it, and of the run record it speaks of. So a line that
was changed, put in between or taken out later shows, and so does a changed record.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.errors import MegamoeError

SCHEMA = "megamoe.journal/1"
NAME = "journal.jsonl"
_LOCK_S = 10.0


class JournalBroken(MegamoeError):
    """A line was changed after it was written, or one is missing."""

    exit_code = 1  # ExitCode.NO: looked, and the answer is no


@dataclass
class Run:
    """What a command says about itself while it runs; ``finish`` makes a line of it."""

    kind: str
    results_dir: Path
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.monotonic)
    facts: dict[str, Any] = field(default_factory=dict)


def digest(value: Any) -> str:
    """``sha256:`` and 64 hex digits over the JSON form with sorted keys."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def file_digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def line_digest(line: Mapping[str, Any]) -> str:
    return digest({key: value for key, value in line.items() if key != "digest"})


def make_line(run: Run, exit_code: int, previous: str) -> dict[str, Any]:
    """The line of a run that ended. ``facts["records"]`` (paths) become names and digests; what the first record says
    about place, sources and machine is taken from it, since it was measured there."""
    from megamoe_cli.report.record import host_state, new_run_id, source_state

    facts = dict(run.facts)
    paths = [Path(path) for path in facts.pop("records", []) if Path(path).is_file()]
    records = [{"path": _relative(path, run.results_dir), "sha256": file_digest(path)} for path in paths]
    document = _document(paths[0]) if paths else {}
    line = {
        "schema": SCHEMA, "id": (document.get("id") if len(paths) == 1 else None) or new_run_id(run.kind.replace(" ", "-"), run.started), "kind": run.kind,
        "command": ["megamoe", *without_values(sys.argv[1:])], "started": _stamp(run.started), "seconds": round(time.monotonic() - run.clock, 3),
        "exit_code": int(exit_code), "source": document.get("source") or source_state(),
        "host": document.get("host") or host_state(), "where": document.get("where", []), "records": records,
        **facts, "previous": previous}  # fmt: skip
    line = json.loads(json.dumps(line, default=str))  # what the digest is over is what stands in the file
    return {**line, "digest": line_digest(line)}


def _document(path: Path) -> dict[str, Any]:
    """A run record; empty for one that cannot be read (a far side may send anything): the line is written all the same."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def without_values(words: Sequence[str]) -> list[str]:
    """A command line as it may be kept: the values of ``remote --env NAME=VALUE`` may be secrets."""
    out: list[str] = []
    for word in words:
        option, equals, rest = word.partition("=") if word.startswith("--env=") else ("", "", word)
        if option or out and out[-1] == "--env":
            name, has_value, _ = rest.partition("=")
            word = option + equals + name + (has_value and "=***")
        out.append(word)
    return out


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(seconds))


def _relative(path: Path, base: Path) -> str:
    try:
        return path.resolve().relative_to(base.resolve()).as_posix()
    except ValueError:
        return str(path.resolve())


def finish(run: Run, exit_code: int) -> dict[str, Any]:
    """Appends the line, under a lock. OSError when the folder cannot be written."""
    from filelock import FileLock, Timeout

    run.results_dir.mkdir(parents=True, exist_ok=True)
    path = run.results_dir / NAME
    try:
        with FileLock(str(run.results_dir / f".{NAME}.lock"), timeout=_LOCK_S):
            line = make_line(run, exit_code, _last_digest(path))
            text = "\n" * _ends_torn(path) + json.dumps(line) + "\n"
            with open(path, "a", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
    except Timeout:
        raise OSError(f"another process holds {path} for more than {_LOCK_S:g} s") from None
    return line


_TORN = "unreadable"  # what was once written as the digest of a line that was torn


def _last_digest(path: Path) -> str:
    """Of the last line that is one; torn lines (a full disk, a killed writer) do not count."""
    return next((found["digest"] for text in reversed(_lines(path)) if (found := _parsed(text)) is not None), "")


def _lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.is_file() else []


def _parsed(text: bytes) -> dict[str, Any] | None:
    """None for what is no line of a journal: torn, or of another program."""
    try:
        line = json.loads(text)  # UnicodeDecodeError is a ValueError
        return line if isinstance(line["digest"], str) and isinstance(line, dict) else None
    except (ValueError, KeyError, TypeError):
        return None


def _ends_torn(path: Path) -> bool:
    """Does the file end in the middle of a line?"""
    try:
        with open(path, "rb") as stream:
            stream.seek(-1, 2)
            return stream.read(1) != b"\n"
    except OSError:  # not there, or empty
        return False


def read(results_dir: Path, warn: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """All lines, oldest first. JournalBroken for the first one that is not as it was written. What is no line at all (torn
    by a full disk or a killed writer) is left out: ``warn`` hears of it once. A run that somebody made unreadable is
    missed by the line after it all the same."""
    path = results_dir / NAME
    out: list[dict[str, Any]] = []
    torn: list[int] = []
    for number, text in enumerate(path.read_bytes().split(b"\n") if path.is_file() else [], 1):
        if not text.strip():
            continue
        line = _parsed(text)
        if line is None:
            torn.append(number)
            continue
        if line.get("schema") != SCHEMA or line_digest(line) != line["digest"]:
            raise JournalBroken(f"{path}, line {number}: changed after it was written")
        if line["previous"] != (out[-1]["digest"] if out else "") and not (torn and line["previous"] == _TORN):
            raise JournalBroken(f"{path}, line {number}: the line before it is not the one it followed")
        out.append(line)
    if torn:
        which = f"line {torn[0]} is" if len(torn) == 1 else f"lines {', '.join(map(str, torn))} are"
        warn(f"{path}: {which} torn and left out; the runs they were about are not known")
    return out
