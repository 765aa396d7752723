// L1 epilogue: clamp, SwiGLU, routing weight, requantization per 128 of I, straight from the
// accumulators to l2_acts. Gate and up alternate by 8 columns (see the weight transform), so each thread
// holds both halves of its activations. A warpgroup has 64 of the group's 128 columns; the two exchange
// row maxima through shared memory.
#pragma once
#include "math_loop.cuh"

namespace megamoe {

MM_DEVICE f32 silu_fast(f32 g) {
    constexpr f32 kLog2e = 1.4426950408889634f;
    return g * hw::rcp_approx(1.0f + hw::exp2_approx(-g * kLog2e));
}
MM_DEVICE f32 silu_exact(f32 g) { return hw::div_exact(g, 1.0f + hw::exp_exact(-g)); }

template <class C>
struct EpilogueL1 {
    static constexpr u32 kSubTiles = MathThread<C>::kSubTiles;
    static constexpr f32 kE4m3Max = 448.0f, kAmaxFloor = 1e-10f;
    const KernelParams& p;
    const Tile& tile;
    const MathThread<C>& me;

    // Natural-order raw accumulators, for the named check of phase l1.
    MM_DEVICE void dump_raw(const f32 (&acc)[kSubTiles][64]) const {
        f32* raw = reinterpret_cast<f32*>(p.l1_raw);
#pragma unroll
        for (u32 s = 0; s < kSubTiles; ++s)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = s * 64 + me.fragment.row + 8 * half;
                if (row >= tile.valid()) continue;
                f32* out = raw + static_cast<u64>(tile.row0 + row) * 2 * p.intermediate + tile.n * 128 + me.warpgroup * 64 + me.fragment.column;
#pragma unroll
                for (u32 chunk = 0; chunk < 16; ++chunk) {
                    f32* at = out + chunk / 2 * 8 + (chunk % 2 ? p.intermediate : 0);
                    hw::st_f32(at, acc[s][4 * chunk + 2 * half]);
                    hw::st_f32(at + 1, acc[s][4 * chunk + 2 * half + 1]);
                }
            }
    }

    // Gates at acc[8j + 0..3], ups at acc[8j + 4..7]: rows row, row, row + 8, row + 8 each. Branches stay outside
    // the unrolled loops: inside, both sides of each would be instructions to fetch.
    MM_DEVICE void clamp(f32 (&acc)[64]) const {
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                acc[8 * j + i] = hw::min_nan(acc[8 * j + i], p.clamp);
                acc[8 * j + 4 + i] = hw::max_nan(hw::min_nan(acc[8 * j + 4 + i], p.clamp), -p.clamp);
            }
    }
    // Activations replace the gates.
    template <bool kFast>
    MM_DEVICE void activate(f32 (&acc)[64], f32 weight_lo, f32 weight_hi) const {
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const f32 g = acc[8 * j + i], u = acc[8 * j + 4 + i];
                acc[8 * j + i] = (kFast ? silu_fast(g) : silu_exact(g)) * (u * (i < 2 ? weight_lo : weight_hi));
            }
    }

    static MM_DEVICE f32 row_amax(const f32 (&acc)[64], u32 half) {
        f32 amax = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
#pragma unroll
            for (u32 i = 0; i < 2; ++i) amax = hw::max_f32(amax, hw::abs_f32(acc[8 * j + 2 * half + i]));
        return quad_max(amax);
    }

    // Quantizes one row's 64 columns of this warpgroup and writes them, 16 bytes per lane.
    MM_DEVICE void store_row(const f32 (&acc)[64], u32 half, u32 row, f32 inverse) const {
        u32 words[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) {
            const u32 lo = hw::cvt_e4m3x2(acc[16 * w + 2 * half] * inverse, acc[16 * w + 2 * half + 1] * inverse);
            const u32 hi = hw::cvt_e4m3x2(acc[16 * w + 8 + 2 * half] * inverse, acc[16 * w + 8 + 2 * half + 1] * inverse);
            words[w] = lo | hi << 16;
        }
        quad_transpose(words, me.quad_lane());
        if (row >= tile.valid()) return;
        u8* out = local_region<u8>(p, kL2Acts) + static_cast<u64>(tile.row0 + row) * p.intermediate + tile.n * 128 + me.warpgroup * 64 + me.quad_lane() * 16;
        hw::st_vec4(out, {hw::byte_perm(words[0], words[1], 0x5410), hw::byte_perm(words[2], words[3], 0x5410),
                          hw::byte_perm(words[0], words[1], 0x7632), hw::byte_perm(words[2], words[3], 0x7632)});
    }

    // Two maxima buffers in turn, so one barrier a tile is enough. Rows past the block's end are computed too
    // (on whatever lies there) and not stored.
    MM_DEVICE void run(u8* smem, const u8* side, f32 (&acc)[kSubTiles][64]) const {
        using Plan = SharedPlan<C>;
        f32* amax = reinterpret_cast<f32*>(smem + Plan::kAmax) + tile.maxima_buffer() * 2 * Plan::kARows;
        const f32* weights = reinterpret_cast<const f32*>(side);
        const bool second = kSubTiles > 1 && tile.valid() > 64;
        f32 own[kSubTiles][2];
        if constexpr (C::kPhase == Phase::kL1) {
            if (p.l1_raw) dump_raw(acc);
        }
#pragma unroll
        for (u32 s = 0; s < kSubTiles; ++s) {
            if (s > 0 && !second) break;
            const u32 row = s * 64 + me.fragment.row;
            const f32 lo = C::kBlockM >= 64 || row < C::kBlockM ? hw::lds_f32(weights + row) : 0.0f;
            const f32 hi = C::kBlockM >= 64 || row + 8 < C::kBlockM ? hw::lds_f32(weights + row + 8) : 0.0f;
            if (p.flags & kHasClamp) clamp(acc[s]);
            if (p.flags & kFastMath) activate<true>(acc[s], lo, hi); else activate<false>(acc[s], lo, hi);
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                own[s][half] = row_amax(acc[s], half);
                if (me.quad_lane() == 0) hw::sts_f32(amax + me.warpgroup * Plan::kARows + row + 8 * half, own[s][half]);
            }
        }
        MathThread<C>::sync_math();
        f32* scales = local_region<f32>(p, kL2ActsSf) + static_cast<u64>(tile.n) * p.pool_rows + tile.row0;
#pragma unroll
        for (u32 s = 0; s < kSubTiles; ++s) {
            if (s > 0 && !second) break;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = s * 64 + me.fragment.row + 8 * half;
                const f32 other = hw::lds_f32(amax + (me.warpgroup ^ 1) * Plan::kARows + row);
                const f32 top = hw::max_f32(hw::max_f32(other, own[s][half]), kAmaxFloor);
                store_row(acc[s], half, row, hw::div_exact(kE4m3Max, top));
                if (me.warpgroup == 0 && me.quad_lane() == 0 && row < tile.valid()) hw::st_f32(scales + row, top * (1.0f / kE4m3Max));
            }
        }
        me.sync_warpgroup();
        if (me.thread == 0) hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL2Arrival, tile.bank()) + tile.row0 / C::kBlockM, 1);
    }
};

}  // namespace megamoe
