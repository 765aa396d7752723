"""``megamoe build``: compile phases with NVRTC (sm_90a) or the host compiler (emulator); show what came out."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import click

from megamoe_cli.cli.app import App, json_option, table_option
from megamoe_cli.compile.driver import TARGETS, BuildRequest, Outcome, build_many, prepare
from megamoe_cli.compile.entry import PHASES, check_phase
from megamoe_cli.compile.parallel import default_jobs
from megamoe_cli.config import REGISTER_FILE, KernelConfig
from megamoe_cli.errors import ExitCode, MegamoeError
from megamoe_cli.shapes import parse_shape

SCHEMA = "megamoe.build-report/1"
_LOG_LINES = 24


@click.command("build")
@click.argument("phases", nargs=-1, metavar="[PHASE]...")
@click.option("--config", default="", metavar="KEY=VAL,...", help="Kernel configuration on top of the default.")
@click.option("--shape", default="flash", show_default=True, metavar="NAME|HxIxExK",
              help="Shape that settles the number of stages and the shared-memory size.")
@click.option("--ranks", default="8", show_default=True, metavar="N", help="Ranks, for the same purpose.")
@click.option("--target", type=click.Choice([*TARGETS, "all"]), default="sm_90a", show_default=True,
              help="Machine code for the GPU, a library for the CPU emulator, or both.")
@table_option
@click.option("--checked", is_flag=True, help="The emulator's instrumented flavour: bounds, races.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), metavar="N", help="Compilers at a time [default: by cores and memory].")
@click.option("--force", is_flag=True, help="Compile even what the cache has.")
@click.option("--allow-spills", is_flag=True, help="Accept spills and a register plan that ptxas ignored.")
@click.option("--strict", is_flag=True, help="Also refuse serialized WGMMA.")
@click.option("--nvrtc-opt", "nvrtc_options", multiple=True, metavar="OPT", help="Extra NVRTC option; may be repeated.")
@click.option("--explain", is_flag=True, help="Show warp, warpgroup, role and registers of the configuration; compile nothing.")
@click.option("--matrix", is_flag=True,
              help="Every legal combination of policy, promotion, tile, math threads, split, frontend and cluster (what --config names "
                   "is fixed); default phase: combine. Says how many were refused and by which rule.")
@click.option("-n", "--dry-run", is_flag=True, help="Check and resolve; compile nothing.")
@click.option("-q", "--quiet", is_flag=True, help="Only results, warnings and errors.")
@click.option("-v", "--verbose", count=True, help="Paths, notes and compiler logs.")
@json_option
@click.pass_obj
def build_command(app: App, phases: tuple[str, ...], config: str, shape: str, ranks: str, target: str, table: str, checked: bool,
                  jobs: int | None, force: bool, allow_spills: bool, strict: bool, nvrtc_options: tuple[str, ...],
                  explain: bool, matrix: bool, dry_run: bool, quiet: bool, verbose: int) -> int:
    """Compile PHASEs (default: all five: stub, dispatch, l1, l2, combine); show registers and spills.

    Works on any machine: no GPU and no driver are needed.

    \b
    megamoe build
    megamoe build l1 combine --config block_m=64 --explain
    megamoe build --target all --json
    """
    if quiet or verbose:
        app.verbosity = -1 if quiet else verbose
    if matrix and not phases:
        phases = ("combine",)
    requests = requests_of({"phases": phases, "config": config, "shape": shape, "ranks": ranks, "target": target, "checked": checked,
                            "force": force, "allow_spills": allow_spills, "strict": strict, "nvrtc_options": nvrtc_options})
    if matrix:
        from megamoe_cli.cli.build_matrix import run_matrix

        if explain:
            raise click.UsageError("--matrix and --explain exclude each other")
        return run_matrix(app, requests, config, jobs, dry_run)
    requests = _for_this_gpu(app, requests, table) if not config.strip() else requests
    ready = [prepare(request) for request in requests]
    if explain:
        return _explain(app, ready[0].config, ready[0].smem)
    if dry_run:
        return _dry_run(app, ready)
    app.started("build")
    start = time.perf_counter()
    outcomes = _build_with_progress(app, requests, jobs, ready[0].config.name())
    seconds = time.perf_counter() - start
    if app.json:
        app.emit(_document(outcomes, seconds))
    else:
        from megamoe_cli.report.build_table import print_build

        for config in dict.fromkeys(o.request.config for o in outcomes):
            print_build(app, [o for o in outcomes if o.request.config == config], seconds)
    return _finish(app, outcomes)


def _for_this_gpu(app: App, requests: list[BuildRequest], table: str) -> list[BuildRequest]:
    """With an SM90 GPU here and no configuration given: every kernel that its heuristic table may pick for some load, so
    that nothing compiles later. The emulator's builds, and machines without a GPU, keep the built-in default."""
    from megamoe_cli.tuning.lookup import Picker
    from megamoe_cli.tuning.space import kernels_of

    picker, out = Picker(table, "auto", app.say, app.warn), []
    for request in requests:
        assert request.shape is not None
        choices = picker.choices(request.shape, request.ranks) if request.target == "sm_90a" else []
        kernels = kernels_of(choices)
        if kernels and not out:
            app.say(f"{len(kernels)} kernels that the table may pick on this GPU (--table none: the built-in default): "
                    + ", ".join(config.name() for config in kernels))
        out += [replace(request, config=config) for config in kernels] or [request]
    return out


def requests_of(values: dict[str, Any]) -> list[BuildRequest]:
    """What these options (names of this command's parameters) ask to be built."""
    variant = KernelConfig.parse(values["config"])
    layer = parse_shape(values["shape"])
    phases, target = values["phases"], values["target"]
    names = list(dict.fromkeys(check_phase(p) for p in phases if p != "all")) if phases and "all" not in phases else list(PHASES)
    targets = TARGETS if target == "all" else (target,)
    return [BuildRequest(
        phase, variant, to, layer, _one_rank_count(values["ranks"]),
        flavour="checked" if values["checked"] and to == "emulator" else "plain", force=values["force"],
        allow_spills=values["allow_spills"], strict=values["strict"], options=values["nvrtc_options"] if to == "sm_90a" else ())
        for to in targets for phase in names]


def _one_rank_count(text: str) -> int:
    """--ranks is a list elsewhere, and so in settings files; a build takes the first."""
    first = text.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        raise click.BadParameter(f"{text!r} is not a positive number of ranks", param_hint="'--ranks'")
    return int(first)


def _build_with_progress(app: App, requests: list[BuildRequest], jobs: int | None, name: str) -> list[Outcome]:
    """Says what is going on as soon as it takes a second; silent when the cache answers."""
    done, told, lock = 0, False, threading.Lock()

    def tell() -> None:
        nonlocal told
        with lock:
            if not told:
                told = True
                app.say(f"compiling {name}, {jobs or default_jobs()} compilers at a time")

    def report(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        kernel = outcome.kernel
        if kernel is None or not kernel.hit:
            tell()  # before the first line about what was compiled, also when that took less than a second
            state = f"{kernel.seconds:.1f} s" if kernel else "failed"
            app.say(f"[{done}/{len(requests)}] {outcome.request.target} {outcome.request.phase}: {state}")

    notice = threading.Timer(1.0, tell)
    notice.daemon = True
    notice.start()
    try:
        return build_many(requests, jobs, report)
    finally:
        notice.cancel()


def _print_log(app: App, log: str) -> None:
    """The compiler's words on stderr; without -v their beginning, because the first error is the one that counts."""
    lines = log.rstrip().splitlines()
    shown = lines if app.verbosity > 0 else lines[:_LOG_LINES]
    click.echo("\n".join(shown), err=True)
    if len(shown) < len(lines):
        click.echo(f"... {len(lines) - len(shown)} more lines of the compiler's log: -v shows all", err=True)


def _finish(app: App, outcomes: list[Outcome]) -> int:
    """Errors to stderr, one line each; the exit code of the first."""
    first: MegamoeError | None = None
    for outcome in outcomes:
        if outcome.error is None:
            continue
        first = first or outcome.error
        log = getattr(outcome.error, "log", "")
        if log and (app.verbosity > 0 or outcome.kernel is None):
            _print_log(app, log)
        click.echo(f"error: {outcome.request.target} {outcome.request.phase}: {' '.join(str(outcome.error).split())}", err=True)
    if first is not None and first.hint:
        click.echo(f"hint: {first.hint}", err=True)
    return int(first.exit_code if first else ExitCode.DONE)


def _document(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    return {"schema": SCHEMA, "seconds": round(seconds, 3), "ok": all(o.error is None for o in outcomes),
            "kernels": [row_of(o) for o in outcomes]}


def row_of(outcome: Outcome) -> dict[str, Any]:
    """A kernel of a report document, fit or not."""
    error = outcome.error
    row = outcome.kernel.to_dict() if outcome.kernel else {"phase": outcome.request.phase, "target": outcome.request.target}
    return row | {"ok": error is None, "error": None if error is None else " ".join(str(error).split()),
                  "log": getattr(error, "log", "") or None}


def _dry_run(app: App, ready: list[Any]) -> int:
    rows = [{"phase": r.request.phase, "target": r.request.target, "config": r.config.to_dict(), "config_name": r.config.name(),
             "smem_bytes": r.smem, "source_digest": r.sources.digest, "sources": list(r.sources.files)} for r in ready]
    if app.json:
        app.emit({"schema": SCHEMA, "dry_run": True, "kernels": rows})
        return ExitCode.DONE
    for row in rows:
        click.echo(f"would build {row['target']} {row['phase']}: {row['config_name']}, {row['smem_bytes']} bytes of shared memory, "
                   f"{len(row['sources'])} sources {row['source_digest'][:12]}")
    return ExitCode.DONE


def _explain(app: App, config: KernelConfig, smem: int | None) -> int:
    roles = config.roles()
    planned = sum(role.threads * role.registers for role in roles)
    totals = {"threads": config.threads, "launch_registers": config.launch_registers, "planned": planned,
              "owned": config.threads * config.launch_registers, "register_file": REGISTER_FILE, "smem_bytes": smem}
    warps = [{"warp": warp, "warpgroup": warp // 4, "role": role.name, "registers": role.registers}
             for role in roles for warp in range(*role.warps)]
    if app.json:
        app.emit({"schema": "megamoe.explain/1", "config": config.to_dict(), "config_name": config.name(),
                  "accumulators": config.accumulators, "warps": warps, "totals": totals})
        return ExitCode.DONE
    from megamoe_cli.report.build_table import print_explain

    print_explain(app, config, warps, totals)
    return ExitCode.DONE
