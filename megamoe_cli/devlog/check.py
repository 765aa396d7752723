"""Are the entries of a log true? Against their own digest, their own data, and the records of the runs where these are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.devlog import evidence
from megamoe_cli.devlog.entry import Parsed, parse, read_log, render
from megamoe_cli.devlog.journal import JournalBroken, digest, read
from megamoe_cli.errors import MegamoeError


@dataclass
class Finding:
    """One entry. ``false``: what is wrong with it; ``unproven``: runs whose records are not on this machine."""

    id: str
    line: int
    false: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "line": self.line, "false": self.false, "unproven": self.unproven}


def check_file(path: Path, results_dir: Path, warn: Callable[[str], None] = lambda text: None) -> tuple[list[Finding], list[str]]:
    """Every entry, and what in the file belongs to none (or a journal that was changed)."""
    entries, complaints = parse(read_log(path))
    try:
        journal = {line["id"]: line for line in read(results_dir, warn)}
    except JournalBroken as error:
        return [check_entry(entry, {}, results_dir) for entry in entries], [*complaints, str(error)]
    return [check_entry(entry, journal, results_dir) for entry in entries], complaints


def check_entry(parsed: Parsed, journal: Mapping[str, Mapping[str, Any]], results_dir: Path) -> Finding:
    """The text against the data, the data against the digest, the data against the runs."""
    found = Finding(parsed.id, parsed.line)
    try:
        if digest(parsed.entry) != parsed.stated:
            found.false.append("the data were changed: their digest is another one")
        expected = render(parsed.entry)
        if expected != parsed.text:
            found.false.append(_difference(expected, parsed.text))
        _check_runs(parsed.entry, journal, results_dir, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        found.false.append(f"the data are not those of an entry: {type(error).__name__}: {error}")
    return found


def _difference(expected: str, text: str) -> str:
    """The first line that is not what the data say."""
    for want, got in zip(expected.split("\n"), text.split("\n")):
        if want != got:
            return f"the text says {got.strip()[:100]!r}, the record {want.strip()[:100]!r}"
    return "lines were added or taken away"


def _check_runs(entry: Mapping[str, Any], journal: Mapping[str, Mapping[str, Any]], results_dir: Path, found: Finding) -> None:
    claimed = entry["evidence"]
    lines = []
    for run in claimed["runs"]:
        line = journal.get(run["id"])
        if line is None:
            found.unproven.append(run["id"])
        elif line["digest"] != run["digest"]:
            found.false.append(f"run {run['id']} went another way: the journal has another line for it")
        else:
            lines.append(line)
    if found.unproven or found.false or not lines:
        return
    if any(not (results_dir / record["path"]).is_file() for line in lines for record in line.get("records") or ()):
        found.unproven += [line["id"] for line in lines]
        return
    try:
        proven = evidence.gather(lines, results_dir)
    except MegamoeError as error:
        found.false.append(str(error))
        return
    for key, value in proven.items():
        if claimed.get(key) != value:
            found.false.append(f"{key}: the entry claims what the records of its runs do not say")
