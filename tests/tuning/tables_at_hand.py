"""Tables for tests, made from a few numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from megamoe_cli.config import KernelConfig
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.lookup import Machine, Query
from megamoe_cli.tuning.schema import ANY, EXPECTED, MATCH_KEYS, TOKENS, Choice, Evidence, Match, Range, Table
from megamoe_cli.tuning.table_check import kernel_digest
from megamoe_cli.tuning.table_writer import write

SHAPE = Shape(4096, 2048, 32, 6)
H200 = Machine(132, "virtual", "NVIDIA H200")
QUERY = Query(SHAPE, 1, H200)
SMALL, MIDDLE, BIG = (Choice(KernelConfig(block_m=m)) for m in (32, 64, 128))
NAMES = {SMALL: "small", MIDDLE: "middle", BIG: "big"}


def measured(cuts: list[tuple[float, Choice]], ratios: dict[int, dict[Choice, float]], query: Query = QUERY, default: Choice = BIG,
             machine: str = "m1", **provenance: Any) -> Table:
    """``cuts``: (upper end in tokens, choice) ascending; above the last: the default. ``ratios``: tokens -> choice -> ratio
    to the incumbent."""
    rows = [Evidence(f"e{tokens}{NAMES[c]}", NAMES[c], tokens, "uniform", median_us=100.0 * r, vs_incumbent=r,
                     verdict="better" if r < 1 else "same", rounds=16, machine=machine)
            for tokens, found in sorted(ratios.items()) for c, r in found.items()]
    scale = query.ranks * query.shape.topk / query.shape.experts
    ranges, start = [], 0.0
    for end, choice in cuts:
        ids = tuple(row.id for row in rows if row.config == NAMES[choice] and start <= row.tokens * scale < end * scale)
        ranges.append(Range(start, end * scale, NAMES[choice], ids))
        start = end * scale
    ranges.append(Range(start, math.inf, NAMES[default], ()))
    used = dict.fromkeys([*(c for _, c in cuts), default, *(c for found in ratios.values() for c in found)])
    return Table(None, Match(query.values()), EXPECTED, NAMES[default], tuple(ranges), {NAMES[c]: c for c in used}, evidence=tuple(rows),
                 provenance={"source": "measured", "run": f"run-{machine}", "machines": [{"id": machine, "gpu": "NVIDIA H200"}], **provenance},
                 digest=kernel_digest())


def rule_of_thumb(cuts: list[tuple[int, Choice]], default: Choice = BIG) -> Table:
    """A baseline for every geometry and GPU. ``cuts``: (first token count above, choice) ascending; from the last on: the default."""
    starts = [0, *(end for end, _ in cuts)]
    ranges = [Range(start, end, NAMES[choice], ()) for start, (end, choice) in zip(starts, [*cuts, (math.inf, default)])]
    return Table(None, Match(dict.fromkeys(MATCH_KEYS, ANY)), TOKENS, NAMES[default], tuple(ranges), {NAMES[c]: c for c in [*(c for _, c in cuts), default]},
                 provenance={"source": "baseline"})


# What the tests' lookups find in place of the baselines that ship, whose picks follow the latest measurement: a test of the
# tuner or of the lookup has the same incumbents and picks after the next one.
OWN = rule_of_thumb([(120, SMALL), (480, MIDDLE)])
OWN_NAME = "baseline-own.yaml"


def saved(table: Table, path: Path) -> Table:
    write(path, table)
    return replace(table, path=path)
