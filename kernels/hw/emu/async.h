// Asynchronous operations in flight: each advances in stages that the scheduler may delay separately.
#pragma once
#include "engine.h"

namespace megamoe::emu {

struct AsyncOp {
    enum Kind : u8 { kTensorLoad, kBulkLoad, kBulkStore, kMma } kind;
    u8 stage = 0;
    Where where;
    Thread* issuer = nullptr;
    Cta* cta = nullptr;          // whose shared memory it touches
    u8* smem = nullptr;
    u32 smem_bytes = 0;          // bytes counted on the mbarrier
    u32 barrier = 0;             // offset of the mbarrier in that CTA
    const void* src = nullptr;   // bulk load
    void* dst = nullptr;         // bulk store
    TensorMapImage map{};
    i64 c0 = 0, c1 = 0;
    BulkGroup* group = nullptr;
    Warpgroup* warpgroup = nullptr;
    u32 agent = 0, epoch = 0;
    Clock clock;                 // of the issuer when it was issued
    std::vector<u8> data;        // bulk store: what was read
};

// Performs the next stage; true when the operation is finished.
bool async_step(AsyncOp& op);
bool mma_step(Warpgroup& wg);
void mma_drain_on_exit(Thread& t);
void mbarrier_complete_tx(Cta& cta, u32 offset, u32 bytes, u32 agent, u32 epoch, const Where& where);

// 64 x n += 64 x 32 times (n x 32)^T on decoded e4m3 values, accumulated in FP32 in ascending k.
void gemm_m64k32(float* acc, const float* a, const float* b_transposed, u32 n);
// The same as the tensor core does it: products and accumulator lose, toward zero, what lies more than `bits` bits (1 to
// 23) below the largest exponent among them, then they are added exactly and cut to FP32.
void gemm_m64k32_truncated(float* acc, const float* a, const float* b_transposed, u32 n, u32 bits);
float sum_k32_truncated(float acc, const float* a, const float* b, u32 step, u32 bits);  // one element; b[k * step]
constexpr u32 kMostSumBits = 23;
extern const float* const kE4m3Values;  // [256]

// Race check of an asynchronous access (no-op when off).
void shadow_async(const AsyncOp& op, const void* p, u64 bytes, bool write);

}  // namespace megamoe::emu
