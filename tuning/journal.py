"""The trials of a run: one JSON line each, on disk before anything is decided from it.

Appended in one write and fsynced; opened for resuming, whatever a crash or a power loss left at the end is cut off first.
Nothing that was measured is ever rewritten: later lines for the same key win.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.protocol import plain
from megamoe_cli.tuning.table_writer import sync_folder

SCHEMA = "megamoe.trial/1"
# ok: timed and right. void: takes back an earlier line of its key (the device was gone, so it says nothing of the candidate).
# Everything else disqualifies.
STATUSES = ("void", "ok", "wrong", "hang", "crash", "fault", "error", "too-fast", "invalid", "build-failed", "unfit")


@dataclass
class Trial:
    """One measurement of configuration ``a`` beside ``b`` (the incumbent) at one size.

    ``pairs``: (a, b) kernel times in microseconds, interleaved, on the same inputs, the slowest rank's. ``conditions``:
    clocks, throttle reasons, other processes. ``check``: the worst relative error of each side after timing.
    """

    key: str
    stage: str
    tokens: int
    routing: str
    seed: int
    a: dict[str, Any]
    b: dict[str, Any]
    status: str
    pairs: list[list[float]] = field(default_factory=list)
    floor_us: float = 0.0
    message: str = ""
    where: str = ""
    stopped: bool = False
    check: dict[str, Any] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    at: str = ""
    worker: int = 0  # which start of the measuring processes it ran in: a confirmation is from another one
    machine: str = ""  # id of the GPU in the run's machine.json
    stderr: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **plain(asdict(self))}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Trial:
        """ValueError when ``data`` is no trial."""
        if data.get("schema") != SCHEMA or data.get("status") not in STATUSES or not isinstance(data.get("key"), str):
            raise ValueError("not a trial")
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ValueError(str(error)) from None


class Journal:
    """``trials.jsonl`` of one run. ``repaired``: bytes that a crash left and that were cut off; ``skipped``: lines in the
    middle that are no trials (kept in the file, not used)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, Trial] = {}
        self.repaired = self.skipped = 0
        self._fd = -1

    def open(self) -> Journal:
        """Creates or repairs the file and reads it. UsageError when it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = not self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            if new:
                sync_folder(self.path.parent)
            self._read()
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}", hint="pass --results-dir", rule="unwritable") from None
        return self

    def _read(self) -> None:
        data = self.path.read_bytes()
        end = 0
        pending = 0
        for start, line in _lines(data):
            trial = _trial(line)
            if trial is None:
                pending += 1
                continue
            # A bad line with a good one behind it was not cut short: something else wrote it.
            self.skipped, pending = self.skipped + pending, 0
            self._keep(trial)
            end = start + len(line) + 1
        if end < len(data):
            self.repaired = len(data) - end
            os.ftruncate(self._fd, end)
            os.fsync(self._fd)

    def append(self, trial: Trial) -> None:
        """Writes the trial and returns when it is on disk. EnvironmentUnfit when it cannot be (disk full): what was
        written of it is taken back, so the file stays whole."""
        line = (json.dumps(trial.to_dict(), separators=(",", ":"), allow_nan=False) + "\n").encode()
        before = os.fstat(self._fd).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._fd, line[written:])
            os.fsync(self._fd)
        except OSError as error:
            os.ftruncate(self._fd, before)
            raise EnvironmentUnfit(f"a trial cannot be saved to {self.path}: {error.strerror or error}",
                                   hint="make room, then continue with --resume: finished trials are kept") from None
        self._keep(trial)

    def _keep(self, trial: Trial) -> None:
        if trial.status == "void":
            self.trials.pop(trial.key, None)
        else:
            self.trials[trial.key] = trial

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its end) of every complete line."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield start, data[start:end]
        start = end + 1


def _trial(line: bytes) -> Trial | None:
    try:
        value = json.loads(line)
        return Trial.from_dict(value) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None
