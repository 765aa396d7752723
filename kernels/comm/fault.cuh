// Fault records: the first fault of a launch on a rank is kept, in memory the host can read even after
// the kernel died.
#pragma once
#include "../hw/hw.cuh"
#include "../layout/symmetric_buffer.cuh"

namespace megamoe {

struct FaultDetail {
    u32 wait, index, observed, expected;
};

MM_DEVICE void record_fault(const KernelParams& p, u32 code, FaultDetail d, u64 waited_ns) {
    if (hw::atom_cas_relaxed<Scope::kGpu>(control_word(p, kFaultClaim), 0, 1) != 0) return;
    u32* record = reinterpret_cast<u32*>(p.fault);
    hw::st_u32(record + 1, d.wait);
    hw::st_u32(record + 2, p.rank);
    hw::st_u32(record + 3, hw::cta_idx());
    hw::st_u32(record + 4, hw::thread_idx() / 32);
    hw::st_u32(record + 5, d.index);
    hw::st_u32(record + 6, d.observed);
    hw::st_u32(record + 7, d.expected);
    // At the end of a launch the last CTA may have moved the epoch already; what is waited for names the launch.
    hw::st_u32(record + 8, d.wait == kWaitDoneFlag ? d.expected - 1 : hw::ld_relaxed<Scope::kGpu>(control_word(p, kEpoch)));
    hw::st_u64(reinterpret_cast<u64*>(record + 10), waited_ns);
    hw::st_u64(reinterpret_cast<u64*>(record + 12), hw::global_timer_ns());
    hw::st_release<Scope::kSys>(record, code);
}

}  // namespace megamoe
