// The operations a kernel can ask of the emulator. device.cuh wraps them under the names of hw/sm90; they are
// defined in the runtime library, so the compiler of a kernel can neither look into them nor keep memory or
// accumulators in registers across them. Every operation that can fail takes the caller's file and line.
#pragma once
#include "../types.cuh"

namespace megamoe::emu {

enum class Order : u32 { kRelaxed, kAcquire, kRelease, kAcqRel };
enum class Rmw : u32 { kAdd, kCas };
enum class Proxy : u32 { kAll, kShared, kGlobal };
enum class WarpOp : u32 { kSync, kShfl, kShflXor, kShflUp, kUniform, kBallot, kAll, kAny, kElect, kMma };

// Content of a TensorMap on the emulator (docs/internals.md): rows x cols of one-byte elements, row-major.
struct TensorMapImage {
    static constexpr u64 kMagic = 0x50414D524F534E54ull;  // "TNSORMAP", little endian
    u64 magic, base, rows, cols, row_stride_bytes;
    u32 box_rows, box_cols, elem_bytes, swizzle;  // swizzle: 0 or 128
    u64 pad[9];
};
static_assert(sizeof(TensorMapImage) == sizeof(TensorMap), "a tensor map is 128 bytes");

#define MM_FL const char *file, int line

// Identity, time, registers
u32 thread_idx();
u32 cta_idx();
u32 num_ctas();
u32 cluster_cta_rank();
u64 global_timer_ns();
u32 dynamic_smem_bytes();
u8* dynamic_smem();
u32 smem_addr(const void* p, MM_FL);
void nap(u32 ns, MM_FL);
[[noreturn]] void trap(MM_FL);
bool mutant(u32 id);
void set_max_registers(u32 regs, bool increase, MM_FL);

// Memory
u32 ordered_load(const u32* p, Order order, Scope scope, MM_FL);
void ordered_store(u32* p, u32 v, Order order, Scope scope, MM_FL);
u32 atomic(u32* p, Rmw op, u32 a, u32 b, Order order, Scope scope, MM_FL);
void fence_acq_rel(Scope scope);
u32 weak_load_u32(const void* p, bool shared, MM_FL);
u64 weak_load_u64(const void* p, bool shared, MM_FL);
Vec4 weak_load_vec4(const void* p, bool shared, MM_FL);
void weak_store_u32(void* p, u32 v, bool shared, MM_FL);
void weak_store_u64(void* p, u64 v, bool shared, MM_FL);
void weak_store_vec4(void* p, Vec4 v, bool shared, MM_FL);
void store_vec4_cluster(void* p, u32 cta, Vec4 v, MM_FL);

// Synchronisation
u32 warp_collective(WarpOp op, u32 mask, u32 value, u32 arg, MM_FL);
// d[4] += of m16n8k32; operands: a0..a3, b0, b1 of this lane.
void warp_mma(f32* d, const u32* operands, MM_FL);
void bar_sync(u32 id, u32 threads, MM_FL);
void bar_arrive(u32 id, u32 threads, MM_FL);
void cluster_arrive(MM_FL);
void cluster_wait(MM_FL);
void fence_proxy_async(Proxy space);
void fence_mbarrier_init();
void mbarrier_init(u64* bar, u32 arrivals, MM_FL);
void mbarrier_arrive(u64* bar, MM_FL);
void mbarrier_arrive_expect_tx(u64* bar, u32 bytes, MM_FL);
void mbarrier_arrive_cluster(u64* bar, u32 cta, bool release_cluster, MM_FL);
bool mbarrier_test_wait(u64* bar, u32 parity, MM_FL);
bool mbarrier_try_wait(u64* bar, u32 parity, bool cluster_scope, MM_FL);

// Asynchronous copies
void tma_prefetch_descriptor(const TensorMap* map, MM_FL);
void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, u32 cta_mask, bool multicast, MM_FL);
void bulk_load(void* dst, const void* src, u32 bytes, u64* bar, u32 cta_mask, bool multicast, MM_FL);
void bulk_store(void* dst, const void* src, u32 bytes, MM_FL);
void bulk_commit(MM_FL);
void bulk_wait(u32 pending, bool read_only, MM_FL);
void bulk_prefetch_l2(const void* src, u32 bytes, MM_FL);

// WGMMA: d is this thread's fragment of n / 2 values.
void wgmma_fence(MM_FL);
void wgmma_issue(f32* d, u32 n, u64 desc_a, u64 desc_b, bool accumulate, MM_FL);
void wgmma_commit(MM_FL);
void wgmma_wait(f32* d, u32 regs, u32 pending, MM_FL);
void wgmma_pin(f32* d, u32 regs);

#undef MM_FL

}  // namespace megamoe::emu
