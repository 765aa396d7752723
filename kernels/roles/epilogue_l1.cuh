// L1 epilogue: clamp, SwiGLU, routing weight, requantization per 128 of I, straight from the
// accumulators to l2_acts. Gate and up alternate by 8 columns (see the weight transform), so each thread
// holds both halves of its activations. Where several threads groups share a row's 128 columns (column parts of the
// tile), they exchange row maxima through shared memory.
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
    using Shape = TileShape<C>;
    using Plan = SharedPlan<C>;
    static constexpr u32 kUnits = Shape::kUnits, kRegs = Shape::kRegs;
    static constexpr u32 kActs = kRegs / 2, kGroups = Shape::kChunks / 2;   // activations of a unit, in 8-column groups of 4
    static constexpr f32 kE4m3Max = 448.0f, kAmaxFloor = 1e-10f;
    using Accumulators = f32[kUnits][kRegs];
    // Activations replace the gates: those of 8-column group j at acc[8j + 0..3]. With two passes, the first pass's are
    // held in their own registers.
    static constexpr bool kHolds = Shape::kPasses > 1;
    using Held = f32[kHolds ? kUnits : 1][kHolds ? kActs : 1];
    const KernelParams& p;
    const Tile& tile;
    const MathThread<C>& me;

    // First activation column of a pass and a column unit, within the tile's 128.
    MM_DEVICE u32 act_column(u32 pass, u32 c) const { return (pass * C::kBlockN + me.column(c)) / 2; }
    // Warps without rows do nothing; a warp's others (16 rows at least are computed) are computed on whatever lies there
    // and not stored.
    MM_DEVICE bool has(u32 r) const { return me.warp_has(r, tile.valid()); }

    // Natural-order raw accumulators, for the named check of phase l1.
    MM_DEVICE void dump_raw(const Accumulators& acc, u32 pass) const {
        f32* raw = reinterpret_cast<f32*>(p.l1_raw);
#pragma unroll
        for (u32 u = 0; u < kUnits; ++u)
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = me.row(u / Shape::kColumnUnits) + 8 * half;
                if (row >= tile.valid()) continue;
                f32* out = raw + static_cast<u64>(tile.row0 + row) * 2 * p.intermediate + tile.n * 128 +
                           act_column(pass, u % Shape::kColumnUnits) + me.pair_column();
#pragma unroll
                for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk) {
                    f32* at = out + chunk / 2 * 8 + (chunk % 2 ? p.intermediate : 0);
                    hw::st_f32(at, acc[u][4 * chunk + 2 * half]);
                    hw::st_f32(at + 1, acc[u][4 * chunk + 2 * half + 1]);
                }
            }
    }

    // Gates at acc[8j + 0..3], ups at acc[8j + 4..7]: rows row, row, row + 8, row + 8 each. Branches stay outside
    // the unrolled loops: inside, both sides of each would be instructions to fetch.
    MM_DEVICE void clamp(f32 (&acc)[kRegs]) const {
#pragma unroll
        for (u32 j = 0; j < kGroups; ++j)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                acc[8 * j + i] = hw::min_nan(acc[8 * j + i], p.clamp);
                acc[8 * j + 4 + i] = hw::max_nan(hw::min_nan(acc[8 * j + 4 + i], p.clamp), -p.clamp);
            }
    }
    template <bool kFast>
    MM_DEVICE void activate_unit(f32 (&acc)[kRegs], f32 weight_lo, f32 weight_hi) const {
#pragma unroll
        for (u32 j = 0; j < kGroups; ++j) {
            if (j == kGroups / 2) hw::wgmma_pin(acc);   // all at once would not fit in the registers
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const f32 g = acc[8 * j + i], u = acc[8 * j + 4 + i];
                acc[8 * j + i] = (kFast ? silu_fast(g) : silu_exact(g)) * (u * (i < 2 ? weight_lo : weight_hi));
            }
        }
    }

    // Activations of one pass.
    MM_DEVICE void activate(const u8* side, Accumulators& acc, u32 pass) const {
        const f32* weights = reinterpret_cast<const f32*>(side);
        if constexpr (C::kPhase == Phase::kL1) {
            if (p.l1_raw) dump_raw(acc, pass);
        }
#pragma unroll
        for (u32 r = 0; r < Shape::kRowUnits; ++r) {
            if (!has(r)) break;
            const u32 row = me.row(r);
            const f32 lo = C::kBlockM >= 64 || row < C::kBlockM ? hw::lds_f32(weights + row) : 0.0f;
            const f32 hi = C::kBlockM >= 64 || row + 8 < C::kBlockM ? hw::lds_f32(weights + row + 8) : 0.0f;
#pragma unroll
            for (u32 c = 0; c < Shape::kColumnUnits; ++c) {
                const u32 u = r * Shape::kColumnUnits + c;
                if (p.flags & kHasClamp) clamp(acc[u]);
                if (p.flags & kFastMath) activate_unit<true>(acc[u], lo, hi); else activate_unit<false>(acc[u], lo, hi);
            }
        }
    }

    static MM_DEVICE void hold(const Accumulators& acc, Held& held) {
        if constexpr (kHolds) {
#pragma unroll
            for (u32 u = 0; u < kUnits; ++u)
#pragma unroll
                for (u32 i = 0; i < kActs; ++i) held[u][i] = acc[u][i / 4 * 8 + i % 4];
        }
    }
    // Activation i (0..3) of a group; `group` counts over both passes.
    static MM_DEVICE f32 value(const Accumulators& acc, const Held& held, u32 u, u32 pass, u32 group, u32 i) {
        if constexpr (kHolds) {
            if (pass == 0) return held[u][4 * group + i];
        }
        return acc[u][8 * group + i];
    }

    // Largest magnitude among a row's activations that this part of the tile holds.
    static MM_DEVICE f32 row_amax(const Accumulators& acc, const Held& held, u32 r, u32 half) {
        f32 top = 0.0f;
#pragma unroll
        for (u32 n = 0; n < Shape::kPasses * Shape::kColumnUnits; ++n)
#pragma unroll
            for (u32 j = 0; j < kGroups; ++j)
#pragma unroll
                for (u32 i = 0; i < 2; ++i)
                    top = hw::max_f32(top, hw::abs_f32(value(acc, held, r * Shape::kColumnUnits + n % Shape::kColumnUnits, n / Shape::kColumnUnits, j,
                                                             2 * half + i)));
        return quad_max(top);
    }

    // Quantizes one row's activations of a unit and writes them, up to 16 bytes per lane.
    MM_DEVICE void store_row(const Accumulators& acc, const Held& held, u32 u, u32 pass, u32 half, u32 row, u32 column, f32 inverse) const {
        constexpr u32 kPerLane = kGroups >= 8 ? 2 : 1;   // 8-column groups a lane stores at a time
        const auto pair = [&](u32 group) -> u32 {
            return group < kGroups ? hw::cvt_e4m3x2(value(acc, held, u, pass, group, 2 * half) * inverse,
                                                       value(acc, held, u, pass, group, 2 * half + 1) * inverse) : 0;
        };
#pragma unroll
        for (u32 first = 0; first < kGroups; first += 4 * kPerLane) {
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w)
                words[w] = kPerLane == 2 ? pair(first + 2 * w) | pair(first + 2 * w + 1) << 16 : pair(first + w);
            quad_transpose(words, me.quad_lane());
            if (row >= tile.valid() || first + me.quad_lane() * kPerLane >= kGroups) continue;
            u8* out = local_region<u8>(p, kL2Acts) + static_cast<u64>(tile.row0 + row) * p.intermediate + tile.n * 128 + column + 8 * first +
                      me.quad_lane() * 8 * kPerLane;
            const u32 low0 = hw::byte_perm(words[0], words[1], 0x5410), low1 = hw::byte_perm(words[2], words[3], 0x5410);
            if constexpr (kPerLane == 2) {
                hw::st_vec4(out, {low0, low1, hw::byte_perm(words[0], words[1], 0x7632), hw::byte_perm(words[2], words[3], 0x7632)});
            } else {
                hw::st_u64(reinterpret_cast<u64*>(out), low0 | static_cast<u64>(low1) << 32);
            }
        }
    }

    // Requantizes and stores the tile's activations of all passes. Two maxima buffers in turn, so one barrier a tile
    // is enough.
    MM_DEVICE void store(u8* smem, const Accumulators& acc, const Held& held) const {
        f32* amax = reinterpret_cast<f32*>(smem + Plan::kAmax) + tile.maxima_buffer() * Shape::kParts * Plan::kARows;
        if constexpr (Shape::kParts > 1) {
#pragma unroll
            for (u32 r = 0; r < Shape::kRowUnits; ++r) {
                if (!has(r)) break;
#pragma unroll
                for (u32 half = 0; half < 2; ++half) {
                    const f32 top = row_amax(acc, held, r, half);
                    if (me.quad_lane() == 0) hw::sts_f32(amax + me.part() * Plan::kARows + me.row(r) + 8 * half, top);
                }
            }
            MathThread<C>::sync_math();
        }
        f32* scales = local_region<f32>(p, kL2ActsSf) + static_cast<u64>(tile.n) * p.ring_rows + tile.row0;
#pragma unroll
        for (u32 r = 0; r < Shape::kRowUnits; ++r) {
            if (!has(r)) break;
#pragma unroll
            for (u32 half = 0; half < 2; ++half) {
                const u32 row = me.row(r) + 8 * half;
                f32 top = kAmaxFloor;
                if constexpr (Shape::kParts == 1) top = hw::max_f32(top, row_amax(acc, held, r, half));
                else
#pragma unroll
                    for (u32 part = 0; part < Shape::kParts; ++part) top = hw::max_f32(top, hw::lds_f32(amax + part * Plan::kARows + row));
                const f32 inverse = hw::div_exact(kE4m3Max, top);
#pragma unroll
                for (u32 n = 0; n < Shape::kPasses * Shape::kColumnUnits; ++n) {
                    const u32 pass = n / Shape::kColumnUnits, c = n % Shape::kColumnUnits;
                    store_row(acc, held, r * Shape::kColumnUnits + c, pass, half, row, act_column(pass, c), inverse);
                }
                if (me.part() == 0 && me.quad_lane() == 0 && row < tile.valid()) hw::st_f32(scales + row, top * (1.0f / kE4m3Max));
            }
        }
    }

    // This warpgroup's part of the tile is stored.
    MM_DEVICE void signal() const {
        me.sync_warpgroup();
        if (me.thread == 0 && tile.valid() != 0)
            hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL2Arrival, tile.bank()) + tile.block, 1);
    }
};

}  // namespace megamoe
