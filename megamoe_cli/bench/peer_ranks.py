"""Has the public package compile its kernels for several ranks ahead of the rows, side by side: one group of processes for
each size, which launches once. It also shows early whether the package can run over these ranks at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import MegamoeError
from ..tuning.group import Killed, RankGroup
from .over_ranks import RowRequest, shortened
from .ranks_worker import NO_MULTICAST

AT_ONCE = 5  # groups: each rank holds its share of a shape's weights once more
LIMIT_S = 180.0


def compile_peer(command: Sequence[str], requests: Sequence[RowRequest], say: Callable[[str], None], *, log_dir: Path | None = None,
                 limit_s: float = LIMIT_S) -> dict[int, str]:  # fmt: skip
    """Tokens -> why not, of the sizes whose launch failed. Leaves no process, whatever ends it."""
    stop, began = threading.Event(), time.monotonic()
    failed: dict[int, str] = {}

    def one(request: RowRequest) -> None:
        try:
            with RankGroup(command, env=NO_MULTICAST, log_dir=log_dir, setup_timeout_s=limit_s, killed=stop.is_set) as group:
                task = {**request.task(["peer"]), "compile_peer": True}
                result = group.ask({"id": f"compile-{request.tokens}", "task": task}, limit_s)
            if not result.passed:
                failed[request.tokens] = shortened("peer", result.message)
        except Killed:
            failed[request.tokens] = "interrupted"
        except MegamoeError as error:
            failed[request.tokens] = str(error)

    say(f"compiling the public package's kernels: {len(requests)} sizes")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for future in [pool.submit(one, request) for request in requests]:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    say(f"compiled in {time.monotonic() - began:.0f} s")
    return failed
