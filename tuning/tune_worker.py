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
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fake")
    parser.add_argument("--reserve-sms", type=int, default=0)
    own, rest = parser.parse_known_args(argv)
    words = ("--fake", own.fake) if own.fake else ()
    words += ("--reserve-sms", str(own.reserve_sms)) if own.reserve_sms else ()

    def make(options: argparse.Namespace, control: Any, on_stage: Callable[[str, str], None]) -> Any:
        if own.fake:
            from megamoe_cli.tuning.fake_device import FakeRunner

            return FakeRunner.load(own.fake, options.ranks, control, on_stage, own.reserve_sms)
        return _runner(options, control, on_stage, own.reserve_sms)

    return worker.main(rest, make_runner=make, program=(*PROGRAM, *words))


def _runner(options: argparse.Namespace, control: Any, on_stage: Callable[[str, str], None], reserve_sms: int) -> Any:
    index = worker.device_index(options, control)
    from megamoe_cli.tuning.measuring import TuneRunner

    return TuneRunner(options.backend, options.ranks, control=control, on_stage=on_stage, index=index, reserve_sms=reserve_sms)


if __name__ == "__main__":
    sys.exit(main())
