// Combine: FP32 sum of a token's slots in ascending slot order, BF16 out. A warp takes 256 columns of one
// token; loads of up to four slots are in flight before the first add.
#pragma once
#include "finish.cuh"

namespace megamoe {

template <class C>
struct Combine {
    static constexpr u32 kColumns = 256, kBatch = 4;
    const KernelParams& p;
    u32 warp, lane;   // math warp, lane

    MM_DEVICE bool slot_used(u32 token, u32 slot) const {
        const i64 id = hw::ld_i64(local_region<i64>(p, kTopkIdx) + token * p.topk + slot);
        return id >= 0 && id < static_cast<i64>(p.num_experts);
    }

    static MM_DEVICE void add(f32 (&sum)[8], const Vec4& v) {
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            sum[2 * i] += hw::bits_to_f32(words[i] << 16);
            sum[2 * i + 1] += hw::bits_to_f32(words[i] & 0xffff0000u);
        }
    }

    MM_DEVICE void sum_columns(u32 token, u32 column) const {
        f32 sum[8] = {};
        const u8* slots = local_region<u8>(p, kCombine);
        for (u32 first = 0; first < p.topk; first += kBatch) {
            Vec4 rows[kBatch];
            bool used[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 slot = first + i;
                used[i] = slot < p.topk && slot_used(token, slot);
                if (used[i]) rows[i] = hw::ld_vec4_streaming(slots + ((static_cast<u64>(slot) * p.capacity + token) * p.hidden + column) * 2);
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                if (used[i]) add(sum, rows[i]);
        }
        hw::st_vec4(reinterpret_cast<u8*>(p.y) + (static_cast<u64>(token) * p.hidden + column) * 2,
                    {hw::cvt_bf16x2(sum[0], sum[1]), hw::cvt_bf16x2(sum[2], sum[3]), hw::cvt_bf16x2(sum[4], sum[5]), hw::cvt_bf16x2(sum[6], sum[7])});
    }

    MM_DEVICE void run() const {
        const u32 pieces = ceil_div(p.hidden, kColumns), items = p.num_tokens * pieces;
        const u32 warps = C::kMathWarpgroups * 4;
        for (u32 item = warp * hw::num_ctas() + hw::cta_idx(); item < items; item += hw::num_ctas() * warps) {
            const u32 column = item % pieces * kColumns + lane * 8;
            if (column < p.hidden) sum_columns(item / pieces, column);
        }
    }
};

}  // namespace megamoe
