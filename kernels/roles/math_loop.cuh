// Math warps: the main loop of a tile (one pass over K). Each K-block's products go unit by unit through the tensor
// core and are promoted right away; with two warpgroups one's products run under the other's promotion.
#pragma once
#include "../mma/kblock.cuh"
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
    MM_DEVICE LaneScales(const ColumnScales& s, u32 lane, u32 num_k) : first(0.0f), second(0.0f) { load(s, lane, num_k); }
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

template <class C>
MM_DEVICE Factors<C> factors(f32 row_lo, f32 row_hi, f32 first, f32 second, bool l1) {
    Factors<C> f;
    const f32 row[2] = {row_lo, row_hi};
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if constexpr (TileShape<C>::kScaleBlocks == 1) {
            f.at[half][0][0] = row[half] * first;
            f.at[half][0][1] = row[half] * second;
        } else {
            f.at[half][0][0] = row[half] * first;
            f.at[half][0][1] = row[half] * (l1 ? second : first);
            f.at[half][1][0] = row[half] * (l1 ? first : second);
            f.at[half][1][1] = row[half] * second;
        }
    }
    return f;
}

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

template <class C>
MM_DEVICE void main_loop(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const Tile& tile, const MathThread<C>& me,
                         RingCursor<C::kStages>& stage, f32 (&acc)[TileShape<C>::kUnits][TileShape<C>::kRegs], Trace<C::kTrace>& trace) {
    using Plan = SharedPlan<C>;
    using Shape = TileShape<C>;
    constexpr bool kRescales = C::kPromotion == Promotion::kRescale;
    const bool l1 = tile.kind() == kTileL1;
    const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128;
    const ColumnScales scales = column_scales<C>(p, tile, me);
    const u8* sfa_rows = smem + Plan::kSfa + me.row(0) * 4;
    // The same in all lanes, said so: descriptors are then made on the uniform datapath, with nothing between the products.
    const u32 a_offset = hw::uniform(Plan::kA + me.first_row() * 128), b_offset = hw::uniform(Plan::kB + me.column(0) * 128);

    f32 scratch[kRescales ? 1 : Shape::kRegs];
    Rescale<C> rescale(smem + Plan::kCarry, me.warpgroup * 128 + me.thread);
    if constexpr (!kRescales) {
#pragma unroll
        for (u32 u = 0; u < Shape::kUnits; ++u)
#pragma unroll
            for (u32 i = 0; i < Shape::kRegs; ++i) acc[u][i] = 0.0f;
    }
    if (!me.has(0, tile.valid()) || (kCanHalve<C> && !tile.covers(me.part()))) return skip_loop<C>(p, bars, tile, me.lane(), stage);
    bool has[Shape::kRowUnits];
#pragma unroll
    for (u32 r = 0; r < Shape::kRowUnits; ++r) has[r] = r == 0 || me.has(r, tile.valid());

    LaneScales lane_scales(scales, me.lane(), num_k);
    const UniformDescriptor first_a(Shape::kWarpMma ? 0 : hw::smem_descriptor(smem + a_offset)), first_b(Shape::kWarpMma ? 0 : hw::smem_descriptor(smem + b_offset));
    u32 before = 0;   // the slot of the K-block before
#pragma unroll 1
    for (u32 k = 0; k < num_k; ++k) {
        // Everything that does not need the data comes before the wait.
        const u32 slot = stage.slot();
        const u8 *a = smem + a_offset + slot * Plan::kABytes, *b = smem + b_offset + slot * Plan::kBBytes;
        const u64 desc_a = first_a.moved(slot * Plan::kABytes), desc_b = first_b.moved(slot * Plan::kBBytes);
        const f32* sfa = reinterpret_cast<const f32*>(sfa_rows + slot * Plan::kSfaBytes);
        trace.lap(kTraceMain);
        mbarrier_wait(p, bars.stage_full(slot), stage.parity(), kWaitStageFull, slot);
        trace.lap(k == 0 ? kTraceFirstStage : kTraceStageWait);
        // Between the end of one product and the start of the next the tensor core has nothing of this warpgroup's to do: so
        // the stage before is given back under the first product.
        const auto under_the_product = [&] {
            if (k != 0) finish_stage<C>(bars, before, me.lane());
            lane_scales.refill(scales, me.lane(), k, num_k);
        };
        f32 first, second;
        const auto take_scales = [&] {
            first = lane_scales.first_of(k);
            second = lane_scales.second_of(k);
        };
#pragma unroll
        for (u32 r = 0; r < Shape::kRowUnits; ++r) {
            if (!has[r]) break;
            const u32 row = r * Shape::kUnitRows;
#pragma unroll
            for (u32 c = 0; c < Shape::kColumnUnits; ++c) {
                const u32 u = r * Shape::kColumnUnits + c;
                const u64 unit_a = desc_a + row * 128 / 16, unit_b = desc_b + c * Shape::kUnitColumns * 128 / 16;
                const auto load_factors = [&] {
                    const f32 lo = C::kBlockM >= 64 || me.row(r) < C::kBlockM ? hw::lds_f32(sfa + row) : 0.0f;
                    const f32 hi = C::kBlockM >= 64 || me.row(r) + 8 < C::kBlockM ? hw::lds_f32(sfa + row + 8) : 0.0f;
                    return factors<C>(lo, hi, first, second, l1);
                };
                if constexpr (kRescales) {
                    if (u == 0) take_scales();
                    if (c == 0) rescale.begin(acc, r, load_factors(), k);
                    if constexpr (Shape::kWarpMma) Product<C>::compute(acc[u], a + row * 128, b + c * Shape::kUnitColumns * 128, me.lane(), k != 0);
                    else Product<C>::issue(acc[u], unit_a, unit_b, k != 0);
                    if (u == 0) under_the_product();
                    if constexpr (!Shape::kWarpMma) Product<C>::wait(acc[u]);
                } else {
                    if constexpr (Shape::kWarpMma) Product<C>::compute(scratch, a + row * 128, b + c * Shape::kUnitColumns * 128, me.lane(), false);
                    else Product<C>::issue(scratch, unit_a, unit_b, false);
                    if (u == 0) take_scales();
                    const Factors<C> f = load_factors();
                    if (u == 0) under_the_product();
                    if constexpr (!Shape::kWarpMma) Product<C>::wait(scratch);
                    promote<C>(acc[u], scratch, f, c);
                }
            }
        }
        before = slot;
        stage.advance();
    }
    finish_stage<C>(bars, before, me.lane());
    if constexpr (kRescales) {
#pragma unroll
        for (u32 r = 0; r < Shape::kRowUnits; ++r)
            if (has[r]) rescale.end(acc, r);
    }
}

}  // namespace megamoe
