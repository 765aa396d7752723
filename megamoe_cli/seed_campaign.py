"""Cases for many race-checked seeds: every phase under every policy that exists, over tiles, frontends, routings and
skews. ``megamoe test --sanitize --campaign 200`` runs them. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from . import config as kernel_config
from . import sanitize, testplan
from .config import ALLOWED, NOT_IMPLEMENTED, KernelConfig
from .errors import UsageError
from .shapes import Problem, parse_shape
from .testplan import Case

LEAST_PER_CELL = 8  # seeds of each phase under each policy
VARIANTS = 3  # configurations of a policy that take turns: each costs a compile per phase
_TILE_FIELDS = ("block_m", "block_n", "cluster", "math_threads", "promotion", "frontend", "order")

# ranks, shape, tokens per rank, routing: dozens of rows to an expert; ranks and experts without any; overhanging tiles.
SIZES: tuple[tuple[int, str, str, str], ...] = (
    (2, "256x256x4x2", "uneven:72", "uniform"), (3, "256x256x6x2", "uneven:40", "powerlaw:1.2"),
    (2, "384x128x4x2", "33", "masked:0.3"), (2, "128x384x2x1", "uneven:90", "one-hot-expert:0"),
    (4, "256x128x8x3", "uneven:20", "uniform"), (1, "256x256x3x2", "50", "uniform"), (2, "256x256x4x4", "uneven:24", "balanced"),
)  # fmt: skip
SKEWS = ("", "", "late:any", "slow:any")


def policies() -> list[str]:
    """The policies that the kernel implements."""
    return [name for name in ALLOWED["policy"] if ("policy", name) not in NOT_IMPLEMENTED]


@lru_cache(maxsize=None)
def legal_configs(policy: str) -> tuple[KernelConfig, ...]:
    """Every legal, implemented combination of the tile fields under a policy (with two stages, so that rings wrap)."""
    found = []
    for values in product(*(ALLOWED[name] for name in _TILE_FIELDS)):
        config = replace(KernelConfig(), policy=policy, stages=2, **dict(zip(_TILE_FIELDS, values)))
        if kernel_config.check(config):
            found.append(config)
    return tuple(found)


def variants(policy: str, count: int = VARIANTS) -> list[KernelConfig]:
    """A few of them, spread over the list, the same in every run; the default tile is one where it is legal."""
    legal = legal_configs(policy)
    if not legal:
        raise UsageError(f"no configuration of policy {policy} is legal", rule="policy-tile")
    order = random.Random(policy).sample(legal, len(legal))
    order.sort(key=lambda c: (c.block_m, c.block_n, c.math_threads) != (128, 256, 256))  # stable
    chosen: list[KernelConfig] = []
    for config in order:  # tiles that differ first
        if config.block_m not in {c.block_m for c in chosen}:
            chosen.append(config)
    return (chosen + [c for c in order if c not in chosen])[:count]


def seeds(total: int, first_seed: int = 0, phases: Sequence[str] = (), timeout_s: float = 120.0) -> list[Case]:
    """``total`` cases, each with a seed of its own. UsageError when that is less than ``LEAST_PER_CELL`` for each phase
    under each policy."""
    cells = list(product(phases or testplan.phase_names(), policies()))
    if total < LEAST_PER_CELL * len(cells):
        raise UsageError(f"--campaign {total}: {len(cells)} pairs of phase and policy need {LEAST_PER_CELL} seeds each, "
                         f"{LEAST_PER_CELL * len(cells)} in all", rule="campaign")  # fmt: skip
    return [_case(*cells[n % len(cells)], n // len(cells), first_seed + n, timeout_s) for n in range(total)]


def _case(phase: str, policy: str, turn: int, seed: int, timeout_s: float) -> Case:
    config = variants(policy)[turn % VARIANTS % len(variants(policy))]
    ranks, shape_text, tokens, routing = SIZES[turn % len(SIZES)]
    shape = parse_shape(shape_text)
    options: dict[str, Any] = dict(sanitize.CHECKS)
    options["schedule"], options["completion"] = sanitize.TURNS[turn % len(sanitize.TURNS)]
    if skew := SKEWS[turn // 2 % len(SKEWS)] if ranks > 1 else "":
        options["skew"] = skew
    if turn % 3 == 1:
        options["vary_tokens"] = True
    if turn % 4 == 3:
        options["tokens_bound"] = 4000  # all CTAs send
    counts = testplan.uneven_counts(int(tokens[7:]), ranks, seed) if tokens.startswith("uneven:") else (int(tokens),) * ranks
    problem = Problem.make(shape, ranks, counts)
    case = Case("", phase, problem, routing, None if turn % 5 else 0.5, seed, config, testplan.LAUNCHES, "emulator", timeout_s, options)
    return replace(case, id=testplan.identity(case))
