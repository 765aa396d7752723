"""Registers per role, found by compiling with every NVRTC in use, and the configurations that no plan saves from spilling.
No torch, no cupy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe_cli.config import KernelConfig

# Registers a math thread needs beside its accumulators (addresses, scales, loop state). 128x256 classic
# holds 192 accumulators: 224 registers compile without a spill, 208 cannot.
MATH_OVERHEAD = 24


def planned_registers(config: KernelConfig) -> tuple[int, int, int]:
    """The plan table: registers per thread of (dispatch, TMA, math) for a frontend and a tile.

    Found by compiling: counts without a spill in any role (docs/measured.md). Sums: compact 61,440, and 64,512 where the tile
    holds 192 accumulators or rescaling presses; standard 64,512.
    """
    # Rescaling two row units at BLOCK_N 128: NVRTC 13.0 needs more for the L1 epilogue than 13.5.
    pressed = config.promotion == "rescale" and (config.block_m, config.block_n, config.m_splits) == (128, 128, 1)
    if config.math_threads == 128:  # one warpgroup may have nearly all it can name, and the others are not pressed
        return (80, 80 if config.frontend == "compact" else 56, 256 if pressed else 248)
    if config.frontend == "standard":
        return (56, 64, 192) if config.accumulators + MATH_OVERHEAD <= 192 else (48, 40, 208)
    if pressed:
        return (72, 72, 216)
    if config.accumulators + MATH_OVERHEAD > 208:
        return (56, 56, 224)
    # The TMA warps: with 56, NVRTC 13.0 or 13.5 spills two to six of the weight loader's registers in some kernels of BLOCK_N 128, and of 64 rows
    # or fewer in clusters.
    return (64, 64, 208)


def compiler_spills(c: KernelConfig) -> Iterator[tuple[str, str]]:
    """What the arithmetic allows and a compiler in use spills with every plan there is (docs/measured.md)."""
    if (c.promotion, c.block_m, c.block_n, c.m_splits, c.math_warpgroups, c.frontend, c.cluster) == ("rescale", 128, 128, 1, 2, "standard", 2):
        yield "compiler-spill", ("NVRTC 13.0 spills in the L1 epilogue of rescale at 128x128 cut along N, in clusters of two with the standard "
                                 "frontend: it needs more than 208 math registers, and 512 threads own no more; use frontend=compact or split=m")
