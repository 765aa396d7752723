"""One worker process as the supervisor holds it: its pipes, its stderr log, the case it works on."""

from __future__ import annotations

import os
import selectors
import signal
import time
from pathlib import Path
from typing import Iterator, Mapping, Sequence

from . import errors
from .processes import Tree

STDERR_LINES = 40  # of a dead worker, kept with its case: a dump of stacks and what was said before it
KEPT_LOGS = 40


class Slot:
    """States: ``down``, ``starting`` (no hello yet), ``idle``, ``busy`` (holds a case), ``leaving``."""

    def __init__(self, index: int, log: Path) -> None:
        self.index, self.log = index, log
        self.log_file = open(log, "a+b", buffering=0)  # read back through it too: another run may prune the file
        self.tree: Tree | None = None
        self.state = "down"
        self.case: dict | None = None
        self.stage = ""
        self.where = ""
        self.deadline = 0.0  # monotonic seconds
        self.limit = 0.0  # what the deadline was made from, seconds
        self.started = 0.0
        self.failed_starts = 0
        self.received = b""
        self.outgoing = b""
        self.stdin = self.stdout = -1
        self._log_offset = 0
        self._selector: selectors.BaseSelector | None = None

    def spawn(self, command: Sequence[str], env: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        out_read, out_write = os.pipe()
        in_read, in_write = os.pipe()
        self.log_file.write(f"--- {time.strftime('%H:%M:%S')} start: {' '.join(command)}\n".encode())
        self.mark()
        try:
            self.tree = Tree(command, env=env, stdin=in_read, stdout=out_write, stderr=self.log_file)
        except OSError as error:
            os.close(out_read)
            os.close(in_write)
            raise errors.EnvironmentUnfit(f"cannot start a worker: {error}") from error
        finally:
            os.close(out_write)
            os.close(in_read)
        os.set_blocking(out_read, False)
        os.set_blocking(in_write, False)
        self.stdout, self.stdin = out_read, in_write
        self.received = self.outgoing = b""
        self.state = "starting"
        self._selector = selector
        selector.register(out_read, selectors.EVENT_READ, self)

    def lines(self) -> Iterator[bytes]:
        """Complete lines that are there now; a bounded amount, so that a babbler cannot starve the clocks."""
        for _ in range(64):
            if self.stdout < 0:
                return
            try:
                chunk = os.read(self.stdout, 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                self._forget(self.stdout)  # end of file; the exit itself is seen by the supervisor's clock
                return
            self.received += chunk
            *complete, self.received = self.received.split(b"\n")
            for line in complete:
                if line.strip():
                    yield line

    def write(self) -> None:
        """Sends what the pipe takes now; the rest when the selector says so."""
        try:
            while self.outgoing:
                self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing):]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = b""  # it died or closed stdin: its exit, or the clock, decides
        registered = self._selector is not None and self.stdin in self._selector.get_map()
        if self.outgoing and not registered:
            self._selector.register(self.stdin, selectors.EVENT_WRITE, self)
        elif registered and not self.outgoing:
            self._forget(self.stdin)

    def close_stdin(self) -> None:
        """End of file: the worker's sign to finish."""
        if self.stdin >= 0:
            self._forget(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def end(self, grace_s: float = 0.0) -> int | None:
        """Kills the whole tree and forgets the worker; returns its exit code (None: unkillable, or none)."""
        tree, self.tree, self.state = self.tree, None, "down"
        if tree is None:
            return None
        code = tree.kill(grace_s)
        self.close_stdin()
        if self.stdout >= 0:
            self._forget(self.stdout)
            os.close(self.stdout)
            self.stdout = -1
        return code

    def dump_stacks(self) -> None:
        """Asks a hanging worker for its Python stacks (it registers SIGUSR1): they go to the log and the tail."""
        if self.tree is None or self.tree.exited():
            return
        before = os.fstat(self.log_file.fileno()).st_size
        os.kill(self.tree.pid, signal.SIGUSR1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until and not self.tree.exited():
            if os.fstat(self.log_file.fileno()).st_size != before:
                time.sleep(0.05)  # the rest of the dump
                return
            time.sleep(0.02)

    def mark(self) -> None:
        """The tail starts here: what earlier cases wrote is not about this one."""
        self._log_offset = os.fstat(self.log_file.fileno()).st_size

    def tail(self) -> list[str]:
        """The last lines of stderr since ``mark``."""
        fd = self.log_file.fileno()
        size = os.fstat(fd).st_size
        start = max(self._log_offset, size - (1 << 16))
        lines = os.pread(fd, size - start, start).decode(errors="replace").splitlines()
        return [line for line in lines if line.strip()][-STDERR_LINES:]

    def note(self, line: bytes) -> None:
        """A line of stdout that is no message."""
        self.log_file.write(b"[stdout] " + line[:2000] + b"\n")

    def _forget(self, fd: int) -> None:
        if self._selector is not None and fd in self._selector.get_map():
            self._selector.unregister(fd)


def prune(log_dir: Path) -> None:
    """Keeps the newest worker logs; a busy machine must not fill its disk."""
    logs = sorted(log_dir.glob("worker-*.log"), key=lambda p: p.name)
    for path in logs[:-KEPT_LOGS]:
        path.unlink(missing_ok=True)
