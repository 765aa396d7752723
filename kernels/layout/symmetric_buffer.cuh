// Where things lie in a symmetric buffer. The host passes offsets in KernelParams; the formulae here
// are the second, independent statement of them that the stub phase compares.
#pragma once
#include "params.cuh"

namespace megamoe {

MM_HOST_DEVICE constexpr u64 round_up(u64 x, u64 a) { return (x + a - 1) / a * a; }
MM_HOST_DEVICE constexpr u32 ceil_div(u32 x, u32 d) { return (x + d - 1) / d; }

struct BufferShape {
    u32 ranks, capacity, hidden, intermediate, experts, topk;
    u32 ring_rows = 0;   // 0: the whole pool
};

// Pool rows: every row a rank can receive, and each expert's segment rounded up to 128.
// K, not min(K, E_l): duplicate experts within a token are legal.
MM_HOST_DEVICE constexpr u64 pool_rows(const BufferShape& s) {
    const u64 worst = static_cast<u64>(s.ranks) * s.capacity * s.topk;
    return round_up(worst + static_cast<u64>(s.experts / s.ranks) * (kTokenAlignment - 1), kTokenAlignment);
}

MM_HOST_DEVICE constexpr u64 region_bytes(const BufferShape& s, u32 region) {
    const u64 p = pool_rows(s), local = s.experts / s.ranks;
    const u64 ring = s.ring_rows ? s.ring_rows : p;
    const u64 c = s.capacity, h = s.hidden, i = s.intermediate, k = s.topk;
    switch (region) {
        case kControl: return 256 * 4;
        case kCountFlag: return kMaxRanks * 4;
        case kDoneFlag: return kMaxRanks * 4;
        case kRecvCount: return 2 * s.ranks * local * 4;
        case kRecvList: return s.ranks * c * k * 4;
        case kSendCount: return 2ull * s.experts * 4;
        case kL1Arrival: return 2 * (p / kArrivalGranularity) * 4;
        case kL2Arrival: return 2 * (p / kArrivalGranularity) * 4;
        case kPoolFree: return 2 * (p / kTokenAlignment) * 4;
        case kRecvCountSum: return local * 4;
        case kMetadata: return ring * 3 * 4;
        case kX: return c * h;
        case kXSf: return c * (h / 128) * 4;
        case kTopkIdx: return c * k * 8;
        case kTopkWeights: return c * k * 4;
        case kL1Acts: return ring * h;
        case kL1ActsSf: return (h / 128) * ring * 4;
        case kL1TopkWeights: return ring * 4;
        case kL2Acts: return ring * i;
        case kL2ActsSf: return (i / 128) * ring * 4;
        case kCombine: return k * c * h * 2;
        default: return 0;
    }
}

MM_HOST_DEVICE constexpr u64 region_offset(const BufferShape& s, u32 region) {
    u64 offset = 0;
    for (u32 r = 0; r < region; ++r) offset += round_up(region_bytes(s, r), 1024);
    return offset;
}

template <class T> MM_DEVICE T* peer_region(const KernelParams& p, u32 rank, Region region) {
    return reinterpret_cast<T*>(p.peer_base[rank] + p.region[region]);
}
template <class T> MM_DEVICE T* local_region(const KernelParams& p, Region region) {
    return reinterpret_cast<T*>(p.local_base + p.region[region]);
}
MM_DEVICE u32* control_word(const KernelParams& p, ControlWord word) {
    return local_region<u32>(p, kControl) + word;
}
// Counters of a bank; launch `epoch` uses bank epoch & 1.
MM_DEVICE u32* arrival_bank(const KernelParams& p, Region region, u32 bank) {
    return local_region<u32>(p, region) + bank * (p.pool_rows / kArrivalGranularity);
}
MM_DEVICE u32* pool_free_bank(const KernelParams& p, u32 bank) {
    return local_region<u32>(p, kPoolFree) + bank * (p.pool_rows / kTokenAlignment);
}
MM_DEVICE bool pool_is_ring(const KernelParams& p) { return p.ring_rows < p.pool_rows; }
MM_DEVICE u32* tile_counter(const KernelParams& p, u32 bank) {
    return local_region<u32>(p, kControl) + kTileCounter + 32 * bank;
}
MM_DEVICE u32* send_count_bank(const KernelParams& p, u32 epoch) {
    return local_region<u32>(p, kSendCount) + (epoch & 1) * p.num_experts;
}
MM_DEVICE u32 local_experts(const KernelParams& p) { return p.num_experts / p.num_ranks; }

}  // namespace megamoe
