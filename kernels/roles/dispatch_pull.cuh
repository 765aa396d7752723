// Dispatch warps, second half: learn what this rank received, publish the expert tables to the CTA, and
// pull the rows into the pool: bulk load from the peer into shared memory, bulk store into the pool, then
// one arrival per row. A row longer than 4 KB travels in chunks; the load of the next chunk is in flight
// while the current one is stored.
#pragma once
#include "dispatch_send.cuh"

namespace megamoe {

// Expert tables of a CTA, in shared memory. Entry q = expert * R + j stands for source (rank + j) % R.
template <class C>
struct ExpertTables {
    u32 *row_prefix, *list_base, *pool_base, *counts;
    u32 *active, *active_rows, *num_active;   // experts with rows
    MM_DEVICE ExpertTables(const KernelParams& p, u8* smem) {
        const u32 local = local_experts(p);
        row_prefix = reinterpret_cast<u32*>(smem + SharedPlan<C>::row_prefix(p.hidden));
        list_base = reinterpret_cast<u32*>(smem + SharedPlan<C>::list_base(p.hidden, local, p.num_ranks));
        pool_base = reinterpret_cast<u32*>(smem + SharedPlan<C>::pool_base(p.hidden, local, p.num_ranks));
        counts = reinterpret_cast<u32*>(smem + SharedPlan<C>::counts(p.hidden, local, p.num_ranks));
        active = reinterpret_cast<u32*>(smem + SharedPlan<C>::active(p.hidden, local, p.num_ranks));
        active_rows = active + local;
        num_active = active_rows + local;
    }
};

template <class C>
struct DispatchPull {
    static constexpr u32 kThreads = C::kDispatchWarps * 32;
    static constexpr bool kMayBeRing = C::kPhase >= Phase::kL2;   // before, nothing says when a row has been used

    const KernelParams& p;
    const CtaBarriers<C>& bars;
    ExpertTables<C> tables;
    u8* smem;
    u32 epoch, thread, lane, warp;

    MM_DEVICE DispatchPull(const KernelParams& params, const CtaBarriers<C>& barriers, u8* shared, u32 launch_epoch, u32 dispatch_thread)
        : p(params), bars(barriers), tables(params, shared), smem(shared), epoch(launch_epoch), thread(dispatch_thread),
          lane(dispatch_thread % 32), warp(dispatch_thread / 32) {}

    MM_DEVICE void sync() const { hw::bar_sync(kBarDispatch, kThreads); }

    // Waits for every source's flag, then builds the tables and lets the scheduler start.
    MM_DEVICE void build_tables() const {
        const u32 local = local_experts(p), ranks = p.num_ranks, entries = local * ranks;
        u32* ok_word = tables.row_prefix + entries;   // borrowed before the total goes there
        if (thread < 32) {
            bool ok = true;
            if (lane < ranks)
                ok = wait_equal<Scope::kSys>(p, local_region<u32>(p, kCountFlag) + lane, epoch + 1, kWaitCountFlag, lane);
            ok = hw::all(ok);
            if (lane == 0) hw::sts_u32(ok_word, ok);
        }
        sync();
        const bool ok = hw::lds_u32(ok_word) != 0;   // after an abort the counts mean nothing: take none
        const u32* received = local_region<u32>(p, kRecvCount);
        for (u32 q = thread; q < entries; q += kThreads) {
            const u32 expert = q / ranks, source = (p.rank + q % ranks) % ranks;
            hw::sts_u32(tables.row_prefix + q, ok ? hw::ld_u32(received + source * local + expert) : 0);
            hw::sts_u32(tables.list_base + q, ok ? hw::ld_u32(received + entries + source * local + expert) : 0);
        }
        sync();
        if (thread < 32) {
            const u32 total = warp_prefix(tables.row_prefix, tables.row_prefix, entries, 1);
            if (lane == 0) hw::sts_u32(tables.row_prefix + entries, total);
            hw::warp_sync();
            for (u32 e = lane; e < local; e += 32)
                hw::sts_u32(tables.counts + e, hw::lds_u32(tables.row_prefix + (e + 1) * ranks) - hw::lds_u32(tables.row_prefix + e * ranks));
            hw::warp_sync();
            warp_prefix(tables.counts, tables.pool_base, local, kTokenAlignment);
            u32 active = 0;
            for (u32 base = 0; base < local; base += 32) {
                const u32 e = base + lane, rows = e < local ? hw::lds_u32(tables.counts + e) : 0;
                const u32 with_rows = hw::ballot(rows != 0);
                if (rows != 0) {
                    const u32 at = active + hw::popcount(with_rows & ((1u << lane) - 1));
                    hw::sts_u32(tables.active + at, e);
                    hw::sts_u32(tables.active_rows + at, rows);
                }
                active += hw::popcount(with_rows);
            }
            if (lane == 0) hw::sts_u32(tables.num_active, active);
            hw::warp_sync();
        }
        sync();
        if (thread == 0) hw::mbarrier_arrive(bars.tables());
    }

    // One CTA reports what was received.
    MM_DEVICE void report_counts() const {
        if (hw::cta_idx() != 0) return;
        for (u32 e = thread; e < local_experts(p); e += kThreads) {
            const u32 rows = hw::lds_u32(tables.counts + e);
            hw::st_u32(local_region<u32>(p, kRecvCountSum) + e, rows);
            if (p.stats) hw::red_add_relaxed<Scope::kGpu>(reinterpret_cast<u32*>(p.stats) + e, rows);
        }
    }

    // Where a received row comes from and goes to. Token and slot share a word: no division per chunk.
    struct Row {
        u32 source, token_slot;
        u32 place;   // pool row in memory: of a ring, its remainder
        u32 block;   // its row block among all of the pool
        MM_DEVICE u32 token() const { return token_slot / kMaxTopk; }
        MM_DEVICE u32 slot() const { return token_slot % kMaxTopk; }
    };
    MM_DEVICE Row locate(u32 row) const {
        u32 lo = 0, hi = local_experts(p) * p.num_ranks;   // prefix[lo] <= row < prefix[hi]
        while (hi - lo > 1) {
            const u32 mid = (lo + hi) / 2;
            if (hw::lds_u32(tables.row_prefix + mid) <= row) lo = mid; else hi = mid;
        }
        const u32 expert = lo / p.num_ranks;
        Row r;
        r.source = (p.rank + lo % p.num_ranks) % p.num_ranks;
        const u32 in_list = hw::lds_u32(tables.list_base + lo) + row - hw::lds_u32(tables.row_prefix + lo);
        const u32 entry = hw::ld_u32(local_region<u32>(p, kRecvList) + r.source * (p.capacity * p.topk) + in_list);
        r.token_slot = entry / p.topk * kMaxTopk + entry % p.topk;
        const u32 pool_row = hw::lds_u32(tables.pool_base + expert) + row - hw::lds_u32(tables.row_prefix + expert * p.num_ranks);
        r.place = kMayBeRing ? pool_row % p.ring_rows : pool_row;
        r.block = pool_row / C::kBlockM;
        return r;
    }
    // Row `from` of the batch that the warp's lanes located.
    static MM_DEVICE Row broadcast(const Row& mine, u32 from) {
        return {hw::shfl(mine.source, from), hw::shfl(mine.token_slot, from), hw::shfl(mine.place, from), kMayBeRing ? hw::shfl(mine.block, from) : 0};
    }

    // Counts that say that the L2 tiles of pool rows 128 * segment ... are done.
    MM_DEVICE u32 tiles_of_segment(u32 segment) const {
        const u32 first = segment * kTokenAlignment;
        u32 lo = 0, hi = local_experts(p);   // the last expert that begins at or before it: those without rows begin where the next does
        while (hi - lo > 1) {
            const u32 mid = (lo + hi) / 2;
            if (hw::lds_u32(tables.pool_base + mid) <= first) lo = mid; else hi = mid;
        }
        const u32 left = hw::lds_u32(tables.counts + lo) - (first - hw::lds_u32(tables.pool_base + lo));
        return ceil_div(left < kTokenAlignment ? left : kTokenAlignment, C::kBlockM) * ceil_div(p.hidden, C::kBlockN) * C::kMathWarpgroups;
    }

    // In a ring a row's place may still hold a row whose L2 tiles are not done. Waits for the first row's; returns how
    // many rows of the batch, in order, may be written.
    MM_DEVICE u32 free_rows(const Row& mine, u32 rows) const {
        if (!kMayBeRing || !pool_is_ring(p)) return rows;
        bool free = true;
        const u32 segment = mine.block / (kTokenAlignment / C::kBlockM), ring = p.ring_rows / kTokenAlignment;
        if (lane < rows && segment >= ring) {
            const u32* done = pool_free_bank(p, epoch & 1) + (segment - ring);
            const u32 expected = tiles_of_segment(segment - ring);
            free = hw::ld_acquire<Scope::kGpu>(done) == expected;
            if (lane == 0 && !free) {
                wait_equal<Scope::kGpu>(p, done, expected, kWaitPoolFree, segment - ring);
                free = true;   // or the launch was given up, and what is written means nothing
            }
        }
        const u32 busy = hw::ballot(!free);
        hw::warp_sync();   // what each lane has acquired, before lane 0 copies rows there
        return busy == 0 ? rows : hw::popcount((busy & (0u - busy)) - 1);
    }

    // Scales, routing weights and metadata of the batch's rows, by the whole warp: many loads in flight.
    MM_DEVICE void copy_side_data(const Row& mine, u32 rows) const {
        const u32 groups = p.hidden / 128, items = rows * groups;
        f32* to = local_region<f32>(p, kL1ActsSf);
#pragma unroll 1
        for (u32 base = 0; base < items; base += 32 * kSideUnroll) {
            f32 value[kSideUnroll];
            u32 out[kSideUnroll];   // element of l1_acts_sf: at most H/128 * G, far below 2^32
#pragma unroll
            for (u32 i = 0; i < kSideUnroll; ++i) {
                const u32 item = base + 32 * i + lane, row = item / groups, group = item - row * groups;
                const Row r = broadcast(mine, row < rows ? row : 0);
                out[i] = kNoRow;
                if (row < rows) {
                    value[i] = hw::ld_f32(peer_region<f32>(p, r.source, kXSf) + static_cast<u64>(r.token()) * groups + group);
                    out[i] = group * p.ring_rows + r.place;
                }
            }
#pragma unroll
            for (u32 i = 0; i < kSideUnroll; ++i)
                if (out[i] != kNoRow) hw::st_f32(to + out[i], value[i]);
        }
        if (lane < rows) {
            const f32 weight = hw::ld_f32(peer_region<f32>(p, mine.source, kTopkWeights) + mine.token() * p.topk + mine.slot());
            hw::st_f32(local_region<f32>(p, kL1TopkWeights) + mine.place, weight);
            u32* meta = local_region<u32>(p, kMetadata) + static_cast<u64>(mine.place) * 3;
            hw::st_u32(meta, mine.source);
            hw::st_u32(meta + 1, mine.token());
            hw::st_u32(meta + 2, mine.slot());
        }
    }

    // Bytes of chunk `chunk` of a row.
    MM_DEVICE u32 chunk_size(u32 chunk, u32 chunk_bytes) const {
        const u32 left = p.hidden - chunk * chunk_bytes;
        return left < chunk_bytes ? left : chunk_bytes;
    }

    // The warp takes every step-th row, 32 at a time: lanes locate them together, the first chunks are under
    // way while the side data is copied, then chunks go through the staging buffers. A row is published when
    // the store after its last one has been issued and it alone is known complete: stores overlap.
    MM_DEVICE void pull() const {
        const u32 total = hw::lds_u32(tables.row_prefix + local_experts(p) * p.num_ranks);
        const u32 chunk_bytes = SharedPlan<C>::row_chunk(p.hidden), chunks = ceil_div(p.hidden, chunk_bytes);
        const u32 step = hw::num_ctas() * C::kDispatchWarps;
        u32 issued = 0;   // chunks of earlier batches: buffers and barrier phases follow from the count
#pragma unroll 1
        for (u32 base = hw::cta_idx() * C::kDispatchWarps + warp, rows; base < total; base += rows * step) {
            const u32 left = ceil_div(total - base, step);
            rows = left < 32 ? left : 32;
            Row mine{};
            if (lane < rows) mine = locate(base + lane * step);
            rows = free_rows(mine, rows);
            ChunkCursor load, store;
            u32 loads = 0;
#pragma unroll 1
            for (; loads < C::kRowDepth && load.row < rows; ++loads) {
                const Row row = broadcast(mine, load.row);
                if (lane == 0) start_load(row, load.chunk, chunk_bytes, issued + loads);
                load.advance(chunks);
            }
            copy_side_data(mine, rows);
            hw::warp_sync();   // the side data of all lanes, before lane 0 publishes rows
            u32 stores = 0;
            u32 unpublished = kNoRow;
#pragma unroll 1
            while (store.row < rows) {
                const Row row = broadcast(mine, store.row);
                if (lane == 0) {
                    store_chunk(row, store.chunk, chunk_bytes, issued + stores);
                    if (unpublished != kNoRow) {
                        hw::bulk_wait<1>();
                        publish(unpublished);
                    }
                }
                unpublished = store.chunk + 1 == chunks ? (kMayBeRing ? row.block : row.place / C::kBlockM) : kNoRow;
                store.advance(chunks);
                ++stores;
                if (load.row < rows) {
                    const Row next = broadcast(mine, load.row);
                    if (lane == 0) {
                        hw::bulk_wait_read<0>();   // the buffer that the store just read is the next load's
                        start_load(next, load.chunk, chunk_bytes, issued + loads);
                    }
                    load.advance(chunks);
                    ++loads;
                }
            }
            if (lane == 0) {
                hw::bulk_wait<0>();
                publish(unpublished);
            }
            issued += stores;
        }
    }
    static constexpr u32 kNoRow = ~0u, kSideUnroll = 2;

    MM_DEVICE void publish(u32 block) const {
        hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL1Arrival, epoch & 1) + block, 1);
    }
    // Row of the batch and chunk of the row.
    struct ChunkCursor {
        u32 row = 0, chunk = 0;
        MM_DEVICE void advance(u32 chunks) {
            if (++chunk == chunks) {
                chunk = 0;
                ++row;
            }
        }
    };
    // The n-th chunk of this warp: its staging buffer, barrier and barrier phase.
    MM_DEVICE u8* staging(u32 n, u32 chunk_bytes) const {
        return smem + SharedPlan<C>::kRows + (warp * C::kRowDepth + n % C::kRowDepth) * chunk_bytes;
    }
    MM_DEVICE u64* loaded(u32 n) const { return bars.pull(warp * C::kRowDepth + n % C::kRowDepth); }

    MM_DEVICE void start_load(const Row& row, u32 chunk, u32 chunk_bytes, u32 n) const {
        const u32 offset = chunk * chunk_bytes, bytes = chunk_size(chunk, chunk_bytes);
        hw::mbarrier_arrive_expect_tx(loaded(n), bytes);
        hw::bulk_load(staging(n, chunk_bytes),
                      peer_region<u8>(p, row.source, kX) + static_cast<u64>(row.token()) * p.hidden + offset, bytes, loaded(n));
    }
    MM_DEVICE void store_chunk(const Row& row, u32 chunk, u32 chunk_bytes, u32 n) const {
        mbarrier_wait(p, loaded(n), n / C::kRowDepth % 2, kWaitPull, row.place);
        hw::bulk_store(local_region<u8>(p, kL1Acts) + static_cast<u64>(row.place) * p.hidden + chunk * chunk_bytes,
                       staging(n, chunk_bytes), chunk_size(chunk, chunk_bytes));
        hw::bulk_commit();
    }

    // The other bank was used by the launch before this one; nobody reads it now.
    MM_DEVICE void clear_next_bank() const {
        const u32 words = p.pool_rows / kArrivalGranularity;
        u32* l1 = arrival_bank(p, kL1Arrival, (epoch + 1) & 1);
        u32* l2 = arrival_bank(p, kL2Arrival, (epoch + 1) & 1);
        const u32 first = hw::cta_idx() * kThreads + thread, step = hw::num_ctas() * kThreads;
#pragma unroll 1
        for (u32 i = first; i < words; i += step) {
            hw::st_u32(l1 + i, 0);
            hw::st_u32(l2 + i, 0);
        }
        u32* done = pool_free_bank(p, (epoch + 1) & 1);
        if constexpr (kMayBeRing) {
            for (u32 i = first; i < p.pool_rows / kTokenAlignment; i += step) hw::st_u32(done + i, 0);
        }
        if (first == 0) hw::st_u32(tile_counter(p, (epoch + 1) & 1), 0);
        u32* sent = send_count_bank(p, epoch + 1);
        for (u32 e = first; e < p.num_experts; e += step) hw::st_u32(sent + e, 0);
    }

    MM_DEVICE void run(Trace<C::kTrace>& trace) const {
        build_tables();
        trace.stamp(kTraceTables);
        report_counts();
        pull();
        trace.stamp(kTracePulled);
        clear_next_bank();
        trace.stamp(kTraceDispatchEnd);
    }
};

}  // namespace megamoe
