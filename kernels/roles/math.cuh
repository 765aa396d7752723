// Math warpgroups: tiles in the scheduler's order, then the end of the launch and the combine.
#pragma once
#include "combine.cuh"

namespace megamoe {

template <class C>
MM_DEVICE MathThread<C> this_math_thread() {
    // Read afresh, so that nothing derived from it stays in a register through the main loop.
    MathThread<C> me(hw::thread_idx_volatile() - (C::kThreads - 128 * C::kMathWarpgroups));
    me.warpgroup = hw::uniform(me.warpgroup);
    me.quarter = hw::uniform(me.quarter);
    return me;
}

// The tile at a ring position, and what its flow of control hangs on said to be the same in all lanes: then the main loop, its
// stages and descriptors are on the uniform datapath.
template <class C>
MM_DEVICE Tile tile_at(u8* smem, const RingCursor<kTileSlots>& at) {
    Tile tile = read_tile<C>(smem, at);
    tile.head = hw::uniform(tile.head);
    return tile;
}

// Warpgroups with rows of their own never wait for each other. Started together they would also come to their
// epilogues together; one that starts later keeps its distance, and its products run under the other's epilogues. The ring
// of stages bounds the distance.
template <class C>
MM_DEVICE void start_later(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars) {
    if (p.stagger == 0) return;
    const RingCursor<kTileSlots> first;
    await_tile<C>(p, bars, first);
    if (tile_at<C>(smem, first).kind() == kTileEnd) return;
    mbarrier_wait(p, bars.stage_full(0), 0, kWaitStageFull, 0);
    const u32 start = hw::clock_cycles();
    while (!hw::all(hw::clock_cycles() - start >= p.stagger)) {}
}

template <class C>
MM_DEVICE void math_role(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, u32 math_thread) {
    Trace<C::kTrace> trace(p, math_thread / 128, math_thread % 128 == 0);
    if constexpr (C::kPhase >= Phase::kL1) {
        RingCursor<kTileSlots> ring;
        RingCursor<C::kStages> stage;
        if constexpr (TileShape<C>::kRowSplits > 1) {
            if (hw::uniform(math_thread / 128) != 0) start_later<C>(p, smem, bars);
        }
        while (true) {
            using L1 = EpilogueL1<C>;
            typename L1::Accumulators acc;
            typename L1::Held held;
            u32 kind;
#pragma unroll 1
            for (u32 pass = 0; true; ++pass) {
                {
                    if (pass == 0) await_tile<C>(p, bars, ring);
                    const Tile tile = tile_at<C>(smem, ring);
                    trace.lap(kTraceTileWait);
                    kind = tile.kind();
                    if (kind == kTileEnd) break;
                    main_loop<C>(p, smem, bars, tile, this_math_thread<C>(), stage, acc, trace);
                }
                if (kind == kTileL2 || pass + 1 == TileShape<C>::kPasses) break;
                const Tile tile = tile_at<C>(smem, ring);   // its first activations wait for the second pass
                const MathThread<C> me = this_math_thread<C>();
                L1{p, tile, me}.activate(side_data<C>(smem, ring), acc, pass);
                L1::hold(acc, held);
            }
            if (kind == kTileEnd) break;
            trace.lap(kTraceMain);
            trace.add(kTraceTiles, 1);
            const Tile tile = tile_at<C>(smem, ring);   // again, rather than in registers through the main loop
            const u8* side = side_data<C>(smem, ring);
            const MathThread<C> me = this_math_thread<C>();
            if (kind == kTileL1) {
                const L1 epilogue{p, tile, me};
                epilogue.activate(side, acc, TileShape<C>::kPasses - 1);
                epilogue.store(smem, acc, held);
                trace.lap(kTraceEpilogueL1);
                epilogue.signal();
                trace.lap(kTraceSignalL1);
            } else {
                const EpilogueL2<C> epilogue{p, tile, me};
                epilogue.free_rows();
                trace.lap(kTraceSignalL2);
                epilogue.run(side, acc);
                trace.lap(kTraceEpilogueL2);
            }
            hw::warp_sync();
            if (hw::lane_idx() == 0) release_tile<C>(bars, ring.slot());
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
