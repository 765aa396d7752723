"""``megamoe table``: show, look up, check, merge, compare and export heuristic tables."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megamoe_cli.tuning.lookup import Query
    from megamoe_cli.tuning.schema import Table

FILE = click.Path(path_type=Path, dir_okay=False)


@click.group("table", short_help="Look into heuristic tables: which configuration for which load, and why.")
def table_command() -> None:
    """Look into heuristic tables: which configuration for which load, and why."""


def _files(given: tuple[Path, ...]) -> list[Path]:
    """Files, or all tables where they are looked up."""
    from megamoe_cli import paths

    found = list(given) or [p for folder in paths.table_dirs() if folder.is_dir() for p in sorted(folder.glob("*.yaml"))]
    for path in found:
        if not path.is_file():
            raise UsageError(f"there is no table {path}", rule="table")
    return found


@table_command.command("show")
@click.argument("files", nargs=-1, type=FILE, metavar="[FILE]...")
@json_option
@click.pass_obj
def show_command(app: App, files: tuple[Path, ...]) -> int:
    """What tables pick, by range, with their evidence (default: all tables)."""
    from megamoe_cli.tuning.table_check import load_usable
    from megamoe_cli.tuning.table_writer import to_dict

    tables = [load_usable(path) for path in _files(files)]
    if app.json:
        app.emit({"schema": "megamoe.tables/1", "tables": [{"file": str(t.path), **_finite(to_dict(t))} for t, _ in tables]})
        return ExitCode.DONE
    from megamoe_cli.report.tuning_tables import print_table

    for table, problems in tables:
        print_table(app, table)
        for problem in problems:
            app.warn(f"{table.path}:{problem.line}: {problem.rule}: {problem.message}")
    return ExitCode.DONE


def _finite(value: Any) -> Any:
    """JSON has no infinity: the open end of the last range is null."""
    if isinstance(value, float) and math.isinf(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@table_command.command("lookup")
@click.option("--tokens", required=True, metavar="N[,N...]", help="Tokens per rank.")
@click.option("--shape", default="flash", show_default=True, metavar="NAME|HxIxExK", help="flash, pro, v3, tiny, or sizes.")
@click.option("--ranks", default="8", show_default=True, metavar="R", help="Ranks.")
@click.option("--rank-of", type=click.IntRange(1), metavar="N", help="One rank holding 1/N of the experts (implies --ranks 1).")
@click.option("--backend", default="auto", show_default=True, metavar="NAME", help="virtual, processes, nvlink, or auto: the running GPU.")
@click.option("--sms", type=click.IntRange(1), metavar="N", help="SMs of the GPU (default: the running one).")
@click.option("--table", "table", default="auto", show_default=True, metavar="auto|FILE", help="The tables that ship, or one file.")
@json_option
@click.pass_obj
def lookup_command(app: App, tokens: str, shape: str, ranks: str, rank_of: int | None, backend: str, sms: int | None, table: str) -> int:
    """Which configuration a load gets, and why."""
    from megamoe_cli.plan_values import integers
    from megamoe_cli.tuning.lookup import Library, lookup

    query, counts = _query(shape, ranks, rank_of, backend, sms), integers(tokens, "--tokens", 0)
    library = Library.of(table)
    picks = [(count, lookup(query, count, library, named=table != "auto")) for count in counts]
    if app.json:
        app.emit({"schema": "megamoe.lookup/1", "query": query.values(), "picks": [
            {"tokens": count, "config": pick.choice.to_dict(), "config_name": pick.choice.name(), "source": pick.source,
             "table": str(pick.table) if pick.table else None, "why": pick.why, "warnings": list(pick.warnings),
             "considered": list(pick.considered)} for count, pick in picks]})
        return ExitCode.DONE
    for count, pick in picks:
        click.echo(f"{count:>6} tokens  {pick.choice.name()}  {pick.why}")
    for line in dict.fromkeys(line for _, pick in picks for line in pick.considered):
        app.say(f"not used: {line}")
    for line in dict.fromkeys(line for _, pick in picks for line in pick.warnings):
        app.warn(line)
    return ExitCode.DONE


def _query(shape_text: str, ranks_text: str, rank_of: int | None, backend: str, sms: int | None) -> Query:
    from megamoe_cli.backends.picking import check_name
    from megamoe_cli.bench import slice_of
    from megamoe_cli.plan_values import integers
    from megamoe_cli.shapes import check_shape, parse_shape
    from megamoe_cli.tuning.lookup import Machine, Query, running_machine

    shape, ranks = parse_shape(shape_text), integers(ranks_text, "--ranks", 1)[0]
    if rank_of:
        shape, ranks = slice_of(shape, rank_of), 1
    check_shape(shape, ranks)
    check_name(backend)
    machine = running_machine(backend, ranks) if sms is None else None
    if machine is None:
        if sms is None:
            raise UsageError("no SM90 GPU is here to look up for; name one with --sms 132 (H200 and H100 SXM)", rule="sms")
        machine = Machine(sms, "virtual" if backend in ("auto", "emulator") else backend)
    return Query(shape, ranks, machine)


@table_command.command("check")
@click.argument("files", nargs=-1, type=FILE, metavar="[FILE]...")
@click.option("--strict", is_flag=True, help="Warnings (stale, dirty, partial, unused) fail too.")
@json_option
@click.pass_obj
def check_command(app: App, files: tuple[Path, ...], strict: bool) -> int:
    """Judge tables (default: all): cover, reachability, legal configurations, evidence. Exit 1 names line and rule."""
    from megamoe_cli.tuning.table_check import check_file, errors_of

    rows: list[dict[str, Any]] = []
    failed, checked = 0, _files(files)
    for path in checked:
        _, problems = check_file(path)
        bad = errors_of(problems, strict)
        failed += bool(bad)
        rows += [{"file": str(path), "line": p.line, "severity": p.severity, "rule": p.rule, "message": p.message} for p in problems]
        if not app.json:
            for problem in problems:
                click.echo(problem.text(path))
            if not bad:
                click.echo(f"{path}: ok")
    if app.json:
        app.emit({"schema": "megamoe.table-check/1", "ok": not failed, "files": [str(p) for p in checked], "problems": rows})
    if not checked:
        app.warn("there is no table")
        return ExitCode.NOTHING_SELECTED
    return ExitCode.NO if failed else ExitCode.DONE


@table_command.command("merge")
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE FILE...")
@click.option("-o", "--output", required=True, type=FILE, metavar="FILE", help="Where the merged table goes.")
@click.option("-f", "--force", is_flag=True, help="Replace an existing file.")
@json_option
@click.pass_obj
def merge_command(app: App, files: tuple[Path, ...], output: Path, force: bool) -> int:
    """One table from several machines' measured tables; where they disagree the evidence decides, else the default."""
    from megamoe_cli.tuning.table_check import load_usable
    from megamoe_cli.tuning.table_merge import merge
    from megamoe_cli.tuning.table_writer import write

    if len(files) < 2:
        raise UsageError("merge takes two tables or more", rule="merge-match")
    if output.exists() and not force:
        raise UsageError(f"{output} exists; --force replaces it", rule="unwritable")
    merged = merge([load_usable(path)[0] for path in _files(files)])
    write(output, merged)
    if app.json:
        app.emit({"schema": "megamoe.table-merge/1", "file": str(output), "ranges": len(merged.ranges), "notes": list(merged.notes)})
    else:
        click.echo(f"{output}: {len(merged.ranges)} ranges, {len(merged.evidence)} rows of evidence")
        for note in merged.notes:
            app.say(note)
    return ExitCode.DONE


@table_command.command("diff")
@click.argument("first", type=FILE)
@click.argument("second", type=FILE)
@json_option
@click.pass_obj
def diff_command(app: App, first: Path, second: Path) -> int:
    """Where two tables pick differently, and what that costs by their evidence. Exit 1 when a difference is more than
    noise. Of a static and a measured table: also the model's error."""
    from megamoe_cli.tuning.table_check import load_usable
    from megamoe_cli.tuning.table_merge import diff, model_error

    a, b = (load_usable(path)[0] for path in _files((first, second)))
    found, error = diff(a, b), model_error(a, b)
    real = [d for d in found if d.verdict != "same"]
    if app.json:
        app.emit({"schema": "megamoe.table-diff/1", "a": str(first), "b": str(second), "match": a.match == b.match,
                  "differences": [d.to_dict() for d in found], "model_error": error})
        return ExitCode.NO if real else ExitCode.DONE
    if a.match != b.match:
        app.warn(f"the tables are for different things: {_match_words(a, b)}")
    for d in found:
        cost = "" if d.cost is None else f", up to {100 * d.cost:.1f}% apart"
        click.echo(f"[{d.low:g}, {d.high:g})  {d.first.name()} | {d.second.name()}  {d.verdict}{cost}")
    if error is not None and error["points"]:
        click.echo(f"model: {error['points']} points, median error {100 * error['median']:+.0f}%, median size {100 * error['median_abs']:.0f}%, "
                   f"worst {100 * error['worst']:+.0f}%")
    click.echo(f"{len(found)} differences" + (f", {len(found) - len(real)} of them within noise" if found else ""))
    return ExitCode.NO if real else ExitCode.DONE


def _match_words(a: Table, b: Table) -> str:
    keys = [key for key in a.match.values if a.match.values[key] != b.match.values.get(key)]
    return ", ".join(f"{key} {a.match.values[key]} and {b.match.values.get(key)}" for key in keys)


@table_command.command("export")
@click.argument("file", type=FILE)
@click.option("--format", "form", type=click.Choice(["header", "json"]), default="header", show_default=True, help="constexpr C++14, or JSON.")
@click.option("-o", "--output", type=FILE, metavar="FILE", help="Instead of stdout.")
@click.pass_obj
def export_command(app: App, file: Path, form: str, output: Path | None) -> int:
    """A table for a runtime that reads no YAML."""
    from megamoe_cli.tuning.table_check import load_usable
    from megamoe_cli.tuning.table_writer import to_header, to_json, write_text

    table, _ = load_usable(_files((file,))[0])
    text = to_header(table, file.name) if form == "header" else to_json(table)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
        app.say(f"wrote {output}")
    return ExitCode.DONE
