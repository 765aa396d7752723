"""``megamoe trace``: where a launch's cycles go, from a build that counts them."""

from __future__ import annotations

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.cli.bench_cmd import on_a_gpu, parse_sizes
from megamoe_cli.config import KernelConfig, resolve
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import nearest_name, parse_shape

SCHEMA, LOOP_SCHEMA = "megamoe.trace/1", "megamoe.loop/1"


@click.command("trace")
@click.option("--shape", default="flash", show_default=True)
@click.option("--rank-of", default=8, show_default=True, help="One rank holding 1/N of the shape's experts.")
@click.option("--tokens", default="128,8192", show_default=True)
@click.option("--config", "config_text", default="", help="KEY=VAL,... of the kernel configuration.")
@click.option("--loop", "loop", is_flag=True, help="Instead: the main loop alone, with and without promotion, barriers and copies.")
@click.option("--part", "parts", default="products,promotion,barriers,copies", show_default=True, help="With --loop: how much of it: " + "products, promotion, barriers, copies (each has all before it), in-place, in-place-multiplied, in-place-copies.")
@click.option("--offset", "offsets", default="0", show_default=True, help="With --loop: cycles by which the second warpgroup begins later, comma-separated.")
@click.option("--operands", type=click.Choice(["normal", "zeros"]), default="normal", show_default=True, help="With --loop: zeros take little power.")
@json_option
@click.pass_obj
def trace_command(app: App, shape: str, rank_of: int, tokens: str, config_text: str, loop: bool, parts: str, offsets: str, operands: str) -> int:
    """Count, per math warpgroup, the cycles of each part of the kernel on one GPU (averages over CTAs)."""
    config = KernelConfig.parse(config_text)
    if loop:
        parse_shape(shape), parse_sizes(tokens)  # not used, but not passed over when they are wrong
        return _loop(app, config, parts, offsets, operands)
    from megamoe_cli.bench import Bench, slice_of
    from megamoe_cli.trace import trace

    sizes, part = parse_sizes(tokens), slice_of(parse_shape(shape), rank_of)
    resolve(config, part, 1)
    on_a_gpu()
    bench = Bench(part)
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


def _loop(app: App, config: KernelConfig, parts: str, offsets: str, operands: str) -> int:
    from dataclasses import asdict

    from megamoe_cli import loop_probe

    names = [name.strip() for name in parts.split(",") if name.strip()]
    for name in names:
        if name not in loop_probe.PARTS:
            raise UsageError(f"--part does not know {name!r}; nearest name: {nearest_name(name, loop_probe.PARTS)} (parts: {', '.join(loop_probe.PARTS)})",
                             rule="loop-probe")  # fmt: skip
    if not names or not all(text.strip().isdigit() for text in offsets.split(",")):
        raise UsageError("--loop takes at least one --part, and --offset takes numbers of cycles", rule="loop-probe")
    config = loop_probe.check(config)
    on_a_gpu()
    found = loop_probe.measure([config], names, [int(text) for text in offsets.split(",")], operands=operands)
    if app.json:
        app.emit({"schema": LOOP_SCHEMA, "operands": operands, "rows": [asdict(row) for row in found]})
    else:
        click.echo(f"{'configuration':<44}{'part':<21}{'offset':>7}{'cycles':>9}{'us':>8}{'MHz':>7}{'TFLOPS':>8}   (a K-block of the tile)")
        for row in found:
            click.echo(f"{row.config:<44}{row.part:<21}{row.offset:>7}{row.cycles:>9.0f}{row.us:>8.3f}{row.mhz:>7.0f}{row.tflops:>8.0f}")
    return ExitCode.DONE


def _print(shape: str, row: dict) -> None:
    click.echo(f"{shape} {row['tokens']} tokens, {row['config']}: {row['kernel_us']:.1f} us")
    for who in ("warpgroup 0", "warpgroup 1", "dispatch"):
        click.echo(f"  {who:<12}" + "  ".join(f"{name} {value:.0f}" for name, value in row[who].items()))
    low, high = row["spread of total"]
    click.echo(f"  total of warpgroup 0 over CTAs: {low:.0f} to {high:.0f} cycles")
