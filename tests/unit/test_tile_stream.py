"""The order of tiles, walked on the CPU from the kernel's own header."""

from __future__ import annotations

import ctypes

from hypothesis import given, settings, strategies as st

from tests.unit.host_kernel import library

L1, L2 = 0, 1


def pool_bases(counts: list[int]) -> list[int]:
    bases, at = [], 0
    for n in counts:
        bases.append(at)
        at += -(-n // 128) * 128
    return bases


def walk(counts, block_m, unit_blocks, lag, l1_columns, l2_columns, cta, grid):
    words = ctypes.c_uint32 * len(counts)
    room = 200_000
    out = (ctypes.c_uint32 * (5 * room))()
    n = library().walk_stream(words(*counts), words(*pool_bases(counts)), len(counts), block_m, unit_blocks, lag, l1_columns,
                              l2_columns, cta, grid, out, room)
    assert n < room
    return [tuple(out[5 * i: 5 * i + 5]) for i in range(n)]


def interleave(parts):
    """CTA c's i-th tile is global tile c + i * grid."""
    total = sum(map(len, parts))
    return [parts[t % len(parts)][t // len(parts)] for t in range(total)]


@settings(max_examples=150, deadline=None)
@given(counts=st.lists(st.integers(0, 700), min_size=1, max_size=9), block_m=st.sampled_from([16, 32, 64, 128]),
       unit_blocks=st.integers(1, 9), lag=st.integers(0, 20), l1_columns=st.integers(1, 5), l2_columns=st.integers(0, 4),
       grid=st.integers(1, 13))
def test_every_tile_once_and_every_wait_looks_back(counts, block_m, unit_blocks, lag, l1_columns, l2_columns, grid):
    parts = [walk(counts, block_m, unit_blocks, lag, l1_columns, l2_columns, c, grid) for c in range(grid)]
    stream = interleave(parts)
    expected = set()
    for expert, (n, base) in enumerate(zip(counts, pool_bases(counts))):
        for block in range(-(-n // block_m)):
            valid = min(block_m, n - block * block_m)
            for kind, columns in ((L1, l1_columns), (L2, l2_columns)):
                expected |= {(kind, expert, c, base + block * block_m, valid) for c in range(columns)}
    assert len(stream) == len(expected) and set(stream) == expected
    position = {tile: i for i, tile in enumerate(stream)}
    for kind, expert, c, row0, valid in stream:
        if kind == L2:
            at = position[(kind, expert, c, row0, valid)]
            assert all(position[(L1, expert, n, row0, valid)] < at for n in range(l1_columns))


def test_second_gemm_follows_by_the_lag():
    stream = walk([64] * 10, 64, 1, 3, 2, 1, 0, 1)
    kinds = "".join("12"[t[0]] for t in stream)
    assert kinds == "11" * 3 + "112" * 7 + "222"


def test_no_rows_no_tiles():
    assert walk([0, 0, 0], 64, 4, 2, 3, 3, 0, 1) == []
