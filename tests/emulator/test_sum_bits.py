"""``fp8_sum_bits``: sums that lose what a tensor core loses, against sums done by hand (what that does to
the kernel: emulator_runs/test_long_sums.py)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from megamoe_cli.errors import UsageError

from .harness import Run, build, e4m3_values, random_e4m3, tensor_map
from .test_async import WGMMA

TINY = 2.0**-14
# name -> (accumulator, products of one K=32 step, their sum with 13 bits, the exact sum)
SUMS: dict[str, tuple[float, list[float], float, float]] = {
    "2^14 below the largest vanishes": (0, [1, TINY], 1, 1 + TINY),
    "2^13 below is the last bit": (0, [1, 2 * TINY], 1 + 2 * TINY, 1 + 2 * TINY),
    "2^12 below stays": (0, [1, 4 * TINY], 1 + 4 * TINY, 1 + 4 * TINY),
    "negative: toward zero, not down": (0, [1, -TINY], 1, 1 - TINY),
    "beside a negative one: toward zero, not up": (0, [-1, TINY], -1, -1 + TINY),
    "both negative": (0, [-1, -3 * TINY], -1 - 2 * TINY, -1 - 3 * TINY),
    "half a last bit is dropped": (0, [1, 3 * TINY], 1 + 2 * TINY, 1 + 3 * TINY),
    "half a last bit is dropped, negative": (0, [1, -3 * TINY], 1 - 2 * TINY, 1 - 3 * TINY),
    "each by itself, before they are added": (0, [1, *[TINY] * 16], 1, 1 + 16 * TINY),
    "the largest counts, also when it cancels": (0, [1, -1, TINY], 0, TINY),
    "small ones among themselves": (0, [TINY, TINY], 2 * TINY, 2 * TINY),
    "the accumulator is cut too": (1 + TINY, [4 * TINY], 1 + 4 * TINY, 1 + 5 * TINY),
    "the accumulator is cut with nothing to add": (-1 - TINY, [], -1, -1 - TINY),
    "by products that are larger": (TINY, [1], 1, 1 + TINY),
    "products by an accumulator that is larger": (4, [4 * TINY], 4, 4 + 4 * TINY),
    "the exponent counts, not the value": (0, [1.875, 2 * TINY], 1.875 + 2 * TINY, 1.875 + 2 * TINY),
}  # fmt: skip

MMA = """
struct Params { u64 a, b, c, out; };
MM_DEVICE u32 word(u64 base, u32 row, u32 k) { return hw::ld_u32(reinterpret_cast<const u32*>(base + row * 32 + k)); }
MM_DEVICE void body(const Params& p) {
    const u32 lane = hw::lane_idx(), row = lane / 4, k = lane % 4 * 4;
    f32 d[4];
    for (u32 i = 0; i < 4; ++i) d[i] = hw::ld_f32(reinterpret_cast<const f32*>(p.c) + (row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2);
    hw::mma_e4m3_m16n8k32(d[0], d[1], d[2], d[3], word(p.a, row, k), word(p.a, row + 8, k), word(p.a, row, k + 16), word(p.a, row + 8, k + 16),
                          word(p.b, row, k), word(p.b, row, k + 16));
    for (u32 i = 0; i < 4; ++i) hw::st_f32(reinterpret_cast<f32*>(p.out) + (row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2, d[i]);
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


def codes_of(values: np.ndarray) -> np.ndarray:
    """e4m3 codes of values that are exactly representable."""
    table = {float(v): code for code, v in reversed(list(enumerate(e4m3_values()))) if v == v}
    return np.vectorize(lambda v: table[float(v)], otypes=[np.uint8])(values)


def operands(rows: int, columns: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """a [rows, k], b [columns, k] (codes) and c [rows, columns]: row i has case i's products in its first K step (the
    first against 1, the others against 2^-6), column j all of them in a place of its own, so order cannot matter."""
    a, b, c = np.zeros((rows, k)), np.zeros((columns, k)), np.zeros((rows, columns), np.float32)
    b[:, 0], b[:, 1:32] = 1, 2.0**-6
    for row, (acc, products, _, _) in enumerate(SUMS.values()):
        c[row] = acc
        if products:
            large = [p for p in products if abs(p) >= 1]
            small = [p for p in products if abs(p) < 1]
            a[row, 0] = large[0] if large else 0
            for at, product in enumerate([*large[1:], *small]):
                a[row, 31 - at] = product * 2.0**6
    return codes_of(a), codes_of(b), c


def expected(bits: int) -> np.ndarray:
    return np.array([cut if bits else exact for _, _, cut, exact in SUMS.values()], np.float32)


def wgmma(a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: object) -> np.ndarray:
    out = np.zeros((64, 64), np.float32)
    program = Run()
    maps = tensor_map(program.region(a), 64, 256, 64) + tensor_map(program.region(b), 64, 256, 64)
    program.launch(build(WGMMA, False, "TILE_N=64", "ACCUMULATE=1"), maps, program.region(c), program.region(out), smem=128 * 128 + 8)
    assert str(program.run(**options)) == ""
    return out


@pytest.mark.parametrize("bits", [0, 13])
def test_wgmma_sums_by_hand(bits: int) -> None:
    """Seven more K steps of zeros follow: they cut again, and find nothing."""
    out = wgmma(*operands(64, 64, 256), fp8_sum_bits=bits)
    for name, got, want in zip(SUMS, out, expected(bits)):
        assert (got == want).all(), f"{name}: {got[0]!r}, by hand {want!r}"


@pytest.mark.parametrize("bits", [0, 13])
def test_mma_sums_by_hand(bits: int) -> None:
    assert len(SUMS) == 16, "a row of the instruction for each"
    a, b, c = operands(16, 8, 32)
    out = np.zeros((16, 8), np.float32)
    program = Run()
    program.launch(build(MMA), *(program.region(array) for array in (a, b, c, out)))
    assert str(program.run(fp8_sum_bits=bits)) == ""
    for name, got, want in zip(SUMS, out, expected(bits)):
        assert (got == want).all(), f"{name}: {got[0]!r}, by hand {want!r}"


def by_definition(acc: float, products: list[float], bits: int) -> float:
    """In rationals: cut at ``bits`` below the largest exponent, add, cut to FP32's 24 bits."""
    terms = [Fraction(acc), *map(Fraction, products)]
    largest = max(map(abs, terms))
    if not largest:
        return 0.0
    unit = Fraction(2) ** (int(np.frexp(float(largest))[1]) - 1 - bits)
    total = sum(int(term / unit) for term in terms) * unit  # int() cuts toward zero
    if not total:
        return 0.0
    last = Fraction(2) ** (int(np.frexp(float(abs(total)))[1]) - 24)
    return float(int(total / last) * last)


@pytest.mark.parametrize("bits", [1, 10, 13, 23])
def test_random_sums_follow_the_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    a, b, c = random_e4m3(rng, (64, 256)), random_e4m3(rng, (64, 256)), (100 * rng.standard_normal((64, 64))).astype(np.float32)
    out, values = wgmma(a, b, c, fp8_sum_bits=bits), e4m3_values()
    for row, column in ((0, 0), (7, 63), (31, 5), (63, 40)):
        acc = float(c[row, column])
        for k in range(0, 256, 32):
            acc = by_definition(acc, list(values[a[row, k:k + 32]] * values[b[column, k:k + 32]]), bits)
        assert out[row, column] == acc, (row, column)


def test_nan_and_infinity_stay() -> None:
    a, b, c = operands(64, 64, 256)
    a[3, 40] = 0x7F
    c[4] = np.inf
    out = wgmma(a, b, c, fp8_sum_bits=13)
    assert np.isnan(out[3]).all() and np.isposinf(out[4]).all() and np.isfinite(out[5:]).all()


def test_more_bits_than_fp32_has_are_refused() -> None:
    with pytest.raises(UsageError, match="fp8_sum_bits 24 is outside 0..23"):
        Run().run(fp8_sum_bits=24)
