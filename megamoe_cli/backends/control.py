"""The control plane of one-process-per-rank runs: gloo collectives on the host, nothing on the device.

Every set-up step goes through :meth:`Control.step`: each rank does its part, then all ranks gather who
failed. The first failure (lowest rank) is raised on every rank, so nobody waits for a rank that gave up.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from .. import errors

T = TypeVar("T")
STEP_TIMEOUT_S = 300.0  # how long a rank waits for the others in one step; first imports and context set-up are slow
IDLE_TIMEOUT_S = 7 * 24 * 3600.0  # between cases a rank waits for work; its parent ends it, not a clock

_ours = 0  # open Controls that rely on the default group that we initialised


@dataclass
class _Failure:
    """What one rank's failure looks like on the others."""

    message: str
    hint: str | None
    rule: str | None
    exit_code: int
    records: dict[int, bytes] | None = None  # fault records, when it was a device fault

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, errors.LaunchFault):
            return cls(str(error), error.hint, None, int(error.exit_code), {r: bytes(f) for r, f in error.records.items()})
        if isinstance(error, errors.MegamoeError):
            return cls(str(error), error.hint, getattr(error, "rule", None), int(error.exit_code))
        return cls(f"{type(error).__name__}: {error}", None, None, int(errors.ExitCode.ENVIRONMENT))

    def to_error(self, prefix: str) -> errors.MegamoeError:
        message = prefix + self.message
        if self.records is not None:
            from ..abi import FaultRecord

            return errors.LaunchFault(message, {r: FaultRecord.from_bytes(raw) for r, raw in self.records.items()})
        if self.exit_code == errors.ExitCode.USAGE:
            return errors.UsageError(message, self.hint, self.rule)
        if self.exit_code == errors.ExitCode.BUILD_FAILED:
            return errors.BuildFailed(message, hint=self.hint)
        if self.exit_code == errors.ExitCode.TIMEOUT:
            return errors.TimedOut(message, self.hint)
        if self.exit_code == errors.ExitCode.ENVIRONMENT:
            return errors.EnvironmentUnfit(message, self.hint)
        if self.exit_code == errors.ExitCode.NO:
            return errors.WrongResult(message, self.hint)
        return errors.MegamoeError(message, self.hint)


class Control:
    """``rank`` of ``ranks`` with a gloo ``group``. Collective methods must be called by all ranks in the same order."""

    def __init__(self, group: Any, rank: int, ranks: int, owns_default: bool = False) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks
        self._owns_default, self._closed = owns_default, False
        self.broken: str | None = None  # why no further collective can work: ranks are out of step, or gone
        self.lost = False  # another rank is gone

    # -- making one ----------------------------------------------------------------------------

    @classmethod
    def bootstrap(cls, rank: int, ranks: int, rendezvous: str, timeout_s: float = STEP_TIMEOUT_S) -> Control:
        """Joins ``ranks`` processes at ``rendezvous`` (``file:///path`` or ``tcp://127.0.0.1:port``).

        A process that already has a default group gets a second, independent gloo group over it, if rank and size
        agree (UsageError if not). EnvironmentUnfit when the others do not come within ``timeout_s``.
        """
        global _ours
        import torch.distributed as dist

        if not 0 <= rank < ranks:
            raise errors.UsageError(f"rank {rank} is outside 0..{ranks - 1}", rule="ranks-limit")
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) != (rank, ranks):
                raise errors.UsageError(
                    f"this process is already rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed; "
                    f"it cannot also be rank {rank} of {ranks}", rule="process-group")
            owns = _ours > 0
        else:
            try:
                dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks,
                                        timeout=timedelta(seconds=timeout_s))
            except Exception as error:  # noqa: BLE001  torch raises several unrelated types here
                raise errors.EnvironmentUnfit(
                    f"rank {rank} could not meet the other {ranks - 1} rank(s) at {rendezvous}: {_first_line(error)}"
                ) from error
            owns = True
        control = cls.from_group(None, IDLE_TIMEOUT_S)
        control._owns_default = owns
        _ours += owns
        return control

    @classmethod
    def from_group(cls, group: Any, timeout_s: float = STEP_TIMEOUT_S) -> Control:
        """A control plane beside a caller's process group (None: the default group); collective over its members.

        It is always a group of its own, so our collectives cannot interleave with the caller's.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise errors.UsageError("torch.distributed is not initialised; call init_process_group first",
                                    rule="process-group")
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        own = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout_s),
                             use_local_synchronization=group is not None)
        return cls(own, dist.get_rank(own), len(members))

    # -- collectives ---------------------------------------------------------------------------

    def step(self, name: str, work: Callable[[], T]) -> T:
        """Does ``work`` on this rank; raises the first failing rank's error on every rank. Returns this rank's result."""
        return self._step(name, work, share=False)[self.rank]

    def agree(self, name: str, work: Callable[[], T]) -> list[T]:
        """As :meth:`step`, and returns the results of all ranks (they are pickled)."""
        return self._step(name, work, share=True)

    def _step(self, name: str, work: Callable[[], T], share: bool) -> list[T]:
        result: Any = None
        failure: _Failure | None = None
        own_error: Exception | None = None
        try:
            result = work()
            if share:
                pickle.dumps(result)
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must learn of it
            own_error, failure = error, _Failure.of(error)
        gathered = [entry if isinstance(entry, tuple) and len(entry) == 3 else ("something else", None, None)
                    for entry in self.gather((name, failure, result if share and failure is None else None))]
        names = [entry[0] for entry in gathered]
        if len(set(names)) > 1:
            # One rank left a step in which the others meet again. What it left with is the news; but from here on
            # the ranks' collectives would pair up wrongly, so there must not be any.
            self.broken = f"ranks are at different steps: {_per_rank(names)}"
        failed = [(other.records is None, rank, at, other) for rank, (at, other, _) in enumerate(gathered) if other is not None]
        if failed:  # a device fault explains the timeouts of the others, so it comes first
            _, rank, at, other = min(failed, key=lambda entry: entry[:2])
            raise other.to_error(f"rank {rank}: {at}: ") from (own_error if rank == self.rank else None)
        if self.broken:
            raise errors.MegamoeError(self.broken)
        if not share:
            return [result if rank == self.rank else None for rank in range(self.ranks)]
        return [entry[2] for entry in gathered]

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, on every rank."""
        import torch.distributed as dist

        out: list[Any] = [None] * self.ranks
        self._guard(lambda: dist.all_gather_object(out, value, group=self.group), "gather")
        return out

    def collect(self, value: Any, to: int = 0) -> list[Any] | None:
        """``value`` of every rank, on rank ``to`` only (None elsewhere)."""
        import torch.distributed as dist

        out: list[Any] | None = [None] * self.ranks if self.rank == to else None
        target = dist.get_global_rank(self.group, to)
        self._guard(lambda: dist.gather_object(value, out, dst=target, group=self.group), "collect")
        return out

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """``source``'s value, on every rank."""
        import torch.distributed as dist

        box = [value if self.rank == source else None]
        origin = dist.get_global_rank(self.group, source)
        self._guard(lambda: dist.broadcast_object_list(box, src=origin, group=self.group), "broadcast")
        return box[0]

    def barrier(self, timeout_s: float | None = None) -> None:
        """Returns when every rank is here. EnvironmentUnfit after ``timeout_s``, on rank 0 with who is missing."""
        import torch.distributed as dist

        limit = timedelta(seconds=timeout_s if timeout_s is not None else STEP_TIMEOUT_S)
        self._guard(lambda: dist.monitored_barrier(self.group, timeout=limit), "barrier")

    def _guard(self, collective: Callable[[], Any], what: str) -> None:
        if self.broken:
            raise errors.EnvironmentUnfit(f"rank {self.rank} cannot go on: {self.broken}")
        try:
            collective()
        except (RuntimeError, ValueError) as error:
            # Gloo notices a dead peer by its closed connection, at once.
            self.broken, self.lost = _first_line(error), True
            raise errors.EnvironmentUnfit(f"rank {self.rank} lost the other ranks ({what}): {_first_line(error)}") from error

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Not collective. The default group ends with the last Control that we initialised it for."""
        global _ours
        if self._closed:
            return
        self._closed = True
        import torch.distributed as dist

        if self._owns_default:
            _ours -= 1
        if dist.is_initialized():
            try:
                dist.destroy_process_group(self.group)
                if self._owns_default and _ours == 0:
                    dist.destroy_process_group()
            except (RuntimeError, ValueError, AssertionError):
                pass  # a peer is gone already: nothing is left to agree on


def host_identity() -> str:
    """The same on all processes of one booted machine, containers included; another on any other machine."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        import socket

        return socket.gethostname()


def torchrun_rank() -> tuple[int, int] | None:
    """(rank, ranks) as torchrun says it, or None when this process was not started by torchrun."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _per_rank(names: Sequence[str]) -> str:
    return ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
