"""Puts every fault of the catalogue into a copy of the kernel sources, switched off: ``hw::mutant(id)`` chooses one at
run time. So the kernel's own files carry no test hooks, a fault is two lines one can read (before, after), and one
emulator binary holds them all. CUDA builds are made of the files without them (and ``hw::mutant`` is a constant there).
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CATEGORIES = ("dispatch", "barriers", "rings", "signals", "epilogues", "combine", "cleanup", "clusters", "policies")


@dataclass(frozen=True)
class Mutant:
    """One fault. ``before`` is text of ``file`` (below kernels/): a statement ending in ``;``, else an expression. It is
    the first occurrence after the text ``near``, or without it the only one. ``after`` replaces it; a statement may be
    replaced by nothing. ``cases``: the cases (cases.py) that are tried first."""

    id: int
    category: str
    file: str
    before: str
    after: str
    what: str
    near: str = ""
    cases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.category}-{self.id}"


class DoesNotApply(Exception):
    """The kernel's text has moved on: the catalogue must be brought up to date."""


def locate(mutant: Mutant, text: str) -> tuple[int, int]:
    """Span of ``before`` in the file's text. Raises DoesNotApply when it is not there, or is there twice."""
    start = 0
    if mutant.near:
        if text.count(mutant.near) != 1:
            raise DoesNotApply(f"{mutant.name}: {mutant.file} has {text.count(mutant.near)} times {mutant.near!r}")
        start = text.index(mutant.near)
    at = text.find(mutant.before, start)
    if at < 0:
        raise DoesNotApply(f"{mutant.name}: {mutant.file} has no {mutant.before!r}" + (f" after {mutant.near!r}" if mutant.near else ""))
    if not mutant.near and text.count(mutant.before) != 1:
        raise DoesNotApply(f"{mutant.name}: {mutant.file} has {text.count(mutant.before)} times {mutant.before!r}; say near what")
    return at, at + len(mutant.before)


def switched(mutants: Sequence[Mutant], before: str) -> str:
    """The text that stands for ``before`` and all faults of this place. Line numbers stay as they are."""
    out = before
    for mutant in mutants:
        if "\n" in mutant.after:
            raise DoesNotApply(f"{mutant.name}: the faulty text must be one line")
        if before.rstrip().endswith(";"):
            out = f"if (hw::mutant({mutant.id})) {{ {mutant.after} }} else {{ {out} }}"
        else:
            out = f"(hw::mutant({mutant.id}) ? ({mutant.after}) : ({out}))"
    return out


def patch(text: str, mutants: Sequence[Mutant]) -> str:
    """A file's text with all its faults in it."""
    places: dict[tuple[int, int], list[Mutant]] = {}
    for mutant in mutants:
        places.setdefault(locate(mutant, text), []).append(mutant)
    last = len(text)
    for begin, end in sorted(places, reverse=True):
        if end > last:
            raise DoesNotApply(f"{places[begin, end][0].name}: overlaps another fault's text")
        text = text[:begin] + switched(places[begin, end], text[begin:end]) + text[end:]
        last = begin
    return text


def write_tree(kernels: Path, out: Path, mutants: Sequence[Mutant]) -> None:
    """A copy of the folder ``kernels`` at ``out`` with the faults in it. Raises DoesNotApply naming the first that fails."""
    shutil.copytree(kernels, out)
    for file in dict.fromkeys(mutant.file for mutant in mutants):
        path = out / file
        path.write_text(patch(path.read_text(), [m for m in mutants if m.file == file]))


def digest(kernels: Path, mutants: Sequence[Mutant]) -> str:
    """Names a patched tree: the same sources and faults, the same name."""
    parts = hashlib.sha256(repr(list(mutants)).encode())
    for path in sorted(p for p in kernels.rglob("*") if p.is_file()):
        parts.update(path.relative_to(kernels).as_posix().encode() + b"\0" + path.read_bytes())
    return parts.hexdigest()[:16]
