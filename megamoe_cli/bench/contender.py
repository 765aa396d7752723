"""What is timed: an implementation of the layer on one rank, behind a few calls that only enqueue work on the current
stream. Ours, the public package and a chain of separate kernels are timed by the same code because of this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit, ExitCode, MegamoeError, TimedOut, UsageError

if TYPE_CHECKING:
    import torch

    from ..oracle.casedata import RankInputs, RankWeights
    from ..shapes import Problem


class ContenderFailed(MegamoeError):
    """A contender other than ours crashed, hung or was wrong. ``fatal``: the device may be gone, nothing more can run."""

    exit_code = ExitCode.NO

    def __init__(self, contender: str, reason: str, fatal: bool = False) -> None:
        super().__init__(f"{contender} failed: {reason}")
        self.contender, self.fatal = contender, fatal


class DeviceLost(MegamoeError):
    """The device reported an error; its context cannot be used any more."""

    exit_code = ExitCode.NO


class Contender(ABC):
    """``name`` as the user asked for it, ``version`` for people. ``ours``: judged by our own limits, and its errors are
    raised as they are. ``limits``: (whole output, worst row) relative difference from the reference that is let pass."""

    name: str
    version: str = ""
    ours = False
    limits = (0.06, 0.12)

    @abstractmethod
    def prepare(self, problem: Problem, weights: RankWeights) -> None:
        """Buffers for ``problem`` (one rank) and the weights in the contender's own form (kept while ``weights`` is the
        same object). May compile, allocate and synchronize. UsageError: it cannot do this shape."""

    @abstractmethod
    def load(self, inputs: RankInputs) -> None:
        """Enqueues what brings T tokens into the contender's buffers."""

    @abstractmethod
    def enqueue(self) -> None:
        """Enqueues the layer on the tokens that lie in the buffers. A CUDA graph can capture it."""

    @abstractmethod
    def output(self) -> torch.Tensor:
        """y [T,H] bf16, where the launches write it."""

    def launch(self) -> None:
        """As a user would launch it: ``enqueue``, or the replay of a graph of it."""
        self.enqueue()

    def poison(self) -> None:
        """Enqueues 0xFF bytes (NaN) over the output."""
        import torch

        self.output().view(torch.uint8).fill_(0xFF)

    def check(self) -> None:
        """After a wait: raises for what the device recorded."""

    def close(self) -> None:
        """Gives up what it holds. Idempotent."""


@contextmanager
def blame(contender: Contender, doing: str) -> Iterator[None]:
    """Whatever another contender does wrong is reported as its failure, with the reason; ours raises as it is."""
    try:
        yield
    except (ContenderFailed, EnvironmentUnfit):
        raise
    except Exception as error:
        if contender.ours and (isinstance(error, MegamoeError) or not isinstance(error, RuntimeError)):
            raise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        if contender.ours:  # torch and CuPy report CUDA's errors as RuntimeErrors; after one nothing can run
            raise DeviceLost(f"the device failed ({doing}): {first}") from error
        kind = "" if isinstance(error, MegamoeError) else f"{type(error).__name__}: "
        raise ContenderFailed(contender.name, f"{doing}: {kind}{first}", fatal=isinstance(error, (TimedOut, DeviceLost))) from error


def refuse(contender: Contender, why: str) -> UsageError:
    """What ``prepare`` raises for a shape it does not take."""
    return UsageError(f"{contender.name} does not take this: {why}", rule="contender-shape")


def bytes_of(tensor: Any) -> Any:
    """The same memory as uint8: copies of fp8 that no dtype rule touches."""
    import torch

    return tensor.view(torch.uint8)
