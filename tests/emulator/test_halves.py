"""FP16 as the emulator computes it, against numpy's: every half, and FP32 values around all of them."""

from __future__ import annotations

import numpy as np

from .harness import Run, build

HALVES = """
struct Params { u64 in, out; u32 count; };
MM_DEVICE void body(const Params& p) {
    const f32* in = reinterpret_cast<const f32*>(p.in);
    u32* out = reinterpret_cast<u32*>(p.out);
    for (u32 i = hw::thread_idx(); i < p.count; i += 32) {
        const f32 a = in[3 * i], b = in[3 * i + 1], c = in[3 * i + 2];
        const u32 ab = hw::cvt_f16x2(a, b), bc = hw::cvt_f16x2(b, c), ca = hw::cvt_f16x2(c, a);
        out[6 * i] = ab;
        out[6 * i + 1] = hw::fma_f16x2(ab, bc, ca);
        out[6 * i + 2] = hw::add_f16x2(ab, bc);
        out[6 * i + 3] = hw::f32_to_bits(hw::f16_low(ab));
        out[6 * i + 4] = hw::f32_to_bits(hw::f16_high(ab));
        out[6 * i + 5] = hw::warp_max(0) + hw::log2_ceil(i + 1);
    }
    hw::warp_sync();
    const u32 lane = hw::thread_idx();
    if (p.count == 0) out[lane] = hw::warp_max(lane * 37 % 101) | hw::warp_min(lane * 37 % 101 + 5) << 16;
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


def run(values: np.ndarray, out: np.ndarray, count: int) -> np.ndarray:
    machine = Run()
    machine.launch(build(HALVES), machine.region(values), machine.region(out), count)
    assert str(machine.run()) == ""
    return out


def test_conversions_and_arithmetic_are_those_of_ieee() -> None:
    rng = np.random.default_rng(1)
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)   # up to infinity
    between = (halves[:-2] + halves[1:-1]) / 2   # ties
    near = np.concatenate([halves, between, np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf)), np.float32([65519.9, 65520.0, 1e30, np.nan])])
    near = np.concatenate([near, -near]).astype(np.float32)
    values = np.stack([near, rng.permutation(near), rng.permutation(near)], axis=1)
    values = values[:: max(1, len(values) // 32000)].copy() if len(values) > 64000 else values.copy()
    values = values[: len(values) // 32 * 32].copy()
    out = run(values, np.zeros((len(values), 6), np.uint32), len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        a, b, c = (values[:, i].astype(np.float16) for i in range(3))
        x, y, z = a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)
        wanted = [(a, b), ((x * y + z).astype(np.float16), (y * z + x).astype(np.float16)), ((x + y).astype(np.float16), (y + z).astype(np.float16))]
    for column, (low, high) in enumerate(wanted):
        for want, got in ((low, out[:, column] & 0xFFFF), (high, out[:, column] >> 16)):
            got = got.astype(np.uint16).view(np.float16)
            assert np.array_equal(got, want, equal_nan=True), column
            real = ~np.isnan(want)
            assert np.array_equal(got[real].view(np.uint16), want[real].view(np.uint16)), "also the sign of zero"
    assert np.array_equal(out[:, 3].view(np.float32), a.astype(np.float32), equal_nan=True)
    assert np.array_equal(out[:, 4].view(np.float32), b.astype(np.float32), equal_nan=True)
    assert list(out[:9, 5]) == [0, 1, 2, 2, 3, 3, 3, 3, 4]


def test_largest_and_smallest_of_a_warp() -> None:
    out = run(np.zeros((1, 3), np.float32), np.zeros(32, np.uint32), 0)
    values = np.arange(32) * 37 % 101
    assert set(out) == {int(values.max()) | int(values.min() + 5) << 16}
