"""The child process that measures: ``python -m megamoe_cli.tuning.tune_worker --backend B --ranks R``.

The worker of the test harness (``megamoe_cli/worker.py``) with another runner: the same protocol, the same one process
per rank for nvlink and processes. ``--fake FILE`` puts a scripted device in the place of the GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from megamoe_cli import worker

PROGRAM = (sys.executable, "-m", "megamoe_cli.tuning.tune_worker")


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] == ["--fake"]:
        script, args = args[1], args[2:]

        def fake(options: argparse.Namespace, control: Any, on_stage: Callable[[str, str], None]) -> Any:
            from megamoe_cli.tuning.fake_device import FakeRunner

            return FakeRunner.load(script, options.ranks, control, on_stage)

        return worker.main(args, make_runner=fake, program=(*PROGRAM, "--fake", script))
    return worker.main(args, make_runner=_runner, program=PROGRAM)


def _runner(options: argparse.Namespace, control: Any, on_stage: Callable[[str, str], None]) -> Any:
    from megamoe_cli.backends.driver import prepare_environment
    from megamoe_cli.backends.picking import pick

    index = options.device
    if control is not None:
        from megamoe_cli.backends.nvlink import device_for

        index = device_for(control.rank)
    else:
        pick(options.backend, options.ranks)  # no GPU, too many ranks: said once, not for each task
    prepare_environment()  # before torch makes a context
    from megamoe_cli.tuning.measuring import TuneRunner

    return TuneRunner(options.backend, options.ranks, control=control, on_stage=on_stage, index=index)


if __name__ == "__main__":
    sys.exit(main())
