"""``megamoe trace``: where a launch's cycles go, from a build that counts them."""

from __future__ import annotations

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.cli.bench_cmd import parse_sizes
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import ExitCode
from megamoe_cli.shapes import parse_shape

SCHEMA = "megamoe.trace/1"


@click.command("trace")
@click.option("--shape", default="flash", show_default=True)
@click.option("--rank-of", default=8, show_default=True, help="One rank holding 1/N of the shape's experts.")
@click.option("--tokens", default="128,8192", show_default=True)
@click.option("--config", "config_text", default="", help="KEY=VAL,... of the kernel configuration.")
@json_option
@click.pass_obj
def trace_command(app: App, shape: str, rank_of: int, tokens: str, config_text: str) -> int:
    """Count, per math warpgroup, the cycles of each part of the kernel on one GPU (averages over CTAs)."""
    from megamoe_cli.bench import Bench, slice_of
    from megamoe_cli.trace import trace

    sizes, config = parse_sizes(tokens), KernelConfig.parse(config_text)
    bench = Bench(slice_of(parse_shape(shape), rank_of))
    rows = []
    try:
        for size in sizes:
            rows.append({"tokens": size} | trace(bench, size, config))
            if not app.json:
                _print(shape, rows[-1])
    finally:
        where = bench.backend.where
        bench.close()
    if app.json:
        app.emit({"schema": SCHEMA, "where": where, "shape": shape, "rows": rows})
    return ExitCode.DONE


def _print(shape: str, row: dict) -> None:
    click.echo(f"{shape} {row['tokens']} tokens, {row['config']}: {row['kernel_us']:.1f} us")
    for who in ("warpgroup 0", "warpgroup 1", "dispatch"):
        click.echo(f"  {who:<12}" + "  ".join(f"{name} {value:.0f}" for name, value in row[who].items()))
    low, high = row["spread of total"]
    click.echo(f"  total of warpgroup 0 over CTAs: {low:.0f} to {high:.0f} cycles")
