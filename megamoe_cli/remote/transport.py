"""Running ssh and rsync: time limits, what their failures mean in plain words, and the heartbeat of a running job."""

from __future__ import annotations

import errno
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.errors import EnvironmentUnfit, MegamoeError, TimedOut
from megamoe_cli.remote.far_input import ENDED, PIECE, WANTED, piece
from megamoe_cli.remote.targets import Target

SSH_FAILED = 255
_HEARTBEAT_S = 1.0
_TAIL = 40
# What ssh says -> what it means. ssh does not translate its messages.
_SSH_MEANINGS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
     "the host key of {host} is not the one ssh knows; nothing was sent",
     "ask who runs the machine whether it was reinstalled; if so: ssh-keygen -R with its name as known_hosts has it"),
    (r"Permission denied", "{host} refuses the login", "try it by hand: {ssh} {host} true"),
    (r"Could not resolve hostname", "there is no host {host}", "check host in the target, or ~/.ssh/config"),
    (r"Connection refused|No route to host|Connection timed out|Operation timed out", "{host} cannot be reached",
     "try it by hand: {ssh} {host} true"),
)  # fmt: skip


@dataclass
class Step:
    """One command line that ran. ``what``: prepare, sync, run, ...; ``exit_code`` as its process returned it."""

    what: str
    command: list[str]
    seconds: float = 0.0
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    killed_by: int = 0  # the signal that ended it, on this machine

    def ended(self, code: int | None) -> None:
        """As a shell says it: 128 and the number of the signal."""
        self.killed_by = -code if code is not None and code < 0 else 0
        self.exit_code = 128 + self.killed_by if self.killed_by else code

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "command": self.command, "seconds": round(self.seconds, 3), "exit_code": self.exit_code}


class ConnectionLost(EnvironmentUnfit):
    """ssh gave up: the far side may still be at work until it notices."""


DISK_FULL = ("No space left on device", "Disk quota exceeded")  # the far side speaks C.UTF-8


def explain_killed(target: Target, step: Step) -> ConnectionLost | None:
    """Our own ssh or rsync was ended by a signal, or None."""
    if not step.killed_by:
        return None
    name = signal.Signals(step.killed_by).name if step.killed_by in set(signal.Signals) else f"signal {step.killed_by}"
    return ConnectionLost(f"{target.label}: {Path(step.command[0]).name} on this machine was ended by {name} during {step.what}")


def space_hint(target: Target) -> str:
    return f"free some space on {target.host} below {target.path}, or set path in the target to a folder on another disk"


def explain_ssh(target: Target, stderr: str) -> EnvironmentUnfit:
    """ssh's 255 as one line and a hint."""
    names = {"host": target.host, "ssh": " ".join(target.ssh)}
    for pattern, text, hint in _SSH_MEANINGS:
        if re.search(pattern, stderr):
            return EnvironmentUnfit(f"{target.label}: {text.format(**names)}", hint=hint.format(**names))
    said = last_line(stderr)
    return ConnectionLost(f"{target.label}: the connection broke{': ' + said if said else ''}")


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def explain_rsync(target: Target, step: Step, disk_full: bool = False) -> MegamoeError:
    """rsync's exit codes; its messages carry errno as a number, whatever the language. ``disk_full``: it was looked up."""
    if disk_full or any(f"({number})" in step.stderr for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
        if step.what == "fetch":
            return EnvironmentUnfit(f"this machine: the disk is full; {step.what} stopped",
                                    hint=f"free some space here, in {tempfile.gettempdir()} and where results go")
        return EnvironmentUnfit(f"{target.label}: the disk is full; {step.what} stopped", hint=space_hint(target))
    if killed := explain_killed(target, step):
        return killed
    if step.exit_code == SSH_FAILED:
        return explain_ssh(target, step.stderr)
    if step.exit_code == 11 and not step.stderr.strip():  # its last words were lost
        return EnvironmentUnfit(f"{target.label}: files cannot be written; {step.what} stopped: the disk or a quota is full, or files may not grow",
                                hint=space_hint(target))
    if step.exit_code == 2 and "protocol version mismatch" in step.stderr:
        return EnvironmentUnfit(f"{target.label}: the login shell there prints something before the command, and rsync reads it",
                                hint=f"see it with: {' '.join(target.ssh)} {target.host} true; let the start-up file do it on terminals only")
    if step.exit_code == 127 or re.search(r"rsync[^\n]*(not found|No such file)", step.stderr):
        return EnvironmentUnfit(f"{target.label}: rsync is not installed there", hint="install rsync on the host")
    if step.exit_code in (10, 12, 30):
        return ConnectionLost(f"{target.label}: the connection broke during {step.what}: {last_line(step.stderr)}")
    if step.exit_code == 20:
        return EnvironmentUnfit(f"{target.label}: {step.what} was interrupted")
    return EnvironmentUnfit(f"{target.label}: rsync failed with {step.exit_code} during {step.what}: {_first_line(step.stderr)}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    # Ctrl-C goes to us, and we say what it means; ssh keeps an ignored SIGINT ignored.
    previous = None
    main = threading.current_thread() is threading.main_thread()
    if main:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.Popen(list(command), **options)
    except OSError as error:
        raise EnvironmentUnfit(f"{command[0]} cannot be started: {error.strerror}", hint=f"install {Path(command[0]).name}") from None
    finally:
        if main:
            signal.signal(signal.SIGINT, previous or signal.SIG_DFL)


def call(what: str, command: Sequence[str], *, timeout_s: float, cwd: Path | None = None,
         on_start: Callable[[Step], None] = lambda step: None) -> Step:  # fmt: skip
    """Runs a short command to its end. TimedOut when it takes longer; its exit code is the caller's business."""
    step = Step(what, list(command))
    on_start(step)
    start = time.monotonic()
    process = _start(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except BaseException as error:
        process.terminate()  # rsync then ends the ssh that it started
        try:
            out, err = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        step.seconds = time.monotonic() - start
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimedOut(f"{what}: no answer within {timeout_s:g} s: {last_line(err.decode(errors='replace')) or command[0]}") from None
        raise
    step.seconds = time.monotonic() - start
    step.ended(process.returncode)
    step.stdout, step.stderr = out.decode(errors="replace"), err.decode(errors="replace")
    return step


@dataclass
class Attached:
    """A job in the foreground: its output is ours, its stdin carries our heartbeat, and with ``source`` (a file
    descriptor) what is read there.

    Ctrl-C once is passed on (the command finishes what it is at), twice ends it. With ``lets_go`` it only ends the
    connection: the job is not ours to end. ``ended``: why the far side ended the job, or an empty string.
    """

    step: Step
    timeout_s: float | None
    lets_go: bool = False
    source: int | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL))
    interrupts: int = 0
    ended: str = ""
    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    pieces: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)
    outgoing: bytes = b""

    def run(self) -> int:
        """The exit code of the ssh process (128 and more: a signal ended it, see ``step.killed_by``). TimedOut when it is
        not back in time; then the connection is closed."""
        start = time.monotonic()
        process = _start(self.step.command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a stalled network must not keep us from looking at the clock
        forward = threading.Thread(target=self._forward, args=(process,), daemon=True)
        forward.start()
        if self.source is not None:
            threading.Thread(target=self._read, args=(self.source,), daemon=True).start()
        previous = self._catch()
        try:
            beat, passed = 0.0, 0
            while process.poll() is None and not (self.lets_go and self.interrupts):
                now = time.monotonic()
                if self.timeout_s is not None and now - start > self.timeout_s:
                    raise TimedOut(f"no answer within {self.timeout_s:g} s")
                while passed < self.interrupts:
                    passed += 1
                    self._interrupt(passed)
                while not self.pieces.empty():
                    self.outgoing += self.pieces.get()
                if now - beat >= _HEARTBEAT_S:
                    beat = now
                    self.outgoing = self.outgoing or b"."
                self._send(process)
                try:
                    process.wait(0.02 if self.outgoing or self.source is not None else 0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            self._restore(previous)
            self._hang_up(process)
            forward.join(2)
            self.step.seconds = time.monotonic() - start
            self.step.ended(process.returncode)
            self.step.stderr = "\n".join(self.tail)
        assert self.step.exit_code is not None
        return self.step.exit_code

    def _interrupt(self, number: int) -> None:
        self.outgoing += b"i" if number == 1 else b"t"
        if number <= 2:
            print("interrupt passed on; once more ends the job" if number == 1 else "ending the job", file=sys.stderr, flush=True)

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            while self.outgoing and select.select([], [process.stdin], [], 0)[1]:
                self.outgoing = self.outgoing[os.write(process.stdin.fileno(), self.outgoing):]
        except (BlockingIOError, BrokenPipeError, ValueError):
            pass  # full; or ssh has ended, and poll() is about to say so

    def _read(self, source: int) -> None:
        """One piece of our input for every time the far side wants one."""
        while True:
            self.wanted.acquire()
            try:
                data = os.read(source, PIECE)
            except OSError:
                data = b""
            self.pieces.put(piece(data) if data else b"e")
            if not data:
                return

    def _hang_up(self, process: subprocess.Popen[bytes]) -> None:
        """Closes the channel; the far side takes that as the end. ssh gets a moment to deliver it."""
        try:
            assert process.stdin is not None
            process.stdin.close()
        except OSError:
            pass
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _forward(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip("\r\n")
            # Words of the agent may stand behind a line that the command has not ended.
            before, said, reason = line.partition(ENDED)
            if said:
                self.ended = reason
            elif line.endswith(WANTED):
                before = line.removesuffix(WANTED)
                self.wanted.release()
            elif line.startswith("record: "):
                continue  # a path over there; what is fetched gets a line of its own
            if before or before == line:
                self.tail.append(before)
                print(before, file=sys.stderr, flush=True)

    def _catch(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return None

        def on_interrupt(number: int, frame: Any) -> None:
            self.interrupts += 1  # and no more: run() does the rest, outside of a signal handler

        return signal.signal(signal.SIGINT, on_interrupt)

    @staticmethod
    def _restore(previous: Any) -> None:
        if previous is not None:
            signal.signal(signal.SIGINT, previous)
