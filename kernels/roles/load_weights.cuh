// TMA warp 1, lane 0: the scheduler and the weight loader. It owns the only copy of the tile order and
// publishes each tile before loading its weights, so weights never wait for activations.
#pragma once
#include "dispatch_pull.cuh"

namespace megamoe {

// Shared-memory tables as the callables TileStream wants.
struct SharedWords {
    const u32* words;
    MM_DEVICE u32 operator()(u32 i) const { return hw::lds_u32(words + i); }
};

template <class C>
MM_DEVICE StreamShape stream_shape(const KernelParams& p, const ExpertTables<C>& tables) {
    StreamShape s;
    s.experts = hw::lds_u32(tables.num_active);
    s.block_m = C::kBlockM;
    s.unit_blocks = p.unit_blocks;
    s.lag = p.lag;
    s.l1_columns = 2 * p.intermediate / C::kBlockN;
    s.l2_columns = C::kPhase >= Phase::kL2 ? ceil_div(p.hidden, C::kBlockN) : 0;
    return s;
}

// Weights do not depend on who routed what: while counts and rows travel, ask for the start of the tile this
// CTA gets first if every expert has rows. Wrong guesses cost bandwidth nobody else uses yet.
template <class C>
MM_DEVICE void prefetch_first_tile(const KernelParams& p) {
    hw::tma_prefetch_descriptor(&p.w13);
    hw::tma_prefetch_descriptor(&p.w2);
    const u32 columns = 2 * p.intermediate / C::kBlockN, expert = hw::cta_idx() / columns;
    if (expert >= local_experts(p)) return;
    const u32 row = expert * 2 * p.intermediate + hw::cta_idx() % columns * C::kBlockN, num_k = p.hidden / 128;
    const u32 blocks = p.prefetch_blocks < num_k ? p.prefetch_blocks : num_k;
    for (u32 k = 0; k < blocks; ++k) hw::tma_prefetch_2d(&p.w13, static_cast<i32>(k * 128), static_cast<i32>(row));
}

template <class C>
MM_DEVICE void load_weights(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, u32 epoch) {
    using Plan = SharedPlan<C>;
    prefetch_first_tile<C>(p);
    mbarrier_wait(p, bars.tables(), 0, kWaitTables, 0);
    const ExpertTables<C> tables(p, smem);
    TileStream<SharedWords, SharedWords, SharedWords> stream(stream_shape<C>(p, tables), SharedWords{tables.active_rows},
                                                             SharedWords{tables.active}, SharedWords{tables.pool_base});
    RingCursor<kTileSlots> ring;
    RingCursor<C::kStages> stage;
    u32 l1_tiles = 0, at = hw::cta_idx();
    bool more = stream.skip(at);
    while (true) {
        Tile tile{kTileEnd, 0, 0, 0};
        u32 next = 0;
        if (more) {
            tile = stream.current(epoch & 1);
            tile.set_maxima_buffer(l1_tiles & 1);
            l1_tiles += tile.kind() == kTileL1;
            // Asked for now, needed after this tile's loads: the answer's latency is hidden.
            next = hw::num_ctas() + hw::atom_add_relaxed<Scope::kGpu>(tile_counter(p, epoch & 1), 1);
        }
        mbarrier_wait(p, bars.tile_empty(ring.slot()), ring.parity() ^ 1, kWaitTileEmpty, ring.slot());
        hw::sts_vec4(smem + Plan::kRing + ring.slot() * kTileBytes, {tile.head, tile.expert, tile.n, tile.row0});
        hw::mbarrier_arrive(bars.tile_full(ring.slot()));
        ring.advance();
        if (!more) break;

        const bool l1 = tile.kind() == kTileL1;
        const TensorMap* map = l1 ? &p.w13 : &p.w2;
        const u32 rows_per_expert = l1 ? 2 * p.intermediate : p.hidden;
        const i32 row = static_cast<i32>(tile.expert * rows_per_expert + tile.n * C::kBlockN);
        const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128;
        for (u32 k = 0; k < num_k; ++k) {
            mbarrier_wait(p, bars.stage_empty(stage.slot()), stage.parity() ^ 1, kWaitStageEmpty, stage.slot());
            u64* full = bars.stage_full(stage.slot());
            hw::mbarrier_arrive_expect_tx(full, Plan::kBBytes);
            hw::tma_load_2d(smem + Plan::kB + stage.slot() * Plan::kBBytes, map, full, static_cast<i32>(k * 128), row);
            stage.advance();
        }
        more = stream.skip(next - at);
        at = next;
    }
}

}  // namespace megamoe
