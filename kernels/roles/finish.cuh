// The end of a launch: all CTAs of all ranks agree that every combine slot is written.
#pragma once
#include "epilogue_l2.cuh"

namespace megamoe {

// Called by the warps that do not combine: they only report that their role is over.
template <class C>
MM_DEVICE void leave() { hw::bar_arrive(kBarFinish, C::kThreads); }

// Called by all math threads. False when the wait for the peers ran out.
template <class C>
MM_DEVICE bool finish_and_wait(const KernelParams& p, u8* smem, u32 math_thread) {
    // Read again rather than kept in a register through the main loop; it moves only after this CTA arrives.
    const u32 epoch = hw::ld_relaxed<Scope::kGpu>(control_word(p, kEpoch));
    hw::bar_sync(kBarFinish, C::kThreads);
    u32* ok_word = reinterpret_cast<u32*>(smem + SharedPlan<C>::kAmax);
    if (math_thread < 32) {
        u32 arrived = 0;
        if (math_thread == 0) {
            arrived = hw::atom_add_acq_rel<Scope::kGpu>(control_word(p, kDoneBarrier), 1);
            if (arrived == hw::num_ctas() - 1) {
                // Every CTA has read the epoch and finished its roles: the next launch may count on.
                hw::st_relaxed<Scope::kGpu>(control_word(p, kDoneBarrier), 0);
                hw::st_relaxed<Scope::kGpu>(control_word(p, kEpoch), epoch + 1);
            }
        }
        const bool last = hw::shfl(arrived, 0) == hw::num_ctas() - 1;
        hw::warp_sync();
        if (last && math_thread < p.num_ranks)
            hw::st_release<Scope::kSys>(peer_region<u32>(p, math_thread, kDoneFlag) + p.rank, epoch + 1);
        bool ok = true;
        if (math_thread < p.num_ranks)
            ok = wait_equal<Scope::kSys>(p, local_region<u32>(p, kDoneFlag) + math_thread, epoch + 1, kWaitDoneFlag, math_thread);
        ok = hw::all(ok);
        if (math_thread == 0) hw::sts_u32(ok_word, ok);
    }
    MathThread<C>::sync_math();
    return hw::lds_u32(ok_word) != 0;
}

}  // namespace megamoe
