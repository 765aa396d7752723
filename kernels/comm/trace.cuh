// Where a CTA's cycles go, for builds with kTrace; other builds compile it to nothing.
// The buffer (KernelParams::report) is u32[grid][kTraceWords], zeroed by the host.
#pragma once
#include "../hw/hw.cuh"
#include "../layout/symmetric_buffer.cuh"

namespace megamoe {

constexpr u32 kTraceWords = 32;
// Cycles summed per math warpgroup, then moments of the dispatch warps in cycles since the CTA began.
enum TraceWord : u32 {
    kTraceTileWait, kTraceStageWait, kTraceMain, kTraceEpilogueL1, kTraceEpilogueL2, kTraceFinish, kTraceCombine, kTraceTiles,
    kTraceFirstStage, kTraceTotal, kTraceSignalL1, kTraceSignalL2,
    kTracePerWarpgroup = 12,
    kTraceSent = 24, kTraceTables, kTracePulled, kTraceDispatchEnd, kTraceFirstArrival,
};

template <bool kOn>
struct Trace {
    const KernelParams& p;
    u32 first = ~0u;   // this thread's first word, or ~0: not the one that counts
    u32 start = 0, last = 0;
    MM_DEVICE Trace(const KernelParams& params, u32 warpgroup, bool mine) : p(params) {
        if constexpr (kOn) {
            start = last = hw::clock_cycles();
            if (mine && p.report) first = hw::cta_idx() * kTraceWords + warpgroup * kTracePerWarpgroup;
        }
    }
    MM_DEVICE void add(u32 word, u32 amount) {
        if constexpr (kOn) {
            if (first != ~0u) hw::red_add_relaxed<Scope::kGpu>(reinterpret_cast<u32*>(p.report) + first + word, amount);
        }
    }
    // The cycles since the last lap go to `word`.
    MM_DEVICE void lap(u32 word) {
        if constexpr (kOn) {
            const u32 now = hw::clock_cycles();
            add(word, now - last);
            last = now;
        }
    }
    // The moment itself.
    MM_DEVICE void stamp(u32 word) {
        if constexpr (kOn) add(word, hw::clock_cycles() - start);
    }
};

}  // namespace megamoe
