// Phase stub: what the device believes about the ABI and the layout, for the host to compare, and one
// flag exchange with every peer.
#pragma once
#include "math.cuh"

namespace megamoe {

template <class C>
MM_DEVICE void write_stub_report(const KernelParams& p, u8* smem) {
    if (p.report == 0) return;
    u64* out = reinterpret_cast<u64*>(p.report);
    const BufferShape shape{p.num_ranks, p.capacity, p.hidden, p.intermediate, p.num_experts, p.topk, p.ring_rows};
    for (u32 r = 0; r < kNumRegions; ++r) hw::st_u64(out + r, region_offset(shape, r));
    u64* words = out + kNumRegions;
    hw::st_u64(words + 0, kAbiVersion);
    hw::st_u64(words + 1, sizeof(KernelParams));
    hw::st_u64(words + 2, pool_rows(shape));
    hw::st_u64(words + 3, region_offset(shape, kNumRegions));   // bytes of the symmetric buffer
    hw::st_u64(words + 4, SharedPlan<C>::bytes(p.hidden, local_experts(p), p.num_ranks));
    hw::st_u64(words + 5, hw::dynamic_smem_bytes());
    hw::st_u64(words + 6, hw::smem_addr(smem) % 1024);
    hw::st_u64(words + 7, hw::num_ctas());
}

}  // namespace megamoe
