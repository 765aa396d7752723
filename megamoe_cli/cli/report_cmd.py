"""``megamoe report``: run records as a page for people. The logic is in ``megamoe_cli/report``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from megamoe_cli.cli.app import App, json_option, verbosity_options
from megamoe_cli.errors import ExitCode, UsageError

SCHEMA = "megamoe.report/1"
_SUFFIXES = {".md": "md", ".markdown": "md", ".html": "html", ".htm": "html", ".txt": "text"}
_KINDS = ("build", "test", "bench", "ci", "tune", "remote")


@click.command("report", short_help="Show run records: what ran where, what passed, how fast.")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--last", type=click.IntRange(1), metavar="N", help="The newest N runs [default: 1].")
@click.option("--all", "everything", is_flag=True, help="All runs.")
@click.option("--since", metavar="TIME", help="Runs since then: 12h, 2d, 2026-01-31.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(_KINDS), help="Only runs of this kind; repeatable.")
@click.option("--list", "listed", is_flag=True, help="One line for each run, and no more.")
@click.option("--format", "form", type=click.Choice(("text", "md", "html")), help="[default: by the suffix of -o, else text]")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write it here.")
@click.option("--results-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Where the records are (default: results/).")
@verbosity_options
@json_option
@click.pass_obj
def report_command(app: App, runs: tuple[str, ...], **values: Any) -> int:
    """Show what runs left in results/: where each ran; pass or fail by phase, ranks, tokens and BLOCK_M; times beside their
    floors; what a search found. RUN is an id, the beginning of one, or a folder; without any, the last run.

    \b
    megamoe report                                 # the last run
    megamoe report --since 2d -o page.html         # everything since then, as one page
    megamoe report --list --kind bench

    Exit codes: 0 shown (whatever the runs' own answers are), 2 no such run, 5 nothing selected.
    """
    from megamoe_cli import paths
    from megamoe_cli.report import found_runs
    from megamoe_cli.report.overview import overview_or_problem

    chosen = [f"--{name}" for name in ("last", "since") if values[name]] + ["--all"] * values["everything"] + ["--kind"] * bool(values["kinds"])
    if runs and chosen:
        raise UsageError(f"RUN and {chosen[0]} exclude each other")
    if values["everything"] and values["last"]:
        raise UsageError("--all and --last exclude each other")
    since = found_runs.parse_since(values["since"]) if values["since"] else None
    form = values["form"] or _format_of(values["output"])
    results = Path(values["results_dir"] or app.settings.get("results_dir") or paths.results_dir())
    known, complaints = found_runs.find_runs(results)
    last = values["last"] or (len(known) if values["listed"] else None)  # a list is short: all that was not left out
    everything = values["everything"] or values["listed"] and not (runs or chosen)
    found = found_runs.select(known, runs, last=last, kinds=values["kinds"], since=since, everything=everything)
    by_id = {run.id: run for run in known}
    views = [overview_or_problem(run, by_id) for run in found]
    for text in complaints:
        app.warn(text)
    if app.json:
        _write(app, values["output"], None, {"schema": SCHEMA, "results_dir": str(results), "complaints": complaints, "runs": views})
    elif values["listed"]:
        _list(views)
    else:
        _show(app, views, complaints, form, values["output"])
    return ExitCode.DONE


def _format_of(output: Path | None) -> str:
    if output is None:
        return "text"
    if output.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"-o {output}: the suffix names no format; give --format, or one of {', '.join(_SUFFIXES)}", rule="report-format")
    return _SUFFIXES[output.suffix.lower()]


def _list(views: list[dict[str, Any]]) -> None:
    from megamoe_cli.report.overview import result_text
    from megamoe_cli.report.page import short_places

    for view in views:
        click.echo(f"{view['id']:<34} {view['kind']:<6} {result_text(view):<34} {short_places(view['where'])}")


def _show(app: App, views: list[dict[str, Any]], complaints: list[str], form: str, output: Path | None) -> None:
    from megamoe_cli.report import render
    from megamoe_cli.report.page import page

    blocks = page(views, complaints)
    if form == "text" and output is None:
        render.print_text(app.console(), blocks)
        return
    if form == "text":
        import io

        from rich.console import Console

        text = io.StringIO()
        render.print_text(Console(file=text, width=160, no_color=True, highlight=False, soft_wrap=True), blocks)
        _write(app, output, text.getvalue())
    else:
        _write(app, output, render.markdown(blocks) if form == "md" else render.page_html(blocks))


def _write(app: App, output: Path | None, text: str | None, document: Any = None) -> None:
    import json

    from megamoe_cli.report.junit import check_writable, write_text

    if document is not None and output is None:
        app.emit(document)
    elif output is None:
        click.echo(text, nl=False)
    else:
        check_writable(output, "-o")
        write_text(output, text if text is not None else json.dumps(document, indent=2, default=str) + "\n")
        app.say(f"report: {output}")
