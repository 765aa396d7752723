// The arithmetic of wgmma m64nNk32 e4m3 on host vectors. A product of two e4m3 values is exact in FP32, so fused
// and separate multiply-adds agree and every host gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "async.h"

namespace megamoe::emu {

namespace {

struct Table {
    float value[256];
    Table() {
        for (u32 code = 0; code < 256; ++code) {
            const u32 exponent = (code >> 3) & 15u, mantissa = code & 7u;
            float v = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                    : static_cast<float>(8 + mantissa) * 0x1p-10f * static_cast<float>(1u << exponent);
            if ((code & 0x7Fu) == 0x7Fu) v = __builtin_nanf("");
            value[code] = code & 0x80u ? -v : v;
        }
    }
};
const Table kTable;

typedef float Vec8 __attribute__((vector_size(32), aligned(4)));

// Four rows by two vectors of accumulators stay in registers over all of k.
inline __attribute__((always_inline)) void multiply(float* acc, const float* a, const float* b, u32 n) {
    constexpr u32 kRows = 4, kVecs = 2;
    for (u32 column = 0; column < n; column += 8 * kVecs) {
        for (u32 row = 0; row < 64; row += kRows) {
            Vec8 sum[kRows][kVecs];
            for (u32 i = 0; i < kRows; ++i)
                for (u32 j = 0; j < kVecs; ++j) sum[i][j] = *reinterpret_cast<const Vec8*>(acc + (row + i) * n + column + 8 * j);
            for (u32 k = 0; k < 32; ++k) {
                Vec8 right[kVecs];
                for (u32 j = 0; j < kVecs; ++j) right[j] = *reinterpret_cast<const Vec8*>(b + k * n + column + 8 * j);
                for (u32 i = 0; i < kRows; ++i) {
                    const float left = a[(row + i) * 32 + k];
                    for (u32 j = 0; j < kVecs; ++j) sum[i][j] += left * right[j];
                }
            }
            for (u32 i = 0; i < kRows; ++i)
                for (u32 j = 0; j < kVecs; ++j) *reinterpret_cast<Vec8*>(acc + (row + i) * n + column + 8 * j) = sum[i][j];
        }
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void multiply_avx2(float* acc, const float* a, const float* b, u32 n) { multiply(acc, a, b, n); }
#endif

}  // namespace

const float* const kE4m3Values = kTable.value;

void gemm_m64k32(float* acc, const float* a, const float* b, u32 n) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (wide) {
        multiply_avx2(acc, a, b, n);
        return;
    }
#endif
    multiply(acc, a, b, n);
}

float sum_k32_truncated(float acc, const float* a, const float* b, u32 step, u32 bits) {
    float term[33];
    term[32] = acc;
    float largest = std::fabs(acc), plain = acc;
    for (u32 k = 0; k < 32; ++k) {
        term[k] = a[k] * b[k * step];
        largest = std::max(largest, std::fabs(term[k]));
        plain += term[k];
    }
    if (!std::isfinite(plain) || largest == 0.0f) return plain;  // NaN and infinity have no bits to keep
    // Powers of two and integers below 2^24: everything up to the last line is exact.
    const int unit = std::ilogb(largest) - static_cast<int>(bits);
    const double up = std::ldexp(1.0, -unit);
    i64 total = 0;
    for (const float t : term) total += static_cast<i64>(static_cast<double>(t) * up);  // a cast drops the fraction
    u64 size = static_cast<u64>(total < 0 ? -total : total);
    u32 drop = 0;  // what FP32 cannot hold goes too, toward zero as the rest
    while (size >> drop >> 24) ++drop;
    size = size >> drop << drop;
    return static_cast<float>(std::copysign(std::ldexp(static_cast<double>(size), unit), static_cast<double>(total)));
}

void gemm_m64k32_truncated(float* acc, const float* a, const float* b, u32 n, u32 bits) {
    for (u32 row = 0; row < 64; ++row)
        for (u32 column = 0; column < n; ++column)
            acc[row * n + column] = sum_k32_truncated(acc[row * n + column], a + row * 32, b + column, n, bits);
}

}  // namespace megamoe::emu
