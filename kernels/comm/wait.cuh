// Bounded waits. Two kinds:
//   wait_equal      on another CTA or rank. Soft: when it runs out it records the fault, raises the rank's
//                   abort word and returns false; every other soft wait of the launch then returns too,
//                   and the kernel runs to its end on garbage. Nothing is left spinning on the device.
//   mbarrier_wait   on this CTA's own pipeline. Only a bug in this kernel can make it run out, so it
//                   records and traps (after the loop: inside it, ptxas would ignore setmaxnreg.inc).
#pragma once
#include "fault.cuh"

namespace megamoe {

constexpr u32 kSpinsPerCheck = 64;
// Time in units of 1024 ns (wraps after 73 minutes) and of 2^20 ns: one register each.
MM_DEVICE u32 now_us() { return static_cast<u32>(hw::global_timer_ns() >> 10); }
MM_DEVICE u32 now_ms() { return static_cast<u32>(hw::global_timer_ns() >> 20); }

template <Scope kScope>
MM_DEVICE bool wait_equal(const KernelParams& p, const u32* word, u32 expected, WaitId id, u32 index) {
    u32 seen = hw::ld_acquire<kScope>(word);
    if (seen == expected) return true;
    const u32 start = now_us();
    bool aborted = false, late = false;
    while (seen != expected && !aborted && !late) {
        for (u32 spin = 0; spin < kSpinsPerCheck && seen != expected; ++spin) seen = hw::ld_acquire<kScope>(word);
        aborted = hw::ld_relaxed<Scope::kGpu>(control_word(p, kAbort)) != 0;
        late = now_us() - start > static_cast<u32>(p.timeout_ns >> 10);
    }
    if (seen == expected) return true;
    if (!aborted) {
        record_fault(p, kWaitTimeout, {static_cast<u32>(id), index, seen, expected}, static_cast<u64>(now_us() - start) << 10);
        hw::st_relaxed<Scope::kGpu>(control_word(p, kAbort), 1);
    }
    return false;
}

// Several soft waits may follow one another before a local pipeline moves on, so its bound is 8 times theirs.
// kCluster: threads of the cluster's other CTA arrive on it too.
template <bool kCluster = false>
MM_DEVICE void mbarrier_wait(const KernelParams& p, u64* bar, u32 parity, WaitId id, u32 index) {
    const auto passed = [&] { return kCluster ? hw::mbarrier_try_wait_cluster(bar, parity) : hw::mbarrier_try_wait(bar, parity); };
    if (passed()) return;
    const u32 start = now_ms();
    bool done = false;
    do {
        done = passed();
    } while (!done && now_ms() - start <= static_cast<u32>(p.timeout_ns >> 17));
    if (!done) {
        record_fault(p, kLocalWaitTimeout, {static_cast<u32>(id), index, parity ^ 1, parity}, p.timeout_ns * 8);
        hw::trap();
    }
}

}  // namespace megamoe
