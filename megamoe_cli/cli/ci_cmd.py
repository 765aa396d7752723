"""``megamoe ci``: the whole check of a commit in one command."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from megamoe_cli.ci import DEFAULT_RANKS, Plan
from megamoe_cli.cli.app import App, json_option, verbosity_options
from megamoe_cli.errors import ExitCode


@click.command("ci")
@click.option("--ranks", default=DEFAULT_RANKS, show_default=True, metavar="N[,N...]", help="Rank counts, a step for each.")
@click.option("--phase", default="all", show_default=True, metavar="NAME[,NAME...]", help="Phases to build and test.")
@click.option("--tokens", metavar="T[,T...]", help="As test takes it.")
@click.option("--shape", metavar="NAME|HxIxExK", help="As test takes it.")
@click.option("--backend", default="auto", show_default=True, metavar="NAME", help="auto, emulator, virtual, nvlink, processes.")
@click.option("--no-build", is_flag=True, help="Leave out the sm_90a build.")
@click.option("--fail-on-regression", "limit_text", metavar="SHARE", help="Also bench against the baseline: 3%. Needs an SM90 GPU.")
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH", help="As bench takes it.")
@click.option("--bench-args", metavar="ARGS", help="More arguments for bench, in one string.")
@click.option("--timeout", type=float, default=120.0, show_default=True, metavar="S", help="Seconds one case may take.")
@click.option("--step-timeout", type=click.FloatRange(min=1), default=900.0, show_default=True, metavar="S", help="Seconds one step may take.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Cases and compilers side by side.")
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first step that fails.")
@click.option("-n", "--dry-run", is_flag=True, help="List the steps; run nothing.")
@click.option("--junit", "junit", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH", help="Also write JUnit XML here.")
@click.option("--results-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where records go (default: results/).")
@verbosity_options
@json_option
@click.pass_obj
def ci_command(app: App, **values: Any) -> int:
    """Build, test on 1, 2 and 8 ranks, maybe gate times: one summary, one JUnit file, one exit code.

    Exit codes: 0 all passed; else the gravest of the steps': 70, 2, 3, 4, 124, 1, 5, 6.
    """
    from megamoe_cli import ci
    from megamoe_cli.report.junit import write_text
    from megamoe_cli.report.record import make_run_dir, new_run_id

    plan = Plan.of(values)
    if values["dry_run"]:
        return _list(app, plan)
    app.started("ci", values["results_dir"])
    assert app.run is not None
    run_id, start = new_run_id("ci"), time.monotonic()
    folder = make_run_dir(app.run.results_dir, run_id)
    steps = ci.run(plan, app.run.results_dir, app.say, echo=app.verbosity >= 0)
    document, xml = ci.document(run_id, steps, time.monotonic() - start), ci.junit(steps)
    write_text(folder / "ci.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "junit.xml", xml)
    if values["junit"]:
        write_text(values["junit"], xml)
    app.evidence(record=folder / "ci.json")
    if app.json:
        app.emit(document)
    else:
        for step in steps:
            result = "pass" if step.passed else "not run" if step.exit_code is None else f"exit {step.exit_code}"
            click.echo(f"{step.name:<18} {result:<8} {step.seconds:>7.1f} s  {step.text()}")
        good = sum(step.passed for step in steps)
        click.echo(f"ci: {good} of {len(steps)} steps passed in {document['seconds']:.1f} s")
    return document["exit_code"]


def _list(app: App, plan: Plan) -> int:
    import shlex

    if app.json:
        app.emit({"schema": "megamoe.ci-plan/1", "steps": [{"name": s.name, "command": ["megamoe", *s.words]} for s in plan.steps()]})
    else:
        for step in plan.steps():
            click.echo(f"megamoe {shlex.join(step.words)}")
    return ExitCode.DONE
