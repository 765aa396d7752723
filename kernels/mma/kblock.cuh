// One K-block (128 of K) of a unit, and what becomes of it: classic promotion or rescaling in place.
#pragma once
#include "math_thread.cuh"

namespace megamoe {

// d (+)= A * B^T over the K-block, A and B K-major in shared memory with the 128-byte swizzle.
template <class C>
struct Product {
    using Shape = TileShape<C>;
    static constexpr u32 kRegs = Shape::kRegs;

    // Starts the product. d is undefined until wait(d).
    static MM_DEVICE void issue(f32 (&d)[kRegs], u64 a, u64 b, bool accumulate) {
        hw::wgmma_pin(d);
        hw::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k)   // 32 bytes of K per instruction: +2 in the descriptor
            hw::wgmma_e4m3<Shape::kUnitColumns>(d, a + 2 * k, b + 2 * k, accumulate || k != 0);
        hw::wgmma_commit();
    }
    static MM_DEVICE void wait(f32 (&d)[kRegs]) { hw::wgmma_wait<0>(d); }

    // The same by warp-level instructions; a and b are the addresses of the unit's first rows.
    static MM_DEVICE void compute(f32 (&d)[kRegs], const u8* a, const u8* b, u32 lane, bool accumulate) {
        if (!accumulate)
#pragma unroll
            for (u32 i = 0; i < kRegs; ++i) d[i] = 0.0f;
        const u32 row = lane / 4, byte = lane % 4 * 4;
#pragma unroll
        for (u32 k = 0; k < 128; k += 32) {
            const u32 left[4] = {word(a, row, k + byte), word(a, row + 8, k + byte), word(a, row, k + byte + 16), word(a, row + 8, k + byte + 16)};
#pragma unroll
            for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk) {
                const u32 right[2] = {word(b, 8 * chunk + row, k + byte), word(b, 8 * chunk + row, k + byte + 16)};
                hw::mma_e4m3_m16n8k32(d[4 * chunk], d[4 * chunk + 1], d[4 * chunk + 2], d[4 * chunk + 3], left[0], left[1], left[2], left[3],
                                      right[0], right[1]);
            }
        }
    }

private:
    static MM_DEVICE u32 word(const u8* tile, u32 row, u32 byte) {
        return hw::lds_u32(reinterpret_cast<const u32*>(tile + row * 128 + (byte ^ (row % 8 * 16))));
    }
};

// A descriptor of shared memory whose low word, with the address, is told to be the same in all lanes; its high word is a constant.
struct UniformDescriptor {
    u64 high;
    u32 low;
    MM_DEVICE explicit UniformDescriptor(u64 desc) : high(desc >> 32 << 32), low(hw::uniform(static_cast<u32>(desc))) {}
    MM_DEVICE u64 moved(u32 bytes) const { return high | (low + bytes / 16); }
};

// Scale factors of a thread in a row unit: row scale x weight scale, for the rows `row` (0) and `row + 8` (1), the
// 128-column blocks of its part, and even and odd chunks (gate and up in L1, the same in L2).
template <class C>
struct Factors {
    f32 at[2][TileShape<C>::kScaleBlocks][2];
    static constexpr MM_DEVICE u32 block(u32 column_unit, u32 chunk) { return (column_unit * TileShape<C>::kChunks + chunk) / 16; }
};

// acc += scratch * factors.
template <class C>
MM_DEVICE void promote(f32 (&acc)[TileShape<C>::kRegs], const f32 (&scratch)[TileShape<C>::kRegs], const Factors<C>& f, u32 column_unit) {
#pragma unroll
    for (u32 chunk = 0; chunk < TileShape<C>::kChunks; ++chunk)
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            acc[4 * chunk + i] = hw::fma(scratch[4 * chunk + i], f.at[i / 2][Factors<C>::block(column_unit, chunk)][chunk % 2], acc[4 * chunk + i]);
}

// Rescaling: the running sum stays in the tensor core's accumulator, in units of the current factor, so before a
// K-block it is multiplied by the ratio of the factor before and the new one.
//  - A ratio that is not finite or might let the sum overflow (above 2^40, a zero, a NaN) is never used: the row is
//    `carried` instead: what is there is added, in natural units, to a carry in shared memory, and the sum starts anew.
//    Rows are judged one by one, so the bits of a row do not depend on the rows it shares a tile with.
//  - The tensor core cuts products and sum at 13 bits below the largest; with K that adds up. So every row is carried every
//    8 K-blocks: raw L1 sums at K = 7168 are then 7.8e-4 off in a model of it, every 16 1.1e-3, with classic promotion
//    1.6e-4 (docs/measured.md).
template <class C>
struct Rescale {
    using Shape = TileShape<C>;
    static constexpr u32 kCarryEvery = 8;
    static constexpr f32 kRatioLimit = 1099511627776.0f;   // 2^40

    f32* carry;                                // this thread's column: element i at carry[i * math threads]
    Factors<C> now[Shape::kRowUnits];
    f32 top[Shape::kRowUnits][2] = {};         // largest factor since the row's sum began; infinity: not all finite
    u32 carried = 0;                           // bit 2 * row unit + half: the carry holds something

    MM_DEVICE Rescale(u8* smem, u32 math_thread) : carry(reinterpret_cast<f32*>(smem) + math_thread) {}
    static MM_DEVICE f32 infinity() { return hw::bits_to_f32(0x7f800000u); }
    MM_DEVICE f32* at(u32 unit, u32 i) const { return carry + (unit * Shape::kRegs + i) * (128 * C::kMathWarpgroups); }

    // Brings the unit's accumulators to the new factors; the first K-block only notes them.
    MM_DEVICE void begin(f32 (&acc)[Shape::kUnits][Shape::kRegs], u32 row_unit, const Factors<C>& next, u32 k) {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            f32 largest = 0.0f;
            bool usable = true, finite = true;
#pragma unroll
            for (u32 b = 0; b < Shape::kScaleBlocks; ++b)
#pragma unroll
                for (u32 parity = 0; parity < 2; ++parity) {
                    const f32 size = hw::abs_f32(next.at[half][b][parity]);
                    finite = finite && size < infinity();
                    usable = usable && size > 0.0f && size < infinity() && top[row_unit][half] <= kRatioLimit * size;
                    largest = hw::max_f32(largest, size);
                }
            if (k != 0) {
                const bool keep = usable && k % kCarryEvery != 0;
                if (!keep) flush(acc, row_unit, half);
#pragma unroll
                for (u32 b = 0; b < Shape::kScaleBlocks; ++b)
#pragma unroll
                    for (u32 parity = 0; parity < 2; ++parity) {
                        const f32 ratio = keep ? hw::div_exact(now[row_unit].at[half][b][parity], next.at[half][b][parity]) : 1.0f;
#pragma unroll
                        for (u32 c = 0; c < Shape::kColumnUnits; ++c)
#pragma unroll
                            for (u32 chunk = parity; chunk < Shape::kChunks; chunk += 2)
                                if (Factors<C>::block(c, chunk) == b) {
                                    acc[row_unit * Shape::kColumnUnits + c][4 * chunk + 2 * half] *= ratio;
                                    acc[row_unit * Shape::kColumnUnits + c][4 * chunk + 2 * half + 1] *= ratio;
                                }
                    }
                if (keep) largest = hw::max_f32(largest, top[row_unit][half]);
            }
            top[row_unit][half] = finite ? largest : infinity();
#pragma unroll
            for (u32 b = 0; b < Shape::kScaleBlocks; ++b) {
                now[row_unit].at[half][b][0] = next.at[half][b][0];
                now[row_unit].at[half][b][1] = next.at[half][b][1];
            }
        }
    }

    MM_DEVICE bool has_carry(u32 row_unit, u32 half) const { return carried >> (2 * row_unit + half) & 1; }

    // `use(accumulator, its place in the carry, its sum in natural units)` for each of a row's; `more`: with what was carried.
    template <class Use>
    MM_DEVICE void each_sum(f32 (&acc)[Shape::kUnits][Shape::kRegs], u32 row_unit, u32 half, bool more, const Use& use) const {
#pragma unroll
        for (u32 c = 0; c < Shape::kColumnUnits; ++c)
#pragma unroll
            for (u32 chunk = 0; chunk < Shape::kChunks; ++chunk)
#pragma unroll
                for (u32 i = 2 * half; i < 2 * half + 2; ++i) {
                    const u32 unit = row_unit * Shape::kColumnUnits + c;
                    f32& value = acc[unit][4 * chunk + i];
                    f32* place = at(unit, 4 * chunk + i);
                    const f32 factor = now[row_unit].at[half][Factors<C>::block(c, chunk)][chunk % 2];
                    use(value, place, more ? hw::fma(value, factor, hw::lds_f32(place)) : value * factor);
                }
    }

    MM_DEVICE void flush(f32 (&acc)[Shape::kUnits][Shape::kRegs], u32 row_unit, u32 half) {
        each_sum(acc, row_unit, half, has_carry(row_unit, half), [](f32& value, f32* place, f32 sum) {
            hw::sts_f32(place, sum);
            value = 0.0f;
        });
        carried |= 1u << (2 * row_unit + half);
    }

    // The sums in natural units.
    MM_DEVICE void end(f32 (&acc)[Shape::kUnits][Shape::kRegs], u32 row_unit) const {
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
            each_sum(acc, row_unit, half, has_carry(row_unit, half), [](f32& value, f32*, f32 sum) { value = sum; });
    }
};

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
