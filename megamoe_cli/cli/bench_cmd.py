"""``megamoe bench``: kernel times on one GPU beside the floors."""

from __future__ import annotations

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import parse_shape

SCHEMA = "megamoe.bench/1"


def parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--tokens takes positive counts like 1,8,128, not {text!r}", rule="tokens")
    return sizes


@click.command("bench")
@click.option("--shape", "shapes", default="flash,pro,v3", show_default=True, help="Shapes, comma-separated.")
@click.option("--rank-of", default=8, show_default=True, help="One rank holding 1/N of the shape's experts, as a rank of EP N would.")
@click.option("--tokens", default="1,8,128,1024,8192", show_default=True, help="Tokens of the rank, comma-separated.")
@click.option("--config", "config_text", default="", help="KEY=VAL,... of the kernel configuration.")
@click.option("--samples", default=12, show_default=True, type=click.IntRange(3), help="Timed launches, each with routing of its own.")
@click.option("--seed", default=0, show_default=True)
@json_option
@click.pass_obj
def bench_command(app: App, shapes: str, rank_of: int, tokens: str, config_text: str, samples: int, seed: int) -> int:
    """Time the whole kernel on one GPU: median kernel time with its interval, back-to-back time, floors of the drawn
    routing. L2 is as the launch before left it. Outputs are checked after timing."""
    from megamoe_cli.bench import Bench, slice_of

    sizes = parse_sizes(tokens)
    parsed = [slice_of(parse_shape(name.strip()), rank_of) for name in shapes.split(",")]
    names = [name.strip() for name in shapes.split(",")]
    config = KernelConfig.parse(config_text)
    rows, where = [], ""
    for name, shape in zip(names, parsed):
        bench = Bench(shape, seed)
        where = bench.backend.where
        try:
            for size in sizes:
                row = bench.measure(size, config, samples=samples, say=app.detail)
                rows.append(row.to_dict() | {"shape": name})
                if not app.json:
                    _print_row(rows[-1], first=len(rows) == 1)
        finally:
            bench.close()
    if app.json:
        app.emit({"schema": SCHEMA, "where": where, "rows": rows})
    else:
        click.echo(f"{len(rows)} rows on {where}")
    return ExitCode.DONE


def _print_row(row: dict, first: bool) -> None:
    if first:
        click.echo(f"{'shape':<8}{'tokens':>7}{'kernel us':>11}{'interval':>18}{'in a row':>10}{'floor':>9}{'% floor':>9}  config")
    interval = f"{row['low_us']:.1f}-{row['high_us']:.1f}"
    click.echo(f"{row['shape']:<8}{row['tokens']:>7}{row['kernel_us']:>11.1f}{interval:>18}{row['back_to_back_us']:>10.1f}"
               f"{row['floor_us']:>9.1f}{100 * row['of_floor']:>8.0f}%  {row['config']}")  # fmt: skip
