// Combine: FP32 sum of a token's slots in ascending slot order, BF16 out. A warp takes 512 columns of one
// token, two 16-byte words a lane; the loads of up to eight slots of both are in flight before the first add
// (HBM needs about 48 KB in flight per SM).
#pragma once
#include "finish.cuh"

namespace megamoe {

template <class C>
struct Combine {
    static constexpr u32 kPieces = 2, kColumns = kPieces * 256, kBatch = 8;
    const KernelParams& p;
    u32 warp, lane;   // math warp, lane

    // Bit k: slot k of the token counts. Lanes look at one slot each.
    MM_DEVICE u32 used_slots(u32 token) const {
        i64 id = -1;
        if (lane < p.topk) id = hw::ld_i64(local_region<i64>(p, kTopkIdx) + token * p.topk + lane);
        return hw::ballot(id >= 0 && id < static_cast<i64>(p.num_experts));
    }

    static MM_DEVICE void add(f32 (&sum)[8], const Vec4& v) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] += hw::bits_to_f32(words[i] << 16);
            sum[2 * i + 1] += hw::bits_to_f32(words[i] & 0xffff0000u);
        }
    }

    // Columns past H (the last piece may overhang) are read from the row's start instead and not stored.
    MM_DEVICE void sum_columns(u32 token, u32 column, u32 used) const {
        f32 sum[kPieces][8] = {};
        const u8* base = local_region<u8>(p, kCombine) + static_cast<u64>(token) * p.hidden * 2;
        const u64 slot_stride = static_cast<u64>(p.capacity) * p.hidden * 2;
        u32 at[kPieces];
#pragma unroll
        for (u32 c = 0; c < kPieces; ++c) at[c] = column + 256 * c < p.hidden ? (column + 256 * c) * 2 : 0;
        for (u32 first = 0; first < p.topk; first += kBatch) {
            Vec4 rows[kBatch][kPieces];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                if (used >> (first + i) & 1)
#pragma unroll
                    for (u32 c = 0; c < kPieces; ++c) rows[i][c] = hw::ld_vec4_streaming(base + (first + i) * slot_stride + at[c]);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                if (used >> (first + i) & 1)
#pragma unroll
                    for (u32 c = 0; c < kPieces; ++c) add(sum[c], rows[i][c]);
        }
        u8* out = reinterpret_cast<u8*>(p.y) + static_cast<u64>(token) * p.hidden * 2;
#pragma unroll
        for (u32 c = 0; c < kPieces; ++c) {
            const f32(&v)[8] = sum[c];
            if (column + 256 * c < p.hidden)
                hw::st_vec4(out + (column + 256 * c) * 2, {hw::cvt_bf16x2(v[0], v[1]), hw::cvt_bf16x2(v[2], v[3]),
                                                           hw::cvt_bf16x2(v[4], v[5]), hw::cvt_bf16x2(v[6], v[7])});
        }
    }

    MM_DEVICE void run() const {
        const u32 pieces = ceil_div(p.hidden, kColumns), items = p.num_tokens * pieces;
        const u32 step = hw::num_ctas() * C::kMathWarpgroups * 4;
        u32 item = warp * hw::num_ctas() + hw::cta_idx();
        u32 used = item < items ? used_slots(item / pieces) : 0;
        while (item < items) {
            const u32 next = item + step, token = item / pieces;
            const u32 next_used = next < items ? used_slots(next / pieces) : 0;   // its latency under this item's loads
            sum_columns(token, item % pieces * kColumns + lane * 8, used);
            item = next;
            used = next_used;
        }
    }
};

}  // namespace megamoe
