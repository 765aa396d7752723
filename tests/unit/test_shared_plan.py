"""The kernel's shared-memory plan and buffer layout against the host's mirror of them."""

from __future__ import annotations

import pytest

from tests.unit.host_kernel import library
from megamoe_cli.config import KernelConfig
from megamoe_cli.layout import REGIONS, Layout, smem_bytes
from megamoe_cli.shapes import Shape

SHAPES = [(Shape(4096, 2048, 256, 6), 8), (Shape(7168, 3072, 384, 6), 8), (Shape(7168, 2048, 256, 8), 8), (Shape(256, 256, 16, 2), 8),
          (Shape(128, 128, 3, 1), 1), (Shape(12288, 384, 129 * 3, 5), 3)]


@pytest.mark.parametrize("shape,ranks", SHAPES)
@pytest.mark.parametrize("block_m,stages,frontend", [(128, 4, "compact"), (128, 3, "standard"), (64, 4, "compact"), (64, 5, "standard"),
                                                     (32, 4, "compact"), (16, 2, "standard")])
def test_shared_memory_plan(shape, ranks, block_m, stages, frontend):
    config = KernelConfig(block_m=block_m, stages=stages, frontend=frontend)
    warps = 2 if frontend == "compact" else 4
    assert smem_bytes(config, shape, ranks) == library().shared_bytes(block_m, stages, warps, shape.hidden, shape.experts // ranks, ranks)


@pytest.mark.parametrize("shape,ranks", SHAPES)
@pytest.mark.parametrize("capacity", [1, 128, 8192])
def test_region_offsets(shape, ranks, capacity):
    layout = Layout(shape, ranks, capacity)
    for index, name in enumerate(REGIONS):
        assert layout.offsets[index] == library().buffer_offset(ranks, capacity, shape.hidden, shape.intermediate, shape.experts, shape.topk, index), name
    assert layout.total_bytes == library().buffer_offset(ranks, capacity, shape.hidden, shape.intermediate, shape.experts, shape.topk, len(REGIONS))
