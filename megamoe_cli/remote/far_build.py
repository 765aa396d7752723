#!/usr/bin/env python3
"""Compiles emulator kernels on the far side before the command that wants them: ``far_build.py REQUESTS.json [-q]``.

A job with a limit of its own. Every kernel goes into the cache when it is finished, so that after a job that was ended the
next one goes on with the rest. One that does not build is left to the command, which says so in its own words.
"""

from __future__ import annotations

import json
import os
import sys
import time

if __name__ == "__main__":  # the tree it came with, not the folder it lies in
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megamoe_cli.compile.driver import BuildRequest, Outcome, build_many
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import MegamoeError
from megamoe_cli.shapes import Shape


def pack(requests: list[BuildRequest]) -> list[dict]:
    """As JSON values. Shapes: hidden, intermediate, experts, chosen."""
    return [{"phase": r.phase, "config": r.config.to_dict(), "shape": list(vars(r.shape).values()) if r.shape else None, "ranks": r.ranks,
             "flavour": r.flavour} for r in requests]  # fmt: skip


def unpack(items: list[dict]) -> list[BuildRequest]:
    return [BuildRequest(i["phase"], KernelConfig.from_dict(i["config"]), "emulator", Shape(*i["shape"]) if i["shape"] else None, i["ranks"],
                         flavour=i["flavour"]) for i in items]  # fmt: skip


def main(words: list[str]) -> int:
    with open(words[0], encoding="utf-8") as stream:
        requests = unpack(json.load(stream))
    start, done, fresh, failed = time.monotonic(), 0, 0, 0

    def on_done(outcome: Outcome) -> None:
        nonlocal done, fresh, failed
        done += 1
        failed += outcome.kernel is None
        if outcome.kernel is not None and not outcome.kernel.hit:
            fresh += 1
            if "-q" not in words:
                print(f"emulator kernel {done} of {len(requests)}: {outcome.request.phase}, {outcome.kernel.seconds:.0f} s", file=sys.stderr, flush=True)

    try:
        build_many(requests, on_done=on_done)
    except MegamoeError as error:
        print(f"emulator kernels: {error}", file=sys.stderr)
        return int(error.exit_code)
    if fresh and "-q" not in words:
        print(f"{fresh} emulator kernels compiled there in {time.monotonic() - start:.0f} s, before the command's own time", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
