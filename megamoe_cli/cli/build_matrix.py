"""``megamoe build --matrix``: compiles every legal combination, side by side, and says what came out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from megamoe_cli.cli.app import App
from megamoe_cli.combinations import Combinations, enumerate_all
from megamoe_cli.compile.driver import BuildRequest, Outcome, build_many
from megamoe_cli.compile.parallel import default_jobs
from megamoe_cli.errors import ExitCode, UsageError

SCHEMA = "megamoe.matrix/1"
_SAY_EVERY_S = 20.0


def run_matrix(app: App, requests: Sequence[BuildRequest], config_text: str, jobs: int | None, dry_run: bool) -> int:
    """``requests``: one for each phase and target, of the configuration that ``config_text`` gives. Returns the exit code:
    4 when one does not compile, spills, or loses its register plan."""
    first = requests[0]
    fixed = [part.partition("=")[0].strip() for part in config_text.split(",") if part.strip()]
    found = enumerate_all(first.config, first.shape, first.ranks, fixed=fixed)
    if not found.legal:
        raise UsageError(f"no combination is legal: {found.sentence()}", rule="matrix")
    wanted = [replace(request, config=config) for config in found.legal for request in requests]
    app.say(f"{found.sentence()} for shape {first.shape} on {first.ranks} ranks; {len(wanted)} kernels")
    if dry_run:
        return _dry_run(app, found, wanted)
    app.started("build")
    began = time.perf_counter()
    outcomes = _build(app, wanted, jobs or default_jobs())
    seconds = time.perf_counter() - began
    if app.json:
        app.emit(_document(found, outcomes, seconds))
    else:
        _show(app, found, outcomes, seconds, jobs or default_jobs())
    for outcome in outcomes:
        if outcome.error is not None:
            click.echo(f"error: {outcome.request.target} {outcome.request.config.name()}: {' '.join(str(outcome.error).split())}", err=True)
    bad = [outcome.error for outcome in outcomes if outcome.error is not None]
    return int(bad[0].exit_code if bad else ExitCode.DONE)


def _build(app: App, requests: list[BuildRequest], jobs: int) -> list[Outcome]:
    done, told = 0, time.monotonic()

    def report(outcome: Outcome) -> None:
        nonlocal done, told
        done += 1
        request, kernel = outcome.request, outcome.kernel
        state = f"{kernel.seconds:.1f} s" if kernel and not outcome.error else "unfit" if kernel else "failed"
        app.detail(f"[{done}/{len(requests)}] {request.target} {request.phase} {request.config.name()}: {state}")
        if time.monotonic() - told > _SAY_EVERY_S:
            told = time.monotonic()
            app.say(f"{done} of {len(requests)} kernels, {jobs} compilers at a time")

    return build_many(requests, jobs, report)


def _dry_run(app: App, found: Combinations, wanted: list[BuildRequest]) -> int:
    if app.json:
        app.emit({"schema": SCHEMA, "dry_run": True, "combinations": _counts(found), "kernels": [r.config.name() for r in wanted]})
    else:
        for request in wanted:
            click.echo(f"would build {request.target} {request.phase}: {request.config.name()}")
    return ExitCode.DONE


def _counts(found: Combinations) -> dict[str, Any]:
    return {"total": found.total, "legal": len(found.legal), "refused": found.refused}


def _document(found: Combinations, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    from megamoe_cli.cli.build_cmd import row_of

    return {"schema": SCHEMA, "seconds": round(seconds, 3), "ok": all(o.error is None for o in outcomes), "combinations": _counts(found),
            "kernels": [row_of(o) for o in outcomes]}  # fmt: skip


def _show(app: App, found: Combinations, outcomes: list[Outcome], seconds: float, jobs: int) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("policy", "promotion", "target", "kernels", "most spills B", "unfit", "compile s"):
        table.add_column(name, justify="left" if name in ("policy", "promotion", "target") else "right")
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        config = outcome.request.config
        groups.setdefault((config.policy, config.promotion, outcome.request.target), []).append(outcome)
    for key, some in groups.items():
        built = [o.kernel for o in some if o.kernel]
        spills = max((kernel.resources.spills for kernel in built if kernel.resources), default=0)
        spent = sum(float(kernel.manifest.get("compile_seconds", 0.0)) for kernel in built if not kernel.hit)
        table.add_row(*key, str(len(some)), str(spills), str(sum(o.error is not None for o in some)), f"{spent:.0f}")
    app.console().print(table)
    compiler = next((o.kernel.manifest["compiler"] for o in outcomes if o.kernel), "no compiler")
    states = Counter("unfit" if o.kernel and o.error else "failed" if o.error else "from the cache" if o.kernel and o.kernel.hit else "compiled"
                     for o in outcomes)  # fmt: skip
    spilling = sum(bool(o.kernel and o.kernel.resources and o.kernel.resources.spills) for o in outcomes)
    app.console().print(f"{found.sentence()}\n{len(outcomes)} kernels: " + ", ".join(f"{count} {state}" for state, count in states.items())
                        + f"; {spilling} spill; {seconds:.1f} s with {jobs} compilers at a time ({compiler})", markup=False, soft_wrap=True)
