// CTA, named, warp and cluster barriers; mbarriers; proxy fences (PTX ISA 9.7.13).
#pragma once
#include "../types.cuh"

namespace megamoe::hw {

// barrier.sync over the whole CTA (id 0); usable from different code paths (9.7.13.1).
template <u32 kThreads> MM_DEVICE void cta_sync() { asm volatile("barrier.sync 0, %0;" ::"n"(kThreads) : "memory"); }
MM_DEVICE void bar_sync(u32 id, u32 threads) { asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
MM_DEVICE void bar_arrive(u32 id, u32 threads) { asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// bar.warp.sync: converges the lanes of `mask` and orders their memory accesses (9.7.13.2).
MM_DEVICE void warp_sync(u32 mask = 0xffffffffu) { __syncwarp(mask); }

// barrier.cluster (9.7.13.3)
MM_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
MM_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// fence.proxy.async: orders generic-proxy accesses before later async-proxy ones (9.7.13.4).
MM_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async;" ::: "memory"); }
MM_DEVICE void fence_proxy_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
MM_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// mbarrier (9.7.13.15). `bar` is a generic pointer into this CTA's shared memory.
MM_DEVICE void mbarrier_init(u64* bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(arrivals) : "memory");
}
// Makes initialised mbarriers visible to the async proxy and to the cluster (9.7.13.4).
MM_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

MM_DEVICE void mbarrier_arrive(u64* bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(static_cast<u32>(__cvta_generic_to_shared(bar))) : "memory");
}
MM_DEVICE void mbarrier_arrive_expect_tx(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(bytes) : "memory");
}
// Arrive on the mbarrier at the same offset in CTA `cta` of this cluster (mapa, 9.7.9.22). In its default form, as multicast
// pipelines use it: after what this thread did with its shared memory, which is all that freeing a stage needs. The form
// with release.cluster also orders global memory and compiles to MEMBAR.GPU: 1.4 us for every K-block, once measured here.
MM_DEVICE void mbarrier_arrive_cluster(u64* bar, u32 cta) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(cta) : "memory");
}
// The same after every store of this thread, those into the other CTA's shared memory too.
MM_DEVICE void mbarrier_arrive_release_cluster(u64* bar, u32 cta) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(cta) : "memory");
}
// True once the phase of `parity` has completed; may return false early (bounded hardware suspend).
MM_DEVICE bool mbarrier_try_wait(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(parity) : "memory");
    return done != 0;
}
// The same without waiting: false while the phase is not complete.
MM_DEVICE bool mbarrier_test_wait(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(parity) : "memory");
    return done != 0;
}
// mbarrier_try_wait with acquire at cluster scope: for what a peer CTA stored before it arrived. Invalidates L1 (CCTL.IVALL).
MM_DEVICE bool mbarrier_try_wait_cluster(u64* bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "r"(parity) : "memory");
    return done != 0;
}

}  // namespace megamoe::hw
