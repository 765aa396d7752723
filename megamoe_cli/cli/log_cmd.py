"""``megamoe log``: the development log, written from run records. The logic is in ``megamoe_cli/devlog``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.errors import ExitCode, UsageError

_FILE = click.option("--file", "file", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
                     help="The log [default: docs/log.md of the checkout].")
_RESULTS = click.option("--results-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
                        help="Where journal and run records are (default: results/).")


def _results(app: App, given: Path | None) -> Path:
    from megamoe_cli import paths

    return Path(given or app.settings.get("results_dir") or paths.results_dir())


@click.group("log", invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "runs", multiple=True, metavar="ID", help="A run; repeatable [default: all since the last entry].")
@click.option("--phase", multiple=True, metavar="NAME", help="Refuse unless this phase ran; repeatable.")
@click.option("--ranks", metavar="N[,N...]", help="Refuse unless it ran on these rank counts.")
@click.option("--request", default="", metavar="TEXT", help="What was asked for.")
@click.option("--issue", "issues", multiple=True, metavar="TEXT", help="A known issue, beside those in the records; repeatable.")
@click.option("--next", "next_steps", multiple=True, metavar="TEXT", help="A next step; repeatable.")
@click.option("-n", "--dry-run", is_flag=True, help="Print the entry; write nothing.")
@_FILE
@_RESULTS
@json_option
@click.pass_context
def log_command(ctx: click.Context, file: Path | None, results_dir: Path | None, **values: Any) -> int | None:
    """Write an entry about the runs since the last one, from their records. Refuses what was not run.

    \b
    megamoe test --ranks 8 && megamoe log --request "combine on 8 ranks" --next "tune BLOCK_M 64"
    megamoe log --phase combine --ranks 1,2,8
    megamoe log check
    """
    if ctx.invoked_subcommand is not None:
        return None
    from megamoe_cli.devlog import entry, writing
    from megamoe_cli.plan_values import integers, names
    from megamoe_cli.testplan import phase_names

    app: App = ctx.obj
    path = writing.log_path(file)
    phases = [p for text in values["phase"] for p in names(text, phase_names(), "phase")]
    ranks = integers(values["ranks"], "--ranks") if values["ranks"] else []
    made = writing.make(_results(app, results_dir), path, run_ids=values["runs"], phases=phases, ranks=ranks,
                        request=values["request"], issues=values["issues"], next_steps=values["next_steps"], warn=app.warn)
    if not values["dry_run"]:
        entry.append(path, made)
        app.say(f"entry {made['id']} written to {path}")
        if complaints := entry.parse(entry.read_log(path))[1]:
            app.warn(f"{path} has text that belongs to no entry ({complaints[0].partition(':')[0]}); megamoe log check calls it false")
    if app.json:
        app.emit(made)
    elif values["dry_run"] or app.verbosity > 0:
        click.echo(entry.render(made), nl=False)
    return ExitCode.DONE


@log_command.command("show")
@click.argument("entry_id", required=False, metavar="[ID]")
@_FILE
@json_option
@click.pass_obj
def show_command(app: App, entry_id: str | None, file: Path | None) -> int:
    """Print an entry (default: the last)."""
    from megamoe_cli.devlog import writing

    found = writing.find(writing.log_path(file), entry_id)
    if app.json:
        app.emit(found.entry)
    else:
        click.echo(found.text, nl=False)
    return ExitCode.DONE


@log_command.command("list")
@click.option("--runs", is_flag=True, help="List the runs of the journal instead, and which entries are about them.")
@_FILE
@_RESULTS
@json_option
@click.pass_obj
def list_command(app: App, runs: bool, file: Path | None, results_dir: Path | None) -> int:
    """One line per entry, oldest first."""
    from megamoe_cli.devlog import entry, journal, writing

    path = writing.log_path(file)
    entries = entry.parse(entry.read_log(path))[0]
    about = {run["id"]: parsed.id for parsed in entries for run in parsed.entry["evidence"]["runs"]}
    if runs:
        lines = journal.read(_results(app, results_dir), app.warn)
        rows = [{"id": l["id"], "kind": l["kind"], "exit_code": l["exit_code"], "seconds": l["seconds"], "entry": about.get(l["id"])} for l in lines]  # noqa: E741
    else:
        rows = [{"id": p.id, "written": p.entry["written"], "commit": p.entry["evidence"]["source"].get("commit"),
                 "phases": p.entry["evidence"]["phases"], "request": p.entry["request"]} for p in entries]
    if app.json:
        app.emit({"schema": "megamoe.log-list/1", "runs" if runs else "entries": rows})
        return ExitCode.DONE
    for row in rows:
        if runs:
            click.echo(f"{row['id']}  exit {row['exit_code']:<4} {row['seconds']:>7.1f} s  {row['kind']:<14} {row['entry'] or 'not logged'}")
        else:
            click.echo(f"{row['id']}  {(row['commit'] or 'no commit')[:10]}  {', '.join(row['phases']) or '-':<34} {row['request']}")
    return ExitCode.DONE


@log_command.command("check")
@click.option("--strict", is_flag=True, help="Exit 6 when records needed to prove an entry are not on this machine.")
@_FILE
@_RESULTS
@json_option
@click.pass_obj
def check_command(app: App, strict: bool, file: Path | None, results_dir: Path | None) -> int:
    """Exit 1 when an entry claims what its records do not say, or was changed by hand."""
    from megamoe_cli.devlog import writing
    from megamoe_cli.devlog.check import check_file

    path = writing.log_path(file)
    if not path.is_file():
        raise UsageError(f"there is no log: {path}", hint="megamoe log writes the first entry", rule="log-entry")
    findings, complaints = check_file(path, _results(app, results_dir), app.warn)
    false = sum(bool(f.false) for f in findings)
    unproven = sum(bool(f.unproven) and not f.false for f in findings)
    if app.json:
        app.emit({"schema": "megamoe.log-check/1", "entries": [f.to_dict() for f in findings], "complaints": complaints})
    else:
        for finding in findings:
            for text in finding.false:
                click.echo(f"{path}:{finding.line}: entry {finding.id}: FALSE: {text}")
            if finding.unproven and not finding.false:
                click.echo(f"{path}:{finding.line}: entry {finding.id}: NOT PROVEN: digest fits, record not here: {', '.join(finding.unproven)}")
        for text in complaints:
            click.echo(f"{path}: {text}")
        click.echo(f"{len(findings)} entries: {len(findings) - false - unproven} proven by records, {unproven} not proven (digest "
                   f"fits, record not here), {false} false" + (f"; {len(complaints)} places belong to no entry" if complaints else ""))
    if false or complaints:
        return ExitCode.NO
    return ExitCode.INCONCLUSIVE if strict and unproven else ExitCode.DONE
