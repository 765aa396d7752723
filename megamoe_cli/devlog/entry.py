"""One entry of the development log: plain data, its Markdown, and back.

The Markdown is made from the data and from nothing else, and the data stand beside it in a comment with a digest. So an
entry can be checked: the digest must fit the data, the text must be what the data render to, and the data must be what
the journal and the run records say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe_cli.devlog.changes import KEY_FILES, Change
from megamoe_cli.devlog.journal import digest

SCHEMA = "megamoe.log-entry/1"
HEADING = "# Development log\n\nWritten by `megamoe log` from run records; `megamoe log check` finds what was changed by hand.\n"
_OPEN, _CLOSE = "<!-- megamoe-log ", " -->"
_BLOCK = re.compile(r"^<!-- megamoe-log (\{[^\n]*\}) -->\n((?:(?!<!-- megamoe-log)[^\n]*\n)*?)<!-- megamoe-log-end (\S+) -->$", re.M)


def build(entry_id: str, evidence: Mapping[str, Any], changes: Mapping[str, Any] | None, *, request: str, issues: Sequence[str],
          next_steps: Sequence[str], now: str) -> dict[str, Any]:  # fmt: skip
    """The data of an entry. ``request``, ``issues``, ``next_steps``: the author's words; the rest was measured."""
    return {"schema": SCHEMA, "id": entry_id, "written": now, "request": _line(request), "issues": [_line(i) for i in issues],
            "next": [_line(n) for n in next_steps], "changes": changes, "evidence": dict(evidence)}


def _line(text: str) -> str:
    return " ".join(text.split())


def render(entry: Mapping[str, Any]) -> str:
    """The Markdown of an entry, without the comments around it."""
    evidence, changes = entry["evidence"], entry["changes"]
    source = evidence["source"]
    commit = (source.get("commit") or "")[:10]
    phases = evidence["phases"]
    title = [entry["written"][:10], "phase " + ", ".join(phases) if phases else ", ".join(sorted({r["kind"] for r in evidence["runs"]}))]
    lines = [f"## {' · '.join([*title, commit or 'no commit'])}", ""]
    lines += _section("Request", [entry["request"] or "not stated"], plain=True)
    state = ", tree dirty" if source.get("dirty") else ""
    said = f" {_text(changes['subject'])}" if changes and changes["subject"] else ""
    lines += _section("Commit", [f"`{commit or 'none'}`{said}{state}; kernel sources `{source['kernel_sources']}`, version {source['version']}"],
                      plain=True)
    lines += _section("Phase", [", ".join(phases) or "none"], plain=True)
    lines += _changes(changes)
    lines += ["**Commands**", "", "| where | command | outcome | seconds |", "|---|---|---|---|"]
    lines += [f"| {_text(row['place'])} | {_code(row['command'])} | {_outcome(row['exit_code'])} | {row['seconds']} |" for row in evidence["commands"]]
    lines += ["", "**Tested**", ""]
    if evidence["tested"]:
        lines += ["| phase | ranks | tokens | BLOCK_M | where | passed |", "|---|---|---|---|---|---|"]
        lines += [f"| {row['phase']} | {row['ranks']} | {', '.join(row['tokens'])} | {row['block_m']} | {_text(row['where'])} | "
                  f"{row['passed']} of {row['cases']} |" for row in evidence["tested"]]
    else:
        lines.append("Nothing was tested.")
    if evidence["times"]:
        lines += ["", "| shape | tokens | kernel us | interval | where | config |", "|---|---|---|---|---|---|"]
        lines += [f"| {row['shape']} | {row['tokens']} | {row['kernel_us']} | {row['low_us']} to {row['high_us']} | {_text(row['where'])} | "
                  f"{_text(row['config'])} |" for row in evidence["times"]]
    lines += ["", f"Machine: {_text('; '.join(evidence['machines']))}. Runs: {', '.join(run['id'] for run in evidence['runs'])}.", ""]
    lines += _section("Known issues", [*evidence["issues"], *entry["issues"]] or ["none known"])
    lines += _section("Next steps", entry["next"] or ["not stated"])
    return "\n".join(lines).rstrip() + "\n"


def _section(name: str, items: Sequence[str], plain: bool = False) -> list[str]:
    if plain:
        return [f"**{name}.** {_text(items[0]) if name != 'Commit' else items[0]}", ""]
    return [f"**{name}**", "", *(f"- {_text(item)}" for item in items), ""]


def _changes(changes: Mapping[str, Any] | None) -> list[str]:
    if not changes:
        return _section("Core changes", ["not known: these sources are not in a repository"])
    files = [Change(**c) for c in [*changes["changed"], *changes["uncommitted"]]]
    core = [c for c in files if c.rank < 4]
    parts = [f"{folder.rstrip('/')}: {len(here)} files, +{sum(c.added or 0 for c in here)} -{sum(c.removed or 0 for c in here)}"
             for n, folder in enumerate(("kernels/", "phases/", "tuning/", "megamoe_cli/")) if (here := [c for c in core if c.rank == n])]
    if len(files) > len(core):
        parts.append(f"elsewhere: {len(files) - len(core)} files")
    since = f"since `{changes['base'][:10]}`" if changes["base"] else "from the beginning" if changes["changed"] else "base not in this clone"
    notes = [f"{len(changes['uncommitted'])} files not committed"] if changes["uncommitted"] else []
    lines = [f"**Core changes** ({', '.join([since, *notes])})", "", *(f"- {part}" for part in parts or ["none"]), ""]
    return [*lines, *_section("Key files", [c.text() for c in files[:KEY_FILES]] or ["none"])]


def _text(text: str) -> str:
    """Text that stays text in a table cell and cannot open a comment."""
    return str(text).replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("|", "\\|").replace("\n", " ") + "`"


def _outcome(code: int | None) -> str:
    names = {0: "passed", 1: "failed", 2: "refused", 3: "machine unfit", 4: "build failed", 5: "nothing selected", 6: "inconclusive",
             124: "timeout", 130: "interrupted", 143: "terminated"}
    return "not finished" if code is None else f"{names.get(code, 'error')} ({code})"


def block(entry: Mapping[str, Any]) -> str:
    """The entry as it stands in the file: data, text, digest."""
    # In a comment no --> may occur: > is spelled as JSON can spell it.
    data = json.dumps(entry, sort_keys=True, ensure_ascii=True).replace(">", "\\u003e")
    return f"{_OPEN}{data}{_CLOSE}\n{render(entry)}<!-- megamoe-log-end {digest(entry)} -->\n"


class Parsed:
    """A block of the file: ``entry`` (data), ``text``, ``stated`` (digest), ``line`` where it begins."""

    def __init__(self, entry: dict[str, Any], text: str, stated: str, line: int) -> None:
        self.entry, self.text, self.stated, self.line = entry, text, stated, line

    @property
    def id(self) -> str:
        return str(self.entry.get("id", f"line {self.line}"))


def parse(text: str) -> tuple[list[Parsed], list[str]]:
    """The entries of a log file, and what in it belongs to none: (entries, complaints). Only the header that ``append``
    writes may stand outside of entries, at the beginning."""
    found, complaints, end, known = [], [], 0, set()
    if text.startswith(HEADING):
        end = len(HEADING)
    elif text.strip():
        complaints.append(f"line 1: the log does not begin with the header that megamoe log writes ({HEADING.splitlines()[0]!r} and one line)")
    for match in _BLOCK.finditer(text):
        complaints += _stray(text[end:match.start()], text.count("\n", 0, end) + 1)
        line, end = text.count("\n", 0, match.start()) + 1, match.end()
        try:
            entry = json.loads(match[1])
            if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
                raise ValueError
        except ValueError:
            complaints.append(f"line {line}: the data of this entry cannot be read")
            continue
        found.append(Parsed(entry, match[2], match[3], line))
        if found[-1].id in known:
            complaints.append(f"line {line}: entry {found[-1].id} stands here a second time")
        known.add(found[-1].id)
    return found, complaints + _stray(text[end:], text.count("\n", 0, end) + 1)


def _stray(text: str, first: int) -> list[str]:
    """Text outside of entries: a claim put in by hand, an entry that was pasted or lost its markers. One complaint for
    lines that stand together."""
    found, before = [], False
    for n, line in enumerate(text.split("\n")):
        marks = line.startswith(("## ", "<!-- megamoe-log"))
        if line.strip() and (marks or not before):
            found.append(f"line {first + n}: {line.strip()[:60]!r} belongs to no entry that megamoe log wrote")
        before = bool(line.strip())
    return found


def read_log(path: Path) -> str:
    """The text of a log file; empty when there is none. UsageError when it cannot be read, or is not UTF-8."""
    from megamoe_cli.errors import UsageError

    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", rule="log-file") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", rule="log-file") from None


def append(path: Path, entry: Mapping[str, Any]) -> None:
    """Adds the entry at the end of the file, which is made when it is not there."""
    from megamoe_cli.report.junit import write_text

    old = read_log(path) or HEADING
    write_text(path, old.rstrip("\n") + "\n\n" + block(entry))
