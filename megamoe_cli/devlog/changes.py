"""What git says about a commit and what came before it: the "core changes" of a log entry."""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# In the order in which a reader wants them: the kernel first.
CORE = ("kernels/", "phases/", "tuning/", "megamoe_cli/")
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
KEY_FILES = 8


@dataclass(frozen=True)
class Change:
    """``added``/``removed``: lines; None for a binary file."""

    path: str
    added: int | None
    removed: int | None

    @property
    def size(self) -> int:
        return (self.added or 0) + (self.removed or 0)

    @property
    def rank(self) -> int:
        return next((n for n, prefix in enumerate(CORE) if self.path.startswith(prefix)), len(CORE))

    def text(self) -> str:
        return f"{self.path} (binary)" if self.added is None else f"{self.path} (+{self.added} -{self.removed})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def git(root: Path, *words: str) -> str | None:
    """Output of a git command, or None when it fails. Never localised, never paged."""
    try:
        done = subprocess.run(["git", "-C", str(root), "-c", "core.quotepath=off", *words], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip("\n") if done.returncode == 0 else None


def known(root: Path, commit: str) -> bool:
    return git(root, "cat-file", "-e", f"{commit}^{{commit}}") is not None


def subject(root: Path, commit: str) -> str:
    return git(root, "log", "-1", "--format=%s", commit) or ""


def base_of(root: Path, commit: str, previous: str | None) -> str | None:
    """What the changes are counted from: the commit of the previous entry where this one grew out of it, else the
    parent; None when the repository does not have it (a shallow clone)."""
    if previous and previous != commit and git(root, "merge-base", "--is-ancestor", previous, commit) is not None:
        return git(root, "rev-parse", previous)
    parents = (git(root, "log", "-1", "--format=%P", commit) or "").split()
    if parents:
        return parents[0] if known(root, parents[0]) else None
    return None if git(root, "rev-parse", "--is-shallow-repository") == "true" else _EMPTY_TREE


def changes(root: Path, *between: str) -> list[Change]:
    """Changed files, kernel first, larger first. ``between``: two commits, or one for what the tree has on top of it."""
    found = []
    for line in (git(root, "diff", "--numstat", "--no-renames", *between, "--") or "").splitlines():
        added, removed, path = line.split("\t", 2)
        found.append(Change(path, *(None if n == "-" else int(n) for n in (added, removed))))
    if len(between) == 1:
        for path in (git(root, "ls-files", "--others", "--exclude-standard") or "").splitlines():
            data = (root / path).read_bytes() if (root / path).is_file() else b""
            found.append(Change(path, data.count(b"\n"), 0))
    return sorted(found, key=lambda change: (change.rank, -change.size, change.path))


def describe(root: Path, commit: str, dirty: bool, previous: str | None) -> dict[str, Any]:
    """Plain data for an entry: commit, subject, base, files changed since, and those changed but not committed."""
    base = base_of(root, commit, previous)
    return {
        "commit": commit, "subject": subject(root, commit), "base": base if base != _EMPTY_TREE else None,
        "changed": [c.to_dict() for c in changes(root, base, commit)] if base else [],
        "uncommitted": [c.to_dict() for c in changes(root, commit)] if dirty else [],
    }
