// The head of a launch, by every thread of the sending CTAs before roles part (math warps have nothing to do
// yet): tell every expert's owner which of this rank's rows it will get.
// Per CTA: histogram of experts in shared memory, one global add per expert to stake a range, rank-wide
// barrier, prefix over experts, then each entry goes to its place in the owner's list. With one CTA
// (small calls) the global steps drop out, and the whole head costs a few CTA barriers.
#pragma once
#include "../comm/pipeline.cuh"
#include "../scheduler/tile_stream.cuh"

namespace megamoe {

// Exclusive prefix sum of `n` words in shared memory by one warp; `in` and `out` may be the same array.
// `round` rounds each term up (pool segments); returns the total.
MM_DEVICE u32 warp_prefix(const u32* in, u32* out, u32 n, u32 round) {
    const u32 lane = hw::lane_idx();
    u32 carry = 0;
#pragma unroll 1
    for (u32 base = 0; base < n; base += 32) {
        const u32 i = base + lane;
        const u32 term = i < n ? ceil_div(hw::lds_u32(in + i), round) * round : 0;
        u32 sum = term;
#pragma unroll
        for (u32 d = 1; d < 32; d *= 2) {
            const u32 below = hw::shfl_up(sum, d);
            if (lane >= d) sum += below;
        }
        if (i < n) hw::sts_u32(out + i, carry + sum - term);
        carry += hw::shfl(sum, 31);
    }
    return carry;
}

template <class C>
struct DispatchSend {
    static constexpr u32 kThreads = C::kThreads;

    const KernelParams& p;
    u32 epoch, thread;
    u32* histogram;   // [E] entries of this CTA per expert, then this CTA's offset within the expert
    u32* prefix;      // [E] this rank's entries per expert, then where they start; last, the push cursor
    u32* broadcast;

    MM_DEVICE DispatchSend(const KernelParams& params, u8* smem, u32 launch_epoch)
        : p(params), epoch(launch_epoch), thread(hw::thread_idx()) {
        const u32 local = local_experts(p);
        histogram = reinterpret_cast<u32*>(smem + SharedPlan<C>::send(p.hidden, local, p.num_ranks));
        prefix = histogram + round_up(4 * p.num_experts, 16) / 4;
        broadcast = prefix + round_up(4 * p.num_experts, 16) / 4;
    }

    MM_DEVICE void sync() const { hw::cta_sync<kThreads>(); }
    MM_DEVICE u32 first() const { return hw::cta_idx() * kThreads + thread; }
    MM_DEVICE u32 stride() const { return p.dispatch_ctas * kThreads; }

    // `take(i, expert)` for this thread's entries that name an expert; several loads are in flight at once.
    template <class Take>
    MM_DEVICE void each_entry(bool report, const Take& take) const {
        const u32 entries = p.num_tokens * p.topk;
#pragma unroll 1
        for (u32 base = first(); base < entries; base += kIdUnroll * stride()) {
            i64 id[kIdUnroll];
#pragma unroll
            for (u32 j = 0; j < kIdUnroll; ++j) {
                const u32 i = base + j * stride();
                id[j] = i < entries ? hw::ld_i64(local_region<i64>(p, kTopkIdx) + i) : -1;
            }
#pragma unroll
            for (u32 j = 0; j < kIdUnroll; ++j) {
                const u32 i = base + j * stride();
                if (id[j] >= 0 && id[j] < static_cast<i64>(p.num_experts)) take(i, static_cast<u32>(id[j]));
                else if (id[j] != -1 && report)
                    record_fault(p, kBadExpertId, {kWaitNone, i, static_cast<u32>(id[j]), p.num_experts}, 0);
            }
        }
    }
    static constexpr u32 kIdUnroll = 2;

    MM_DEVICE void count() const {
#pragma unroll 1
        for (u32 e = thread; e < p.num_experts; e += kThreads) hw::sts_u32(histogram + e, 0);
        sync();
        each_entry(true, [this](u32, u32 e) { hw::atom_add_relaxed<Scope::kCta>(histogram + e, 1); });
        sync();
    }

    // Leaves the rank's count per expert in `prefix` and this CTA's offset in `histogram`.
    MM_DEVICE void stake() const {
        if (p.dispatch_ctas == 1) {
            for (u32 e = thread; e < p.num_experts; e += kThreads) {
                hw::sts_u32(prefix + e, hw::lds_u32(histogram + e));
                hw::sts_u32(histogram + e, 0);
            }
            sync();
            return;
        }
        u32* counts = send_count_bank(p, epoch);
#pragma unroll 1
        for (u32 e = thread; e < p.num_experts; e += kThreads) {
            const u32 mine = hw::lds_u32(histogram + e);
            const u32 offset = mine ? hw::atom_add_relaxed<Scope::kGpu>(counts + e, mine) : 0;
            hw::sts_u32(histogram + e, offset);
        }
        sync();
        if (thread == 0) {
            u32* barrier = control_word(p, kCountBarrier);
            hw::red_add_release<Scope::kGpu>(barrier, 1);
            wait_equal<Scope::kGpu>(p, barrier, p.dispatch_ctas, kWaitCountBarrier, 0);
        }
        sync();
#pragma unroll 1
        for (u32 e = thread; e < p.num_experts; e += kThreads) hw::sts_u32(prefix + e, hw::ld_relaxed<Scope::kGpu>(counts + e));
        sync();
    }

    // Counts and list starts to each owner (CTA 0), entries to the owners' lists (all CTAs).
    MM_DEVICE void push() const {
        const u32 local = local_experts(p), plane = p.num_ranks * local;
        const bool leader = hw::cta_idx() == 0;
        if (leader) {
            for (u32 e = thread; e < p.num_experts; e += kThreads)
                hw::st_u32(peer_region<u32>(p, e / local, kRecvCount) + p.rank * local + e % local, hw::lds_u32(prefix + e));
        }
        sync();
        if (thread < 32) warp_prefix(prefix, prefix, p.num_experts, 1);
        sync();
        // prefix[e] now counts from the rank's first expert; lists start at each owner's first expert.
#pragma unroll 1
        for (u32 e = thread; e < p.num_experts; e += kThreads) {
            const u32 start = hw::lds_u32(prefix + e) - hw::lds_u32(prefix + e / local * local);
            if (leader) hw::st_u32(peer_region<u32>(p, e / local, kRecvCount) + plane + p.rank * local + e % local, start);
            hw::sts_u32(histogram + e, hw::lds_u32(histogram + e) + start);
        }
        sync();
        each_entry(false, [this, local](u32 i, u32 e) {
            const u32 at = hw::atom_add_relaxed<Scope::kCta>(histogram + e, 1);
            hw::st_u32(peer_region<u32>(p, e / local, kRecvList) + p.rank * (p.capacity * p.topk) + at, i);
        });
        sync();
    }

    // The last CTA to finish its pushes raises this rank's flag at every peer.
    MM_DEVICE void publish() const {
        if (thread >= 32) return;
        bool last = true;
        if (p.dispatch_ctas > 1) {
            u32 arrived = 0;
            if (thread == 0) {
                arrived = hw::atom_add_acq_rel<Scope::kGpu>(control_word(p, kListBarrier), 1);
                if (arrived == p.dispatch_ctas - 1) {   // everyone has left the count barrier too
                    hw::st_relaxed<Scope::kGpu>(control_word(p, kListBarrier), 0);
                    hw::st_relaxed<Scope::kGpu>(control_word(p, kCountBarrier), 0);
                }
            }
            last = hw::shfl(arrived, 0) == p.dispatch_ctas - 1;
            hw::warp_sync();
        }
        if (last && thread < p.num_ranks)
            hw::st_release<Scope::kSys>(peer_region<u32>(p, thread, kCountFlag) + p.rank, epoch + 1);
    }

    MM_DEVICE void run() const {
        count();
        stake();
        push();
        publish();
    }
};

}  // namespace megamoe
