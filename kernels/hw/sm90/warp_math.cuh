// Warp collectives and conversions (PTX ISA 9.7.9.6, 9.7.13.8-12, 9.7.9.21, 9.7.3).
#pragma once
#include "../types.cuh"

namespace megamoe::hw {

MM_DEVICE u32 shfl(u32 v, u32 lane) { return __shfl_sync(0xffffffffu, v, lane); }
MM_DEVICE u32 shfl_xor(u32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
MM_DEVICE u32 shfl_up(u32 v, u32 delta) { return __shfl_up_sync(0xffffffffu, v, delta); }
MM_DEVICE f32 shfl_xor_f32(f32 v, u32 mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
MM_DEVICE u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
MM_DEVICE u32 popcount(u32 v) { return __popc(v); }
MM_DEVICE bool all(bool p) { return __all_sync(0xffffffffu, p); }
MM_DEVICE bool any(bool p) { return __any_sync(0xffffffffu, p); }

// elect.sync (9.7.13.14): one lane of the full warp; which one is unspecified but stable.
MM_DEVICE bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// Approximate base-2 exponential and reciprocal (ex2.approx.f32, rcp.approx.ftz.f32).
MM_DEVICE f32 exp2_approx(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
MM_DEVICE f32 rcp_approx(f32 x) {
    f32 y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// IEEE division and exponential, for fast_math = false.
MM_DEVICE f32 div_exact(f32 a, f32 b) { return __fdiv_rn(a, b); }
MM_DEVICE f32 exp_exact(f32 x) { return expf(x); }
MM_DEVICE f32 fma(f32 a, f32 b, f32 c) { return __fmaf_rn(a, b, c); }

// Two f32 to e4m3, round to nearest even, saturating to +-448, NaN kept (cvt.rn.satfinite.e4m3x2.f32).
// `lo` lands in the low byte.
MM_DEVICE u16 cvt_e4m3x2(f32 lo, f32 hi) {
    u16 v;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(hi), "f"(lo));
    return v;
}
// Two f32 to bf16, round to nearest even; `lo` lands in the low half (cvt.rn.bf16x2.f32).
MM_DEVICE u32 cvt_bf16x2(f32 lo, f32 hi) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(hi), "f"(lo));
    return v;
}
// min.NaN / max.NaN.f32: a NaN operand makes the result NaN (9.7.3.11-12).
MM_DEVICE f32 min_nan(f32 a, f32 b) {
    f32 y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
MM_DEVICE f32 max_nan(f32 a, f32 b) {
    f32 y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
// max.f32: NaN counts as nothing. The magnitude of either operand costs no instruction.
MM_DEVICE f32 max_f32(f32 a, f32 b) { return fmaxf(a, b); }
MM_DEVICE f32 abs_f32(f32 v) { return fabsf(v); }
// A value that is the same in all lanes (the emulator checks it), told to the compiler: what is derived from it moves to the uniform
// datapath, and a branch on it keeps the warp together. `redux` writes a uniform register; a shuffle does not.
MM_DEVICE u32 uniform(u32 v) { return __reduce_or_sync(0xffffffffu, v); }

MM_DEVICE f32 bits_to_f32(u32 v) { return __uint_as_float(v); }
MM_DEVICE u32 f32_to_bits(f32 v) { return __float_as_uint(v); }

// prmt (9.7.7.7): picks bytes of {b, a} by the selector's nibbles.
MM_DEVICE u32 byte_perm(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

}  // namespace megamoe::hw
