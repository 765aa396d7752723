"""The loop that ``megamoe trace --loop`` times computes what it says: on the emulator, race-checked, against numpy."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megamoe_cli import loop_probe
from megamoe_cli.config import KernelConfig
from megamoe_cli.layout import smem_bytes
from megamoe_cli.shapes import parse_shape

from .harness import Run, build, e4m3_values, random_e4m3


def logical(image: np.ndarray) -> np.ndarray:
    """e4m3 codes as they lie in shared memory ([rows,128], 128-byte swizzle) -> values, row by row."""
    rows, columns = np.indices(image.shape)
    return e4m3_values()[image[rows, columns ^ (rows % 8 * 16)]]


@pytest.mark.parametrize("part", list(loop_probe.PARTS))
@pytest.mark.parametrize("text", ["block_m=64", "split=m"])
def test_the_sums_are_those_of_the_operands(part: str, text: str) -> None:
    config = loop_probe.check(KernelConfig.parse(text))
    blocks, grid, groups = 6, 2, config.math_warpgroups
    stage = (max(config.block_m, 64) + config.block_n) * 128
    source = random_e4m3(np.random.default_rng(1), (grid, 2, stage // 128, 128)) & 0xBF  # small enough to be summed exactly in float32
    cycles, sink = np.zeros((grid, groups), np.uint32), np.zeros((grid, groups * 128), np.float32)
    entry = re.sub(rf"\({loop_probe.KERNEL},", "(mega_moe,", loop_probe.entry_text(config, part))
    run = Run()
    words = [run.region(a, name=n) for n, a in (("cycles", cycles), ("sink", sink), ("source", source))]
    run.launch(build(entry, True), *words, 2 * stage | blocks << 32, 0, grid=grid, smem=smem_bytes(config, parse_shape("flash"), 8))
    assert str(run.run(races=True, wall_limit_s=60.0)) == ""

    rows = max(config.block_m, 64)
    for cta in range(grid):
        used = [k % 2 if part.endswith("copies") else 0 for k in range(blocks)]
        products = [logical(source[cta, s, :rows]) @ logical(source[cta, s, rows:]).sum(0) for s in used]   # of each row, over all columns
        scale = np.where(np.arange(rows) % 2 == 0, 1.0, 0.5)
        sums = np.zeros(rows)
        for product in products:   # multiplied: what is there, by the row's scale, before each K-block; promoted: the K-block itself
            in_place, scaled = part.startswith("in-place"), part not in ("products", "in-place")
            sums = (sums * scale if in_place and scaled else sums) + (product * scale if scaled and not in_place else product)
        assert abs(sink[cta].astype(np.float64).sum() - sums.sum()) <= 1e-4 * np.abs(sink[cta]).astype(np.float64).sum()
        by_row = sink[cta].reshape(groups, 4, 8, 4).astype(np.float64).sum(3)   # a thread's rows: `row` and `row + 8`, of one parity
        odd = np.arange(8) % 2 == 1
        assert abs(by_row[:, :, odd].sum() - sums[1::2].sum()) <= 1e-4 * np.abs(by_row).sum()
    assert (cycles > 0).all()


def test_what_has_no_loop_is_refused() -> None:
    from megamoe_cli.errors import UsageError

    for text in ("policy=mma_sync,block_m=16", "block_m=64,promotion=rescale", "cluster=2"):
        with pytest.raises(UsageError, match="the loop alone"):
            loop_probe.check(KernelConfig.parse(text))
