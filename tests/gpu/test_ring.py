"""The activation pool as a ring, on a GPU: the bits of the whole pool, with 1, 2 and 8 virtual ranks."""

from __future__ import annotations

import pytest
import torch

from megamoe_cli.config import KernelConfig
from megamoe_cli.shapes import Problem, Shape
from tests.ring import outputs_on

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("text", ["", "cluster=2", "split=m,stagger=2500", "block_m=64,tail=1", "policy=serial_n,block_m=64"])
def test_a_ring_gives_the_bits_of_the_whole_pool(ranks: int, text: str) -> None:
    from megamoe_cli.backends.virtual import open_backend

    shape = Shape(1024, 512, 48, 4)
    problem = Problem.make(shape, ranks, tuple(700 - 37 * rank for rank in range(ranks)))
    config = KernelConfig.parse(text)
    with open_backend(ranks) as backend:
        whole, ring = outputs_on(backend, problem, config, 0), outputs_on(backend, problem, config, 1024)
    assert all(torch.equal(a, b) for a, b in zip(whole, ring, strict=True))
