// What the in-place main loop (packed_rescale.cuh) must know of a row's scales along K before it begins.
#pragma once
#include "../layout/symmetric_buffer.cuh"
#include "../hw/hw.cuh"

namespace megamoe {

// Smallest and largest of positive scales, by their bits; anything else is larger than all of them.
struct ScaleRange {
    u32 low = ~0u, high = 0;
    MM_DEVICE void add(f32 scale) {
        const u32 bits = hw::f32_to_bits(scale);
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
    }
    // With those of all lanes of the warp.
    MM_DEVICE void join() {
        low = hw::warp_min(low);
        high = hw::warp_max(high);
    }
    // Within 2^(spread + 1) of each other and 2^-below .. 2^above.
    MM_DEVICE bool near(u32 spread, u32 below, u32 above) const {
        return (high >> 23) - (low >> 23) <= spread && low >> 23 >= 127 - below && high >> 23 < 127 + above;
    }
    MM_DEVICE u32 exponent() const { return high >> 23 & 0xff; }   // the largest is below 2^(exponent() - 126)
};

// A row of the pool, in kRowKind. Both words are written when the row is pulled; L1's tiles, which read the first while others are
// done already, count themselves in the second.
struct RowKind {
    static constexpr u32 kIrregular = 0x100;
    u32 word;   // L1: exponent of the largest input scale | irregular. L2: L1 tiles that make the row irregular
    static MM_DEVICE RowKind of(const ScaleRange& inputs) { return {inputs.exponent() | (inputs.near(8, 60, 40) ? 0 : kIrregular)}; }
    MM_DEVICE u32 exponent() const { return word & 0xff; }
    MM_DEVICE bool regular(bool l1) const { return l1 ? word < kIrregular : word == 0; }
};

// Scales between the two products are at least 1e-10 / 448; beyond this they are too far from it.
constexpr f32 kRegularL2Scale = 256.0f;

}  // namespace megamoe
