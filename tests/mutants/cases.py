"""The cases of the mutation campaign: small, each there for what the others do not reach. All are race-checked, three
launches in a row, under two schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megamoe_cli import sanitize, testplan
from megamoe_cli.testplan import Case, Request

SEEDS = (0, 1, 2)  # random and lazy, by priority and lazy, random and random (sanitize.TURNS)

# name -> (why, request). One kernel configuration wherever possible: each costs a compile.
_RING = ["block_m=64", "stages=2"]
_RESCALED = ["block_m=16", "math_threads=128", "policy=wide_n", "promotion=rescale", "stages=2"]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": ("several blocks to an expert, two stages that wrap", {"tokens_per_rank": "40,71"}),
    "wide": ("all CTAs send", {"tokens_per_rank": "33,58", "options": {"tokens_bound": 4000, "vary_tokens": True}}),
    "mixed": ("three ranks, one of them without tokens; masked slots, three of them; a clamp",
              {"ranks": "3", "shape": "256x256x6x3", "tokens_per_rank": "17,0,40", "routing": "masked:0.4", "clamp": "0.5"}),
    "tall": ("65 rows of one expert in a block of 128", {"shape": "256x256x2x1", "tokens_per_rank": "33,32",
                                                          "routing": "one-hot-expert", "config": ["block_m=128", "stages=2"]}),
    "tiles": ("one CTA that takes dozens of tiles", {"tokens_per_rank": "72,60", "config": ["block_m=16", "stages=2"], "options": {"ctas": 1}}),
    "overhang": ("the last column tile overhangs H", {"shape": "384x128x4x2", "tokens_per_rank": "24,9"}),
    "few": ("experts with no row and with one", {"shape": "256x256x16x2", "tokens_per_rank": "3,2"}),
    "long": ("rows of more than one chunk", {"shape": "4224x128x2x1", "tokens_per_rank": "7,5"}),
    "pair": ("pairs of CTAs: odd numbers of row blocks, so that one of a pair has no rows",
             {"shape": "128x1024x4x2", "tokens_per_rank": "90,120", "routing": "powerlaw:1.2",
              "config": ["block_m=128", "cluster=2", "stages=2"], "options": {"ctas": 2}}),
    "narrow": ("two passes over K, the second of which ends in the middle of the ring",
               {"shape": "384x256x4x2", "tokens_per_rank": "24,9", "config": ["block_m=64", "block_n=128", "stages=2"]}),
    "rescaled": ("33 K-blocks in one accumulator of 256 columns: carried twice",
                 {"shape": "4224x256x2x1", "tokens_per_rank": "7,5", "config": _RESCALED}),
    "extreme": ("scales that may not be divided by", {"named": "S26", "config": _RESCALED}),
    "serial": ("two products of 128 columns, each in its own accumulator",
               {"tokens_per_rank": "24,9", "config": ["block_m=16", "math_threads=128", "policy=serial_n", "stages=2"]}),
    "warp": ("warp-level products", {"tokens_per_rank": "24,9", "config": ["block_m=32", "policy=mma_sync", "stages=2"]}),
    "waves": ("waves of one unit, two waves to a CTA's ring",
              {"tokens_per_rank": "40,71", "config": [*_RING, "order=wave", "lag=1", "unit_blocks=1"], "options": {"ctas": 1}}),
}  # fmt: skip


def campaign_case(name: str, seed: int, **options: Any) -> Case:
    """Case ``name`` with the schedule of ``seed``; ``options`` are added to its own (such as ``mutant=101``)."""
    changes = dict(REQUESTS[name][1])
    extra, named = changes.pop("options", {}), changes.pop("named", "")
    request = replace(
        Request(ranks="2", phase="combine", shape="256x256x4x2", config=_RING, backend="emulator", seed=seed, timeout_s=60.0,
                options=sanitize.CHECKS | {"schedule": sanitize.MIXED, "completion": sanitize.MIXED} | extra | options), **changes)  # fmt: skip
    (case,) = testplan.named(request, [named]) if named else testplan.expand(request)
    return replace(case, id=f"{name}-s{seed}")
