// One K-block (128 of K) of a warpgroup's share of a tile, and its promotion.
#pragma once
#include "../comm/pipeline.cuh"

namespace megamoe {

// Where a math thread's accumulators lie in a 64-row sub-tile: rows `row` and `row + 8`, and for each
// 8-column chunk the two columns 8 * chunk + column and the next.
struct Fragment {
    u32 row, column;
    MM_DEVICE explicit Fragment(u32 warpgroup_thread)
        : row(warpgroup_thread / 32 * 16 + (warpgroup_thread % 32) / 4), column(warpgroup_thread % 4 * 2) {}
};

// scratch = A[64 x 128] * B[128 x 128]^T. Issues and commits; the caller waits.
MM_DEVICE void issue_kblock(f32 (&scratch)[64], u64 desc_a, u64 desc_b) {
    hw::wgmma_pin(scratch);
    hw::wgmma_fence();
#pragma unroll
    for (u32 k = 0; k < 4; ++k)   // 32 bytes of K per instruction: +2 in the descriptor
        hw::wgmma_e4m3<128>(scratch, desc_a + 2 * k, desc_b + 2 * k, k != 0);
    hw::wgmma_commit();
}

// acc += scratch * (row scale * column scale). Even and odd 8-column chunks have their own column scale:
// gate and up in L1, the same in L2.
MM_DEVICE void promote(f32 (&acc)[64], const f32 (&scratch)[64], f32 row_lo, f32 row_hi, f32 even, f32 odd) {
    const f32 lo_even = row_lo * even, lo_odd = row_lo * odd;
    const f32 hi_even = row_hi * even, hi_odd = row_hi * odd;
#pragma unroll
    for (u32 chunk = 0; chunk < 16; ++chunk) {
        const f32 lo = chunk % 2 ? lo_odd : lo_even;
        const f32 hi = chunk % 2 ? hi_odd : hi_even;
        acc[4 * chunk + 0] = hw::fma(scratch[4 * chunk + 0], lo, acc[4 * chunk + 0]);
        acc[4 * chunk + 1] = hw::fma(scratch[4 * chunk + 1], lo, acc[4 * chunk + 1]);
        acc[4 * chunk + 2] = hw::fma(scratch[4 * chunk + 2], hi, acc[4 * chunk + 2]);
        acc[4 * chunk + 3] = hw::fma(scratch[4 * chunk + 3], hi, acc[4 * chunk + 3]);
    }
}

// 4 x 4 transpose of words among the four lanes that share a row: lane q ends with word q of lanes 0..3.
MM_DEVICE void quad_transpose(u32 (&w)[4], u32 quad_lane) {
#pragma unroll
    for (u32 i = 0; i < 4; i += 2) {
        const bool odd = quad_lane & 1;
        const u32 got = hw::shfl_xor(odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got; else w[i + 1] = got;
    }
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
        const bool high = quad_lane & 2;
        const u32 got = hw::shfl_xor(high ? w[i] : w[i + 2], 2);
        if (high) w[i] = got; else w[i + 2] = got;
    }
}

// Largest of a value over the four lanes of a row; NaN counts as nothing.
MM_DEVICE f32 quad_max(f32 v) {
    v = hw::max_f32(v, hw::shfl_xor_f32(v, 1));
    return hw::max_f32(v, hw::shfl_xor_f32(v, 2));
}

}  // namespace megamoe
