// Identity, registers, time and the kernel entry. PTX ISA sections are named per wrapper.
#pragma once
#include "../types.cuh"

// A kernel entry: `body(params)` runs once per thread. One CTA per SM; the cluster size is a
// compile-time attribute, which an ordinary launch honours.
#define MM_KERNEL_ENTRY(name, threads, cluster, Params, body)                              \
    extern "C" __global__ void __launch_bounds__(threads, 1) __cluster_dims__(cluster, 1, 1) \
        name(const __grid_constant__ Params params) {                                      \
        body(params);                                                                      \
    }

namespace megamoe::hw {

MM_DEVICE u32 thread_idx() { return threadIdx.x; }
// %tid.x, read where it stands: the compiler neither hoists nor keeps it (10.1).
MM_DEVICE u32 thread_idx_volatile() {
    u32 tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}
MM_DEVICE u32 cta_idx() { return blockIdx.x; }
MM_DEVICE u32 num_ctas() { return gridDim.x; }

// %laneid (10.3)
MM_DEVICE u32 lane_idx() {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Warp index made uniform for the compiler, so that role branches are warp-uniform.
MM_DEVICE u32 warp_idx() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// %cluster_ctarank (10.15)
MM_DEVICE u32 cluster_cta_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// %globaltimer (10.27): nanoseconds; may tick coarsely (about 1 us).
MM_DEVICE u64 global_timer_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

// %clock (10.25): cycles of this SM, low word.
MM_DEVICE u32 clock_cycles() {
    u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
    return t;
}

// %dynamic_smem_size (10.31)
MM_DEVICE u32 dynamic_smem_bytes() {
    u32 n;
    asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(n));
    return n;
}

// nanosleep (9.7.19)
MM_DEVICE void nap(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }

// Faults of the mutation campaign (tests/mutants) exist on the emulator only.
MM_DEVICE constexpr bool mutant(u32) { return false; }

// trap (9.7.19). Keep it after loops: inside a spin loop ptxas ignores setmaxnreg.inc.
MM_DEVICE void trap() {
    asm volatile("trap;");
    __builtin_unreachable();   // what the caller holds in registers is dead here
}

// setmaxnreg (9.7.19.5): all warps of the warpgroup execute it.
template <u32 kRegs>
MM_DEVICE void reg_alloc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegs));
}
template <u32 kRegs>
MM_DEVICE void reg_dealloc() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegs));
}

// griddepcontrol (9.7.13.13)
MM_DEVICE void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
MM_DEVICE void grid_dependency_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Base of the CTA's dynamic shared memory; 1024-byte aligned (checked by the stub phase).
MM_DEVICE u8* dynamic_smem() {
    extern __shared__ __align__(1024) u8 megamoe_dynamic_smem[];
    return megamoe_dynamic_smem;
}

// 32-bit shared-window address (cvta, 9.7.9.20)
MM_DEVICE u32 smem_addr(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

}  // namespace megamoe::hw
