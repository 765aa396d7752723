"""Starting and ending process trees so that none is left behind.

Every tree gets a session (process group) of its own and a random token in its environment. Killing
means: the group, then whatever still carries the token (a grandchild that changed its session).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO, Mapping, Sequence

TOKEN = "MEGAMOE_PROCESS_TOKEN"
PARENT = "MEGAMOE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


class Tree:
    """One started process with everything it may start. ``process`` has binary pipes."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None,
                 stdin: int | IO | None = subprocess.DEVNULL, stdout: int | IO | None = None,
                 stderr: int | IO | None = None, cwd: str | None = None) -> None:
        # An inner tree (the ranks of a worker) extends the outer token, so the outer kill finds it too.
        self.token = f"{os.environ.get(TOKEN, '')}/{uuid.uuid4().hex}"
        full = dict(os.environ if env is None else env)
        full[TOKEN] = self.token
        full[PARENT] = str(os.getpid())
        self.process = subprocess.Popen(
            list(command), env=full, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd,
            start_new_session=True, bufsize=0,
        )
        self.pid = self.process.pid
        self._cleared = False

    def exited(self) -> bool:
        """True once the process ended. Does not reap it: its pid must stay ours until the group is killed."""
        if self.process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def wait(self, seconds: float) -> bool:
        """Waits up to ``seconds`` for the process itself; True when it ended."""
        deadline = time.monotonic() + seconds
        while not self.exited():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def kill(self, grace_s: float = 0.0, settle_s: float = 10.0) -> int | None:
        """Ends the whole tree and reaps the process; returns its code (negative: signal).

        ``grace_s`` > 0 first sends SIGTERM to the group and waits that long for the process.
        None: it did not die within ``settle_s`` (stuck in the kernel, such as in a driver call).
        """
        if not self._cleared and grace_s > 0 and not self.exited():
            self._signal_group(signal.SIGTERM)
            self.wait(grace_s)
        if not self._cleared:
            self._signal_group(signal.SIGKILL)
        deadline = time.monotonic() + settle_s
        while True:
            left = [pid for pid in token_pids(self.token) if pid != self.pid]
            for pid in left:
                _signal(pid, signal.SIGKILL)
            if self.exited() and not left:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        try:
            code = self.process.wait(0.01)
        except subprocess.TimeoutExpired:
            return None
        self._cleared = True
        return code

    def _signal_group(self, sig: int) -> None:
        if self.process.returncode is not None:
            return  # reaped: the number may belong to someone else by now
        try:
            os.killpg(self.pid, sig)
        except (ProcessLookupError, PermissionError):
            _signal(self.pid, sig)


def _signal(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


def token_pids(token: str) -> list[int]:
    """Live (not zombie) processes whose environment carries ``token`` or a token below it."""
    needle = f"{TOKEN}={token}".encode()
    found: list[int] = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return found  # no /proc: the group kill is all there is
    for entry in entries:
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            if needle in Path("/proc", entry, "environ").read_bytes():
                found.append(int(entry))
        except OSError:
            continue  # gone, a zombie, or not ours to read
    return found


def die_with_parent() -> None:
    """In a child: be killed when the parent goes away, however it goes. Exits at once if it already has."""
    if sys.platform.startswith("linux"):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    parent = os.environ.pop(PARENT, None)  # what we start ourselves has us as its parent, or says so anew
    if parent and os.getppid() != int(parent):
        os._exit(143)


def describe_exit(code: int | None) -> str:
    """``died with SIGSEGV`` / ``exited with 3`` / ``could not be killed``."""
    if code is None:
        return "could not be killed (stuck in a kernel or driver call)"
    if code < 0:
        try:
            return f"died with {signal.Signals(-code).name}"
        except ValueError:
            return f"died with signal {-code}"
    return f"exited with {code}"
