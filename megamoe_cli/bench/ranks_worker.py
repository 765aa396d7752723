"""The process (or one of the processes) in which ``megamoe bench --ranks`` measures:
``python -m megamoe_cli.bench.ranks_worker --backend B --ranks R``. The worker of the test harness with another runner.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .. import worker

PROGRAM = (sys.executable, "-m", "megamoe_cli.bench.ranks_worker")
# A multicast object can outlive its processes on a shared machine. Every library in the process is told to make none,
# whatever the user's environment says.
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}


def main(argv: Sequence[str] | None = None, runner: Callable[..., Any] | None = None, program: Sequence[str] = PROGRAM) -> int:
    """``runner(options, control, on_stage, reserve_sms)`` replaces the making of the runner (for tests without a device)."""
    os.environ.update(NO_MULTICAST)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--reserve-sms", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    words = ("--reserve-sms", str(own.reserve_sms)) if own.reserve_sms else ()
    make = runner or _runner
    return worker.main(rest, make_runner=lambda options, control, on_stage: make(options, control, on_stage, own.reserve_sms),
                       program=(*program, *words))  # fmt: skip


def _runner(options: argparse.Namespace, control: Any, on_stage: Callable[[str, str], None], reserve_sms: int) -> Any:
    index = worker.device_index(options, control)
    from .ranks_runner import RanksRunner

    return RanksRunner(options.backend, options.ranks, control=control, on_stage=on_stage, index=index, reserve_sms=reserve_sms)


if __name__ == "__main__":
    sys.exit(main())
