"""The measuring processes, held from outside: all ranks are one unit.

One task at a time goes in, one result comes out. A rank that dies, hangs or is late ends the whole group; the task is
recorded as ``crash`` or ``hang`` and the next one meets a fresh group. Nothing a device does can reach this process: it
imports neither torch nor cupy.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe_cli import paths, protocol
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit, ExitCode, MegamoeError, UsageError
from megamoe_cli.processes import describe_exit
from megamoe_cli.protocol import CaseResult
from megamoe_cli.supervisor import TICK_S, worker_env
from megamoe_cli.worker_slot import Slot, prune

SETUP_STAGES = ("compile", "setup", "inputs", "reference")  # bounded by the set-up limit, not by the candidate's


def _sets_up(stage: str) -> bool:
    """A stage may name who is in it: ``run peer``."""
    return stage.partition(" ")[0] in SETUP_STAGES


class Killed(Exception):
    """The user asked twice, or to terminate: the group was ended in the middle of a task."""


class RankGroup:
    """``command`` starts the group. ``killed()`` is asked at least five times a second while a task runs; when it turns
    true the group is ended and ``Killed`` raised. ``starts`` counts the groups so far."""

    def __init__(self, command: Sequence[str], *, log_dir: Path | None = None, env: Mapping[str, str] | None = None,
                 start_timeout_s: float = 180.0, setup_timeout_s: float = 300.0, killed: Callable[[], bool] = lambda: False,
                 on_stage: Callable[[str], None] = lambda stage: None) -> None:
        self.command, self.env = list(command), worker_env(env, 1)
        self.start_timeout_s, self.setup_timeout_s = start_timeout_s, setup_timeout_s
        self.killed, self.on_stage = killed, on_stage
        self.starts = 0
        self._log_dir = log_dir or paths.cache_dir() / "logs"
        self._selector: selectors.BaseSelector | None = None
        self._slot: Slot | None = None

    @property
    def where(self) -> str:
        return self._slot.where if self._slot else ""

    @property
    def log(self) -> Path | None:
        return self._slot.log if self._slot else None

    def ask(self, task: Mapping[str, Any], timeout_s: float) -> CaseResult:
        """Runs ``task`` (it has an ``id``) and returns what became of it; never raises for what a candidate did.

        EnvironmentUnfit, BuildFailed or UsageError when no group can be started; Killed on request.
        """
        slot = self._ready()
        slot.case, slot.state, slot.stage, slot.started = dict(task), "busy", "", time.monotonic()
        slot.mark()
        self._limit(timeout_s)
        slot.outgoing += protocol.encode(task)
        slot.write()
        while True:
            for line in self._wait():
                result = self._result(line, timeout_s)
                if result is not None:
                    slot.case, slot.state = None, "idle"
                    if result.status in ("error", "crash", "hang") and not result.stderr:
                        result.stderr = slot.tail()
                    if result.respawn:
                        self.end()
                    return result
            if slot.tree is None or slot.tree.exited():
                # What it said before it died still counts.
                for line in slot.lines() if slot.tree else ():
                    if (result := self._result(line, timeout_s)) is not None:
                        self.end()
                        return result
                tail = slot.tail()
                return self._verdict("crash", f"the measuring process {describe_exit(self.end())}{self._during(slot)}", tail)
            if time.monotonic() >= slot.deadline:
                slot.dump_stacks()
                tail = slot.tail()
                self.end()
                return self._verdict("hang", f"no answer within {slot.limit:g} s{self._during(slot)}", tail)

    def restart(self) -> None:
        """The next task meets processes that no earlier task ran in."""
        self.end()

    def end(self) -> int | None:
        """Kills the group; returns the exit code of its parent, None when there was none."""
        return self._slot.end() if self._slot is not None else None

    def close(self) -> None:
        """Lets the group leave (its stdin ends), for up to 2 s; then it is killed."""
        slot = self._slot
        if slot is not None and slot.tree is not None and slot.state == "idle":
            slot.close_stdin()
            slot.tree.wait(2.0)
        self.end()
        if slot is not None:
            slot.log_file.close()
        if self._selector is not None:
            self._selector.close()
        self._slot = self._selector = None

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.end()
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _ready(self) -> Slot:
        """A group that said hello; two failed starts in a row are the machine's fault."""
        if self._slot is None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            prune(self._log_dir)
            self._slot = Slot(0, self._log_dir / f"worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-tune-{id(self) & 0xFFFF:04x}.log")
            self._selector = selectors.DefaultSelector()
        slot = self._slot
        for attempt in (1, 2):
            if slot.tree is not None and not slot.tree.exited() and slot.state == "idle":
                return slot
            self.end()
            assert self._selector is not None
            slot.spawn(self.command, self.env, self._selector)
            self.starts += 1
            self._limit(self.start_timeout_s)
            said = self._hello(slot)
            if said is None:
                return slot
            if attempt == 2:
                raise EnvironmentUnfit(f"the measuring process does not start: {said}", hint=f"its stderr is in {slot.log}")
        return slot

    def _hello(self, slot: Slot) -> str | None:
        """Waits for the hello; what went wrong instead, or None."""
        while True:
            for line in self._wait():
                message = protocol.decode(line)
                if message is None:
                    slot.note(line)
                elif "hello" in message:
                    hello = message["hello"]
                    slot.where = str(hello.get("where", "")) if isinstance(hello, dict) else ""
                    slot.state = "idle"
                    return None
                elif "fatal" in message:
                    self.end()
                    _raise_fatal(message["fatal"])
            if slot.tree is None or slot.tree.exited():
                tail = slot.tail()
                return f"{describe_exit(self.end())}{': ' + tail[-1] if tail else ''}"
            if time.monotonic() >= slot.deadline:
                slot.dump_stacks()
                self.end()
                return f"not ready after {slot.limit:g} s"

    def _wait(self) -> list[bytes]:
        """Lines that came within a tick. Killed when the user wants out."""
        slot = self._slot
        assert slot is not None and self._selector is not None
        if self.killed():
            self.end()
            raise Killed
        lines: list[bytes] = []
        nap = max(0.0, min(TICK_S, slot.deadline - time.monotonic()))
        if not self._selector.get_map():
            time.sleep(nap)  # its stdout is closed: only its exit or the clock is left
        for key, events in self._selector.select(nap):
            if events & selectors.EVENT_WRITE:
                slot.write()
            if events & selectors.EVENT_READ:
                lines += slot.lines()
        if len(slot.received) > protocol.MAX_LINE:
            slot.received = b""
        return lines

    def _result(self, line: bytes, timeout_s: float) -> CaseResult | None:
        slot = self._slot
        assert slot is not None
        message = protocol.decode(line)
        if message is None or slot.case is None or message.get("id") != slot.case.get("id"):
            slot.note(line)
            return None
        if isinstance(message.get("stage"), str):
            stage = message["stage"]
            if _sets_up(stage) != _sets_up(slot.stage) or not slot.stage:
                self._limit(self.setup_timeout_s if _sets_up(stage) else timeout_s)
            slot.stage = stage
            self.on_stage(stage)
            return None
        try:
            return CaseResult.from_dict(message)
        except (ValueError, TypeError):
            slot.note(line)
            return None

    def _limit(self, seconds: float) -> None:
        assert self._slot is not None
        self._slot.limit, self._slot.deadline = seconds, time.monotonic() + seconds

    def _verdict(self, status: str, message: str, tail: list[str]) -> CaseResult:
        slot = self._slot
        assert slot is not None
        case, slot.case = slot.case or {}, None
        return CaseResult(id=str(case.get("id")), status=status, where=slot.where, message=message, stderr=tail,
                          seconds=time.monotonic() - slot.started,
                          exit_code=int(ExitCode.TIMEOUT if status == "hang" else ExitCode.NO))

    @staticmethod
    def _during(slot: Slot) -> str:
        return f" during {slot.stage}" if slot.stage else ""


def _raise_fatal(said: Any) -> None:
    said = said if isinstance(said, dict) else {}
    message, hint, code = str(said.get("message", "no task can run here")), said.get("hint"), said.get("exit_code")
    for kind in (UsageError, BuildFailed, EnvironmentUnfit):
        if code == kind.exit_code:
            raise kind(message, hint=hint)
    raise MegamoeError(message, hint)
