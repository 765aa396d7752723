"""The last L2 tiles cut in two: the same bits, each column of each row once."""

from __future__ import annotations

import pytest
import torch

from megamoe_cli.backends.emulator import EmulatorBackend
from megamoe_cli.config import KernelConfig, check
from megamoe_cli.shapes import Problem, Shape
from tests.emulator_runs.test_ring import outputs
from tests.ring import outputs_on


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


def test_the_kernel_halves_no_more_than_the_tail() -> None:
    """Each half loads activations of its own, so the copies tell: of ten experts on six CTAs the last six are cut."""
    problem, copies = Problem.make(Shape(256, 128, 20, 2), 2, (60, 60)), []
    for text in ("block_m=64,stages=2", "block_m=64,stages=2,tail=1"):
        with EmulatorBackend(2, ctas=6) as backend:
            outputs_on(backend, problem, KernelConfig.parse(text), 0, launches=1)
            copies.append(backend.report.stats.bulk_copies)
    # A rank's last six experts fill six CTAs with one L2 tile each. A second half adds three copies: weights, scales, side data.
    assert copies[1] - copies[0] == 2 * 6 * 3


def test_halves_are_of_one_of_two_warpgroups() -> None:
    for text in ("split=m", "math_threads=128,block_n=128,block_m=64", "policy=mma_sync,block_m=16"):
        verdict = check(KernelConfig.parse(text + ",tail=1"))
        assert not verdict and verdict.rule == "policy-tile" and "tail=1" in verdict.explanation
