"""Compilers as bounded child processes: a time limit, no process left behind, a readable ending."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megamoe_cli.errors import BuildFailed, TimedOut
from megamoe_cli.paths import cupy_env
from megamoe_cli.processes import Tree, describe_exit

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
_running: set[Tree] = set()
_stopping = threading.Event()


@dataclass(frozen=True)
class Ended:
    """``code``: exit status (negative: signal). ``ending``: the same in words."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def ending(self) -> str:
        return describe_exit(self.code)


def run_child(command: Sequence[str], stdin: bytes = b"", timeout_s: float = 300, cwd: str | None = None) -> Ended:
    """Runs ``command`` to its end. TimedOut after ``timeout_s``; on any way out its process tree is gone.

    FileNotFoundError when the program does not exist.
    """
    check_stop()
    # NVRTC keeps what it compiled in the driver's cache, and a hit comes without ptxas's log: no registers, no spills to judge.
    env = dict(os.environ) | cupy_env() | {"CUDA_CACHE_DISABLE": "1"}
    # Children import this very package, also when it was found through the working directory.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_PARENT, env.get("PYTHONPATH", "")]))
    # Files, not pipes: output of any size needs no reader thread, and a killed child leaves what it said.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        tree = Tree(command, env=env, stdin=given, stdout=out, stderr=err, cwd=cwd)
        _running.add(tree)
        try:
            done = tree.wait(timeout_s)
        finally:
            code = tree.kill()
            _running.discard(tree)
        out.seek(0)
        err.seek(0)
        stdout, stderr = out.read(), err.read()
    if not done:
        raise TimedOut(f"{Path(command[0]).name} did not finish within {timeout_s:g} s and was stopped")
    return Ended(-9 if code is None else code, stdout, stderr)


def check_stop() -> None:
    """Raises BuildFailed while the builds of this process are being stopped: no thread starts or awaits anything new."""
    if _stopping.is_set():
        raise BuildFailed("the build was interrupted")


@contextmanager
def children_stopped() -> Iterator[None]:
    """Ends every compiler that threads of this process wait for; until the block ends, none can be started."""
    _stopping.set()
    try:
        for tree in list(_running):
            tree.kill()
        yield
    finally:
        _stopping.clear()
