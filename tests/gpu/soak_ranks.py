"""One rank of a soak over real GPUs: ``python -m torch.distributed.run --nproc-per-node N tests/gpu/soak_ranks.py LAUNCHES``.
Prints ``SOAK rank launches where`` and exits 0 when every launch gave the bits of the first one with its data."""

from __future__ import annotations

import os
import sys

from megamoe_cli.backends.control import Control
from megamoe_cli.config import KernelConfig
from megamoe_cli.shapes import Problem, Shape
from tests.soak import soak


def main() -> int:
    rank, ranks, launches = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
    control = Control.bootstrap(rank, ranks, "env://")
    from megamoe_cli.backends.nvlink import open_backend

    tokens = tuple((40, 0, 13, 64, 7, 64, 1, 30)[r % 8] for r in range(ranks))
    with open_backend(ranks, control=control) as backend:
        mix = [KernelConfig(block_m=64, frontend="standard"), KernelConfig(cluster=2)]
        done = soak(backend, Problem.make(Shape(256, 256, 16, 2), ranks, tokens), KernelConfig(), launches, seed=1, delay_bytes=256 << 20, mix=mix)
        sys.stdout.write(f"SOAK {rank} {done} {backend.where}\n")  # one write: the ranks share the pipe
        sys.stdout.flush()
    control.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
