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


def walk_halves(counts, block_m, unit_blocks, lag, l1_columns, l2_columns, cta, grid, wave=False, halve_last=0):
    """(kind, expert, column, row0, valid, 0 or 1 + which half) of each of the CTA's tiles."""
    words = ctypes.c_uint32 * len(counts)
    room = 200_000
    out = (ctypes.c_uint32 * (6 * room))()
    n = library().walk_stream(words(*counts), words(*pool_bases(counts)), len(counts), block_m, unit_blocks, lag, l1_columns,
                              l2_columns, int(wave), halve_last, cta, grid, out, room)
    assert n < room
    return [tuple(out[6 * i: 6 * i + 6]) for i in range(n)]


def walk(*args, **options):
    """The same without halves."""
    tiles = walk_halves(*args, **options)
    assert not any(tile[5] for tile in tiles)
    return [tile[:5] for tile in tiles]


def interleave(parts):
    """CTA c's i-th tile is global tile c + i * grid."""
    total = sum(map(len, parts))
    return [parts[t % len(parts)][t // len(parts)] for t in range(total)]


@settings(max_examples=150, deadline=None)
@given(counts=st.lists(st.integers(0, 700), min_size=1, max_size=9), block_m=st.sampled_from([16, 32, 64, 128, 256]),
       unit_blocks=st.integers(1, 9), lag=st.integers(0, 20) | st.just(1000), wave=st.booleans(), l1_columns=st.integers(1, 5), l2_columns=st.integers(0, 4),
       grid=st.integers(1, 13))
def test_every_tile_once_and_every_wait_looks_back(counts, block_m, unit_blocks, lag, wave, l1_columns, l2_columns, grid):
    parts = [walk(counts, block_m, unit_blocks, lag, l1_columns, l2_columns, c, grid, wave) for c in range(grid)]
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


def test_only_the_last_tiles_are_halves():
    """Four experts of 2, 1, 1 and 1 row blocks with 3 L2 columns: the last 6 tiles are those of the last two experts."""
    whole = walk([100, 40, 0, 64, 10], 64, 8, 1, 2, 3, 0, 1)
    for halve_last, experts in ((0, set()), (2, set()), (3, {4}), (5, {4}), (6, {3, 4}), (14, {1, 3, 4}), (15, {0, 1, 3, 4}), (99, {0, 1, 3, 4})):
        tiles = walk_halves([100, 40, 0, 64, 10], 64, 8, 1, 2, 3, 0, 1, halve_last=halve_last)
        expected = []
        for tile in whole:
            halves = (1, 2) if tile[0] == L2 and tile[1] in experts else (0,)
            expected += [(*tile, half) for half in halves]
        assert sorted(tiles) == sorted(expected), halve_last


def test_second_gemm_follows_by_the_lag():
    stream = walk([64] * 10, 64, 1, 3, 2, 1, 0, 1)
    kinds = "".join("12"[t[0]] for t in stream)
    assert kinds == "11" * 3 + "112" * 7 + "222"


def test_a_wave_is_its_units_then_their_second_gemm():
    """Also the last wave, which is not full, and a wave of 0 units, which is one of 1."""
    def kinds(lag, l2_columns=1):
        return "".join("12"[t[0]] for t in walk([64] * 7, 64, 1, lag, 2, l2_columns, 0, 1, wave=True))

    assert kinds(3) == "111111222" * 2 + "112"
    assert kinds(0) == kinds(1) == "112" * 7
    assert kinds(7) == kinds(1000) == "11" * 7 + "2" * 7
    assert kinds(3, l2_columns=0) == "11" * 7


def test_a_wave_takes_units_of_several_blocks_and_across_experts():
    stream = walk([130, 64, 10], 64, 2, 2, 1, 1, 0, 1, wave=True)
    assert [(t[0], t[1], t[3] % 128 // 64, t[4]) for t in stream] == [
        (L1, 0, 0, 64), (L1, 0, 1, 64), (L1, 0, 0, 2), (L2, 0, 0, 64), (L2, 0, 1, 64), (L2, 0, 0, 2),
        (L1, 1, 0, 64), (L1, 2, 0, 10), (L2, 1, 0, 64), (L2, 2, 0, 10)]  # fmt: skip


def test_no_rows_no_tiles():
    for wave in (False, True):
        assert walk([0, 0, 0], 64, 4, 2, 3, 3, 0, 1, wave) == []
