"""What no launch on the drawn routing can beat: bytes it must read over the HBM rate, FLOPs over the tensor rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from ..errors import UsageError
from ..shapes import Shape

# Measured ceilings of an H200 (docs/measured.md): HBM into shared memory, and WGMMA with classic promotion.
HBM_BYTES_PER_S = 4.70e12
E4M3_FLOPS = 1565e12


def slice_of(shape: Shape, ranks: int) -> Shape:
    """What one rank of ``ranks`` holds, as a problem of its own: E/ranks experts, everything else the same."""
    if ranks < 1 or shape.experts % ranks:
        raise UsageError(f"{shape.experts} experts do not split into {ranks} equal parts", rule="experts-ranks")
    return Shape(shape.hidden, shape.intermediate, shape.experts // ranks, shape.topk)


def weight_us(shape: Shape, experts: int) -> float:
    """Reading the weights of so many experts, at HBM rate."""
    return experts * 3 * shape.intermediate * shape.hidden / HBM_BYTES_PER_S * 1e6


def tensor_us(shape: Shape, rows: int) -> float:
    """Both products of so many rows, at tensor rate."""
    return rows * 6 * shape.intermediate * shape.hidden / E4M3_FLOPS * 1e6


def floors_us(shape: Shape, ids: Iterable[Any]) -> tuple[float, float, float]:
    """(weights, tensor, active experts): mean over the drawn routings of the bytes of the experts hit over HBM rate, and
    of the rows' FLOPs over the tensor rate."""
    weights, flops, active = [], [], []
    for drawn in ids:
        used = drawn[drawn >= 0]
        hit = int(used.unique().numel())
        active.append(hit)
        weights.append(weight_us(shape, hit))
        flops.append(tensor_us(shape, int(used.numel())))
    return statistics.fmean(weights), statistics.fmean(flops), statistics.fmean(active)
