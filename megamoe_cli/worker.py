"""The child process that runs cases: ``python -m megamoe_cli.worker --backend B --ranks R``.

Reads one JSON case per line on stdin and writes JSON lines on stdout (``protocol.py``); everything else goes to
stderr. ``nvlink`` and ``processes`` start one such process per rank (``rank_group.py``); under torchrun this process
is a rank itself and rank 0 reads its cases from ``--cases FILE``.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from . import protocol, rank_group
from .errors import EnvironmentUnfit, ExitCode, MegamoeError, UsageError
from .processes import die_with_parent

if TYPE_CHECKING:
    from .backends.control import Control
    from .runner import Runner

ONE_PROCESS_PER_RANK = ("nvlink", "processes")
PROGRAM = (sys.executable, "-m", "megamoe_cli.worker")


def main(argv: Sequence[str] | None = None, make_runner: Callable[..., Runner] | None = None,
         program: Sequence[str] = PROGRAM) -> int:  # fmt: skip
    """``make_runner(args, control, on_stage)`` replaces the making of the Runner and ``program`` what is started as a
    rank (for tests without a device)."""
    args = _parser().parse_args(argv)
    out = _take_stdout()
    die_with_parent()
    # Before torch: a library that forks or hangs on import must be visible too.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    say = _Speaker(out)
    per_rank = args.backend in ONE_PROCESS_PER_RANK
    under_torchrun = per_rank and args.rank is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        if per_rank and args.rank is None and not under_torchrun:
            return rank_group.serve(args.ranks, lambda rank, at: _rank_command(program, args, rank, at), out)
        if per_rank:
            return _serve_rank(args, say, make_runner or _rank_runner)
        runner = (make_runner or _single_runner)(args, None, say.stage)
    except MegamoeError as error:
        say(fatal={"message": str(error), "hint": error.hint, "exit_code": int(error.exit_code)})
        return int(error.exit_code)
    say(hello={"pid": os.getpid(), "backend": args.backend, "ranks": args.ranks, "where": args.backend})
    for case in _cases(args, say):
        result = runner.run(case)
        say(**result.to_dict())
        if result.respawn:
            return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megamoe_cli.worker", description="Runs cases for megamoe (internal).")
    parser.add_argument("--backend", required=True, choices=("emulator", "virtual", *ONE_PROCESS_PER_RANK))
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cases", metavar="FILE", help="JSON lines to run instead of stdin")
    parser.add_argument("--device", type=int, default=0, help="CUDA device of virtual ranks")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)  # set by rank_group
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return parser


def _take_stdout() -> int:
    """Keeps the real stdout for the protocol and sends every stray print to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return out


class _Speaker:
    """Writes protocol lines whole."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __call__(self, **message: Any) -> None:
        data = protocol.encode(message)
        try:
            while data:
                data = data[os.write(self._fd, data):]
        except BrokenPipeError:
            os._exit(int(ExitCode.TERMINATED))  # nobody listens any more

    def stage(self, case_id: str, name: str) -> None:
        self(id=case_id, stage=name)


def _cases(args: argparse.Namespace, say: _Speaker) -> Iterator[dict[str, Any]]:
    stream = open(args.cases, "rb") if args.cases else sys.stdin.buffer
    with stream:
        for line in stream:
            if not line.strip():
                continue
            case = protocol.decode(line)
            if case is None or not isinstance(case.get("id"), str):
                say(id="", status="error", message=f"not a case: {line[:200]!r}", exit_code=int(ExitCode.USAGE))
                continue
            yield case


def _single_runner(args: argparse.Namespace, control: Control | None, on_stage: Callable[[str, str], None]) -> Runner:
    from .backends.picking import pick

    pick(args.backend, args.ranks)  # no GPU, too many ranks: said once, not per case
    if args.backend == "virtual":
        from .backends.driver import prepare_environment

        prepare_environment()  # before torch makes a context
    from .runner import Runner

    opener = None
    if args.backend == "virtual" and args.device:
        from .backends.virtual import open_backend

        opener = lambda ranks, **options: open_backend(ranks, device=args.device, **options)  # noqa: E731
    return Runner(args.backend, args.ranks, on_stage=on_stage, opener=opener,
                  device=None if args.backend == "emulator" else f"cuda:{args.device}")  # fmt: skip


# -- one process per rank --------------------------------------------------------------------------


def _rank_command(program: Sequence[str], args: argparse.Namespace, rank: int, rendezvous: str) -> list[str]:
    command = [*program, "--backend", args.backend, "--ranks", str(args.ranks)]
    if args.cases:
        command += ["--cases", args.cases]
    return [*command, "--rank", str(rank), "--rendezvous", rendezvous]


def _serve_rank(args: argparse.Namespace, say: _Speaker, make_runner: Callable[..., Runner]) -> int:
    """One rank of a group: rank 0 hears and speaks, all run each case together."""
    from .backends.control import Control

    rank, rendezvous = args.rank, args.rendezvous
    if rank is None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        rendezvous = "env://"
        if size != args.ranks:
            raise UsageError(f"torchrun started {size} ranks, --ranks says {args.ranks}", rule="ranks-limit")
        if not args.cases and rank == 0:
            raise UsageError("under torchrun cases come from --cases FILE", rule="cases-file")
    leads = rank == 0
    control = Control.bootstrap(rank, args.ranks, rendezvous)
    quiet: Callable[[str, str], None] = say.stage if leads else (lambda *_: None)
    try:
        runner = control.step("set up this rank", lambda: make_runner(args, control, quiet))
    except MegamoeError as error:
        if leads:
            say(fatal={"message": str(error), "hint": error.hint, "exit_code": int(error.exit_code)})
        return 0 if leads else rank_group.LOST_PEERS if control.lost else 0
    if leads:
        say(hello={"pid": os.getpid(), "backend": args.backend, "ranks": args.ranks, "where": args.backend})
    source = _cases(args, say) if leads else iter(())
    while True:
        try:
            case = control.broadcast(next(source, None) if leads else None)
        except EnvironmentUnfit as error:
            print(f"megamoe: {error}", file=sys.stderr)
            return rank_group.LOST_PEERS
        if case is None:
            control.close()
            return 0
        result = runner.run(case)
        if control.lost:  # another rank died: its death is the news, and the group's parent tells it
            print(f"megamoe: {result.message}", file=sys.stderr)
            return rank_group.LOST_PEERS
        if leads:
            say(**result.to_dict())
        if control.broken or any(control.gather(result.respawn)):
            return 0


def device_index(args: argparse.Namespace, control: Control | None) -> int:
    """The CUDA device of this process, its environment prepared before torch makes a context. EnvironmentUnfit or UsageError
    when no task can run here: no GPU, too many ranks (said once, not for each task)."""
    from .backends.driver import prepare_environment

    index = args.device
    if control is None:
        from .backends.picking import pick

        pick(args.backend, args.ranks)
    else:
        from .backends.nvlink import device_for

        index = device_for(control.rank)
    prepare_environment()
    return index


def _rank_runner(args: argparse.Namespace, control: Control, on_stage: Callable[[str, str], None]) -> Runner:
    from .backends.nvlink import device_for
    from .runner import Runner

    index = device_for(control.rank)
    return Runner(args.backend, args.ranks, control=control, on_stage=on_stage, device=f"cuda:{index}")


if __name__ == "__main__":
    sys.exit(main())
