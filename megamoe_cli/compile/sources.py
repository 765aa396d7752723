"""Which kernel sources a translation unit reaches, and a digest of their bytes.

The digest depends on relative names and bytes only: not on where the tree lies, not on file times.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megamoe_cli.errors import BuildFailed

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(include|if|ifdef|ifndef|elif|else|endif)\b[ \t]*(.*?)[ \t]*(?://.*)?$")
_QUOTED = re.compile(r'^"([^"]+)"')
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_ON_EMULATOR = re.compile(r"^(?:defined\s*\(\s*MEGAMOE_EMULATOR\s*\)|defined\s+MEGAMOE_EMULATOR|MEGAMOE_EMULATOR)$")
# Names that compilers see (errors, line tables) carry this prefix, so they read as paths of the repository.
PREFIX = "kernels"


@dataclass(frozen=True)
class SourceSet:
    """Everything a unit includes with quotes. ``files``: name relative to the kernels folder -> text."""

    files: dict[str, str] = field(repr=False)
    digest: str

    def flattened(self) -> dict[str, str]:
        """The same files under ``kernels/...`` with each quoted include spelled that way: an include set that
        needs no file system, so a cubin does not depend on where the sources lie. Line numbers stay."""
        return {posixpath.join(PREFIX, name): self.canonical(text, name) for name, text in self.files.items()}

    def canonical(self, text: str, includer: str = "") -> str:
        """``text`` of file ``includer`` ('' for the unit itself) with includes of these files spelled from the root."""
        lines = []
        for line in text.split("\n"):
            target = _include_of(line)
            name = _find(target, includer, self.files.__contains__) if target else None
            lines.append(f'#include "{posixpath.join(PREFIX, name)}"' if name else line)
        return "\n".join(lines)


def closure(text: str, root: Path, *, emulator: bool) -> SourceSet:
    """All files below ``root`` that ``text`` reaches through quoted includes.

    Branches on MEGAMOE_EMULATOR are followed for the build at hand only; under any other condition both
    sides count. Raises BuildFailed when a file is missing.
    """
    files: dict[str, str] = {}
    todo = [(target, "") for target in _includes(text, emulator)]
    while todo:
        target, includer = todo.pop()
        name = _find(target, includer, lambda n: n in files or (root / n).is_file())
        if name is None:
            where = f"{PREFIX}/{includer}" if includer else "the entry text"
            raise BuildFailed(f'{where} includes "{target}", which is not among the kernel sources in {root}')
        if name in files:
            continue
        files[name] = (root / name).read_text(encoding="utf-8")
        todo += [(inner, name) for inner in _includes(files[name], emulator)]
    return SourceSet(dict(sorted(files.items())), digest_of(files))


def digest_of(files: dict[str, str]) -> str:
    """64 hex digits over names and texts."""
    digest = hashlib.sha256()
    for name in sorted(files):
        data = files[name].encode()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _find(target: str, includer: str, exists: Callable[[str], bool]) -> str | None:
    """Name below the root: beside the includer first, then from the root, as compilers search."""
    beside = posixpath.normpath(posixpath.join(posixpath.dirname(includer), target))
    return next((name for name in (beside, posixpath.normpath(target)) if exists(name)), None)


def _include_of(line: str) -> str | None:
    match = _DIRECTIVE.match(line)
    if not match or match[1] != "include":
        return None
    quoted = _QUOTED.match(match[2])
    return quoted[1] if quoted else None


def _includes(text: str, emulator: bool) -> list[str]:
    """Quoted include targets in order, without those in a branch that is certainly not compiled."""
    found: list[str] = []
    taken: list[bool | None] = []  # per open #if: certainly compiled, certainly not, or unknown
    text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n"), text)
    for line in text.split("\n"):
        match = _DIRECTIVE.match(line)
        if not match:
            continue
        word, rest = match[1], match[2]
        if word in ("if", "ifdef", "ifndef"):
            negated = word == "ifndef" or rest.startswith("!")
            known = bool(_ON_EMULATOR.match(rest.lstrip("! ")))
            taken.append((emulator != negated) if known else None)
        elif word == "else" and taken:
            taken[-1] = None if taken[-1] is None else not taken[-1]
        elif word == "elif" and taken:
            taken[-1] = False if taken[-1] else None
        elif word == "endif" and taken:
            taken.pop()
        elif word == "include" and False not in taken:
            target = _include_of(line)
            if target is not None:
                found.append(target)
    return found
