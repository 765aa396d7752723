"""Expert weights as the kernel wants them: gate and up rows interleaved by 8, cut into tiles, scales untouched.

An L1 tile of 256 transformed rows holds 128 gate rows and the 128 up rows that belong to them, so one thread sees both
halves of every activation it makes. A tile's 256 rows of one K-block (128 columns) lie together, 32 KB, already in the
swizzled form in which the tensor core reads shared memory: the kernel copies them with one bulk copy, and HBM is read in
long runs instead of in 128-byte pieces a row apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .errors import UsageError
from .shapes import SCALE_BLOCK, check_dtype, check_tensor

INTERLEAVE_ROWS = 8
TILE_ROWS = 256
_COPY_BYTES = 256 * 2**20


class LayerWeights(NamedTuple):
    """One GEMM's weights of a rank, both contiguous: e4m3 [E_l, N, K], or, transformed, [E_l, ceil(N/256), K/128, 256, 128];
    float32 scales [E_l, N/128, K/128]."""

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


def tile_weights(weight: torch.Tensor) -> torch.Tensor:
    """[E_l, N, K] -> [E_l, ceil(N/256), K/128, 256, 128] of the same dtype (one byte an element), a new contiguous tensor.

    Tile (n, k) holds rows 256n... of columns 128k...; rows past N are zero. Within row r of a tile the 16-byte pieces
    are permuted: piece c lies at c ^ (r % 8), the tensor core's 128-byte swizzle.
    """
    experts, rows, columns = weight.shape
    tiles, blocks = -(-rows // TILE_ROWS), columns // SCALE_BLOCK
    out = torch.empty(experts, tiles, blocks, TILE_ROWS, SCALE_BLOCK, dtype=torch.uint8, device=weight.device)
    # A piece is two 64-bit words. All of it happens on the device, in few steps however many experts there are.
    words = out.view(torch.int64).view(experts, tiles, blocks, TILE_ROWS // 8, 8, 8, 2)
    place = torch.arange(8, device=weight.device)
    swizzle = (place[:, None] ^ place[None, :]).view(8, 8, 1)   # [row % 8, piece]
    at_once = max(1, _COPY_BYTES // (tiles * TILE_ROWS * columns))   # the copies between stay small
    for first in range(0, experts, at_once):
        part = weight[first : first + at_once].view(torch.uint8)
        if rows % TILE_ROWS:
            part = torch.cat([part, part.new_zeros(len(part), tiles * TILE_ROWS - rows, columns)], 1)
        if part.storage_offset() % 8 or part.data_ptr() % 8:   # words do not begin at any byte
            part = part.clone()
        source = part.contiguous().view(torch.int64).view(-1, tiles, TILE_ROWS // 8, 8, blocks, 8, 2).permute(0, 1, 4, 2, 3, 5, 6)
        words[first : first + at_once] = source.gather(5, swizzle.expand(source.shape))
    return out.view(weight.dtype)


def untile_weights(tiled: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of ``tile_weights``: [E_l, rows, K]."""
    experts, tiles, blocks = tiled.shape[:3]
    pieces = tiled.view(torch.uint8).view(experts, tiles, blocks, TILE_ROWS // 8, 8, 8, 16)
    plain = torch.stack([pieces[..., row, [piece ^ row for piece in range(8)], :] for row in range(8)], dim=4)
    whole = plain.permute(0, 1, 3, 4, 2, 5, 6).reshape(experts, tiles * TILE_ROWS, blocks * SCALE_BLOCK)
    return whole[:, :rows].contiguous().view(tiled.dtype)


def transform_weights_for_mega_moe_sm90(
    l1_weights: Sequence[torch.Tensor], l2_weights: Sequence[torch.Tensor]
) -> tuple[LayerWeights, LayerWeights]:
    """``((w13, w13_sf), (w2, w2_sf))`` in natural layout -> the two layers as ``fp8_mega_moe`` takes them.

    w13 e4m3 [E_l, 2I, H] (gate rows, then up rows), w13_sf float32 [E_l, 2I/128, H/128], w2 e4m3 [E_l, H, I], w2_sf
    float32 [E_l, H/128, I/128]; all contiguous. Returns w13 [E_l, I/128, H/128, 256, 128] and w2 [E_l, ceil(H/256), I/128,
    256, 128] (``tile_weights``; w13 interleaved first), new tensors, and the scales as they are. Raises UsageError for any
    other dtype, shape or stride: packed (UE8M0) scales in particular belong to another kernel.
    """
    l1, l2 = layer_pair("l1_weights", l1_weights), layer_pair("l2_weights", l2_weights)
    check_weights(l1, l2)
    return LayerWeights(tile_weights(interleave_gate_up(l1.weight)), l1.scales), LayerWeights(tile_weights(l2.weight), l2.scales)


def layer_pair(name: str, pair: Sequence[torch.Tensor]) -> LayerWeights:
    """``pair`` as LayerWeights; UsageError when it is not a pair of tensors."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(t, torch.Tensor) for t in pair):
        raise UsageError(f"{name} must be a pair (weight, scales) of tensors", rule="weight-format")
    return LayerWeights(*pair)


def check_weights(l1: LayerWeights, l2: LayerWeights, experts: int | None = None, hidden: int | None = None,
                  intermediate: int | None = None) -> None:  # fmt: skip
    """dtypes, shapes and strides of both layers in natural layout. Sizes not given are read off w13."""
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


def check_transformed(l1: LayerWeights, l2: LayerWeights, experts: int, hidden: int, intermediate: int) -> None:
    """The same for what ``transform_weights_for_mega_moe_sm90`` returned."""
    k, n = hidden // SCALE_BLOCK, intermediate // SCALE_BLOCK
    for name, layer, tiles, blocks, scales in (
        ("w13", l1, n, k, (experts, 2 * n, k)), ("w2", l2, -(-hidden // TILE_ROWS), n, (experts, k, n)),
    ):  # fmt: skip
        check_dtype(name, layer.weight.dtype)
        if layer.weight.dim() == 3:
            raise UsageError(f"{name} is in natural layout; pass what transform_weights_for_mega_moe_sm90 returned", rule="weight-format")
        want = (experts, tiles, blocks, TILE_ROWS, SCALE_BLOCK)
        check_tensor(name, layer.weight.dtype, layer.weight.shape, want, layer.weight.stride())
        check_tensor(f"{name}_sf", layer.scales.dtype, layer.scales.shape, scales, layer.scales.stride())
