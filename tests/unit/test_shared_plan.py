"""The kernel's shared-memory plan and buffer layout against the host's mirror of them."""

from __future__ import annotations

import pytest

from tests.unit.host_kernel import library
from megamoe_cli.config import KernelConfig
from megamoe_cli.layout import REGIONS, Layout, smem_bytes
from megamoe_cli.shapes import Shape

SHAPES = [(Shape(4096, 2048, 256, 6), 8), (Shape(7168, 3072, 384, 6), 8), (Shape(7168, 2048, 256, 8), 8), (Shape(256, 256, 16, 2), 8),
          (Shape(128, 128, 3, 1), 1), (Shape(12288, 384, 129 * 3, 5), 3)]


# The variants of host_kernel.cpp, in its order.
VARIANTS = (
    "stages=4", "stages=3,frontend=standard", "block_m=64,stages=4", "block_m=64,stages=5,frontend=standard", "block_m=32,stages=4",
    "block_m=16,stages=2,frontend=standard", "block_n=128,stages=4",
    "block_m=64,block_n=128,stages=4,frontend=standard,math_threads=128,promotion=rescale", "stages=2,promotion=rescale",
    "block_m=64,stages=2,math_threads=128,policy=serial_n", "block_m=64,stages=2,math_threads=128,policy=serial_n,promotion=rescale",
    "block_m=64,stages=2,frontend=standard,math_threads=128,policy=wide_n,promotion=rescale", "block_m=32,stages=3,policy=mma_sync",
    "block_m=16,block_n=128,stages=3,math_threads=128,policy=mma_sync,promotion=rescale",
    "stages=2,promotion=rescale,split=m",
)  # fmt: skip


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=VARIANTS)
def test_shared_memory_plan(variant):
    config = KernelConfig.parse(VARIANTS[variant])
    for shape, ranks in SHAPES:
        assert smem_bytes(config, shape, ranks) == library().shared_bytes(variant, shape.hidden, shape.experts // ranks, ranks), shape


@pytest.mark.parametrize("shape,ranks", SHAPES)
@pytest.mark.parametrize("capacity", [1, 128, 8192])
def test_region_offsets(shape, ranks, capacity):
    layout = Layout(shape, ranks, capacity)
    for index, name in enumerate(REGIONS):
        assert layout.offsets[index] == library().buffer_offset(ranks, capacity, shape.hidden, shape.intermediate, shape.experts, shape.topk, index), name
    assert layout.total_bytes == library().buffer_offset(ranks, capacity, shape.hidden, shape.intermediate, shape.experts, shape.topk, len(REGIONS))
