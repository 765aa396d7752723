// Combine: FP32 sum of a token's slots in ascending slot order, BF16 out. A warp takes 256 columns of one
// token; the loads of up to eight slots are in flight before the first add.
#pragma once
#include "finish.cuh"

namespace megamoe {

template <class C>
struct Combine {
    static constexpr u32 kColumns = 256, kBatch = 8;
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

    // Columns past H (the last piece of an odd H) are read within the row's end and not stored.
    MM_DEVICE void sum_columns(u32 token, u32 column, u32 used) const {
        f32 sum[8] = {};
        const u8* row = local_region<u8>(p, kCombine) + (static_cast<u64>(token) * p.hidden + (column < p.hidden ? column : 0)) * 2;
        const u64 slot_stride = static_cast<u64>(p.capacity) * p.hidden * 2;
        for (u32 first = 0; first < p.topk; first += kBatch) {
            Vec4 rows[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                if (used >> (first + i) & 1) rows[i] = hw::ld_vec4_streaming(row + (first + i) * slot_stride);
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i)
                if (used >> (first + i) & 1) add(sum, rows[i]);
        }
        if (column < p.hidden)
            hw::st_vec4(reinterpret_cast<u8*>(p.y) + (static_cast<u64>(token) * p.hidden + column) * 2,
                        {hw::cvt_bf16x2(sum[0], sum[1]), hw::cvt_bf16x2(sum[2], sum[3]), hw::cvt_bf16x2(sum[4], sum[5]), hw::cvt_bf16x2(sum[6], sum[7])});
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
