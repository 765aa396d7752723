"""``megamoe bench --protocol-cost``: all experts on one rank against the same on several virtual ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.bench_cmd import given, on_a_gpu, parse_counts, parse_sizes, record_run
from megamoe_cli.config import KernelConfig, require
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import parse_shape

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App

COST_SCHEMA = "megamoe.protocol-cost/1"


def run_protocol_cost(app: App, values: Mapping[str, Any]) -> int:
    """All experts on one rank against the same on several virtual ranks."""
    from megamoe_cli.bench import protocol_cost
    from megamoe_cli.report import bench_table

    if values["reserve_sms"]:
        raise UsageError(f"--protocol-cost gives both sides {protocol_cost.SMS} SMs: no --reserve-sms with it", rule="protocol-cost")
    if values["against"] or values["row_set"] or values["limit_text"] or values["save_baseline"] or values["baseline"]:
        raise UsageError("--protocol-cost compares our kernel with itself: no --against, --rows or baseline with it", rule="protocol-cost")
    ranks = parse_counts(values["cost_ranks"], "--protocol-cost")
    sizes = parse_sizes(values["tokens"]) if given("tokens") else [4096, 16384]
    names = [name.strip() for name in (values["shapes"] if given("shapes") else "flash").split(",")]
    config = KernelConfig.parse(values["config_text"])
    for name in names:
        protocol_cost.check(parse_shape(name), sizes, ranks)
        for count in (1, *ranks):
            require(config, parse_shape(name), count)
    on_a_gpu()
    app.started("bench")
    costs: list[dict[str, Any]] = []
    for name in names:
        found = protocol_cost.measure_cost(name, parse_shape(name), sizes, ranks, config=config, samples=max(values["samples"] // 2, 3),
                                           seed=values["seed"], say=app.detail)  # fmt: skip
        costs += [cost.to_dict() for cost in found]
    document = {"schema": COST_SCHEMA, "sms": protocol_cost.SMS, "costs": costs, "exit_code": int(ExitCode.DONE)}
    record_run(app, document)
    if app.json:
        app.emit(document)
    else:
        click.echo("\n".join([bench_table.cost_header(), *(bench_table.cost_line(cost) for cost in costs)]))
    return ExitCode.DONE
