"""Makes the public package compile its kernels ahead of a comparison, several at a time.

It compiles at the first launch of each variant (half a minute each, one after the other in one process) and keeps the result
in a cache on disk. So: processes that each launch some of the rows once, on weights whose values do not matter.

    python -m megamoe_cli.bench.peer_build 4096x2048x32x6 1,2,4
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..shapes import Problem, Shape, parse_shape

if TYPE_CHECKING:
    from ..oracle.casedata import RankInputs

SMALL = 128  # tokens: up to there rows share a buffer, and most of them a kernel
MOST_PROCESSES = 12  # each holds a shape's weights on the GPU: up to 6 GB


def groups(rows: Mapping[Shape, Sequence[int]]) -> list[tuple[Shape, list[int]]]:
    """What one process does: a size of its own above SMALL (largest first, they compile longest), small ones in twos."""
    large = [(shape, [size]) for shape, sizes in rows.items() for size in sizes if size > SMALL]
    small = []
    for shape, sizes in rows.items():
        few = sorted(size for size in sizes if size <= SMALL)
        small += [(shape, few[at : at + 2]) for at in range(0, len(few), 2)]
    return sorted(large, key=lambda group: -group[1][0]) + small


def build(rows: Mapping[Shape, Sequence[int]], say: Callable[[str], None], *, timeout_s: float = 240.0,
          command: Sequence[str] = (sys.executable, "-m", "megamoe_cli.bench.peer_build"), processes: int | None = None) -> list[str]:  # fmt: skip
    """Runs all groups; returns one line for each that failed (the comparison itself will then say more)."""
    waiting, running, failed = groups(rows), [], []
    most = processes or max(1, min(MOST_PROCESSES, os.cpu_count() or 1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # finds what this process finds
    began = time.monotonic()
    say(f"compiling the public package's kernels: {len(waiting)} groups of rows, {min(most, len(waiting))} processes")
    try:
        while waiting or running:
            while waiting and len(running) < most:
                shape, sizes = waiting.pop(0)
                words = [*command, str(shape), ",".join(map(str, sizes))]
                log = tempfile.TemporaryFile("w+")  # a pipe that nobody reads would fill up
                running.append((shape, sizes, log, subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=log, text=True, env=environment)))
            for entry in list(running):
                shape, sizes, log, process = entry
                if process.poll() is not None:
                    running.remove(entry)
                    log.seek(0)
                    said = log.read().strip().splitlines()
                    log.close()
                    if process.returncode:
                        failed.append(f"{shape} at {sizes}: {said[-1] if said else f'exit {process.returncode}'}")
            if time.monotonic() - began > timeout_s:
                failed += [f"{shape} at {sizes}: not done within {timeout_s:g} s" for shape, sizes, _, _ in running]
                break
            time.sleep(0.05)
    finally:
        for _, _, log, process in running:
            process.kill()
            process.wait()
            log.close()
    say(f"compiled in {time.monotonic() - began:.0f} s")
    return failed


def blank_layers(shape: Shape, experts: int, device: Any = "cuda") -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Weights of ``experts`` in the package's form: uninitialised codes and zero scales, for what nobody reads."""
    import torch

    hidden, intermediate, blocks = shape.hidden, shape.intermediate, 128
    fp8 = {"dtype": torch.float8_e4m3fn, "device": device}
    return ((torch.empty(experts, 2 * intermediate, hidden, **fp8), torch.zeros(experts, 2 * intermediate // blocks, hidden // blocks, device=device)),
            (torch.empty(experts, hidden, intermediate, **fp8), torch.zeros(experts, hidden // blocks, intermediate // blocks, device=device)))


def blank_inputs(shape: Shape, tokens: int, device: Any = "cuda") -> RankInputs:
    """Zeros that go round over all experts."""
    import torch

    from ..oracle.casedata import RankInputs

    ids = torch.arange(tokens * shape.topk, device=device).view(tokens, shape.topk) % shape.experts
    return RankInputs(torch.zeros(tokens, shape.hidden, dtype=torch.float8_e4m3fn, device=device),
                      torch.ones(tokens, shape.hidden // 128, device=device), ids, torch.ones(tokens, shape.topk, device=device))  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    import torch

    from ..backends.driver import prepare_environment
    from .peer import Peer, load_package

    prepare_environment()
    shape, sizes = parse_shape(arguments[0]), [int(size) for size in arguments[1].split(",")]
    peer = Peer(load_package())
    peer.use_layers(*blank_layers(shape, shape.experts))
    for size in sizes:
        peer.allocate(Problem.make(shape, 1, size), "cuda")
        peer.load(blank_inputs(shape, size))
        peer.enqueue()
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
