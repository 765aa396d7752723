// Bulk and tensor copies (PTX ISA 9.7.9.24 - 9.7.9.27). One thread issues; completion is counted in
// bytes on an mbarrier (loads) or in bulk groups (stores).
#pragma once
#include "../types.cuh"

namespace megamoe::hw {

// L2 eviction policies (createpolicy encodings as the CUDA headers use them).
enum class CacheHint : u64 {
    kNormal = 0x1000000000000000ull,
    kEvictFirst = 0x12F0000000000000ull,
    kEvictLast = 0x14F0000000000000ull,
};

MM_DEVICE void tma_prefetch_descriptor(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// 2-D box into shared memory: c0 along the contiguous dimension, c1 along rows.
MM_DEVICE void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, CacheHint hint = CacheHint::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::
            "r"(static_cast<u32>(__cvta_generic_to_shared(dst))), "l"(map), "r"(static_cast<u32>(__cvta_generic_to_shared(bar))),
            "r"(c0), "r"(c1), "l"(static_cast<u64>(hint)) : "memory");
}

// The same box into every CTA of `cta_mask`, at the same offsets; each CTA's mbarrier gets the bytes.
MM_DEVICE void tma_load_2d_multicast(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, u16 cta_mask,
                                     CacheHint hint = CacheHint::kNormal) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5, %6;" ::
            "r"(static_cast<u32>(__cvta_generic_to_shared(dst))), "l"(map), "r"(static_cast<u32>(__cvta_generic_to_shared(bar))),
            "r"(c0), "r"(c1), "h"(cta_mask), "l"(static_cast<u64>(hint)) : "memory");
}

// Bring a box into L2 only (9.7.9.27.3, cp.async.bulk.prefetch.tensor).
MM_DEVICE void tma_prefetch_2d(const TensorMap* map, i32 c0, i32 c1) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1) : "memory");
}

// 1-D bulk load; addresses and size are multiples of 16. The source may be a peer's memory.
MM_DEVICE void bulk_load(void* dst_smem, const void* src_global, u32 bytes, u64* bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(static_cast<u32>(__cvta_generic_to_shared(dst_smem))), "l"(src_global), "r"(bytes),
            "r"(static_cast<u32>(__cvta_generic_to_shared(bar))) : "memory");
}

// The same bytes into every CTA of `cta_mask`, at the same offsets; each CTA's mbarrier gets the bytes.
MM_DEVICE void bulk_load_multicast(void* dst_smem, const void* src_global, u32 bytes, u64* bar, u16 cta_mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
            "r"(static_cast<u32>(__cvta_generic_to_shared(dst_smem))), "l"(src_global), "r"(bytes),
            "r"(static_cast<u32>(__cvta_generic_to_shared(bar))), "h"(cta_mask) : "memory");
}

// 1-D bulk store, then commit and wait. wait<N>: all but the newest N groups are complete (visible to
// this thread); wait_read<N>: their shared-memory source may be reused.
MM_DEVICE void bulk_store(void* dst_global, const void* src_smem, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::
                     "l"(dst_global), "r"(static_cast<u32>(__cvta_generic_to_shared(src_smem))), "r"(bytes) : "memory");
}
MM_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <u32 kPending> MM_DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }
template <u32 kPending> MM_DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }

// Bring `bytes` (multiple of 16) of global memory into L2 (9.7.9.26).
MM_DEVICE void bulk_prefetch_l2(const void* src_global, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src_global), "r"(bytes) : "memory");
}

}  // namespace megamoe::hw
