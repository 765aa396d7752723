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
    const Vec4 v = hw::lds_vec4(smem + SharedPlan<C>::kRing + at.slot() * kTileBytes);
    return {v.x, v.y, v.z, v.w};
}

// Named barriers (0 is the CTA's).
enum BarrierId : u32 { kBarDispatch = 1, kBarMath = 2, kBarWarpgroup0 = 3, kBarWarpgroup1 = 4, kBarFinish = 5 };

template <class C>
struct CtaBarriers {
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
            hw::mbarrier_init(stage_empty(s), 4 * C::kMathWarpgroups);    // one lane of each math warp
        }
        for (u32 s = 0; s < kTileSlots; ++s) {
            hw::mbarrier_init(tile_full(s), 1);                           // scheduler
            hw::mbarrier_init(tile_empty(s), 1 + 4 * C::kMathWarpgroups); // A loader, math warps
        }
        for (u32 i = 0; i < SharedPlan<C>::kNumPull; ++i) hw::mbarrier_init(pull(i), 1);
        hw::mbarrier_init(tables(), 1);
        hw::fence_mbarrier_init();
    }
};

// Tile ring, consumer side. The slot, with the side data of the tile's rows, stays valid until the consumer
// arrives on tile_empty.
template <class C>
MM_DEVICE Tile wait_tile(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const RingCursor<kTileSlots>& at) {
    mbarrier_wait(p, bars.tile_full(at.slot()), at.parity(), kWaitTileFull, at.slot());
    return read_tile<C>(smem, at);
}

}  // namespace megamoe
