// What the math warps read of the weights' scales, and the loop of a warpgroup that has nothing to multiply.
#pragma once
#include "../mma/math_thread.cuh"
#include "load_acts.cuh"

namespace megamoe {

// Weight scales of this thread's columns along K. In L1 gate and up, in L2 the two 128-column blocks of its part (the
// same twice when there is one).
struct ColumnScales {
    const f32* first;
    u32 step;   // elements from the first to the second
};
template <class C>
MM_DEVICE ColumnScales column_scales(const KernelParams& p, const Tile& tile, const MathThread<C>& me) {
    const u32 h_blocks = p.hidden / 128, i_blocks = p.intermediate / 128;
    ColumnScales s;
    if (tile.kind() == kTileL1) {   // tile n holds gate and up rows 128n .. 128n+127
        const f32* base = reinterpret_cast<const f32*>(p.w13_sf) + static_cast<u64>(tile.expert) * 2 * i_blocks * h_blocks;
        s.first = base + static_cast<u64>(tile.n) * h_blocks;
        s.step = i_blocks * h_blocks;
    } else {
        const u32 block = (tile.n * C::kBlockN + me.column(0)) / 128;   // past the end when the tile overhangs: any scale will do
        const f32* base = reinterpret_cast<const f32*>(p.w2_sf) + static_cast<u64>(tile.expert) * h_blocks * i_blocks;
        s.first = base + static_cast<u64>(block < h_blocks ? block : h_blocks - 1) * i_blocks;
        s.step = TileShape<C>::kScaleBlocks > 1 && block + 1 < h_blocks ? i_blocks : 0;
    }
    return s;
}

// Those scales of 32 K-blocks, one a lane: in the loop they come by a shuffle. (A load from global memory in every K-block, even
// one ahead of its use, takes longer than the products: 1,100 cycles.)
struct LaneScales {
    f32 first, second;
    MM_DEVICE void load(const ColumnScales& s, u32 k, u32 num_k) {
        if (k >= num_k) return;
        first = hw::ld_nc_f32(s.first + k);
        second = hw::ld_nc_f32(s.first + s.step + k);
    }
    MM_DEVICE LaneScales(const ColumnScales& s, u32 lane, u32 num_k) : first(1.0f), second(1.0f) { load(s, lane, num_k); }
    // After K-block k has taken its scales: every 16 K-blocks the lanes whose scales are used up take the next ones. They have a
    // K-block's time to arrive.
    MM_DEVICE void refill(const ColumnScales& s, u32 lane, u32 k, u32 num_k) {
        if (k == 0 || k % 16 != 0) return;
        hw::warp_sync();   // keeps what follows out of the other K-blocks
        if (lane / 16 != k / 16 % 2) load(s, k + 16 + lane % 16, num_k);
    }
    MM_DEVICE f32 first_of(u32 k) const { return hw::bits_to_f32(hw::shfl(hw::f32_to_bits(first), k % 32)); }
    MM_DEVICE f32 second_of(u32 k) const { return hw::bits_to_f32(hw::shfl(hw::f32_to_bits(second), k % 32)); }
};

// A warpgroup with no rows in the tile keeps step with the loaders.
template <class C>
MM_DEVICE void skip_loop(const KernelParams& p, const CtaBarriers<C>& bars, const Tile& tile, u32 lane, RingCursor<C::kStages>& stage) {
    const u32 num_k = (tile.kind() == kTileL1 ? p.hidden : p.intermediate) / 128;
#pragma unroll 1
    for (u32 k = 0; k < num_k; ++k) {
        mbarrier_wait(p, bars.stage_full(stage.slot()), stage.parity(), kWaitStageFull, stage.slot());
        hw::warp_sync();
        release_stage<C>(bars, stage.slot(), lane);
        stage.advance();
    }
}

}  // namespace megamoe
