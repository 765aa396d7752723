// TMA warp 1, lane 0: the scheduler and the weight loader. It owns the only copy of the tile order and
// publishes each tile before loading its weights, so weights never wait for activations. In a cluster of two, CTA 0
// schedules for both: a tile is a pair of row blocks, and each CTA loads half of the weights into both.
#pragma once
#include "dispatch_pull.cuh"

namespace megamoe {

// Shared-memory tables as the callables TileStream wants.
struct SharedWords {
    const u32* words;
    MM_DEVICE u32 operator()(u32 i) const { return hw::lds_u32(words + i); }
};

// Half an L2 tile is a warpgroup's column part, and the other warpgroup has nothing to do.
template <class C>
constexpr bool kCanHalve = TileShape<C>::kParts == 2 && C::kMathWarpgroups == 2 && C::kPhase >= Phase::kL2;

template <class C>
MM_DEVICE StreamShape stream_shape(const KernelParams& p, const ExpertTables<C>& tables) {
    StreamShape s;
    s.experts = hw::lds_u32(tables.num_active);
    s.block_m = C::kCluster * C::kBlockM;
    s.unit_blocks = p.unit_blocks;
    s.lag = p.lag;
    s.wave = (p.flags & kWaveOrder) != 0;
    s.pair = C::kCluster;
    s.ring_rows = p.ring_rows;
    if (kCanHalve<C> && (p.flags & kHalveTail)) s.halve_last = num_clusters<C>();   // what would not keep all CTAs busy
    s.l1_columns = p.intermediate / 128;   // whole requantization groups, whatever BLOCK_N
    s.l2_columns = C::kPhase >= Phase::kL2 ? ceil_div(p.hidden, C::kBlockN) : 0;
    return s;
}

// Where this CTA's share of K-block 0 of a tile's weights (its `rows` rows from `first` on) lies; the next K-block
// follows kWeightTileRows * 128 bytes on. In L1 column tiles are always whole weight tiles, in L2 BLOCK_N rows.
template <class C>
MM_DEVICE const u8* tile_weights(const KernelParams& p, bool l1, u32 expert, u32 n, u32 rows, u32 first) {
    const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128, tiles = l1 ? p.intermediate / 128 : ceil_div(p.hidden, kWeightTileRows);
    const u32 row = (l1 ? n * kWeightTileRows : n * C::kBlockN) + first + cta_in_cluster<C>() * (rows / C::kCluster);
    const u64 tile = static_cast<u64>(expert) * tiles + row / kWeightTileRows;
    return reinterpret_cast<const u8*>(l1 ? p.w13 : p.w2) + (tile * num_k * kWeightTileRows + row % kWeightTileRows) * 128;
}

// Weights do not depend on who routed what: while counts and rows travel, ask for the start of the tile this
// CTA gets first if every expert has rows. Wrong guesses cost bandwidth nobody else uses yet.
template <class C>
MM_DEVICE void prefetch_first_tile(const KernelParams& p) {
    const u32 columns = p.intermediate / 128, expert = cluster_idx<C>() / columns;
    if (expert >= local_experts(p)) return;
    const u8* from = tile_weights<C>(p, true, expert, cluster_idx<C>() % columns, C::kBlockN, 0);
    const u32 num_k = p.hidden / 128, blocks = p.prefetch_blocks < num_k ? p.prefetch_blocks : num_k;
    for (u32 k = 0; k < blocks; ++k) hw::bulk_prefetch_l2(from + k * kWeightTileRows * 128, C::kBlockN / C::kCluster * 128);
}

// Puts a tile into the ring of CTA `cta` of the cluster.
template <class C>
MM_DEVICE void publish_tile(u8* smem, const CtaBarriers<C>& bars, u32 slot, u32 cta, const Tile& tile) {
    u8* to = smem + SharedPlan<C>::kRing + slot * kTileBytes;
    if (cta == 0) {   // its own
        hw::sts_vec4(to, tile.packed());
        hw::mbarrier_arrive(bars.tile_full(slot));
    } else {
        hw::sts_vec4_cluster(to, cta, tile.packed());
        hw::mbarrier_arrive_release_cluster(bars.tile_full(slot), cta);
    }
}

// All of a tile's weights, K-block by K-block: of a pair each CTA loads its half for both.
template <class C>
MM_DEVICE void load_tile_weights(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, const Tile& tile, RingCursor<C::kStages>& stage) {
    using Plan = SharedPlan<C>;
    constexpr u32 kStep = kWeightTileRows * 128;
    const bool l1 = tile.kind() == kTileL1;
    const u32 rows = kCanHalve<C> && tile.is_half() ? C::kBlockN / 2 : C::kBlockN, first = rows * (tile.is_half() ? tile.half() : 0);
    const u8* from = tile_weights<C>(p, l1, tile.expert, tile.n, rows, first);
    const u32 bytes = rows * 128 / C::kCluster, place = first * 128 + cta_in_cluster<C>() * bytes;
    const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128, loads = l1 ? TileShape<C>::kPasses * num_k : num_k;
    for (u32 load = 0; load < loads; ++load, from += kStep) {
        if (TileShape<C>::kPasses > 1 && load == num_k) from = from - num_k * kStep + Plan::kBBytes;   // the second pass: the tile's other rows
        wait_stage_empty<C>(p, bars, stage);
        u64* full = bars.stage_full(stage.slot());
        u8* to = smem + Plan::kB + stage.slot() * Plan::kBBytes + place;
        hw::mbarrier_arrive_expect_tx(full, rows * 128);
        // Beyond the stages, weights wait in L2: HBM goes on while the math warps wait or are in an epilogue.
        if (p.ahead != 0 && load + p.ahead < num_k) hw::bulk_prefetch_l2(from + p.ahead * kStep, bytes);
        if constexpr (C::kCluster == 1) hw::bulk_load(to, from, bytes, full);
        else hw::bulk_load_multicast(to, from, bytes, full, (1 << C::kCluster) - 1);
        stage.advance();
    }
}

// The CTA that schedules: CTA 0 of a cluster.
template <class C>
MM_DEVICE void schedule_and_load_weights(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, u32 epoch) {
    prefetch_first_tile<C>(p);
    mbarrier_wait(p, bars.tables(), 0, kWaitTables, 0);
    const ExpertTables<C> tables(p, smem);
    TileStream<SharedWords, SharedWords, SharedWords> stream(stream_shape<C>(p, tables), SharedWords{tables.active_rows},
                                                             SharedWords{tables.active}, SharedWords{tables.pool_base});
    RingCursor<kTileSlots> ring;
    RingCursor<C::kStages> stage;
    u32 l1_tiles = 0, at = cluster_idx<C>();
    bool more = stream.skip(at);
    while (true) {
        const bool last = !more;
        Tile tile{kTileEnd, 0, 0, 0, 0};
        u32 next = 0;
        if (more) {
            tile = stream.current(epoch & 1);
            // Asked for now, needed after this tile's loads: the answer's latency is hidden.
            next = num_clusters<C>() + hw::atom_add_relaxed<Scope::kGpu>(tile_counter(p, epoch & 1), 1);
        }
        mbarrier_wait<(C::kCluster > 1)>(p, bars.tile_empty(ring.slot()), ring.parity() ^ 1, kWaitTileEmpty, ring.slot());
#pragma unroll
        for (u32 cta = 0; cta < C::kCluster; ++cta) {
            Tile own = cta == 0 || last ? tile : stream.current(epoch & 1, cta);
            own.set_maxima_buffer(l1_tiles & 1);
            publish_tile<C>(smem, bars, ring.slot(), cta, own);
        }
        l1_tiles += tile.kind() == kTileL1;
        ring.advance();
        if (!more) break;
        load_tile_weights<C>(p, smem, bars, tile, stage);
        more = stream.skip(next - at);
        at = next;
    }
}

// The other CTA of a pair: its tiles come through the ring.
template <class C>
MM_DEVICE void follow_and_load_weights(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars) {
    prefetch_first_tile<C>(p);
    RingCursor<kTileSlots> ring;
    RingCursor<C::kStages> stage;
    while (true) {
        const Tile tile = wait_tile<C>(p, smem, bars, ring);
        release_tile<C>(bars, ring.slot());
        ring.advance();
        if (tile.kind() == kTileEnd) break;
        load_tile_weights<C>(p, smem, bars, tile, stage);
    }
}

template <class C>
MM_DEVICE void load_weights(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars, u32 epoch) {
    if (C::kCluster == 1 || cta_in_cluster<C>() == 0) schedule_and_load_weights<C>(p, smem, bars, epoch);
    else follow_and_load_weights<C>(p, smem, bars);
}

}  // namespace megamoe
