// TMA warp 0, lane 0: activations and their scales, once the rows have arrived (L1) or the L1 tiles of
// the block are written (L2).
#pragma once
#include "load_weights.cuh"

namespace megamoe {

template <class C>
MM_DEVICE void load_acts(const KernelParams& p, u8* smem, const CtaBarriers<C>& bars) {
    using Plan = SharedPlan<C>;
    constexpr u32 kBoxRows = C::kBlockM < 64 ? C::kBlockM : 64;
    RingCursor<kTileSlots> ring;
    RingCursor<C::kStages> stage;
    while (true) {
        const Tile tile = wait_tile<C>(p, smem, bars, ring);
        if (tile.kind() == kTileEnd) break;

        const bool l1 = tile.kind() == kTileL1;
        const u32* arrivals = arrival_bank(p, l1 ? kL1Arrival : kL2Arrival, tile.bank()) + tile.block;
        const u32 expected = l1 ? tile.valid() : p.intermediate / 128 * C::kMathWarpgroups;
        // Of a pair's last tile one CTA may have no rows: it only keeps step.
        const bool any = C::kCluster == 1 || tile.valid() != 0;
        // What did not arrive must not be stored: its metadata could point anywhere. The epilogue reads the tile again.
        if (any && !wait_equal<Scope::kGpu>(p, arrivals, expected, l1 ? kWaitL1Arrival : kWaitL2Arrival, tile.block))
            hw::sts_u32(reinterpret_cast<u32*>(smem + Plan::kRing + ring.slot() * kTileBytes), tile.without_rows());
        hw::fence_proxy_async();   // the rows or scales were written by ordinary stores; TMA reads them

        const TensorMap* map = l1 ? &p.l1_acts : &p.l2_acts;
        // What the epilogue needs of each row comes with the first K-block, into the tile's slot.
        u8* side = side_data<C>(smem, ring);
        const u8* side_from = l1 ? local_region<u8>(p, kL1TopkWeights) + tile.row0 * 4ull : local_region<u8>(p, kMetadata) + tile.row0 * 12ull;
        const u32 side_bytes = C::kBlockM * (l1 ? 4 : 12);
        const f32* scales = local_region<f32>(p, l1 ? kL1ActsSf : kL2ActsSf) + tile.row0;
        const u32 num_k = (l1 ? p.hidden : p.intermediate) / 128;
        const u32 boxes = ceil_div(tile.valid(), kBoxRows);   // rows past the last box stay unread
        const u32 loads = l1 ? TileShape<C>::kPasses * num_k : num_k;
        for (u32 load = 0, k = 0; load < loads; ++load, k = k + 1 == num_k ? 0 : k + 1) {
            wait_stage_empty<C>(p, bars, stage);
            u64* full = bars.stage_full(stage.slot());
            if (!any) {
                hw::mbarrier_arrive(full);
                stage.advance();
                continue;
            }
            hw::mbarrier_arrive_expect_tx(full, boxes * kBoxRows * 128 + C::kBlockM * 4 + (load == 0 ? side_bytes : 0));
            if (load == 0) hw::bulk_load(side, side_from, side_bytes, full);
            u8* a = smem + Plan::kA + stage.slot() * Plan::kABytes;
            for (u32 b = 0; b < boxes; ++b)
                hw::tma_load_2d(a + b * kBoxRows * 128, map, full, static_cast<i32>(k * 128), static_cast<i32>(tile.row0 + b * kBoxRows));
            hw::bulk_load(smem + Plan::kSfa + stage.slot() * Plan::kSfaBytes, scales + static_cast<u64>(k) * p.ring_rows, C::kBlockM * 4, full);
            stage.advance();
        }
        release_tile<C>(bars, ring.slot());
        ring.advance();
    }
}

}  // namespace megamoe
