"""Finding and ending the processes of a remote job. Used on the far side by ``agent.py``; standard library only."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable

from megamoe_cli.processes import TOKEN

_SETTLE_S = 10.0  # how long killed processes may take to go


def token_of(state: str, job: str = "") -> str:
    """Token of one job, or the prefix of the tokens of all jobs of this state folder."""
    return f"megamoe-remote/{hashlib.sha256(os.path.realpath(state).encode()).hexdigest()[:16]}/{job}"


def stat_fields(pid: int | str) -> list[str] | None:
    """Fields of /proc/PID/stat after the name (state, parent, group, ...), or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def birth(pid: int) -> str | None:
    """Start time of a live process: with its number it names one process even after the number is used again."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def descendants(root: int) -> list[int]:
    """Live processes below ``root``. A subreaper finds orphans that changed session and environment this way too."""
    below: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        fields = stat_fields(entry)
        if fields and fields[0] not in "ZX":
            below.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        children = below.get(todo.pop(), [])
        found += children
        todo += children
    return found


def tokens_below(prefix: str) -> dict[int, str]:
    """Process -> its token, of all live processes whose token begins with ``prefix``. Not this process."""
    needle, found = f"{TOKEN}={prefix}".encode(), {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as stream:
                own = next((v for v in stream.read().split(b"\0") if v.startswith(needle)), None)
        except OSError:
            continue  # gone, a zombie, or another user's
        if own is not None and int(entry) != os.getpid():
            found[int(entry)] = own.partition(b"=")[2].decode()
    return found


def children(parent: int) -> list[int]:
    """Live processes that ``parent`` started itself."""
    stats = ((int(entry), stat_fields(entry)) for entry in filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid, fields in stats if fields and fields[0] not in "ZX" and int(fields[1]) == parent]


def send(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, PermissionError):
        pass


def kill_all(find: Callable[[], list[int]], grace_s: float, head: int | None = None) -> tuple[int, list[int]]:
    """Ends what ``find()`` lists: SIGTERM (to ``head`` alone when given: it knows how to end the rest), up to
    ``grace_s`` seconds, SIGKILL. Returns (how many, those that stay)."""
    seen = set(find())
    if grace_s > 0:
        for pid in seen if head is None else [head]:
            send(pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while time.monotonic() < until and find():
            time.sleep(0.05)
    until = time.monotonic() + _SETTLE_S
    while True:
        left = find()
        seen.update(left)
        for pid in left:
            send(pid, signal.SIGKILL)
        if not left or time.monotonic() > until:
            return len(seen), left
        time.sleep(0.02)
