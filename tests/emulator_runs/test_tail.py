"""The last L2 tiles cut in two: the same bits, each column of each row once."""

from __future__ import annotations

import pytest
import torch

from megamoe_cli.config import KernelConfig, check
from tests.emulator_runs.test_ring import outputs


@pytest.mark.parametrize(("text", "ring"), [
    ("block_m=128,stages=2", 0), ("block_m=64,stages=2,cluster=2", 0), ("block_m=32,stages=2,block_n=128", 0),
    ("block_m=64,stages=2,lag=1,unit_blocks=1", 256),
])  # fmt: skip
def test_halves_give_the_bits_of_whole_tiles(text: str, ring: int) -> None:
    config, halved, tokens = KernelConfig.parse(text), KernelConfig.parse(text + ",tail=1"), (140, 9)
    whole = outputs(config, tokens, ring, ctas=6)
    for options in ({}, {"schedule": "random", "completion": "lazy", "seed": 3}):
        got = outputs(halved, tokens, ring, ctas=6, **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, got, strict=True))


def test_halves_are_of_one_of_two_warpgroups() -> None:
    for text in ("split=m", "math_threads=128,block_n=128,block_m=64", "policy=mma_sync,block_m=16"):
        verdict = check(KernelConfig.parse(text + ",tail=1"))
        assert not verdict and verdict.rule == "policy-tile" and "tail=1" in verdict.explanation
