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
}  # fmt: skip


def campaign_case(name: str, seed: int, **options: Any) -> Case:
    """Case ``name`` with the schedule of ``seed``; ``options`` are added to its own (such as ``mutant=101``)."""
    changes = dict(REQUESTS[name][1])
    extra = changes.pop("options", {})
    request = replace(
        Request(ranks="2", phase="combine", shape="256x256x4x2", config=_RING, backend="emulator", seed=seed, timeout_s=60.0,
                options=sanitize.CHECKS | {"schedule": sanitize.MIXED, "completion": sanitize.MIXED} | extra | options), **changes)  # fmt: skip
    (case,) = testplan.expand(request)
    return replace(case, id=f"{name}-s{seed}")
