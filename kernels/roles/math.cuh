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
            const Tile tile = read_tile<C>(p, smem, bars, ring);
            trace.lap(kTraceTileWait);
            hw::warp_sync();
            if (hw::lane_idx() == 0) hw::mbarrier_arrive(bars.tile_empty(ring.slot()));
            ring.advance();
            if (tile.kind() == kTileEnd) break;
            f32 acc[MathThread<C>::kSubTiles][64];
            main_loop<C>(p, smem, bars, tile, this_math_thread<C>(), stage, acc, trace);
            trace.lap(kTraceMain);
            trace.add(kTraceTiles, 1);
            const MathThread<C> me = this_math_thread<C>();
            if (tile.kind() == kTileL1) {
                EpilogueL1<C>{p, tile, me}.run(smem, acc);
                trace.lap(kTraceEpilogueL1);
            } else {
                EpilogueL2<C>{p, tile, me}.run(acc);
                trace.lap(kTraceEpilogueL2);
            }
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
