"""``megamoe tune``: from a model shape to a table that says which configuration wins for which load, with evidence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.app import App, json_option, reserve_option, verbosity_options
from megamoe_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megamoe_cli.tuning.plan import Plan, Settings
    from megamoe_cli.tuning.run import Request, Run
    from megamoe_cli.tuning.space import Expansion

SCHEMA = "megamoe.tune/1"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
# What a plan fixes; --resume continues it and takes none of these.
_PLANNED = ("shape", "ranks", "rank_of", "tokens", "holdout", "routing", "backend", "space", "strategy", "incumbent", "seed", "sms",
            "reserve_sms", "static", "fake", "min_gain", "tolerance", "max_slowdown", "rounds")


@click.command("tune", short_help="Find the fastest configuration for each load; write a table.")
@click.option("--shape", default="flash", show_default=True, metavar="NAME|HxIxExK", help="flash, pro, v3, tiny, or sizes.")
@click.option("--ranks", default="1", show_default=True, metavar="R", help="Ranks.")
@click.option("--rank-of", type=click.IntRange(1), metavar="N", help="One rank holding 1/N of the experts, as a rank of EP N would.")
@click.option("--tokens", metavar="T,T,...", help="Tokens per rank to tune at (default: powers of two).")
@click.option("--holdout", metavar="T,T,...", help="Sizes to validate on (default: range edges and middles).")
@click.option("--routing", default="uniform", show_default=True, metavar="NAME", help="Routing to tune on.")
@click.option("--space", default="default", show_default=True, metavar="NAME|FILE:NAME", help="quick, default, full, or a space file.")
@click.option("--config", "config", multiple=True, metavar="KEY=VAL,...", help="One more candidate; repeatable, also with --resume.")
@click.option("--strategy", type=click.Choice(["halving", "grid", "tpe"]), default="halving", show_default=True, help="How candidates are searched.")
@click.option("--incumbent", type=click.Choice(["auto", "baseline", "default"]), default="auto", show_default=True, help="What they must beat.")
@click.option("--budget", metavar="TIME", help="Stop measuring after this long, such as 90s, 6m, 1h; the best so far is kept.")
@click.option("--resume", is_flag=False, flag_value="last", metavar="[RUN]", help="Continue a run: its folder, its id, or the last one.")
@click.option("--retry-failed", is_flag=True, help="With --resume: measure failed candidates again.")
@click.option("--fit-only", is_flag=True, help="With --resume: make the table from what was measured, measure nothing.")
@click.option("--plan", "plan_only", is_flag=True, help="Show what would run, what is refused by which rule, and about how long; stop.")
@click.option("--build-only", is_flag=True, help="Compile every candidate and stop: to bring the cache to a GPU.")
@click.option("--cubins", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="With --build-only: put the kernels there too; else: take them from there (what is missing is compiled).")
@click.option("--static", is_flag=True, help="Compile and rank by a model, as without a GPU.")
@click.option("--sms", type=click.IntRange(1), metavar="N", help="SMs of the GPU that is assumed without one (default: 132).")
@reserve_option
@click.option("--min-gain", default="1%", show_default=True, metavar="P", help="The least gain worth another configuration.")
@click.option("--tolerance", default="2%", show_default=True, metavar="P", help="Configurations this close to the best are equally good.")
@click.option("--max-slowdown", default="3%", show_default=True, metavar="P", help="Allowed on a held-out size.")
@click.option("--rounds", type=click.IntRange(6), default=16, show_default=True, help="Pairs of launches of a final.")
@click.option("--candidate-timeout", type=float, default=20.0, show_default=True, metavar="S", help="Seconds one measurement may take.")
@click.option("--backend", default="auto", show_default=True, metavar="NAME", help="auto, virtual, nvlink, processes.")
@click.option("--seed", type=click.IntRange(0), help="Of inputs (default: drawn, and recorded).")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Compilers at a time [default: by cores and memory].")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Where the table goes (default: where it is looked up).")
@click.option("--results-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where the run's folder goes (default: results/).")
@click.option("--fake", hidden=True, help="A scripted device in the place of the GPU (JSON file).")
@verbosity_options
@json_option
@click.pass_context
def tune_command(ctx: click.Context, **values: Any) -> int:
    """Find the fastest configuration for each load; write a table with its evidence.

    Candidates are compiled, checked on fresh inputs, screened, and timed beside what is picked today, launch by launch.
    Winners are measured again in fresh processes; ranges are validated on sizes that were not tuned. Ctrl-C once
    finishes the trial and saves, --resume goes on. Without a GPU: compiles, and ranks by a model.

    \b
    megamoe tune --shape flash --rank-of 8 --budget 6m
    megamoe tune --shape flash --rank-of 8 --plan
    megamoe tune --resume
    """
    from megamoe_cli import paths
    from megamoe_cli.tuning import run as tuning

    app: App = ctx.obj
    results = values["results_dir"] or paths.results_dir()
    budget_s = parse_budget(values["budget"]) if values["budget"] else None
    if values["resume"]:
        return _resume(ctx, app, values, results, budget_s)
    for name in ("retry_failed", "fit_only"):
        if values[name]:
            raise UsageError(f"--{name.replace('_', '-')} goes with --resume", rule="resume")
    request = request_of(values)
    plan, expansion = tuning.make_plan(request)
    static = tuning.machine_of(request) is None
    if values["plan_only"]:
        return _show_plan(app, plan, expansion, values["jobs"], static)
    if values["build_only"]:
        return _build_only(app, plan, values["jobs"], values["cubins"])
    _use_cubins(values)
    app.started("tune", results)
    folder = tuning.new_folder(results, plan)
    app.say(f"{_headline(plan, static)}; record: {folder}")
    if static:
        return _static(app, plan, folder, values)
    return _run(app, plan, folder, values, budget_s)


def request_of(values: dict[str, Any]) -> Request:
    """What these options (names of this command's parameters) ask for, checked."""
    from megamoe_cli.bench import slice_of
    from megamoe_cli.plan_values import integers, routings
    from megamoe_cli.shapes import parse_shape
    from megamoe_cli.tuning.run import Request

    shape, ranks = parse_shape(values["shape"]), integers(values["ranks"], "--ranks", 1)
    if len(ranks) > 1:
        raise UsageError("--ranks takes one number here: a table is for one", rule="ranks-limit")
    if values["rank_of"]:
        if ranks != [1]:
            raise UsageError("--rank-of is one rank's share; it goes with --ranks 1", rule="ranks-limit")
        shape = slice_of(shape, values["rank_of"])
    routing = routings(values["routing"])
    if len(routing) > 1:
        raise UsageError("--routing takes one routing here", rule="routing-name")
    return Request(
        shape, ranks[0], integers(values["tokens"], "--tokens", 1) if values["tokens"] else (),
        integers(values["holdout"], "--holdout", 1) if values["holdout"] else (), routing[0], values["backend"], values["space"],
        _choices(values["config"]), values["strategy"], values["incumbent"], values["seed"], values["sms"], values["static"],
        str(Path(values["fake"]).resolve()) if values["fake"] else "", _settings(values), values["reserve_sms"])


def _choices(texts: tuple[str, ...]) -> list[Any]:
    from megamoe_cli.config import KernelConfig
    from megamoe_cli.tuning.schema import Choice

    return [Choice(KernelConfig.parse(text)) for text in texts]


def _settings(values: dict[str, Any]) -> Settings:
    from megamoe_cli.tuning.plan import Settings

    return Settings(min_gain=_fraction(values["min_gain"], "--min-gain"), tolerance=_fraction(values["tolerance"], "--tolerance"),
                    max_slowdown=_fraction(values["max_slowdown"], "--max-slowdown"), final_rounds=values["rounds"])


def parse_budget(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"--budget: {text!r} is no time such as 90s, 6m or 1h", rule="budget")
    return float(match[1]) * _UNITS[match[2]]


def _fraction(text: str, option: str) -> float:
    """``1%`` and ``0.01`` are the same."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", str(text).strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise UsageError(f"{option}: {text!r} is no share below 100%, such as 3% or 0.03", rule="fraction")
    return value


def _headline(plan: Plan, static: bool = False) -> str:
    sms = f"{plan.machine.sms} SMs" + (f", {plan.reserve_sms} reserved" if plan.reserve_sms else "")
    where = f"no GPU: compiling, and a model for {sms}" if static else f"{plan.machine.backend} on {plan.machine.name} ({sms})"
    return (f"tuning {plan.shape.name} on {plan.ranks} rank{'s' if plan.ranks > 1 else ''}, {where}: {len(plan.candidates)} candidates, "
            f"{len(plan.sizes)} sizes from {plan.sizes[0]} to {plan.sizes[-1]} tokens, incumbent from {plan.incumbent_from}, seed {plan.seed}")


# -- what does not measure -------------------------------------------------------------------------


def _show_plan(app: App, plan: Plan, expansion: Expansion, jobs: int | None, static: bool) -> int:
    from megamoe_cli.compile.parallel import default_jobs
    from megamoe_cli.tuning.summary import estimate

    cost = estimate(plan, jobs or default_jobs())
    if app.json:
        app.emit({"schema": "megamoe.tune-plan-report/1", "static": static, "estimate": cost, "plan": plan.to_dict()})
        return ExitCode.DONE
    click.echo(_headline(plan, static))
    for start, choice in plan.incumbents:
        click.echo(f"incumbent from {start} tokens: {choice.name()}")
    accounts = expansion.accounts()
    click.echo(f"space {plan.space}: {accounts['generated']} combinations, {accounts['candidates']} candidates, {accounts['same']} the same as another")
    for rule, count in accounts["refused"].items():
        click.echo(f"refused {count:>6} by {rule}: such as: {expansion.example[rule]}")
    click.echo(f"kernels to compile: {cost['kernels']}, about {cost['compile_s_cold']} s cold; launch parameters need no kernel of their own")
    stages = ", ".join(f"{count} {stage}" for stage, count in cost["trials"].items())
    where = "on a GPU, trials" if static else "trials"
    click.echo(f"{where}: about {cost['total_trials']} ({stages}), about {cost['run_s_model']:.0f} s (model) beside set-up")
    return ExitCode.DONE


def _use_cubins(values: dict[str, Any]) -> None:
    from megamoe_cli.tuning.compiling import use_cubins

    if values["cubins"]:
        use_cubins(values["cubins"])


def _build_only(app: App, plan: Plan, jobs: int | None, cubins: Path | None) -> int:
    from megamoe_cli.report.tune_view import TuneView
    from megamoe_cli.tuning.compiling import compile_all, send_cubins

    with TuneView(app, plan, 0) as view:
        built = compile_all(plan, jobs, view.built)
    sent = send_cubins(built, cubins) if cubins else 0
    good = len(built.resources.keys() - built.refused.keys())
    if app.json:
        app.emit({"schema": "megamoe.tune-build/1", "kernels": good, "refused": {c.name(): why for c, why in built.refused.items()},
                  "seconds": round(built.seconds, 2), "cubins": str(cubins) if cubins else None, "cubin_bytes": sent})
    else:
        where = f"; {cubins} holds {sent / 2**20:.1f} MiB" if cubins else ""
        click.echo(f"{good} kernels built in {built.seconds:.1f} s, {len(built.refused)} refused{where}")
    return ExitCode.BUILD_FAILED if built.refused and not good else ExitCode.DONE


def _static(app: App, plan: Plan, folder: Path, values: dict[str, Any]) -> int:
    from megamoe_cli.report.tune_view import TuneView
    from megamoe_cli.tuning.compiling import compile_all
    from megamoe_cli.tuning.static_rank import print_ranking, rank, write_result

    app.started("tune", folder.parent)
    with TuneView(app, plan, 0) as view:
        built = compile_all(plan, values["jobs"], view.built)
    ranking = rank(plan, built)
    path = write_result(plan, ranking, folder, values["output"])
    app.evidence(record=folder / "ranking.json")
    if app.json:
        app.emit(ranking.to_dict() | {"table": str(path)})
    else:
        print_ranking(app, plan, ranking)
        click.echo(f"table (model, answers only when it is named): {path}")
    return ExitCode.DONE


# -- what measures ---------------------------------------------------------------------------------


def _resume(ctx: click.Context, app: App, values: dict[str, Any], results: Path, budget_s: float | None) -> int:
    from click.core import ParameterSource

    from megamoe_cli.tuning import run as tuning

    given = [name for name in _PLANNED if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE]
    if given:
        raise UsageError(f"--resume continues the run's own plan; leave out --{given[0].replace('_', '-')}", rule="resume")
    _use_cubins(values)
    folder = tuning.find_run(values["resume"], results)
    plan = tuning.resume_plan(folder, _choices(values["config"]))
    app.say(f"{_headline(plan)}; continuing {folder}")
    app.started("tune", results)
    return _run(app, plan, folder, values, budget_s)


def _run(app: App, plan: Plan, folder: Path, values: dict[str, Any], budget_s: float | None) -> int:
    from megamoe_cli.report.tune_view import TuneView
    from megamoe_cli.tuning.group import Killed
    from megamoe_cli.tuning.run import Run
    from megamoe_cli.tuning.summary import expected_trials

    app.started("tune", folder.parent)
    app.evidence(record=folder / "summary.json")
    with TuneView(app, plan, sum(expected_trials(plan).values()), budget_s) as view:
        run = Run(plan, folder, view, budget_s, values["candidate_timeout"], values["retry_failed"], values["fit_only"], values["jobs"])
        try:
            outcome, table = run.execute()
        except Killed:
            app.say(f"killed; what was measured is in {folder}, continue with --resume {folder.name}")
            return ExitCode.INTERRUPTED
    return _finish(app, run, outcome, table, values["output"])


def _finish(app: App, run: Run, outcome: Any, table: Any, output: Path | None) -> int:
    import json

    from megamoe_cli.report.tune_view import print_result
    from megamoe_cli.tuning.run import install

    summary = json.loads((run.folder / "summary.json").read_text())
    app.evidence(record=run.folder / "summary.json")
    path, why = install(run.folder, table, run.plan, output)
    validation = summary["validation"]
    slow = validation is not None and validation["worst_slowdown"] > validation["max_slowdown"]
    if outcome.stopped == "interrupted":
        code = ExitCode.INTERRUPTED
    elif slow:
        code = ExitCode.NO
    else:
        code = ExitCode.INCONCLUSIVE if table.partial else ExitCode.DONE
    if app.json:
        app.emit({"schema": SCHEMA, "exit_code": int(code), "folder": str(run.folder), "table": str(path or run.folder / "table.yaml"),
                  "installed": path is not None, "summary": summary})
    else:
        print_result(app, summary, run.plan)
        click.echo(f"table: {path or run.folder / 'table.yaml'}")
    for note in summary["notes"]:
        app.say(f"note: {note}")
    if path is None:
        app.say(f"not put where tables are looked up: {why}")
    if table.partial:
        app.warn(f"partial ({outcome.stopped or 'validation incomplete'}): continue with --resume {run.folder.name}")
    if slow:
        app.warn(f"a held-out size is {100 * (validation['worst_slowdown'] - 1):.1f}% slower than the best known there, above the limit")
    return code
