// Positions in mbarrier rings, and the barriers of a CTA by name.
#pragma once
#include "trace.cuh"
#include "wait.cuh"
#include "../layout/shared_plan.cuh"

namespace megamoe {

// Slot and parity of the n-th use of a ring of kDepth barriers, in one register.
template <u32 kDepth>
struct RingCursor {
    u32 bits = 0;   // slot | parity << 8
    MM_DEVICE u32 slot() const { return bits & 0xff; }
    MM_DEVICE u32 parity() const { return bits >> 8; }
    MM_DEVICE void advance() { bits = slot() + 1 == kDepth ? (bits & 0x100) ^ 0x100 : bits + 1; }
};

template <class C>
MM_DEVICE Tile read_tile(u8* smem, const RingCursor<kTileSlots>& at) {
    return Tile::unpacked(hw::lds_vec4(smem + SharedPlan<C>::kRing + at.slot() * kTileBytes));
}

// Named barriers (0 is the CTA's).
enum BarrierId : u32 { kBarDispatch = 1, kBarMath = 2, kBarWarpgroup0 = 3, kBarWarpgroup1 = 4, kBarFinish = 5 };

template <class C>
struct CtaBarriers {
    static constexpr u32 kMathWarps = 4 * C::kMathWarpgroups;
    u64* base;
    MM_DEVICE explicit CtaBarriers(u8* smem) : base(reinterpret_cast<u64*>(smem + SharedPlan<C>::kBarriers)) {}
    MM_DEVICE u64* stage_full(u32 s) const { return base + s; }
    MM_DEVICE u64* stage_empty(u32 s) const { return base + C::kStages + s; }
    MM_DEVICE u64* tile_full(u32 s) const { return base + 2 * C::kStages + s; }
    MM_DEVICE u64* tile_empty(u32 s) const { return base + 2 * C::kStages + kTileSlots + s; }
    MM_DEVICE u64* pull(u32 i) const { return base + 2 * C::kStages + 2 * kTileSlots + i; }
    MM_DEVICE u64* tables() const { return base + 2 * C::kStages + 2 * kTileSlots + SharedPlan<C>::kNumPull; }

    // One thread, before a CTA barrier.
    MM_DEVICE void init() const {
        for (u32 s = 0; s < C::kStages; ++s) {
            hw::mbarrier_init(stage_full(s), 2);                          // A loader, B loader
            hw::mbarrier_init(stage_empty(s), C::kCluster * kMathWarps);  // one lane of each math warp: a stage is loaded by both CTAs of a pair
        }
        for (u32 s = 0; s < kTileSlots; ++s) {
            hw::mbarrier_init(tile_full(s), 1);                           // scheduler
            // A loader and math warps; in a pair those of both CTAs, and the other's weight loader (used in CTA 0 only).
            hw::mbarrier_init(tile_empty(s), C::kCluster * (1 + kMathWarps) + C::kCluster - 1);
        }
        for (u32 i = 0; i < SharedPlan<C>::kNumPull; ++i) hw::mbarrier_init(pull(i), 1);
        hw::mbarrier_init(tables(), 1);
        hw::fence_mbarrier_init();
    }
};

// Tile ring, consumer side. The slot, with the side data of the tile's rows, stays valid until the consumer
// arrives on tile_empty.
template <class C>
MM_DEVICE void await_tile(const KernelParams& p, const CtaBarriers<C>& bars, const RingCursor<kTileSlots>& at) {
    mbarrier_wait<(C::kCluster > 1)>(p, bars.tile_full(at.slot()), at.parity(), kWaitTileFull, at.slot());
}
template <class C>
MM_DEVICE Tile wait_tile(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const RingCursor<kTileSlots>& at) {
    await_tile<C>(p, bars, at);
    return read_tile<C>(smem, at);
}

// What the epilogue of the tile at a ring position needs of its rows: routing weights (L1) or metadata (L2).
template <class C>
MM_DEVICE u8* side_data(u8* smem, const RingCursor<kTileSlots>& at) {
    return smem + SharedPlan<C>::kSide + at.slot() * SharedPlan<C>::kSideBytes;
}

// All lanes of a math warp, after a warp_sync: the warp has read the stage. Both CTAs of a pair load into it.
template <class C>
MM_DEVICE void release_stage(const CtaBarriers<C>& bars, u32 slot, u32 lane) {
    if constexpr (C::kCluster == 1) {
        if (lane == 0) hw::mbarrier_arrive(bars.stage_empty(slot));
    } else {
        if (lane < C::kCluster) hw::mbarrier_arrive_cluster(bars.stage_empty(slot), lane);
    }
}
// All lanes of a math warp: it has read the stage for the last time.
template <class C>
MM_DEVICE void finish_stage(const CtaBarriers<C>& bars, u32 slot, u32 lane) {
    hw::warp_sync();
    release_stage<C>(bars, slot, lane);
}
// Nothing is read that the other CTA stored, so no acquire at cluster scope.
template <class C>
MM_DEVICE void wait_stage_empty(const KernelParams& p, const CtaBarriers<C>& bars, const RingCursor<C::kStages>& stage) {
    mbarrier_wait(p, bars.stage_empty(stage.slot()), stage.parity() ^ 1, kWaitStageEmpty, stage.slot());
}

// One thread: the tile's slot is no longer needed by its role or warp. The scheduler waits in CTA 0.
template <class C>
MM_DEVICE void release_tile(const CtaBarriers<C>& bars, u32 slot) {
    if constexpr (C::kCluster == 1) hw::mbarrier_arrive(bars.tile_empty(slot));
    else hw::mbarrier_arrive_cluster(bars.tile_empty(slot), 0);
}

// Clusters of a launch, and this CTA's place. Both CTAs of a pair work on the same weights and neighbouring row blocks.
template <class C> MM_DEVICE u32 cluster_idx() { return hw::cta_idx() / C::kCluster; }
template <class C> MM_DEVICE u32 num_clusters() { return hw::num_ctas() / C::kCluster; }
template <class C> MM_DEVICE u32 cta_in_cluster() { return C::kCluster == 1 ? 0 : hw::cluster_cta_rank(); }

}  // namespace megamoe
