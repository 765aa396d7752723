"""No hang and no other bit in 2,000 launches with ranks drifting apart at random, 8 virtual ranks on one GPU."""

from __future__ import annotations

import pytest

from megamoe_cli.config import KernelConfig
from megamoe_cli.shapes import Problem, Shape
from tests.soak import soak

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mixed", [False, True])
def test_two_thousand_launches_with_random_skew(mixed: bool) -> None:
    from megamoe_cli.backends.virtual import open_backend

    problem = Problem.make(Shape(256, 256, 16, 2), 8, (40, 0, 13, 64, 7, 64, 1, 30))
    mix = [KernelConfig(block_m=64, frontend="standard"), KernelConfig(block_m=32)] if mixed else []
    with open_backend(8) as backend:
        assert soak(backend, problem, KernelConfig(), 2000, seed=int(mixed), delay_bytes=64 << 20, mix=mix) == 2000
