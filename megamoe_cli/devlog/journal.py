"""``results/journal.jsonl``: one line for every build, test, bench, ci and remote run, appended when it ends.

A line carries the digest of its own content, of the line before it, and of the run record it speaks of. So a line that
was changed, put in between or taken out later shows, and so does a changed record.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.errors import MegamoeError

SCHEMA = "megamoe.journal/1"
NAME = "journal.jsonl"
_LOCK_S = 10.0


class JournalBroken(MegamoeError):
    """A line is no JSON, or was changed after it was written."""

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
    document = json.loads(paths[0].read_text(encoding="utf-8")) if paths else {}
    line = {
        "schema": SCHEMA, "id": (document.get("id") if len(paths) == 1 else None) or new_run_id(run.kind.replace(" ", "-"), run.started), "kind": run.kind,
        "command": ["megamoe", *sys.argv[1:]], "started": _stamp(run.started), "seconds": round(time.monotonic() - run.clock, 3),
        "exit_code": int(exit_code), "source": document.get("source") or source_state(),
        "host": document.get("host") or host_state(), "where": document.get("where", []), "records": records,
        **facts, "previous": previous}  # fmt: skip
    line = json.loads(json.dumps(line, default=str))  # what the digest is over is what stands in the file
    return {**line, "digest": line_digest(line)}


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
            with open(path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
                stream.flush()
    except Timeout:
        raise OSError(f"another process holds {path} for more than {_LOCK_S:g} s") from None
    return line


def _last_digest(path: Path) -> str:
    if not path.is_file():
        return ""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        return json.loads(lines[-1])["digest"] if lines else ""
    except (ValueError, KeyError, TypeError):
        return "unreadable"


def read(results_dir: Path) -> list[dict[str, Any]]:
    """All lines, oldest first. JournalBroken for the first one that is not as it was written."""
    path = results_dir / NAME
    if not path.is_file():
        return []
    out: list[dict[str, Any]] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            known = line["digest"]
        except (ValueError, KeyError, TypeError):
            raise JournalBroken(f"{path}, line {number}: not a line of a journal") from None
        if line.get("schema") != SCHEMA or line_digest(line) != known:
            raise JournalBroken(f"{path}, line {number}: changed after it was written")
        if line["previous"] != (out[-1]["digest"] if out else ""):
            raise JournalBroken(f"{path}, line {number}: the line before it is not the one it followed")
        out.append(line)
    return out
