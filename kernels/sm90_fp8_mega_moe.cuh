// The kernel: roles assembled. One CTA per SM, persistent. Warps, in order: dispatch, TMA, math.
#pragma once
#include "roles/stub.cuh"

namespace megamoe {

// A variant's compile-time choices, completed with what follows from them.
template <class Variant>
struct Resolved : Variant {
    static constexpr u32 kFrontendWarps = Variant::kDispatchWarps + Variant::kTmaWarps;
    static constexpr u32 kThreads = 32 * kFrontendWarps + 128 * Variant::kMathWarpgroups;
    // What each thread starts with: the register file over the threads.
    static constexpr u32 kLaunchRegs = 65536 / kThreads / 8 * 8;
    static_assert(kFrontendWarps % 4 == 0, "register counts are set per warpgroup");
    static_assert(Variant::kStages >= 2 && (Variant::kCluster == 1 || Variant::kCluster == 2));
};

// Before phase l1 no role has accumulators, and all keep what they were launched with.
template <class C, u32 kRegs>
MM_DEVICE void set_registers() {
    if constexpr (C::kPhase < Phase::kL1) return;
    if constexpr (kRegs > C::kLaunchRegs) hw::reg_alloc<kRegs>();
    if constexpr (kRegs < C::kLaunchRegs) hw::reg_dealloc<kRegs>();
}

template <class C>
MM_DEVICE void cluster_sync() {
    if constexpr (C::kCluster > 1) {
        hw::cluster_arrive();
        hw::cluster_wait();
    }
}

template <class Variant>
MM_DEVICE void run(const KernelParams& p) {
    using C = Resolved<Variant>;
    u8* smem = hw::dynamic_smem();
    const u32 thread = hw::thread_idx(), warp = hw::warp_idx(), lane = hw::lane_idx();
    const CtaBarriers<C> bars(smem);
    if (thread == 0) bars.init();
    const u32 epoch = hw::ld_relaxed<Scope::kGpu>(control_word(p, kEpoch));
    hw::cta_sync<C::kThreads>();
    cluster_sync<C>();   // before one CTA of a pair arrives on the other's barriers

    if constexpr (C::kPhase == Phase::kStub) {
        if (hw::cta_idx() == 0 && thread == 0) write_stub_report<C>(p, smem);
    }
    Trace<C::kTrace> trace(p, 0, thread == 0);
    if constexpr (C::kPhase >= Phase::kDispatch) {
        if (hw::cta_idx() < p.dispatch_ctas) DispatchSend<C>(p, smem, epoch).run();
        trace.stamp(kTraceSent);
    }
    if (warp < C::kFrontendWarps) {
        // Compact: dispatch and TMA share a warpgroup, so they share its register count.
        if constexpr (C::kDispatchWarps % 4 != 0) set_registers<C, C::kRegsDispatch>();
        if (warp < C::kDispatchWarps) {
            if constexpr (C::kDispatchWarps % 4 == 0) set_registers<C, C::kRegsDispatch>();
            if constexpr (C::kPhase >= Phase::kDispatch) {
                DispatchPull<C>(p, bars, smem, epoch, thread).run(trace);
            }
        } else {
            if constexpr (C::kDispatchWarps % 4 == 0) set_registers<C, C::kRegsTma>();
            if constexpr (C::kPhase >= Phase::kL1) {
                if (lane == 0 && warp == C::kDispatchWarps) load_acts<C>(p, smem, bars);
                if (lane == 0 && warp == C::kDispatchWarps + 1) load_weights<C>(p, smem, bars, epoch);
            }
            hw::warp_sync();
        }
        leave<C>();
    } else {
        set_registers<C, C::kRegsMath>();
        math_role<C>(p, smem, bars, thread - 32 * C::kFrontendWarps);
    }
    cluster_sync<C>();   // shared memory stays while the other CTA may still write or arrive
}

}  // namespace megamoe
