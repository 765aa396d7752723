// Math warpgroups: tiles in the scheduler's order, then the end of the launch and the combine.
#pragma once
#include "combine.cuh"

namespace megamoe {

template <class C>
MM_DEVICE MathThread<C> this_math_thread() {
    // Read afresh, so that nothing derived from it stays in a register through the main loop.
    return MathThread<C>(hw::thread_idx_volatile() - (C::kThreads - 128 * C::kMathWarpgroups));
}

template <class C>
MM_DEVICE void math_role(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, u32 math_thread) {
    Trace<C::kTrace> trace(p, math_thread / 128, math_thread % 128 == 0);
    if constexpr (C::kPhase >= Phase::kL1) {
        RingCursor<kTileSlots> ring;
        RingCursor<C::kStages> stage;
        while (true) {
            f32 acc[MathThread<C>::kSubTiles][64];
            {
                const Tile tile = wait_tile<C>(p, smem, bars, ring);
                trace.lap(kTraceTileWait);
                if (tile.kind() == kTileEnd) break;
                main_loop<C>(p, smem, bars, tile, this_math_thread<C>(), stage, acc, trace);
            }
            trace.lap(kTraceMain);
            trace.add(kTraceTiles, 1);
            const Tile tile = read_tile<C>(smem, ring);   // again, rather than in registers through the main loop
            const u8* side = smem + SharedPlan<C>::kSide + ring.slot() * SharedPlan<C>::kSideBytes;
            const MathThread<C> me = this_math_thread<C>();
            if (tile.kind() == kTileL1) {
                EpilogueL1<C>{p, tile, me}.run(smem, side, acc);
                trace.lap(kTraceEpilogueL1);
            } else {
                EpilogueL2<C>{p, tile, me}.run(side, acc);
                trace.lap(kTraceEpilogueL2);
            }
            hw::warp_sync();
            if (hw::lane_idx() == 0) hw::mbarrier_arrive(bars.tile_empty(ring.slot()));
            ring.advance();
        }
    }
    const bool complete = finish_and_wait<C>(p, smem, math_thread);
    trace.lap(kTraceFinish);
    if constexpr (C::kPhase == Phase::kCombine) {
        if (complete) Combine<C>{p, math_thread / 32, math_thread % 32}.run();
        trace.lap(kTraceCombine);
    }
    trace.stamp(kTraceTotal);
}

}  // namespace megamoe
