"""The parent that runs cases in child processes and outlives whatever happens to them.

A case that crashes, hangs or talks garbage costs that one case: its whole process tree is killed, the
result says ``crash`` or ``hang`` with the last lines of stderr, and a fresh worker takes the next case.
Imports neither torch nor cupy: nothing a device does can reach this process.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from . import errors, paths, protocol
from .processes import describe_exit
from .protocol import CaseResult
from .worker_slot import Slot, prune

HOST_LIMIT_S = 600.0  # least limit of a stage that is only this program's own work on the host
HOST_STAGES = ("inputs", "check")
TICK_S = 0.2  # how late a death without end-of-file (a grandchild holds the pipe) may be seen


class CaseResults(list):
    """The results, in the order the cases were given; cases that did not run are missing.

    ``interrupted``: the signal that cut the run short (SIGINT, SIGTERM, SIGHUP), or None.
    ``logs``: the stderr files of the workers.
    """

    def __init__(self, results: Iterable[CaseResult] = (), interrupted: int | None = None,
                 logs: Sequence[Path] = ()) -> None:
        super().__init__(results)
        self.interrupted = interrupted
        self.logs = list(logs)


def run_cases(
    cases: Sequence[Any],
    *,
    backend: str,
    ranks: int,
    timeout_s: float,
    on_result: Callable[[CaseResult], None] | None = None,
    jobs: int = 1,
    on_stage: Callable[[str, str], None] | None = None,
    build_timeout_s: float = 600.0,
    start_timeout_s: float = 180.0,
    host_timeout_s: float = HOST_LIMIT_S,
    on_interrupt: Callable[[str], None] | None = None,
    worker_command: Sequence[str] | None = None,
    worker_args: Sequence[str] = (),
    log_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> CaseResults:
    """Runs every case in a worker and hands each result over as it comes.

    ``timeout_s`` bounds one case (a case's own ``timeout_s`` wins); time spent compiling is bounded by
    ``build_timeout_s``, making inputs and judging outputs by ``host_timeout_s`` (or ``timeout_s`` if that is more).
    ``jobs`` workers run side by side. ``on_stage(case id, stage)`` is progress.
    Ctrl-C once: ``on_interrupt`` is told what happens now (default: stderr is), no further case starts, running ones
    finish; twice, or SIGTERM: killed at once.
    Raises UsageError, EnvironmentUnfit or BuildFailed when the worker says that no case can run.
    """
    loop = _Loop(
        [protocol.case_dict(c) for c in cases],
        command=list(worker_command or default_command(backend, ranks)) + list(worker_args),
        timeout_s=timeout_s, build_timeout_s=build_timeout_s, start_timeout_s=start_timeout_s,
        on_result=on_result or (lambda _: None), on_stage=on_stage or (lambda *_: None),
        host_timeout_s=host_timeout_s, on_interrupt=on_interrupt or _say_interrupted,
        jobs=max(1, min(jobs, len(cases))), log_dir=log_dir or paths.cache_dir() / "logs", env=env, backend=backend,
    )
    return loop.run()


def default_command(backend: str, ranks: int) -> list[str]:
    return [sys.executable, "-m", "megamoe_cli.worker", "--backend", backend, "--ranks", str(ranks)]


class _Loop:
    def __init__(self, cases: list[dict], *, command: list[str], timeout_s: float, build_timeout_s: float,
                 start_timeout_s: float, host_timeout_s: float, on_result: Callable, on_stage: Callable,
                 on_interrupt: Callable[[str], None], jobs: int, log_dir: Path, env: Mapping[str, str] | None, backend: str) -> None:
        self.todo = deque(enumerate(cases))
        self.command, self.backend = command, backend
        self.timeout_s, self.build_timeout_s, self.start_timeout_s = timeout_s, build_timeout_s, start_timeout_s
        self.host_timeout_s = host_timeout_s
        self.on_result, self.on_stage, self.on_interrupt = on_result, on_stage, on_interrupt
        self.done: dict[int, CaseResult] = {}
        self.position: dict[int, int] = {}  # slot index -> index of its case
        self.env = worker_env(env, jobs)
        self.selector = selectors.DefaultSelector()
        paths.make_dir(log_dir)
        prune(log_dir)
        stamp = f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{id(self) & 0xFFFF:04x}"
        try:
            self.slots = [Slot(i, log_dir / f"{stamp}-{i}.log") for i in range(jobs)]
        except OSError as error:
            raise errors.EnvironmentUnfit(f"{log_dir} cannot be written: {error.strerror}", errors.CACHE_HINT) from None
        self.stop = 0  # signals seen: 1 = no new case, 2 = kill
        self.signal: int | None = None
        self.told = False  # about the first Ctrl-C

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> CaseResults:
        old = self._install_signals()
        try:
            while True:
                if self.stop == 1 and not self.told and self._busy():
                    self.told = True
                    self.on_interrupt("interrupted: finishing running cases; Ctrl-C again to stop at once")
                if self.stop >= 2 or (not self._feed() and not self._busy()):
                    break
                for key, events in self.selector.select(self._nap()):
                    slot: Slot = key.data
                    if events & selectors.EVENT_WRITE:
                        slot.write()
                    if events & selectors.EVENT_READ:
                        self._read(slot)
                self._check_clocks()
            self._finish(gently=self.stop < 2)
        finally:
            self._finish(gently=False)  # an exception from a callback must not leave a worker either
            self._restore_signals(old)
            self.selector.close()
            for slot in self.slots:
                slot.log_file.close()
        return CaseResults((self.done[i] for i in sorted(self.done)), self.signal, [s.log for s in self.slots])

    def _busy(self) -> bool:
        return any(s.state in ("busy", "starting") for s in self.slots)

    def _feed(self) -> bool:
        """Starts workers and hands out cases; True while there is something left to hand out."""
        if self.stop:
            for slot in self.slots:
                if slot.state == "starting":  # it has no case yet, so there is nothing to finish
                    slot.end()
            return False
        for slot in self.slots:
            if not self.todo:
                break
            if slot.state == "idle":
                index, slot.case = self.todo.popleft()
                self.position[slot.index] = index
                slot.state, slot.stage, slot.started = "busy", "", time.monotonic()
                slot.mark()
                self._limit(slot, self._case_limit(slot))
                slot.outgoing += protocol.encode(slot.case)
                slot.write()
            elif slot.state == "down":
                starting = sum(s.state == "starting" for s in self.slots)
                if starting < len(self.todo):
                    self._spawn(slot)
        return bool(self.todo)

    def _case_limit(self, slot: Slot) -> float:
        return float((slot.case or {}).get("timeout_s") or self.timeout_s)

    def _limit(self, slot: Slot, seconds: float) -> None:
        slot.limit, slot.deadline = seconds, time.monotonic() + seconds

    def _nap(self) -> float:
        now = time.monotonic()
        ends = [s.deadline - now for s in self.slots if s.state in ("busy", "starting")]
        return max(0.0, min([TICK_S, *ends]))

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for slot in self.slots:
            if slot.tree is None:
                continue
            if slot.tree.exited():
                self._read(slot)  # what it said before it died still counts
                if slot.tree is not None and slot.tree.exited():
                    self._died(slot)
            elif slot.state in ("busy", "starting", "leaving") and now >= slot.deadline:
                self._expired(slot)

    # -- one worker ----------------------------------------------------------------------------

    def _spawn(self, slot: Slot) -> None:
        slot.spawn(self.command, self.env, self.selector)
        self._limit(slot, self.start_timeout_s)

    def _read(self, slot: Slot) -> None:
        for line in slot.lines():
            self._line(slot, line)
            if slot.tree is None:
                return
        if len(slot.received) > protocol.MAX_LINE:
            self._abandon(slot, "crash", f"the worker wrote a line of more than {protocol.MAX_LINE >> 20} MiB")

    def _line(self, slot: Slot, line: bytes) -> None:
        message = protocol.decode(line)
        if message is None:
            slot.note(line)
        elif "hello" in message and slot.state == "starting":
            slot.state = "idle"
            hello = message["hello"]
            slot.where = str(hello.get("where", "")) if isinstance(hello, dict) else ""
        elif "fatal" in message:
            self._fatal(message["fatal"])
        elif slot.state == "busy" and slot.case is not None and message.get("id") == slot.case.get("id"):
            if isinstance(message.get("stage"), str):
                self._stage(slot, message["stage"])
                return
            try:
                result = CaseResult.from_dict(message)
            except (ValueError, TypeError):
                slot.note(line)
                return
            if result.status in ("error", "crash", "hang") and not result.stderr:
                result.stderr = slot.tail()
            slot.state = "idle"
            if result.respawn:
                slot.state = "leaving"
                self._limit(slot, 5.0)
                slot.close_stdin()
            self._deliver(slot, result)
        else:
            slot.note(line)

    def _stage(self, slot: Slot, stage: str) -> None:
        kind = _limit_of(stage)
        if kind != _limit_of(slot.stage):
            limit = self._case_limit(slot)
            self._limit(slot, {"build": self.build_timeout_s, "host": max(limit, self.host_timeout_s)}.get(kind, limit))
        slot.stage = stage
        self.on_stage(str(slot.case["id"]), stage)

    def _fatal(self, said: Any) -> None:
        said = said if isinstance(said, dict) else {}
        message, hint = str(said.get("message", "the worker cannot run cases")), said.get("hint")
        code = said.get("exit_code")
        if code == errors.ExitCode.USAGE:
            raise errors.UsageError(message, hint)
        if code == errors.ExitCode.BUILD_FAILED:
            raise errors.BuildFailed(message, hint=hint)
        if code == errors.ExitCode.ENVIRONMENT:
            raise errors.EnvironmentUnfit(message, hint)
        raise errors.MegamoeError(message, hint)

    # -- ends ----------------------------------------------------------------------------------

    def _died(self, slot: Slot) -> None:
        state, case = slot.state, slot.case
        code = slot.end()
        if state == "busy" and case is not None:
            self._deliver(slot, self._verdict(slot, "crash", f"worker {describe_exit(code)}{_during(slot)}"))
        elif state in ("starting", "idle"):  # idle: it said hello and left before it got a case
            slot.failed_starts += 1
            if slot.failed_starts >= 2:
                tail = slot.tail()
                raise errors.EnvironmentUnfit(
                    f"the worker process does not start: {describe_exit(code)}{': ' + tail[-1] if tail else ''}",
                    hint=f"its stderr is in {slot.log}",
                )

    def _expired(self, slot: Slot) -> None:
        if slot.state == "starting":
            slot.failed_starts += 1
            slot.dump_stacks()
            slot.end()
            if slot.failed_starts >= 2:
                raise errors.EnvironmentUnfit(
                    f"the worker process is not ready after {slot.limit:g} s", hint=f"its stderr is in {slot.log}")
        elif slot.state == "leaving":
            slot.end()
        else:
            slot.dump_stacks()
            if slot.stage in HOST_STAGES:  # nothing of the kernel's runs then
                self._abandon(slot, "error", f"the host is not done within {slot.limit:g} s{_during(slot)}; the kernel is not "
                              f"to blame: raise --timeout above {slot.limit:g}, or take a smaller case")
                return
            self._abandon(slot, "hang", f"no answer within {slot.limit:g} s{_during(slot)}")

    def _abandon(self, slot: Slot, status: str, message: str) -> None:
        """Kills the worker and, when it held a case, delivers ``status`` for it."""
        held = slot.state == "busy"
        slot.end()
        if held:
            self._deliver(slot, self._verdict(slot, status, message))

    def _verdict(self, slot: Slot, status: str, message: str) -> CaseResult:
        assert slot.case is not None
        return CaseResult(
            id=str(slot.case.get("id")), status=status, where=slot.where or self.backend, message=message,
            seconds=time.monotonic() - slot.started, stderr=slot.tail(),
            repro=str(slot.case.get("repro", "")),
            exit_code=int(errors.ExitCode.NO if status == "crash" else errors.ExitCode.TIMEOUT),
        )

    def _deliver(self, slot: Slot, result: CaseResult) -> None:
        index = self.position[slot.index]
        if not result.repro and slot.case is not None:
            result.repro = str(slot.case.get("repro", ""))
        slot.case, slot.failed_starts = None, 0
        self.done[index] = result
        self.on_result(result)

    def _finish(self, gently: bool) -> None:
        """Ends all workers. Gently: end of file on stdin and up to 5 s to leave, then the tree is killed."""
        alive = [s for s in self.slots if s.tree is not None]
        if gently:
            for slot in alive:
                slot.close_stdin()
            deadline = time.monotonic() + 5.0
            for slot in alive:
                while self.stop < 2 and not slot.tree.wait(min(0.05, max(0.0, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        break
        for slot in alive:
            slot.end()

    # -- signals -------------------------------------------------------------------------------

    def _install_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}  # only the main thread may; the caller's own handling stays in force
        return {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.stop = self.stop + 1 if number == signal.SIGINT else 2
        self.signal = number

    def _restore_signals(self, old: dict[int, Any]) -> None:
        for number, handler in old.items():
            signal.signal(number, handler)


def _limit_of(stage: str) -> str:
    """Which clock a stage runs against: the build's, the host's or the case's own."""
    return "build" if stage == "compile" else "host" if stage in HOST_STAGES else "case"


def _say_interrupted(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _during(slot: Slot) -> str:
    return f" during {slot.stage}" if slot.stage else ""


def worker_env(given: Mapping[str, str] | None, jobs: int) -> dict[str, str]:
    env = dict(os.environ) | paths.cupy_env()
    if jobs > 1:  # torch takes every core by default; side by side the workers would only switch
        env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    env.update(given or {})
    # 8 hardware queues (the default) can put a ninth rank's stream behind a spinning kernel.
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    env["PYTHONUNBUFFERED"] = "1"
    if (root := paths.checkout_root()) is not None:  # the child must import this very package, wherever we stand
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    return env
