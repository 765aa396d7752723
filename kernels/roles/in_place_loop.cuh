// Math warps: the main loop of a tile whose warpgroup has two column units and keeps its sums in the tensor core
// (mma/packed_rescale.cuh). A unit is multiplied and its next product issued while the other's product runs: the
// tensor core always has one of this warpgroup's products, and the other warpgroup's epilogues cost it nothing.
#pragma once
#include "../mma/packed_rescale.cuh"
#include "weight_scales.cuh"

namespace megamoe {

// Settles each row's kind, from what is known of its scales along K (RowKind) and from the columns' scales. True: all rows of the warpgroup
// are regular. Every warp looks at all of them and finds the same.
template <class C>
MM_DEVICE bool judge_rows(const Tile& tile, const MathThread<C>& me, const ColumnScales& scales, const LaneScales& lane_scales, const u32* kinds, u32 num_k,
                          PackedRescale<C>& rescale) {
    const bool l1 = tile.kind() == kTileL1;
    ScaleRange columns;
    if (me.lane() < num_k) {
        columns.add(lane_scales.first);
        columns.add(lane_scales.second);
    }
#pragma unroll 1
    for (u32 k = me.lane() + 32; k < num_k; k += 32) {
        columns.add(hw::ld_nc_f32(scales.first + k));
        columns.add(hw::ld_nc_f32(scales.first + scales.step + k));
    }
    hw::warp_sync();
    columns.join();
    const bool near_columns = PackedRescale<C>::near_columns(columns, l1);
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
        const u32 row = me.row(0) + 8 * h;
        const RowKind kind{row < tile.valid() ? hw::lds_u32(kinds + row) : l1 ? 127u : 0u};   // of a row that does not exist, anything lies there
        // In L2 nothing of a regular row is moved, and what is known are the scales of its inputs.
        rescale.set_row(h, near_columns && kind.regular(l1), l1 ? PackedRescale<C>::unit_of(kind.exponent(), columns.exponent(), num_k) : 127);
    }
    bool all = near_columns;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        const u32 row = me.first_row() + 32 * half + me.lane();
        all = all && (row >= tile.valid() || RowKind{hw::lds_u32(kinds + row)}.regular(l1));
    }
    return hw::all(all);
}

template <class C>
MM_DEVICE void in_place_loop(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const Tile& tile, const u8* side, const MathThread<C>& me,
                             RingCursor<C::kStages>& stage, f32 (&acc)[TileShape<C>::kUnits][TileShape<C>::kRegs], Trace<C::kTrace>& trace) {
    using Plan = SharedPlan<C>;
    using Shape = TileShape<C>;
    const bool l1 = tile.kind() == kTileL1;
    const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128;
    if (!me.has(0, tile.valid())) return skip_loop<C>(p, bars, tile, me.lane(), stage);
    const ColumnScales scales = column_scales<C>(p, tile, me);
    LaneScales lane_scales(scales, me.lane(), num_k);
    const UniformDescriptor first_a(hw::smem_descriptor(smem + Plan::kA + me.first_row() * 128)), first_b(hw::smem_descriptor(smem + Plan::kB + me.column(0) * 128));
    const auto issue = [&](u32 c, u32 slot, bool accumulate) {
        Product<C>::issue(acc[c], first_a.moved(slot * Plan::kABytes), first_b.moved(slot * Plan::kBBytes + c * Shape::kUnitColumns * 128), accumulate);
    };
    const auto factors = [&](u32 k, u32 slot, typename PackedRescale<C>::RowFactors& out) {
        const f32* sfa = reinterpret_cast<const f32*>(smem + Plan::kSfa + slot * Plan::kSfaBytes) + me.row(0);
        const f32 row[2] = {C::kBlockM >= 64 || me.row(0) < C::kBlockM ? hw::lds_f32(sfa) : 1.0f,
                            C::kBlockM >= 64 || me.row(0) + 8 < C::kBlockM ? hw::lds_f32(sfa + 8) : 1.0f}, column[2] = {lane_scales.first_of(k), lane_scales.second_of(k)};
#pragma unroll
        for (u32 h = 0; h < 2; ++h)
#pragma unroll
            for (u32 x = 0; x < 2; ++x) out[h][x] = row[h] * column[x];
    };
    const u32* kinds = reinterpret_cast<const u32*>(side + Plan::kSideKinds);
    PackedRescale<C> rescale;
    u32 slot = stage.slot(), before = slot;
    trace.lap(kTraceMain);
    mbarrier_wait(p, bars.stage_full(slot), stage.parity(), kWaitStageFull, slot);
    trace.lap(kTraceFirstStage);
    issue(0, slot, false);
    issue(1, slot, false);
    factors(0, slot, rescale.now);
    const bool regular = judge_rows<C>(tile, me, scales, lane_scales, kinds, num_k, rescale);
    const u32 every = l1 ? PackedRescale<C>::kMoveEvery : num_k;

    // Waits for K-block k, while both products of the one before are under way.
    const auto await = [&](u32 k) {
        before = slot;
        stage.advance();
        slot = stage.slot();
        lane_scales.refill(scales, me.lane(), k - 1, num_k);
        trace.lap(kTraceMain);
        mbarrier_wait(p, bars.stage_full(slot), stage.parity(), kWaitStageFull, slot);
        trace.lap(kTraceStageWait);
        typename PackedRescale<C>::RowFactors next;
        factors(k, slot, next);
        rescale.look(next);
    };
    // And gives the stage before back once its second unit's product is done.
    const auto step = [&](const auto& turn, bool accumulate) {
        hw::wgmma_wait<1>(acc[0]);
        turn(0);
        issue(0, slot, accumulate);
        hw::wgmma_wait<1>(acc[1]);
        finish_stage<C>(bars, before, me.lane());
        turn(1);
        issue(1, slot, accumulate);
    };
    typename PackedRescale<C>::RowFactors was;   // of the K-block before: looked up again, rather than in registers throughout
    u32 k = 1;
    if (regular) {
#pragma unroll 1
        while (k < num_k) {
            // A loop of its own: between a product's end and the next one's start a branch costs more than the multiplications.
            const u32 end = k + every - 1 < num_k ? k + every - 1 : num_k;
#pragma unroll 1
            for (; k < end; ++k) {
                await(k);
                step([&](u32 c) { rescale.scale(acc[c], c, l1); }, true);
            }
            if (k == num_k) break;
            await(k);
            factors(k - 1, before, was);
            step([&](u32 c) { rescale.move(acc[c], was, c, l1); }, false);
            ++k;
        }
    } else {
        rescale.begin_moving();
#pragma unroll 1
        for (; k < num_k; ++k) {
            await(k);
            factors(k - 1, before, was);
            step([&](u32 c) { rescale.scale_or_move(acc[c], was, c, l1, k % every == 0); }, true);
        }
    }
    const bool moved = !regular || num_k > every;
    stage.advance();
    hw::wgmma_wait<1>(acc[0]);
    rescale.end(acc[0], 0, l1, moved);
    hw::wgmma_wait<0>(acc[1]);
    finish_stage<C>(bars, slot, me.lane());
    rescale.end(acc[1], 1, l1, moved);
}

}  // namespace megamoe
