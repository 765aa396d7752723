// Conversions and approximate arithmetic of hw/sm90/warp_math.cuh in portable C++. The approximate functions are
// correctly rounded here, so they differ from the hardware's in the last bits.
#pragma once
#include "../types.cuh"

namespace megamoe::hw {

MM_DEVICE f32 bits_to_f32(u32 v) {
    f32 f;
    __builtin_memcpy(&f, &v, 4);
    return f;
}
MM_DEVICE u32 f32_to_bits(f32 v) {
    u32 b;
    __builtin_memcpy(&b, &v, 4);
    return b;
}

// .ftz: subnormal inputs and results become zero of the same sign.
MM_DEVICE f32 emu_flush(f32 x) {
    const u32 b = f32_to_bits(x);
    return (b & 0x7F800000u) == 0 ? bits_to_f32(b & 0x80000000u) : x;
}
MM_DEVICE f32 exp2_approx(f32 x) { return emu_flush(__builtin_exp2f(emu_flush(x))); }
MM_DEVICE f32 rcp_approx(f32 x) { return emu_flush(1.0f / emu_flush(x)); }
MM_DEVICE f32 div_exact(f32 a, f32 b) { return a / b; }
MM_DEVICE f32 exp_exact(f32 x) { return __builtin_expf(x); }
MM_DEVICE f32 min_nan(f32 a, f32 b) { return a != a ? a : b != b ? b : b < a ? b : a; }
MM_DEVICE f32 max_nan(f32 a, f32 b) { return a != a ? a : b != b ? b : b > a ? b : a; }
MM_DEVICE f32 max_f32(f32 a, f32 b) { return __builtin_fmaxf(a, b); }
MM_DEVICE f32 abs_f32(f32 v) { return __builtin_fabsf(v); }
MM_DEVICE u32 popcount(u32 v) { return static_cast<u32>(__builtin_popcount(v)); }
MM_DEVICE f32 fma(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }

// One f32 to e4m3: nearest even, saturating to +-448, NaN to 0x7F.
MM_DEVICE u8 emu_e4m3(f32 x) {
    const u32 bits = f32_to_bits(x);
    const u32 sign = (bits >> 24) & 0x80u, mag = bits & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) return 0x7F;
    if (mag >= 0x43E80000u) return static_cast<u8>(sign | 0x7E);  // >= 464 rounds past 448; saturate
    if (mag < 0x3C800000u) {                                      // below 2^-6: multiples of 2^-9
        const f32 scaled = bits_to_f32(mag) * 512.0f;
        u32 q = static_cast<u32>(scaled);
        const f32 rest = scaled - static_cast<f32>(q);
        if (rest > 0.5f || (rest == 0.5f && (q & 1u))) ++q;
        return static_cast<u8>(sign | q);                         // q = 8 is the smallest normal number
    }
    const u32 rounded = mag + 0x7FFFFu + ((mag >> 20) & 1u);      // keep 3 mantissa bits
    const u32 code = (rounded >> 20) - (120u << 3);               // exponent bias 127 -> 7
    return static_cast<u8>(sign | (code > 0x7Eu ? 0x7Eu : code));
}
MM_DEVICE u16 cvt_e4m3x2(f32 lo, f32 hi) { return static_cast<u16>(emu_e4m3(lo) | (emu_e4m3(hi) << 8)); }

MM_DEVICE u32 emu_bf16(f32 x) {
    const u32 b = f32_to_bits(x);
    if ((b & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFFu;
    return (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
}
MM_DEVICE u32 cvt_bf16x2(f32 lo, f32 hi) { return emu_bf16(lo) | (emu_bf16(hi) << 16); }

// prmt: nibble bits 0-2 pick a byte of {b, a}; bit 3 replicates its sign.
MM_DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) {
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 out = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 nibble = (selector >> (4 * i)) & 0xFu;
        u32 byte = static_cast<u32>(both >> (8 * (nibble & 7u))) & 0xFFu;
        if (nibble & 8u) byte = (byte & 0x80u) ? 0xFFu : 0u;
        out |= byte << (8 * i);
    }
    return out;
}

}  // namespace megamoe::hw
