"""Expert weights as the kernel wants them: gate and up rows interleaved by 8, scales untouched.

An L1 tile of 256 transformed rows then holds 128 gate rows and the 128 up rows that belong to them, so one warpgroup
sees both halves of every activation it makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .errors import UsageError
from .shapes import SCALE_BLOCK, check_dtype, check_tensor

INTERLEAVE_ROWS = 8


class LayerWeights(NamedTuple):
    """One GEMM's weights of a rank: e4m3 [E_l, N, K] and float32 scales [E_l, N/128, K/128], both contiguous."""

    weight: torch.Tensor
    scales: torch.Tensor


def interleave_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """[E_l, 2I, H], gate rows then up rows -> the same shape with blocks of 8 gate rows and 8 up rows in turn.

    Transformed row 16b+i is gate row 8b+i and row 16b+8+i is up row 8b+i (i < 8). Returns a new contiguous tensor.
    """
    experts, rows, hidden = w13.shape
    split = w13.view(torch.uint8).reshape(experts, 2, rows // 2 // INTERLEAVE_ROWS, INTERLEAVE_ROWS, hidden)
    return split.transpose(1, 2).contiguous().view(experts, rows, hidden).view(w13.dtype)


def deinterleave_gate_up(w13: torch.Tensor) -> torch.Tensor:
    """The inverse of ``interleave_gate_up``."""
    experts, rows, hidden = w13.shape
    split = w13.view(torch.uint8).reshape(experts, rows // 2 // INTERLEAVE_ROWS, 2, INTERLEAVE_ROWS, hidden)
    return split.transpose(1, 2).contiguous().view(experts, rows, hidden).view(w13.dtype)


def transform_weights_for_mega_moe_sm90(
    l1_weights: Sequence[torch.Tensor], l2_weights: Sequence[torch.Tensor]
) -> tuple[LayerWeights, LayerWeights]:
    """``((w13, w13_sf), (w2, w2_sf))`` in natural layout -> the two layers as ``fp8_mega_moe`` takes them.

    w13 e4m3 [E_l, 2I, H] (gate rows, then up rows), w13_sf float32 [E_l, 2I/128, H/128], w2 e4m3 [E_l, H, I], w2_sf
    float32 [E_l, H/128, I/128]; all contiguous. w13 is copied, the other three are passed on. Raises UsageError for
    any other dtype, shape or stride: packed (UE8M0) scales in particular belong to another kernel.
    """
    l1, l2 = layer_pair("l1_weights", l1_weights), layer_pair("l2_weights", l2_weights)
    check_weights(l1, l2)
    return LayerWeights(interleave_gate_up(l1.weight), l1.scales), l2


def layer_pair(name: str, pair: Sequence[torch.Tensor]) -> LayerWeights:
    """``pair`` as LayerWeights; UsageError when it is not a pair of tensors."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(t, torch.Tensor) for t in pair):
        raise UsageError(f"{name} must be a pair (weight, scales) of tensors", rule="weight-format")
    return LayerWeights(*pair)


def check_weights(l1: LayerWeights, l2: LayerWeights, experts: int | None = None, hidden: int | None = None,
                  intermediate: int | None = None) -> None:  # fmt: skip
    """dtypes, shapes and strides of both layers (the interleave keeps all three). Sizes not given are read off w13."""
    for name, tensor in (("w13", l1.weight), ("w2", l2.weight)):
        check_dtype(name, tensor.dtype)
        if tensor.dim() != 3:
            raise UsageError(f"{name} has {tensor.dim()} dimensions; it must have 3: experts, rows, columns", rule="tensor-shape")
    experts = l1.weight.shape[0] if experts is None else experts
    hidden = l1.weight.shape[2] if hidden is None else hidden
    intermediate = l1.weight.shape[1] // 2 if intermediate is None else intermediate
    for name, value in (("hidden", hidden), ("intermediate", intermediate)):
        if value < SCALE_BLOCK or value % SCALE_BLOCK:
            raise UsageError(f"{name}={value} is not a multiple of 128", rule=f"{name}-multiple")
    k, n = hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK
    for name, tensor, want in (
        ("w13", l1.weight, (experts, 2 * intermediate, hidden)), ("w13_sf", l1.scales, (experts, 2 * n, k)),
        ("w2", l2.weight, (experts, hidden, intermediate)), ("w2_sf", l2.scales, (experts, k, n)),
    ):  # fmt: skip
        check_tensor(name, tensor.dtype, tensor.shape, want, tensor.stride())
