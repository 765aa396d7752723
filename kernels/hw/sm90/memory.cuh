// Ordered loads, stores and atomics (PTX ISA 9.7.9 and 9.7.13; memory model in section 8).
// Flags and counters are touched only through these. Generic addresses unless said.
#pragma once
#include "../types.cuh"

namespace megamoe::hw {

template <Scope kScope> MM_DEVICE u32 ld_acquire(const u32* p) {
    u32 v;
    if constexpr (kScope == Scope::kSys) asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

template <Scope kScope> MM_DEVICE u32 ld_relaxed(const u32* p) {
    u32 v;
    if constexpr (kScope == Scope::kSys) asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    else asm volatile("ld.relaxed.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

template <Scope kScope> MM_DEVICE void st_release(u32* p, u32 v) {
    if constexpr (kScope == Scope::kSys) asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

template <Scope kScope> MM_DEVICE void st_relaxed(u32* p, u32 v) {
    if constexpr (kScope == Scope::kSys) asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else asm volatile("st.relaxed.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

template <Scope kScope> MM_DEVICE void red_add_release(u32* p, u32 v) {
    if constexpr (kScope == Scope::kSys) asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else asm volatile("red.release.cta.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

template <Scope kScope> MM_DEVICE void red_add_relaxed(u32* p, u32 v) {
    if constexpr (kScope == Scope::kSys) asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
    else asm volatile("red.relaxed.cta.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Returning atomics take generic addresses: shared and global counters share one code path.
template <Scope kScope> MM_DEVICE u32 atom_add_relaxed(u32* p, u32 v) {
    u32 old;
    if constexpr (kScope == Scope::kSys) asm volatile("atom.relaxed.sys.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("atom.relaxed.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    else asm volatile("atom.relaxed.cta.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

template <Scope kScope> MM_DEVICE u32 atom_add_acq_rel(u32* p, u32 v) {
    u32 old;
    if constexpr (kScope == Scope::kSys) asm volatile("atom.acq_rel.sys.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    else asm volatile("atom.acq_rel.cta.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
    return old;
}

template <Scope kScope> MM_DEVICE u32 atom_cas_relaxed(u32* p, u32 expected, u32 desired) {
    u32 old;
    if constexpr (kScope == Scope::kSys) asm volatile("atom.relaxed.sys.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("atom.relaxed.gpu.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
    else asm volatile("atom.relaxed.cta.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(desired) : "memory");
    return old;
}

// fence (9.7.13.4)
template <Scope kScope> MM_DEVICE void fence_acq_rel() {
    if constexpr (kScope == Scope::kSys) asm volatile("fence.acq_rel.sys;" ::: "memory");
    else if constexpr (kScope == Scope::kGpu) asm volatile("fence.acq_rel.gpu;" ::: "memory");
    else asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// Read-only loads for data no one writes during the launch (ld.global.nc, 9.7.9.9).
MM_DEVICE f32 ld_nc_f32(const f32* p) {
    f32 v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}

// 16-byte loads and stores (9.7.9.8, 9.7.9.11); no ordering of their own.
MM_DEVICE Vec4 ld_vec4(const void* p) {
    Vec4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
// Streaming variant: each byte is read once, so it should not displace what is reused.
MM_DEVICE Vec4 ld_vec4_streaming(const void* p) {
    Vec4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
MM_DEVICE void st_vec4(void* p, Vec4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Scalar loads and stores of data that other threads write or read (weak; order them with a signal).
// "volatile asm" keeps the compiler from moving them across the ordered operations above.
MM_DEVICE u32 ld_u32(const u32* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
MM_DEVICE i64 ld_i64(const i64* p) {
    i64 v;
    asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
MM_DEVICE f32 ld_f32(const f32* p) {
    f32 v;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
}
MM_DEVICE void st_u32(u32* p, u32 v) { asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
MM_DEVICE void st_u64(u64* p, u64 v) { asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
MM_DEVICE void st_f32(f32* p, f32 v) { asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory"); }

// Shared memory, 32-bit (9.7.9.8): explicit so that neither compiler caches what another role writes.
MM_DEVICE u32 lds_u32(const u32* p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(static_cast<u32>(__cvta_generic_to_shared(p))) : "memory");
    return v;
}
MM_DEVICE f32 lds_f32(const f32* p) {
    f32 v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(static_cast<u32>(__cvta_generic_to_shared(p))) : "memory");
    return v;
}
MM_DEVICE Vec4 lds_vec4(const void* p) {
    Vec4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(static_cast<u32>(__cvta_generic_to_shared(p))) : "memory");
    return v;
}
MM_DEVICE void sts_u32(u32* p, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(p))), "r"(v) : "memory");
}
MM_DEVICE void sts_f32(f32* p, f32 v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(p))), "f"(v) : "memory");
}
MM_DEVICE void sts_vec4(void* p, Vec4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(static_cast<u32>(__cvta_generic_to_shared(p))),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Into the same place of the shared memory of CTA `cta` of the cluster (mapa, st.shared::cluster; PTX ISA 9.7.9.11, 9.7.9.23).
MM_DEVICE void sts_vec4_cluster(void* p, u32 cta, Vec4 v) {
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %0, %1;\nst.shared::cluster.v4.u32 [a], {%2, %3, %4, %5};\n}"
                 ::"r"(static_cast<u32>(__cvta_generic_to_shared(p))), "r"(cta), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

}  // namespace megamoe::hw
