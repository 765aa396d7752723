// Rescaling in place with the carry in registers: sums stay in the tensor core's accumulators, in units of the current
// factors, and in L1 they are moved every 8 K-blocks into pairs of FP16 (mma/kblock.cuh says why they must not stay; L2's
// become BF16, whose rounding is larger than what they lose).
//
// A warpgroup has two column units (M64N128 each) and works on one of them while the other's product runs, so multiplying costs the
// tensor core nothing, and one warpgroup alone keeps it busy. What is left is the instructions themselves, which cost power:
// nothing in the loop checks anything.
//
// Regular rows, whose factors were seen to be near each other, have one unit for their halves, chosen ahead from the largest
// factor: it cannot overflow, and keeps all bits of a half for what a single K-block of the smallest factor adds. Other rows are
// moved after every K-block, in units chosen by the sums themselves. What is done to a row follows from its own factors alone, so its
// bits do not depend on the rows it shares a tile with.
#pragma once
#include "kblock.cuh"
#include "row_kind.cuh"

namespace megamoe {

template <class C>
struct PackedRescale {
    using Shape = TileShape<C>;
    static constexpr u32 kRegs = Shape::kRegs;
    static constexpr u32 kMoveEvery = 8;   // K-blocks, in L1

    // [row, row + 8][0: gates in L1, unit 0 in L2; 1: ups, unit 1]
    using RowFactors = f32[2][2];
    RowFactors now;      // factors of the last K-block looked at
    RowFactors by;       // those that the sums are in units of, over `now`
    bool regular[2];
    u32 carry[2][kRegs / 2] = {};
    // Byte 2 * unit + half: the carry is in units of 2^(byte - 127). Of rows that are not regular it is the even chunks' (gates); the odd
    // ones have a word of their own in shared memory.
    u32 exponents = 0x01010101;

    // May the columns' scales be used in ratios, with those of a regular row? In L1 factors are then within 2^15 of each other; in L2, which
    // moves nothing, within 2^80, so that sums (below 2^30 in units of a factor) stay far from the ends of FP32.
    static MM_DEVICE bool near_columns(const ScaleRange& r, bool l1) { return r.near(l1 ? 5 : 29, 40, 20); }

    // The unit in which no L1 sum of a regular row over num_k K-blocks (of at most 2^24.7 times the factor each) overflows.
    static MM_DEVICE u32 unit_of(u32 row_exponent, u32 column_exponent, u32 num_k) { return row_exponent + column_exponent - 127 + 11 + hw::log2_ceil(num_k); }
    // Row h's kind; `unit`: of a regular row.
    MM_DEVICE void set_row(u32 h, bool is_regular, u32 unit) {
        regular[h] = is_regular;
        if (is_regular) exponents += (unit - 1) * 0x00010001u << 8 * h;
    }
    MM_DEVICE void look(const RowFactors& next) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h)
#pragma unroll
            for (u32 x = 0; x < 2; ++x) {
                by[h][x] = now[h][x] * hw::rcp_approx(next[h][x]);
                now[h][x] = next[h][x];
            }
    }

    // Unit c's sums before a K-block's product is added to them, all rows regular.
    MM_DEVICE void scale(f32 (&sums)[kRegs], u32 c, bool l1) const {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) scale_row(sums, c, l1, h);
    }
    // The product overwrites them. `before`: the factors that they are in units of.
    MM_DEVICE void move(const f32 (&sums)[kRegs], const RowFactors& before, u32 c, bool l1) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) move_row(sums, ByChunk(before[h], c, l1), c, h, exponent(c, h, 0), exponent(c, h, 0));
    }
    // Before the first of these.
    MM_DEVICE void begin_moving() const { hw::sts_u32(odd_exponents(), 0x01010101u); }
    // Either, for rows of any kind; the product is added.
    MM_DEVICE void scale_or_move(f32 (&sums)[kRegs], const RowFactors& before, u32 c, bool l1, bool all) {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            if (regular[h] && !all) {
                scale_row(sums, c, l1, h);
                continue;
            }
            const ByChunk factor(before[h], c, l1);
            if (!regular[h]) choose_unit(sums, factor, c, h);
            move_row(sums, factor, c, h, exponent(c, h, 0), exponent(c, h, 1));
            each(h, [&](u32 i, u32) { sums[i] = 0.0f; });
        }
        hw::warp_sync();
    }

    // Unit c's sums in natural units, with what was moved, if anything was.
    MM_DEVICE void end(f32 (&sums)[kRegs], u32 c, bool l1, bool moved) const {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
            const ByChunk factor(now[h], c, l1);
            if (!moved) {
                each(h, [&](u32 i, u32 parity) { sums[i] *= factor.of[parity]; });
                continue;
            }
            const f32 unit[2] = {hw::bits_to_f32(exponent(c, h, 0) << 23), hw::bits_to_f32(exponent(c, h, 1) << 23)};
            each(h, [&](u32 i, u32 parity) {
                const u32 pair = carry[c][i / 2];
                sums[i] = hw::fma(i % 2 ? hw::f16_high(pair) : hw::f16_low(pair), unit[parity], sums[i] * factor.of[parity]);
            });
        }
    }

private:
    // A row's factor for even and odd chunks of a unit: in L1 gates and ups alternate, in L2 a unit has one factor.
    struct ByChunk {
        f32 of[2];
        MM_DEVICE ByChunk(const f32 (&factor)[2], u32 c, bool l1) : of{l1 || c == 0 ? factor[0] : factor[1], l1 || c == 1 ? factor[1] : factor[0]} {}
    };
    // Of this thread. With one column part the tile's maxima have no use for their memory.
    static MM_DEVICE u32* odd_exponents() {
        static_assert(Shape::kParts == 1 && 2 * SharedPlan<C>::kARows >= 128 * C::kMathWarpgroups);
        return reinterpret_cast<u32*>(hw::dynamic_smem() + SharedPlan<C>::kAmax) + hw::thread_idx_volatile() - (C::kThreads - 128 * C::kMathWarpgroups);
    }
    MM_DEVICE u32 exponent(u32 c, u32 h, u32 parity) const {
        return (parity == 0 || regular[h] ? exponents : hw::lds_u32(odd_exponents())) >> 8 * (2 * c + h) & 0xff;
    }

    // `use(index, parity of its chunk)` for each of a unit's sums of row h.
    template <class Use>
    static MM_DEVICE void each(u32 h, const Use& use) {
#pragma unroll
        for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk)
#pragma unroll
            for (u32 i = 0; i < 2; ++i) use(4 * chunk + 2 * h + i, chunk % 2);
    }
    MM_DEVICE void scale_row(f32 (&sums)[kRegs], u32 c, bool l1, u32 h) const {
        const ByChunk factor(by[h], c, l1);
        each(h, [&](u32 i, u32 parity) { sums[i] *= factor.of[parity]; });
    }
    MM_DEVICE void move_row(const f32 (&sums)[kRegs], const ByChunk& factor, u32 c, u32 h, u32 even, u32 odd) {
        const f32 into[2] = {factor.of[0] * hw::bits_to_f32((254 - even) << 23), factor.of[1] * hw::bits_to_f32((254 - odd) << 23)};
        each_pair(h, [&](u32 pair, u32 parity) {
            carry[c][pair] = hw::add_f16x2(carry[c][pair], hw::cvt_f16x2(sums[2 * pair] * into[parity], sums[2 * pair + 1] * into[parity]));
        });
    }
    template <class Use>
    static MM_DEVICE void each_pair(u32 h, const Use& use) {
#pragma unroll
        for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk) use(2 * chunk + h, chunk % 2);
    }

    // Brings the carry of row h of unit c to units that hold its sums, if they do not yet: the largest becomes 1 to 2.
    MM_DEVICE void choose_unit(const f32 (&sums)[kRegs], const ByChunk& factor, u32 c, u32 h) {
        constexpr u32 kTop = 253, kMostBits = 24;
        constexpr f32 kFloor = 8.077936e-28f;   // 2^-90: a factor in units of the result stays finite where all sums are zero
        f32 top[2] = {kFloor, kFloor};
        each(h, [&](u32 i, u32 parity) { top[parity] = hw::max_f32(top[parity], hw::abs_f32(sums[i])); });
        u32 shrinks[2];
#pragma unroll
        for (u32 parity = 0; parity < 2; ++parity) {
            const f32 largest = top[parity] * hw::abs_f32(factor.of[parity]);
            const u32 old = exponent(c, h, parity);
            u32 unit = old;
            if (largest < hw::bits_to_f32(0x7f800000u)) {   // what is not finite stays so in any unit
                const u32 found = hw::f32_to_bits(largest) >> 23;
                unit = found <= old ? old : found < kTop ? found : kTop;
            }
            const u32 shift = unit - old < kMostBits ? unit - old : kMostBits;
            const u32 more = (unit - old) << 8 * (2 * c + h);
            if (parity == 0) exponents += more; else hw::sts_u32(odd_exponents(), hw::lds_u32(odd_exponents()) + more);
            const f32 shrink = hw::bits_to_f32((127 - shift) << 23);
            shrinks[parity] = hw::cvt_f16x2(shrink, shrink);
        }
        each_pair(h, [&](u32 pair, u32 parity) { carry[c][pair] = hw::fma_f16x2(carry[c][pair], shrinks[parity], 0); });
    }
};

}  // namespace megamoe
