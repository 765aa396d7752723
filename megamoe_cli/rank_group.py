"""The parent of one-process-per-rank runs: starts R rank processes, ends them all at the first death.

It is the worker the supervisor talks to, but relays nothing: rank 0 inherits stdin and the protocol's stdout.
Imports neither torch nor cupy.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .processes import Tree, describe_exit

LOST_PEERS = 75  # exit code of a rank that only noticed that another one is gone
TICK_S = 0.05
ATTRIBUTION_S = 0.5  # after the first death, how long others may die before we say whose fault it was
LEAVE_S = 5.0  # between the first rank's orderly end and the last one's

Command = Callable[[int, str], Sequence[str]]  # (rank, rendezvous) -> argv


def serve(ranks: int, command: Command, out: int, stdin: int = 0) -> int:
    """Runs the group until it ends; returns an exit code (0: every rank ended well).

    ``out``: file descriptor of the protocol's stdout, for rank 0. The first death kills the rest within seconds.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="megamoe-ranks-"))  # its name is the run id: no two runs can meet
    rendezvous = (run_dir / "store").as_uri()
    trees: list[Tree] = []
    restore = _signals(trees)
    try:
        env = _rank_env()
        for rank in range(ranks):
            first = rank == 0
            trees.append(Tree(command(rank, rendezvous), env=env, stdin=stdin if first else None,
                              stdout=out if first else sys.stderr.fileno()))
        return _watch(trees)
    finally:
        for tree in trees:
            tree.kill()
        for number, handler in restore.items():
            signal.signal(number, handler)
        shutil.rmtree(run_dir, ignore_errors=True)


def _watch(trees: Sequence[Tree]) -> int:
    codes: dict[int, int | None] = {}
    first_end = 0.0
    while len(codes) < len(trees):
        for rank, tree in enumerate(trees):
            if rank not in codes and tree.exited():
                codes[rank] = tree.kill()  # reaps it and ends what it may have left
                first_end = first_end or time.monotonic()
        bad = [rank for rank, code in codes.items() if code != 0]
        waited = time.monotonic() - first_end if first_end else 0.0
        if bad and (waited > ATTRIBUTION_S or len(codes) == len(trees)):
            culprits = [rank for rank in bad if codes[rank] != LOST_PEERS] or bad
            for rank in culprits:
                _say(f"rank {rank} {describe_exit(codes[rank])}")
            return 1
        if not bad and codes and waited > LEAVE_S and len(codes) < len(trees):
            missing = [rank for rank in range(len(trees)) if rank not in codes]
            _say(f"rank(s) {', '.join(map(str, missing))} did not end within {LEAVE_S:g} s of the others")
            return 1
        time.sleep(TICK_S)
    return 0


def _say(text: str) -> None:
    print(f"megamoe: {text}", file=sys.stderr, flush=True)


def _rank_env() -> dict[str, str]:
    env = dict(os.environ)
    # All ranks are on this machine: loopback works where a container's host name does not resolve.
    if os.path.isdir("/sys/class/net/lo"):
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)  # a torchrun around us is about another group
    return env


def _signals(trees: list[Tree]) -> dict[int, Any]:
    """SIGTERM ends the group; SIGUSR1 (the supervisor's 'where do you hang?') goes on to every rank."""

    def terminate(_number: int, _frame: Any) -> NoReturn:
        raise SystemExit(143)  # the finally above kills the ranks

    def ask(_number: int, _frame: Any) -> None:
        for tree in trees:
            if not tree.exited():
                os.kill(tree.pid, signal.SIGUSR1)

    return {signal.SIGTERM: signal.signal(signal.SIGTERM, terminate), signal.SIGUSR1: signal.signal(signal.SIGUSR1, ask)}
