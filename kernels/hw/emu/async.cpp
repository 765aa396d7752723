// TMA and bulk copies. A load is two stages, the copy and then the bytes counted on the mbarrier; a store reads
// shared memory, then writes. Unless completion is eager, a destination is poisoned when the copy is issued,
// since its contents are undefined until then: a missing wait becomes NaN instead of luck.
#include "async.h"

#include <cstring>

#include "shadow.h"

namespace megamoe::emu {

namespace {

constexpr u8 kPoison = 0xFF;

std::unique_ptr<AsyncOp> make_op(AsyncOp::Kind kind, Thread& t, Cta& cta, const Where& where) {
    auto op = std::make_unique<AsyncOp>();
    op->kind = kind;
    op->where = where;
    op->where.issuer = static_cast<int>(t.warp->index);
    op->issuer = &t;
    op->cta = &cta;
    if (g_engine->options.races) {
        op->agent = cta.first_tma_agent + cta.next_tma++ % Cta::kTmaAgents;
        op->epoch = g_engine->agents.next(op->agent);
        hb_publish(op->clock, t);
    }
    return op;
}

// The mbarrier must be one the issuing thread can know about, in the target CTA.
void check_barrier(Cta& cta, u32 offset, const Where& where, const Thread& issuer) {
    auto it = cta.mbarriers.find(offset);
    if (it == cta.mbarriers.end()) g_engine->fatal("mbarrier", where, format("smem+%u of CTA %u is not an initialised mbarrier", offset, cta.index));
    const Mbarrier& b = it->second;
    if (!b.fenced)
        g_engine->report("race", where, format("mbarrier at smem+%u (initialised at %s:%d) was not made visible to the async proxy: fence_mbarrier_init missing", offset, b.init.file, b.init.line));
    if (!knows_init(issuer, b))
        g_engine->report("race", where, format("mbarrier at smem+%u of CTA %u is used, but its initialisation at %s:%d is not ordered before this", offset, cta.index, b.init.file, b.init.line));
}

void poison(u8* p, u64 bytes) {
    if (g_engine->options.completion != Completion::kEager) std::memset(p, kPoison, bytes);
}

void check_bulk(const void* global, const void* shared, u64 bytes, const Where& where, const char* what) {
    if (bytes % 16 != 0 || bytes == 0) g_engine->fatal("misaligned", where, format("%s of %llu bytes (a positive multiple of 16)", what, bytes));
    if (reinterpret_cast<u64>(global) % 16 != 0 || (shared != nullptr && reinterpret_cast<u64>(shared) % 16 != 0))
        g_engine->fatal("misaligned", where, format("%s: addresses must be multiples of 16 (%s)", what, describe_address(global).c_str()));
}

const TensorMapImage& image_of(const TensorMap* map, const Where& where) {
    check_access(map, sizeof(TensorMap), 64, false, Access::kWeak, Scope::kCta, where);
    const auto& image = *reinterpret_cast<const TensorMapImage*>(map);
    if (image.magic != TensorMapImage::kMagic) g_engine->fatal("tensormap", where, "the tensor map is not one the emulator encoded");
    return image;
}

// A load of `bytes` into `target`, at the same offsets as in the issuing CTA; the caller adds where it comes from.
std::unique_ptr<AsyncOp> make_load(AsyncOp::Kind kind, Thread& t, Cta& target, const Where& where, u32 offset, u32 bytes, u32 barrier) {
    check_barrier(target, barrier, where, t);
    auto op = make_op(kind, t, target, where);
    op->smem = target.smem + offset;
    op->smem_bytes = bytes;
    op->barrier = barrier;
    poison(op->smem, bytes);
    return op;
}

// The CTAs a load goes to: its own, or those of the mask.
template <class Load> void each_target(Thread& t, u32 cta_mask, bool multicast, const Where& where, const Load& load) {
    Cta& self = cta_of(t);
    if (!multicast) return load(self);
    Cluster& cluster = *self.cluster;
    if (cta_mask == 0 || cta_mask >> cluster.ctas.size() != 0)
        g_engine->fatal("cluster", where, format("multicast to CTAs 0x%x of a cluster of %zu", cta_mask, cluster.ctas.size()));
    for (u32 c = 0; c < cluster.ctas.size(); ++c) {
        if (!(cta_mask >> c & 1u)) continue;
        if (cluster.ctas[c]->live == 0) g_engine->fatal("cluster", where, format("multicast to CTA %u of the cluster, which has exited", c));
        load(*cluster.ctas[c]);
    }
}

// 128-byte swizzle: address bits 4-6 are flipped by bits 7-9.
u64 swizzle128(u64 address) { return address ^ ((address >> 3) & 0x70); }

void copy_box(AsyncOp& op) {
    const TensorMapImage& m = op.map;
    const u64 row_bytes = u64(m.box_cols) * m.elem_bytes;
    const u64 smem_base = kSmemWindow + static_cast<u64>(op.smem - op.cta->smem);
    for (u32 r = 0; r < m.box_rows; ++r) {
        const i64 row = op.c1 + r;
        const u8* src = reinterpret_cast<const u8*>(m.base) + (row >= 0 && row < i64(m.rows) ? row * i64(m.row_stride_bytes) : 0);
        const bool row_inside = row >= 0 && row < i64(m.rows);
        for (u64 at = 0; at < row_bytes; at += 16) {
            u8 chunk[16];
            const i64 byte = op.c0 * m.elem_bytes + static_cast<i64>(at);
            const i64 row_end = static_cast<i64>(m.cols) * m.elem_bytes;
            if (row_inside && byte >= 0 && byte + 16 <= row_end) {
                std::memcpy(chunk, src + byte, 16);
            } else {
                for (i64 i = 0; i < 16; ++i) chunk[i] = row_inside && byte + i >= 0 && byte + i < row_end ? src[byte + i] : 0;
            }
            u64 address = smem_base + r * row_bytes + at;
            if (m.swizzle == 128) address = swizzle128(address);
            std::memcpy(op.cta->smem + (address - kSmemWindow), chunk, 16);
        }
        if (row_inside && g_engine->options.races) {
            const i64 first = std::max<i64>(0, op.c0), last = std::min<i64>(m.cols, op.c0 + m.box_cols);
            if (first < last) shadow_async(op, src + first * m.elem_bytes, static_cast<u64>(last - first) * m.elem_bytes, false);
        }
    }
}

}  // namespace

bool async_step(AsyncOp& op) {
    g_issuer = op.issuer;
    Engine& e = *g_engine;
    bool finished = false;
    switch (op.kind) {
        case AsyncOp::kTensorLoad:
        case AsyncOp::kBulkLoad:
            if (op.stage++ == 0) {
                if (op.kind == AsyncOp::kTensorLoad) {
                    copy_box(op);
                } else {
                    shadow_async(op, op.src, op.smem_bytes, false);
                    std::memcpy(op.smem, op.src, op.smem_bytes);
                }
                shadow_async(op, op.smem, op.smem_bytes, true);
                mark_written(op.smem, op.smem_bytes);
                e.wrote(op.smem, op.smem_bytes);
            } else {
                mbarrier_complete_tx(*op.cta, op.barrier, op.smem_bytes, op.agent, op.epoch, op.where);
                finished = true;
            }
            break;
        case AsyncOp::kBulkStore:
            if (op.stage++ == 0) {
                shadow_async(op, op.smem, op.smem_bytes, false);
                op.data.assign(op.smem, op.smem + op.smem_bytes);
                --op.group->unread;
                if (e.options.races) op.group->read_clock.join_epoch(e.agents, op.agent, op.epoch);
            } else {
                if (e.options.races) op.epoch = e.agents.next(op.agent);
                shadow_async(op, op.dst, op.smem_bytes, true);
                std::memcpy(op.dst, op.data.data(), op.smem_bytes);
                mark_written(op.dst, op.smem_bytes);
                --op.group->unwritten;
                if (e.options.races) op.group->write_clock.join_epoch(e.agents, op.agent, op.epoch);
                e.wrote(op.dst, op.smem_bytes);
                finished = true;
            }
            if (op.issuer->wait.kind == WaitKind::kBulk) e.wake(*op.issuer);
            break;
        case AsyncOp::kMma: finished = mma_step(*op.warpgroup); break;
    }
    g_issuer = nullptr;
    return finished;
}

void tma_prefetch_descriptor(const TensorMap* map, const char* file, int line) {
    enter();
    image_of(map, MM_HERE);
}

void tma_load_2d(void* dst, const TensorMap* map, u64* bar, i32 c0, i32 c1, u32 cta_mask, bool multicast, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter();
    const Where where = MM_HERE;
    e.maybe_preempt(t, 4);
    Cta& self = cta_of(t);
    const TensorMapImage& m = image_of(map, where);
    const u32 bytes = m.box_rows * m.box_cols * m.elem_bytes;
    const u32 offset = smem_offset(self, dst, bytes, where, "tma_load_2d");
    const u32 barrier = smem_offset(self, bar, 8, where, "tma_load_2d mbarrier");
    if (offset % (m.swizzle == 128 ? 1024 : 128) != 0)
        e.fatal("misaligned", where, format("tma_load_2d to smem+%u: a swizzled box starts at a multiple of 1024", offset));
    if (m.swizzle == 128 && m.box_cols * m.elem_bytes != 128) e.fatal("tensormap", where, format("128-byte swizzle with boxes %u bytes wide", m.box_cols * m.elem_bytes));
    check_global_range(reinterpret_cast<const void*>(m.base), (m.rows - 1) * m.row_stride_bytes + m.cols * m.elem_bytes, false, where, "tensor map");
    ++e.stats.tensor_loads;
    each_target(t, cta_mask, multicast, where, [&](Cta& target) {
        auto op = make_load(AsyncOp::kTensorLoad, t, target, where, offset, bytes, barrier);
        op->map = m;
        op->c0 = c0;
        op->c1 = c1;
        e.submit(std::move(op));
    });
}

void bulk_load(void* dst, const void* src, u32 bytes, u64* bar, u32 cta_mask, bool multicast, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter();
    const Where where = MM_HERE;
    e.maybe_preempt(t, 4);
    Cta& self = cta_of(t);
    check_bulk(src, dst, bytes, where, "bulk_load");
    const u32 offset = smem_offset(self, dst, bytes, where, "bulk_load");
    const u32 barrier = smem_offset(self, bar, 8, where, "bulk_load mbarrier");
    check_global_range(src, bytes, false, where, "bulk_load");
    ++e.stats.bulk_copies;
    each_target(t, cta_mask, multicast, where, [&](Cta& target) {
        auto op = make_load(AsyncOp::kBulkLoad, t, target, where, offset, bytes, barrier);
        op->src = src;
        e.submit(std::move(op));
    });
}

void bulk_store(void* dst, const void* src, u32 bytes, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter();
    const Where where = MM_HERE;
    e.maybe_preempt(t, 4);
    Cta& self = cta_of(t);
    check_bulk(dst, src, bytes, where, "bulk_store");
    smem_offset(self, src, bytes, where, "bulk_store");
    check_global_range(dst, bytes, true, where, "bulk_store");
    ++e.stats.bulk_copies;
    if (t.bulk_open == nullptr) {
        self.bulk_groups.emplace_back();
        t.bulk_open = &self.bulk_groups.back();
    }
    auto op = make_op(AsyncOp::kBulkStore, t, self, where);
    op->smem = static_cast<u8*>(const_cast<void*>(src));
    op->smem_bytes = bytes;
    op->dst = dst;
    op->group = t.bulk_open;
    ++t.bulk_open->unread;
    ++t.bulk_open->unwritten;
    poison(static_cast<u8*>(dst), bytes);
    e.submit(std::move(op));
}

void bulk_commit(const char* file, int line) {
    Thread& t = enter();
    (void)file, (void)line;
    if (t.bulk_open == nullptr) {
        cta_of(t).bulk_groups.emplace_back();
        t.bulk_open = &cta_of(t).bulk_groups.back();
    }
    t.bulk_groups.push_back(t.bulk_open);
    t.bulk_open = nullptr;
}

void bulk_wait(u32 pending, bool read_only, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    const size_t n = t.bulk_groups.size() > pending ? t.bulk_groups.size() - pending : 0;
    auto busy = [&] {
        for (size_t i = 0; i < n; ++i)
            if ((read_only ? t.bulk_groups[i]->unread : t.bulk_groups[i]->unwritten) != 0) return true;
        return false;
    };
    while (busy()) g_engine->block(t, WaitKind::kBulk, where, pending, read_only);
    for (size_t i = 0; i < n; ++i) {
        t.clock.join(t.bulk_groups[i]->read_clock);
        if (!read_only) t.clock.join(t.bulk_groups[i]->write_clock);
    }
    if (!read_only) t.bulk_groups.erase(t.bulk_groups.begin(), t.bulk_groups.begin() + static_cast<long>(n));
}

void bulk_prefetch_l2(const void* src, u32 bytes, const char* file, int line) {
    enter();
    const Where where = MM_HERE;
    check_bulk(src, nullptr, bytes, where, "bulk_prefetch_l2");
    check_global_range(src, bytes, false, where, "bulk_prefetch_l2");
}

}  // namespace megamoe::emu
