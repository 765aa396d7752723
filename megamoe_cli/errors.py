"""Exit codes and the exceptions that carry them.

Raise the narrowest class; the CLI prints ``str(error)`` as one line on stderr and exits with
``error.exit_code``. Anything else that escapes is our bug (70).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    NO = 1  # ran, and the answer is no: wrong result, regression
    USAGE = 2  # usage or illegal configuration
    ENVIRONMENT = 3  # no SM90, too few ranks, no compiler, ...
    BUILD_FAILED = 4
    NOTHING_SELECTED = 5
    INCONCLUSIVE = 6
    BUG = 70
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


def stopped_by(number: int) -> int:
    """The exit code of a run that signal ``number`` cut short: 130 for SIGINT, 143 for SIGTERM, as a shell says them."""
    return 128 + number


CACHE_HINT = "set MEGAMOE_CACHE_DIR to a folder you may write to"


class MegamoeError(Exception):
    """Base class: one readable line, one exit code, optionally what to do next."""

    exit_code = ExitCode.BUG

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(MegamoeError):
    """Bad input or an illegal configuration; raised before any launch. ``rule`` names the rule broken."""

    exit_code = ExitCode.USAGE

    def __init__(self, message: str, hint: str | None = None, rule: str | None = None) -> None:
        super().__init__(message, hint)
        self.rule = rule


class EnvironmentUnfit(MegamoeError):
    exit_code = ExitCode.ENVIRONMENT


class BuildFailed(MegamoeError):
    """The compiler refused; ``log`` is its full output."""

    exit_code = ExitCode.BUILD_FAILED

    def __init__(self, message: str, log: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.log = log


class WrongResult(MegamoeError):
    exit_code = ExitCode.NO


class LaunchFault(MegamoeError):
    """A device-side wait ran out, or the device found bad input. ``records`` maps rank -> FaultRecord."""

    exit_code = ExitCode.NO

    def __init__(self, message: str, records: dict | None = None) -> None:
        super().__init__(message)
        self.records = records or {}


class TimedOut(MegamoeError):
    exit_code = ExitCode.TIMEOUT
