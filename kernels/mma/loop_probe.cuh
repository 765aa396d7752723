// The main loop's parts alone, for `megamoe trace --loop`: products of what lies in shared memory, with and without
// promotion, stage barriers and copies, to find what each costs. No part of the kernel.
#pragma once
#include "kblock.cuh"

namespace megamoe {

struct LoopProbeParams {
    u64 cycles;   // u32[grid][math warpgroups]: the loop's
    u64 sink;     // f32[grid][math threads]: keeps the sums alive
    u64 source;   // e4m3[grid][span]: operands; span is a multiple of a stage's bytes
    u32 span, blocks;
    u32 offset;   // cycles by which the second warpgroup begins later
    u32 unused;
};

// kProbeInPlace: sums stay in the tensor core's accumulators, all columns of a warpgroup in one product; with kProbePromotion
// they are multiplied between two K-blocks, as rescaling does.
enum ProbePart : u32 { kProbePromotion = 1, kProbeBarriers = 2, kProbeCopies = 4, kProbeInPlace = 8 };

template <class C, u32 kParts>
struct LoopProbe {
    using Shape = TileShape<C>;
    using Plan = SharedPlan<C>;
    static constexpr bool kInPlace = (kParts & kProbeInPlace) != 0, kPromotes = (kParts & kProbePromotion) != 0 && !kInPlace;
    static constexpr bool kMultiplies = (kParts & kProbePromotion) != 0 && kInPlace, kWaits = (kParts & kProbeBarriers) != 0, kCopies = (kParts & kProbeCopies) != 0;
    static constexpr u32 kFrontend = 32 * (C::kDispatchWarps + C::kTmaWarps), kMath = 128 * C::kMathWarpgroups, kStageBytes = Plan::kABytes + Plan::kBBytes;
    static constexpr u32 kUnits = kInPlace ? Shape::kRowUnits : Shape::kUnits, kRegs = kInPlace ? Shape::kColumns / 2 : Shape::kRegs;
    static_assert(!kCopies || kWaits, "copies need the stages' barriers");
    static_assert(!Shape::kWarpMma, "there are no warp-level products here");

    const LoopProbeParams& p;
    u8* smem;
    MM_DEVICE u64* full(u32 s) const { return reinterpret_cast<u64*>(smem + Plan::kBarriers) + s; }
    MM_DEVICE u64* empty(u32 s) const { return full(s) + C::kStages; }
    MM_DEVICE const u8* source() const { return reinterpret_cast<const u8*>(p.source) + static_cast<u64>(hw::cta_idx()) * p.span; }

    // All threads: operands for the runs without copies, row scales, barriers.
    MM_DEVICE void prepare() const {
        const u32 thread = hw::thread_idx();
        for (u32 at = thread * 16; at < Plan::kSfa; at += (kFrontend + kMath) * 16)
            hw::sts_vec4(smem + at, hw::ld_vec4(source() + (at < Plan::kB ? at % Plan::kABytes : Plan::kABytes + (at - Plan::kB) % Plan::kBBytes)));
        for (u32 at = thread * 4; at < C::kStages * Plan::kSfaBytes; at += (kFrontend + kMath) * 4)
            hw::sts_f32(reinterpret_cast<f32*>(smem + Plan::kSfa + at), at / 4 % 2 == 0 ? 1.0f : 0.5f);   // rows in turn
        if (thread == 0)
            for (u32 s = 0; s < C::kStages; ++s) {
                hw::mbarrier_init(full(s), 1);
                hw::mbarrier_init(empty(s), 4 * C::kMathWarpgroups);
            }
        if (thread == 0) hw::fence_mbarrier_init();
        hw::fence_proxy_async_shared();
        hw::cta_sync<kFrontend + kMath>();
    }

    static MM_DEVICE void wait(u64* bar, u32 parity) {
        while (!hw::mbarrier_try_wait(bar, parity)) {}
    }

    // One thread.
    MM_DEVICE void load() const {
        RingCursor<C::kStages> stage;
        u32 at = 0;
        for (u32 k = 0; k < p.blocks; ++k) {
            wait(empty(stage.slot()), stage.parity() ^ 1);
            u64* bar = full(stage.slot());
            if constexpr (kCopies) {
                hw::mbarrier_arrive_expect_tx(bar, kStageBytes);
                hw::bulk_load(smem + Plan::kA + stage.slot() * Plan::kABytes, source() + at, Plan::kABytes, bar);
                hw::bulk_load(smem + Plan::kB + stage.slot() * Plan::kBBytes, source() + at + Plan::kABytes, Plan::kBBytes, bar);
                at = at + 2 * kStageBytes <= p.span ? at + kStageBytes : 0;
            } else {
                hw::mbarrier_arrive(bar);
            }
            stage.advance();
        }
    }

    MM_DEVICE void release(const MathThread<C>& me, u32 slot) const {
        hw::warp_sync();
        if (me.lane() == 0) hw::mbarrier_arrive(empty(slot));
    }

    // One K-block onto sums that stay in place.
    static MM_DEVICE void issue(f32 (&d)[kRegs], u64 a, u64 b) {
        hw::wgmma_pin(d);
        hw::wgmma_fence();
#pragma unroll
        for (u32 k = 0; k < 4; ++k) hw::wgmma_e4m3<2 * kRegs>(d, a + 2 * k, b + 2 * k, true);
        hw::wgmma_commit();
    }

    MM_DEVICE void multiply(const MathThread<C>& me) const {
        f32 acc[kUnits][kRegs], scratch[kPromotes ? Shape::kRegs : 1];
#pragma unroll
        for (u32 u = 0; u < kUnits; ++u)
#pragma unroll
            for (u32 i = 0; i < kRegs; ++i) acc[u][i] = 0.0f;
        const u32 a_offset = hw::uniform(Plan::kA + me.first_row() * 128), b_offset = hw::uniform(Plan::kB + me.column(0) * 128);
        const u8* sfa_rows = smem + Plan::kSfa + me.row(0) * 4;
        RingCursor<C::kStages> stage;
        if (me.warpgroup == 1) {
            const u32 begin = hw::clock_cycles();
            while (hw::clock_cycles() - begin < p.offset) {}
        }
        const u32 start = hw::clock_cycles();
#pragma unroll 1
        for (u32 k = 0; k < p.blocks; ++k) {
            const u32 slot = hw::uniform(stage.slot());
            const u64 desc_a = hw::smem_descriptor(smem + a_offset + slot * Plan::kABytes), desc_b = hw::smem_descriptor(smem + b_offset + slot * Plan::kBBytes);
            const f32* sfa = reinterpret_cast<const f32*>(sfa_rows + slot * Plan::kSfaBytes);
            if constexpr (kWaits) wait(full(slot), stage.parity());
#pragma unroll
            for (u32 u = 0; u < kUnits; ++u) {
                const u32 r = u / (kUnits / Shape::kRowUnits), c = u % (kUnits / Shape::kRowUnits);
                const u64 a = desc_a + r * Shape::kUnitRows * 128 / 16, b = desc_b + c * Shape::kUnitColumns * 128 / 16;
                if constexpr (kMultiplies) {
                    const f32 lo = hw::lds_f32(sfa + r * Shape::kUnitRows), hi = hw::lds_f32(sfa + r * Shape::kUnitRows + 8);
#pragma unroll
                    for (u32 i = 0; i < kRegs; ++i) acc[u][i] *= i % 4 < 2 ? lo : hi;
                }
                if constexpr (kPromotes) Product<C>::issue(scratch, a, b, false); else issue(acc[u], a, b);
                Factors<C> f;
                if constexpr (kPromotes) {
                    const f32 lo = hw::lds_f32(sfa + r * Shape::kUnitRows), hi = hw::lds_f32(sfa + r * Shape::kUnitRows + 8);
#pragma unroll
                    for (u32 block = 0; block < Shape::kScaleBlocks; ++block)
#pragma unroll
                        for (u32 odd = 0; odd < 2; ++odd) {
                            f.at[0][block][odd] = lo;
                            f.at[1][block][odd] = hi;
                        }
                }
                if (kWaits && u == 0 && k != 0) release(me, slot == 0 ? C::kStages - 1 : slot - 1);
                if constexpr (kPromotes) {
                    Product<C>::wait(scratch);
                    promote<C>(acc[u], scratch, f, c);
                } else {
                    hw::wgmma_wait<0>(acc[u]);
                }
            }
            stage.advance();
        }
        const u32 spent = hw::clock_cycles() - start;
        if (me.thread == 0) hw::st_u32(reinterpret_cast<u32*>(p.cycles) + hw::cta_idx() * C::kMathWarpgroups + me.warpgroup, spent);
        f32 sum = 0.0f;
#pragma unroll
        for (u32 u = 0; u < kUnits; ++u)
#pragma unroll
            for (u32 i = 0; i < kRegs; ++i) sum += acc[u][i];
        hw::st_f32(reinterpret_cast<f32*>(p.sink) + hw::cta_idx() * kMath + me.warpgroup * 128 + me.thread, sum);
    }

    MM_DEVICE void run() const {
        prepare();
        if (hw::warp_idx() < C::kDispatchWarps + C::kTmaWarps) {
            hw::reg_dealloc<C::kRegsTma>();
            if (kWaits && hw::thread_idx() == 0) load();
            hw::warp_sync();
        } else {
            hw::reg_alloc<C::kRegsMath>();
            multiply(MathThread<C>(hw::thread_idx_volatile() - kFrontend));
        }
    }
};

template <class C, u32 kParts>
MM_DEVICE void loop_probe(const LoopProbeParams& p) { LoopProbe<C, kParts>{p, hw::dynamic_smem()}.run(); }

}  // namespace megamoe
