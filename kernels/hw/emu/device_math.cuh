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
MM_DEVICE u32 log2_ceil(u32 v) { return v == 1 ? 0 : 32 - static_cast<u32>(__builtin_clz(v - 1)); }
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

// FP16: nearest even, subnormals kept, beyond 65504 infinity, NaN to 0x7FFF.
MM_DEVICE u32 emu_f16(f32 x) {
    const u32 bits = f32_to_bits(x), sign = bits >> 16 & 0x8000u, mag = bits & 0x7FFFFFFFu;
    if (mag > 0x7F800000u) return 0x7FFFu;
    if (mag >= 0x47800000u) return sign | 0x7C00u;
    if (mag >= 0x38800000u) return sign | ((mag - 0x38000000u + 0xFFFu + (mag >> 13 & 1u)) >> 13);   // a carry may reach infinity
    return sign | (f32_to_bits(bits_to_f32(mag) + 0.5f) - f32_to_bits(0.5f));   // multiples of 2^-24: the low bits of the sum
}
MM_DEVICE f32 emu_from_f16(u32 half) {
    const u32 sign = (half & 0x8000u) << 16, mag = half & 0x7FFFu;
    if (mag >= 0x7C00u) return bits_to_f32(sign | 0x7F800000u | (mag & 0x3FFu) << 13);
    const f32 size = mag < 0x400u ? static_cast<f32>(mag) * 0x1p-24f : bits_to_f32((mag << 13) + 0x38000000u);
    return bits_to_f32(sign | f32_to_bits(size));
}
MM_DEVICE u32 cvt_f16x2(f32 lo, f32 hi) { return emu_f16(lo) | emu_f16(hi) << 16; }
MM_DEVICE f32 f16_low(u32 pair) { return emu_from_f16(pair & 0xFFFFu); }
MM_DEVICE f32 f16_high(u32 pair) { return emu_from_f16(pair >> 16); }
// The sum is exact in FP64 (unless the two are 2^40 apart); its FP32 rounding is made odd, so that rounding it again is rounding once.
MM_DEVICE u32 emu_fma_f16(u32 a, u32 b, u32 c) {
    const double exact = static_cast<double>(emu_from_f16(a)) * static_cast<double>(emu_from_f16(b)) + static_cast<double>(emu_from_f16(c));
    f32 rounded = static_cast<f32>(exact);
    if (exact == exact && static_cast<double>(rounded) != exact && !(f32_to_bits(rounded) & 1u)) {
        const bool up = static_cast<double>(rounded) < exact;
        rounded = bits_to_f32(f32_to_bits(rounded) + (up == (rounded > 0.0f) ? 1u : ~0u));
    }
    return emu_f16(rounded);
}
MM_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return emu_fma_f16(a & 0xFFFFu, b & 0xFFFFu, c & 0xFFFFu) | emu_fma_f16(a >> 16, b >> 16, c >> 16) << 16;
}

MM_DEVICE u32 add_f16x2(u32 a, u32 b) { return fma_f16x2(a, 0x3C003C00u, b); }

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
