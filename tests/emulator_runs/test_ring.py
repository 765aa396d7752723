"""The activation pool as a ring: the same bits as with the whole pool, no place used twice at a time, nothing stuck."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe_cli.backends.emulator import EmulatorBackend
from megamoe_cli.config import KernelConfig, ring_order
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import Problem, Shape
from tests.ring import outputs_on

SHAPE = Shape(256, 128, 10, 2)  # five experts a rank: their segments do not end where the ring does


def outputs(config: KernelConfig, tokens: tuple[int, ...], ring: int, hidden: int = 256, **options: Any) -> list[torch.Tensor]:
    """The ``y`` of three launches on every rank, as bits."""
    with EmulatorBackend(2, **options) as backend:
        return outputs_on(backend, Problem.make(replace(SHAPE, hidden=hidden), 2, tokens), config, ring)


@pytest.mark.parametrize(("text", "ring"), [
    ("block_m=128,stages=2,lag=1,unit_blocks=1", 256), ("block_m=64,stages=2", 384), ("block_m=16,stages=2,lag=0", 128),
    ("block_m=64,stages=2,cluster=2,lag=2,unit_blocks=2", 640), ("block_m=64,stages=2,policy=serial_n,lag=3,unit_blocks=1", 512),
])  # fmt: skip
def test_a_ring_gives_the_bits_of_the_whole_pool(text: str, ring: int) -> None:
    config, tokens = KernelConfig.parse(text), (260, 190)
    whole = outputs(config, tokens, 0)
    for options in ({}, {"schedule": "random", "completion": "lazy", "seed": 5}):
        got = outputs(config, tokens, ring, **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))


@pytest.mark.parametrize("text", ["tail=1", ""])
def test_every_column_tile_and_every_half_of_one_counts(text: str) -> None:
    """Two column tiles to a row of L2, and with tail=1 and many CTAs the last ones in halves: the places are free when all
    are done, and not before."""
    config = KernelConfig.parse(f"block_m=64,stages=2,lag=1,unit_blocks=1,{text}".rstrip(","))
    whole = outputs(config, (100, 70), 0, hidden=384, ctas=8)
    got = outputs(config, (100, 70), 256, hidden=384, ctas=8, schedule="random", completion="lazy", seed=3, races=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))


@pytest.mark.parametrize("seed", [1, 2])
def test_no_place_is_written_while_it_is_read(seed: int) -> None:
    outputs(KernelConfig.parse("block_m=64,stages=2,lag=1,unit_blocks=1"), (200, 70), 256, races=True, schedule="pct", completion="lazy",
            seed=seed)  # fmt: skip


def test_the_order_that_a_ring_allows() -> None:
    """Lag first, then the size of a unit; at least one unit must fit beside the one being read."""
    config = KernelConfig(block_m=128, lag=32, unit_blocks=8)
    assert ring_order(config, 40960) == (32, 8)
    assert ring_order(config, 24576) == (23, 8)
    assert ring_order(config, 1024) == (1, 4)
    assert ring_order(config, 128) == (0, 1)
    assert ring_order(KernelConfig(block_m=16, lag=5, unit_blocks=3), 512) == (3, 3)  # segments of 128 rows
    with pytest.raises(UsageError, match="does not hold one unit"):
        ring_order(KernelConfig(block_m=128, cluster=2), 128)
