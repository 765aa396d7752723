"""The compiler's log as data: registers, spills, stack, static shared memory, barriers, and what ptxas gave up on."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_USED = re.compile(r"Used (\d+) registers")
_NOTE = re.compile(r"ptxas (\w+)\s*:\s*(?:\((C\d+)\)\s*)?(.*)")
_LINE = re.compile(r"in (?:around )?line (\d+)")
# ptxas numbers its notes; the text is matched too, because numbers have moved between releases.
_SERIAL_CODES = {f"C75{n}" for n in range(10, 17)}


@dataclass(frozen=True)
class Note:
    """One remark of ptxas. ``kind``: setmaxnreg (the request was ignored), serialized (WGMMA runs one after
    another), injected-wait (a wait was added for correctness), warning (anything else). ``line``: of the
    PTX text, when given."""

    kind: str
    code: str
    text: str
    line: int | None = None


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one entry function. Bytes, except ``registers`` (per thread) and ``barriers``."""

    entry: str
    arch: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    smem_static: int
    barriers: int
    notes: tuple[Note, ...] = field(default=())

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads

    def of_kind(self, kind: str) -> list[Note]:
        return [note for note in self.notes if note.kind == kind]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"notes": [asdict(note) for note in self.notes]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Resources:
        return cls(**{**values, "notes": tuple(Note(**note) for note in values["notes"])})


def parse_log(log: str, entry: str) -> Resources:
    """Reads the verbose log of one compilation. ValueError when ``entry`` is not in it (no -v, or another kernel).

    Spills and stack are those of the entry and of every function it may call: a spill in either is one in a role.
    """
    arch, registers, barriers, smem = "", None, 0, 0
    stores = loads = stack = 0
    notes: list[Note] = []
    current = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            current = match[1]
            arch = match[2] if current == entry else arch
        elif match := _FUNCTION.search(line):
            current = match[1]
        elif match := _FRAME.search(line):
            stack += int(match[1])
            stores += int(match[2])
            loads += int(match[3])
        elif (match := _USED.search(line)) and current == entry:
            registers = int(match[1])
            barriers = _number(r"used (\d+) barriers", line)
            smem = _number(r"(\d+) bytes smem", line)
        elif note := _note(line):
            notes.append(note)
    if registers is None:
        raise ValueError(f"the compiler log says nothing about entry function {entry!r}")
    return Resources(entry, arch, registers, stores, loads, stack, smem, barriers, tuple(notes))


def _number(pattern: str, line: str) -> int:
    match = re.search(pattern, line)
    return int(match[1]) if match else 0


def _note(line: str) -> Note | None:
    match = _NOTE.search(line)
    if not match:
        return None
    level, code, text = match[1], match[2] or "", match[3].strip()
    if "setmaxnreg" in text and "ignored" in text:
        kind = "setmaxnreg"
    elif "serialized" in text or code in _SERIAL_CODES:
        kind = "serialized"
    elif "wgmma.wait_group is injected" in text:
        kind = "injected-wait"
    elif level != "info" or code:
        kind = "warning"
    else:
        return None
    at = _LINE.search(text)
    return Note(kind, code, text, int(at[1]) if at else None)
