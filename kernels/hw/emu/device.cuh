// What a kernel sees of the emulator: every name and signature of hw/sm90, plus a trailing file and line that
// default to the caller's. An operation missing here does not compile. MM_KERNEL_ENTRY exports the body and the
// launch attributes the runtime reads (kernel_abi in c_api.h).
#pragma once
#include "../types.cuh"
#include "device_math.cuh"
#include "ops.h"

#if defined(__SANITIZE_THREAD__)
#define MM_EMU_CHECKED 1
#else
#define MM_EMU_CHECKED 0
#endif

#define MM_KERNEL_ENTRY(name, threads, cluster, Params, body)                       \
    extern "C" {                                                                    \
    void name(const void* params) { body(*static_cast<const Params*>(params)); }    \
    extern const unsigned name##_threads, name##_cluster, name##_params_bytes, name##_checked; \
    const unsigned name##_threads = threads;                                        \
    const unsigned name##_cluster = cluster;                                        \
    const unsigned name##_params_bytes = sizeof(Params);                            \
    const unsigned name##_checked = MM_EMU_CHECKED;                                 \
    }

// Where the caller stands, as default arguments; MM_FWD passes them on.
#define MM_AT const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define MM_FWD file, line

namespace megamoe::hw {

// ---- thread.cuh
MM_DEVICE u32 thread_idx() { return emu::thread_idx(); }
MM_DEVICE u32 thread_idx_volatile() { return emu::thread_idx(); }
MM_DEVICE u32 cta_idx() { return emu::cta_idx(); }
MM_DEVICE u32 num_ctas() { return emu::num_ctas(); }
MM_DEVICE u32 lane_idx() { return emu::thread_idx() % 32; }
MM_DEVICE u32 warp_idx() { return emu::thread_idx() / 32; }
MM_DEVICE u32 cluster_cta_rank() { return emu::cluster_cta_rank(); }
MM_DEVICE u64 global_timer_ns() { return emu::global_timer_ns(); }
MM_DEVICE u32 clock_cycles() { return static_cast<u32>(emu::global_timer_ns()); }
MM_DEVICE u32 dynamic_smem_bytes() { return emu::dynamic_smem_bytes(); }
MM_DEVICE void nap(u32 ns, MM_AT) { emu::nap(ns, MM_FWD); }
// Is this fault of the mutation campaign (tests/mutants) switched on?
MM_DEVICE bool mutant(u32 id) { return emu::mutant(id); }
MM_DEVICE void trap(MM_AT) { emu::trap(MM_FWD); }
template <u32 kRegs> MM_DEVICE void reg_alloc(MM_AT) {
    static_assert(kRegs % 8 == 0 && kRegs >= 24 && kRegs <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
    emu::set_max_registers(kRegs, true, MM_FWD);
}
template <u32 kRegs> MM_DEVICE void reg_dealloc(MM_AT) {
    static_assert(kRegs % 8 == 0 && kRegs >= 24 && kRegs <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
    emu::set_max_registers(kRegs, false, MM_FWD);
}
// Launches of a rank never overlap here, so both are satisfied at once.
MM_DEVICE void grid_dependency_wait() {}
MM_DEVICE void grid_dependency_launch() {}
MM_DEVICE u8* dynamic_smem() { return emu::dynamic_smem(); }
MM_DEVICE u32 smem_addr(const void* p, MM_AT) { return emu::smem_addr(p, MM_FWD); }

// ---- memory.cuh
template <Scope kScope> MM_DEVICE u32 ld_acquire(const u32* p, MM_AT) {
    return emu::ordered_load(p, emu::Order::kAcquire, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE u32 ld_relaxed(const u32* p, MM_AT) {
    return emu::ordered_load(p, emu::Order::kRelaxed, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE void st_release(u32* p, u32 v, MM_AT) {
    emu::ordered_store(p, v, emu::Order::kRelease, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE void st_relaxed(u32* p, u32 v, MM_AT) {
    emu::ordered_store(p, v, emu::Order::kRelaxed, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE void red_add_release(u32* p, u32 v, MM_AT) {
    emu::atomic(p, emu::Rmw::kAdd, v, 0, emu::Order::kRelease, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE void red_add_relaxed(u32* p, u32 v, MM_AT) {
    emu::atomic(p, emu::Rmw::kAdd, v, 0, emu::Order::kRelaxed, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE u32 atom_add_relaxed(u32* p, u32 v, MM_AT) {
    return emu::atomic(p, emu::Rmw::kAdd, v, 0, emu::Order::kRelaxed, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE u32 atom_add_acq_rel(u32* p, u32 v, MM_AT) {
    return emu::atomic(p, emu::Rmw::kAdd, v, 0, emu::Order::kAcqRel, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE u32 atom_cas_relaxed(u32* p, u32 expected, u32 desired, MM_AT) {
    return emu::atomic(p, emu::Rmw::kCas, expected, desired, emu::Order::kRelaxed, kScope, MM_FWD);
}
template <Scope kScope> MM_DEVICE void fence_acq_rel() { emu::fence_acq_rel(kScope); }

// Weak accesses: no ordering of their own, so the race check sees them as plain ones.
// Passed by value: a local whose address escapes would itself be instrumented in checked builds.
MM_DEVICE f32 ld_nc_f32(const f32* p, MM_AT) { return bits_to_f32(emu::weak_load_u32(p, false, MM_FWD)); }
MM_DEVICE Vec4 ld_vec4(const void* p, MM_AT) { return emu::weak_load_vec4(p, false, MM_FWD); }
MM_DEVICE Vec4 ld_vec4_streaming(const void* p, MM_AT) { return emu::weak_load_vec4(p, false, MM_FWD); }
MM_DEVICE void st_vec4(void* p, Vec4 v, MM_AT) { emu::weak_store_vec4(p, v, false, MM_FWD); }
MM_DEVICE u32 ld_u32(const u32* p, MM_AT) { return emu::weak_load_u32(p, false, MM_FWD); }
MM_DEVICE i64 ld_i64(const i64* p, MM_AT) { return static_cast<i64>(emu::weak_load_u64(p, false, MM_FWD)); }
MM_DEVICE f32 ld_f32(const f32* p, MM_AT) { return bits_to_f32(emu::weak_load_u32(p, false, MM_FWD)); }
MM_DEVICE void st_u32(u32* p, u32 v, MM_AT) { emu::weak_store_u32(p, v, false, MM_FWD); }
MM_DEVICE void st_u64(u64* p, u64 v, MM_AT) { emu::weak_store_u64(p, v, false, MM_FWD); }
MM_DEVICE void st_f32(f32* p, f32 v, MM_AT) { emu::weak_store_u32(p, f32_to_bits(v), false, MM_FWD); }
MM_DEVICE u32 lds_u32(const u32* p, MM_AT) { return emu::weak_load_u32(p, true, MM_FWD); }
MM_DEVICE f32 lds_f32(const f32* p, MM_AT) { return bits_to_f32(emu::weak_load_u32(p, true, MM_FWD)); }
MM_DEVICE Vec4 lds_vec4(const void* p, MM_AT) { return emu::weak_load_vec4(p, true, MM_FWD); }
MM_DEVICE void sts_u32(u32* p, u32 v, MM_AT) { emu::weak_store_u32(p, v, true, MM_FWD); }
MM_DEVICE void sts_f32(f32* p, f32 v, MM_AT) { emu::weak_store_u32(p, f32_to_bits(v), true, MM_FWD); }
MM_DEVICE void sts_vec4(void* p, Vec4 v, MM_AT) { emu::weak_store_vec4(p, v, true, MM_FWD); }
MM_DEVICE void sts_vec4_cluster(void* p, u32 cta, Vec4 v, MM_AT) { emu::store_vec4_cluster(p, cta, v, MM_FWD); }

// ---- sync.cuh
template <u32 kThreads> MM_DEVICE void cta_sync(MM_AT) { emu::bar_sync(0, kThreads, MM_FWD); }
MM_DEVICE void bar_sync(u32 id, u32 threads, MM_AT) { emu::bar_sync(id, threads, MM_FWD); }
MM_DEVICE void bar_arrive(u32 id, u32 threads, MM_AT) { emu::bar_arrive(id, threads, MM_FWD); }
MM_DEVICE void warp_sync(u32 mask = 0xffffffffu, MM_AT) { emu::warp_collective(emu::WarpOp::kSync, mask, 0, 0, MM_FWD); }
MM_DEVICE void cluster_arrive(MM_AT) { emu::cluster_arrive(MM_FWD); }
MM_DEVICE void cluster_wait(MM_AT) { emu::cluster_wait(MM_FWD); }
MM_DEVICE void fence_proxy_async() { emu::fence_proxy_async(emu::Proxy::kAll); }
MM_DEVICE void fence_proxy_async_shared() { emu::fence_proxy_async(emu::Proxy::kShared); }
MM_DEVICE void fence_proxy_async_global() { emu::fence_proxy_async(emu::Proxy::kGlobal); }
MM_DEVICE void mbarrier_init(u64* bar, u32 arrivals, MM_AT) { emu::mbarrier_init(bar, arrivals, MM_FWD); }
MM_DEVICE void fence_mbarrier_init() { emu::fence_mbarrier_init(); }
MM_DEVICE void mbarrier_arrive(u64* bar, MM_AT) { emu::mbarrier_arrive(bar, MM_FWD); }
MM_DEVICE void mbarrier_arrive_expect_tx(u64* bar, u32 bytes, MM_AT) { emu::mbarrier_arrive_expect_tx(bar, bytes, MM_FWD); }
MM_DEVICE void mbarrier_arrive_cluster(u64* bar, u32 cta, MM_AT) { emu::mbarrier_arrive_cluster(bar, cta, false, MM_FWD); }
MM_DEVICE void mbarrier_arrive_release_cluster(u64* bar, u32 cta, MM_AT) { emu::mbarrier_arrive_cluster(bar, cta, true, MM_FWD); }
MM_DEVICE bool mbarrier_try_wait(u64* bar, u32 parity, MM_AT) { return emu::mbarrier_try_wait(bar, parity, false, MM_FWD); }
MM_DEVICE bool mbarrier_test_wait(u64* bar, u32 parity, MM_AT) { return emu::mbarrier_test_wait(bar, parity, MM_FWD); }
MM_DEVICE bool mbarrier_try_wait_cluster(u64* bar, u32 parity, MM_AT) { return emu::mbarrier_try_wait(bar, parity, true, MM_FWD); }

// ---- tma.cuh
enum class CacheHint : u64 {
    kNormal = 0x1000000000000000ull,
    kEvictFirst = 0x12F0000000000000ull,
    kEvictLast = 0x14F0000000000000ull,
};
MM_DEVICE void tma_prefetch_descriptor(const TensorMap* map, MM_AT) { emu::tma_prefetch_descriptor(map, MM_FWD); }
MM_DEVICE void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, CacheHint = CacheHint::kNormal, MM_AT) {
    emu::tma_load_2d(dst, map, bar, c0, c1, 0, false, MM_FWD);
}
MM_DEVICE void tma_load_2d_multicast(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, u16 cta_mask,
                                     CacheHint = CacheHint::kNormal, MM_AT) {
    emu::tma_load_2d(dst, map, bar, c0, c1, cta_mask, true, MM_FWD);
}
MM_DEVICE void bulk_load(void* dst_smem, const void* src_global, u32 bytes, u64* bar, MM_AT) {
    emu::bulk_load(dst_smem, src_global, bytes, bar, 0, false, MM_FWD);
}
MM_DEVICE void bulk_load_multicast(void* dst_smem, const void* src_global, u32 bytes, u64* bar, u16 cta_mask, MM_AT) {
    emu::bulk_load(dst_smem, src_global, bytes, bar, cta_mask, true, MM_FWD);
}
MM_DEVICE void bulk_store(void* dst_global, const void* src_smem, u32 bytes, MM_AT) {
    emu::bulk_store(dst_global, src_smem, bytes, MM_FWD);
}
MM_DEVICE void bulk_commit(MM_AT) { emu::bulk_commit(MM_FWD); }
template <u32 kPending> MM_DEVICE void bulk_wait(MM_AT) { emu::bulk_wait(kPending, false, MM_FWD); }
template <u32 kPending> MM_DEVICE void bulk_wait_read(MM_AT) { emu::bulk_wait(kPending, true, MM_FWD); }
MM_DEVICE void tma_prefetch_2d(const TensorMap* map, i32, i32, MM_AT) { emu::tma_prefetch_descriptor(map, MM_FWD); }
MM_DEVICE void bulk_prefetch_l2(const void* src_global, u32 bytes, MM_AT) { emu::bulk_prefetch_l2(src_global, bytes, MM_FWD); }

// ---- wgmma.cuh
MM_DEVICE void wgmma_fence(MM_AT) { emu::wgmma_fence(MM_FWD); }
MM_DEVICE void wgmma_commit(MM_AT) { emu::wgmma_commit(MM_FWD); }
template <u32 kPending, u32 kRegs> MM_DEVICE void wgmma_wait(f32 (&d)[kRegs], MM_AT) {
    emu::wgmma_wait(d, kRegs, kPending, MM_FWD);
}
template <u32 kRegs> MM_DEVICE void wgmma_pin(f32 (&d)[kRegs]) { emu::wgmma_pin(d, kRegs); }
// The same encoding as hw/sm90: K-major, 128-byte swizzle, 1024 bytes between groups of 8 rows.
MM_DEVICE u64 smem_descriptor(const void* tile, MM_AT) {
    const u64 addr = emu::smem_addr(tile, MM_FWD);
    return ((addr & 0x3FFFFull) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}
template <u32 kN> MM_DEVICE void wgmma_e4m3(f32 (&d)[kN / 2], u64 desc_a, u64 desc_b, bool accumulate, MM_AT) {
    static_assert(kN == 64 || kN == 128 || kN == 256, "hw/sm90 has N = 64, 128, 256");
    emu::wgmma_issue(d, kN, desc_a, desc_b, accumulate, MM_FWD);
}
// A warp operation: the last lane to arrive computes for all.
MM_DEVICE void mma_e4m3_m16n8k32(f32& d0, f32& d1, f32& d2, f32& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, MM_AT) {
    f32 d[4] = {d0, d1, d2, d3};
    const u32 operands[6] = {a0, a1, a2, a3, b0, b1};
    emu::warp_mma(d, operands, MM_FWD);
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

// ---- warp_math.cuh: collectives (the arithmetic is in device_math.cuh)
MM_DEVICE u32 uniform(u32 v, MM_AT) { return emu::warp_collective(emu::WarpOp::kUniform, ~0u, v, 0, MM_FWD); }
MM_DEVICE u32 shfl(u32 v, u32 lane, MM_AT) { return emu::warp_collective(emu::WarpOp::kShfl, ~0u, v, lane, MM_FWD); }
MM_DEVICE u32 shfl_xor(u32 v, u32 mask, MM_AT) { return emu::warp_collective(emu::WarpOp::kShflXor, ~0u, v, mask, MM_FWD); }
MM_DEVICE u32 shfl_up(u32 v, u32 delta, MM_AT) { return emu::warp_collective(emu::WarpOp::kShflUp, ~0u, v, delta, MM_FWD); }
MM_DEVICE f32 shfl_xor_f32(f32 v, u32 mask, MM_AT) {
    return bits_to_f32(emu::warp_collective(emu::WarpOp::kShflXor, ~0u, f32_to_bits(v), mask, MM_FWD));
}
MM_DEVICE u32 ballot(bool p, MM_AT) { return emu::warp_collective(emu::WarpOp::kBallot, ~0u, p, 0, MM_FWD); }
MM_DEVICE bool all(bool p, MM_AT) { return emu::warp_collective(emu::WarpOp::kAll, ~0u, p, 0, MM_FWD) != 0; }
MM_DEVICE bool any(bool p, MM_AT) { return emu::warp_collective(emu::WarpOp::kAny, ~0u, p, 0, MM_FWD) != 0; }
MM_DEVICE bool elect_one(MM_AT) { return emu::warp_collective(emu::WarpOp::kElect, ~0u, 0, 0, MM_FWD) != 0; }

}  // namespace megamoe::hw

#undef MM_AT
#undef MM_FWD
