// Math warps: the main loop of a tile (one pass over K). Each K-block's products go unit by unit through the tensor
// core and are promoted right away (or, where they are rescaled, added in place); with two warpgroups one's products run under the
// other's promotion.
#pragma once
#include "in_place_loop.cuh"

namespace megamoe {

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

template <class C>
MM_DEVICE void main_loop(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const Tile& tile, const u8* side, const MathThread<C>& me,
                         RingCursor<C::kStages>& stage, f32 (&acc)[TileShape<C>::kUnits][TileShape<C>::kRegs], Trace<C::kTrace>& trace) {
    using Plan = SharedPlan<C>;
    using Shape = TileShape<C>;
    constexpr bool kRescales = C::kPromotion == Promotion::kRescale;
    if constexpr (Shape::kPackedCarry) return in_place_loop<C>(p, smem, bars, tile, side, me, stage, acc, trace);
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
        // Between the end of one product and the start of the next the tensor core has nothing of this warpgroup's to do.
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
