// Math warpgroups: the main loop of a tile. Each of the two warpgroups owns 128 of its 256 columns and
// all its rows: one or two M64N128 products per K-block over one scratch accumulator, promoted into FP32
// right away. The other warpgroup's products run under the promotion.
#pragma once
#include "../mma/kblock.cuh"
#include "load_acts.cuh"

namespace megamoe {

template <class C>
struct MathThread {
    static constexpr u32 kSubTiles = SharedPlan<C>::kARows / 64;
    u32 warpgroup, thread;   // thread within the warpgroup
    Fragment fragment;
    MM_DEVICE explicit MathThread(u32 math_thread) : warpgroup(math_thread / 128), thread(math_thread % 128), fragment(math_thread % 128) {}
    MM_DEVICE u32 lane() const { return thread % 32; }
    MM_DEVICE u32 quad_lane() const { return thread % 4; }
    MM_DEVICE void sync_warpgroup() const { hw::bar_sync(kBarWarpgroup0 + warpgroup, 128); }
    static MM_DEVICE void sync_math() { hw::bar_sync(kBarMath, C::kMathWarpgroups * 128); }
};

// Weight scales of this warpgroup's columns along K: even and odd 8-column chunks.
struct ColumnScales {
    const f32 *even, *odd;
};
template <class C>
MM_DEVICE ColumnScales column_scales(const KernelParams& p, const Tile& tile, u32 warpgroup) {
    const u32 h_blocks = p.hidden / 128, i_blocks = p.intermediate / 128;
    ColumnScales s;
    if (tile.kind() == kTileL1) {   // tile n holds gate and up rows 128n .. 128n+127
        const f32* base = reinterpret_cast<const f32*>(p.w13_sf) + static_cast<u64>(tile.expert) * 2 * i_blocks * h_blocks;
        s.even = base + static_cast<u64>(tile.n) * h_blocks;
        s.odd = base + static_cast<u64>(i_blocks + tile.n) * h_blocks;
    } else {
        const u32 block = tile.n * 2 + warpgroup;   // past the end when the tile overhangs: any scale will do
        const f32* base = reinterpret_cast<const f32*>(p.w2_sf) + static_cast<u64>(tile.expert) * h_blocks * i_blocks;
        s.even = base + static_cast<u64>(block < h_blocks ? block : h_blocks - 1) * i_blocks;
        s.odd = s.even;
    }
    return s;
}

template <class C>
MM_DEVICE void main_loop(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const Tile& tile, const MathThread<C>& me,
                         RingCursor<C::kStages>& stage, f32 (&acc)[MathThread<C>::kSubTiles][64], Trace<C::kTrace>& trace) {
    using Plan = SharedPlan<C>;
    constexpr u32 kSubTiles = MathThread<C>::kSubTiles;
    const u32 num_k = (tile.kind() == kTileL1 ? p.hidden : p.intermediate) / 128;
    const ColumnScales scales = column_scales<C>(p, tile, me.warpgroup);
    const bool second = kSubTiles > 1 && tile.valid() > 64;   // rows 64.. exist: otherwise skip their half
    const u8* sfa_rows = smem + Plan::kSfa + me.fragment.row * 4;
    const u32 b_offset = Plan::kB + me.warpgroup * 128 * 128;

#pragma unroll
    for (u32 s = 0; s < kSubTiles; ++s)
#pragma unroll
        for (u32 i = 0; i < 64; ++i) acc[s][i] = 0.0f;

    f32 scratch[64];
    f32 next_even = hw::ld_nc_f32(scales.even), next_odd = hw::ld_nc_f32(scales.odd);
#pragma unroll 1
    for (u32 k = 0; k < num_k; ++k) {
        const f32 even = next_even, odd = next_odd;
        if (k + 1 < num_k) {
            next_even = hw::ld_nc_f32(scales.even + k + 1);
            next_odd = hw::ld_nc_f32(scales.odd + k + 1);
        }
        // Everything that does not need the data comes before the wait.
        const u32 slot = hw::uniform(stage.slot());
        const u64 desc_a = hw::smem_descriptor(smem + Plan::kA + slot * Plan::kABytes);
        const u64 desc_b = hw::smem_descriptor(smem + b_offset + slot * Plan::kBBytes);
        const f32* sfa = reinterpret_cast<const f32*>(sfa_rows + slot * Plan::kSfaBytes);
        trace.lap(kTraceMain);
        mbarrier_wait(p, bars.stage_full(slot), stage.parity(), kWaitStageFull, slot);
        trace.lap(kTraceStageWait);
#pragma unroll
        for (u32 s = 0; s < kSubTiles; ++s) {
            if (s > 0 && !second) break;
            issue_kblock(scratch, desc_a + s * 64 * 128 / 16, desc_b);
            const u32 row = s * 64 + me.fragment.row;
            const f32 lo = C::kBlockM >= 64 || row < C::kBlockM ? hw::lds_f32(sfa + s * 64) : 0.0f;
            const f32 hi = C::kBlockM >= 64 || row + 8 < C::kBlockM ? hw::lds_f32(sfa + s * 64 + 8) : 0.0f;
            hw::wgmma_wait<0>(scratch);
            if (s + 1 == kSubTiles || !second) {   // the stage has been read for the last time
                hw::warp_sync();
                if (me.lane() == 0) hw::mbarrier_arrive(bars.stage_empty(slot));
            }
            promote(acc[s], scratch, lo, hi, even, odd);
        }
        stage.advance();
    }
}

}  // namespace megamoe
