"""What a job needs on the far side before it starts: variables nobody else may read, and emulator kernels.

A far side without a GPU runs the emulator, whose kernels take the host compiler minutes when nothing is there yet: longer
than one command may take. They are compiled first, as a job of its own limit (``build_timeout``).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megamoe_cli.errors import ExitCode
from megamoe_cli.remote import commands
from megamoe_cli.remote.passthrough import Inner
from megamoe_cli.remote.targets import Target

if TYPE_CHECKING:
    from megamoe_cli.compile.driver import BuildRequest
    from megamoe_cli.remote.runs import Visit

KERNELS = "kernels.json"


@contextmanager
def private_folder(target: Target, job: str) -> Iterator[Path]:
    """A folder with the values of the target's ``env`` for this job, modes 0700 and 0600."""
    with tempfile.TemporaryDirectory(prefix="megamoe-private-") as folder:
        handle = os.open(Path(folder, f"{job}.json"), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(dict(target.env), stream)
        yield Path(folder)


def wanted_there(visit: Visit, inner: Inner, background: bool) -> list[BuildRequest]:
    """The emulator kernels to compile before the command. A background job has time enough itself."""
    if background or not visit.target.build_timeout:
        return []
    return [request for request, certain in inner.emulated if certain or not visit.has_gpu]


def build_command(visit: Visit, job: str, inner: Inner) -> list[str]:
    target, place = visit.target, commands.Place.of(visit.target).inside
    words = [target.python, "-B", f"{place}/tree/megamoe_cli/remote/far_build.py", f"{place}/inputs/{KERNELS}"]
    quiet = ["-q"] if {"-q", "--quiet"} & set(inner.args) else []
    env = commands.environment(target, remote_compiler=False, more={})
    return commands.job(target, job, [*words, *quiet], env, what="compiling emulator kernels", lock=False, need=inner.need,
                        limit_s=target.build_timeout)


def build_there(visit: Visit, job: str, inner: Inner, requests: Sequence[BuildRequest]) -> int:
    """Exit code of the job; 0 when all is there. What did not build is the command's to say."""
    from megamoe_cli.remote.far_build import pack

    with tempfile.TemporaryDirectory(prefix="megamoe-inputs-") as folder:
        Path(folder, KERNELS).write_text(json.dumps(pack(list(requests))), encoding="utf-8")
        visit.copy("send kernel list", commands.send_folder(visit.target, Path(folder), "inputs"))
    code = visit.run(job, build_command(visit, job, inner), what="build there", limit_s=visit.target.build_timeout)
    visit.jobs.remove(job)  # has no records
    return code


def too_slow_text(visit: Visit) -> str:
    return (f"error: {visit.target.label}: the emulator's kernels were not compiled within {visit.target.build_timeout:g} s (build_timeout); "
            "the command was not started\nhint: those that were finished are kept there: run it again to go on with the rest, or raise "
            "build_timeout of the target, or use --detach")


def was_ended(code: int) -> bool:
    """Did somebody or something end the job of ``build_there``?"""
    return code in (ExitCode.TIMEOUT, ExitCode.INTERRUPTED, ExitCode.TERMINATED, 137)
