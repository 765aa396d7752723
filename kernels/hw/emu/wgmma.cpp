// Warpgroup MMA. Issuing does not block: each thread appends to its warpgroup's queue, the 128th arrival makes an
// operation executable, and shared memory is read when it executes. Accumulators are NaN from issue until the
// thread's wgmma_wait hands the values back.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "async.h"
#include "shadow.h"

namespace megamoe::emu {

namespace {

const u32 kPoisonBits = 0x7FC0DEADu;  // a quiet NaN with a payload the hardware does not produce

bool is_poison(const f32* p) {
    u32 bits;
    std::memcpy(&bits, p, 4);
    return bits == kPoisonBits;
}

Warpgroup& group_of(Thread& t, const Where& where) {
    Cta& cta = cta_of(t);
    const u32 index = t.index / 128u;
    if ((index + 1) * 128 > cta.threads.size()) g_engine->fatal("wgmma", where, "the calling warp is not part of a full warpgroup");
    return cta.warpgroups[index];
}

// Row and column in the 64 x n tile of fragment value i of thread t (see hw/sm90/wgmma.cuh).
u32 fragment_row(u32 thread, u32 i) { return 16 * (thread / 32) + (thread % 32) / 4 + 8 * ((i >> 1) & 1u); }
u32 fragment_column(u32 thread, u32 i) { return 8 * (i >> 2) + 2 * (thread % 4) + (i & 1u); }

MmaEntry& join_entry(Warpgroup& wg, Thread& t, const Where& where, bool commit, bool& first) {
    while (wg.base + wg.queue.size() <= t.mma_next) wg.queue.emplace_back();
    MmaEntry& entry = wg.queue[t.mma_next - wg.base];
    ++t.mma_next;
    first = entry.arrivals++ == 0;
    if (first) {
        entry.commit = commit;
        entry.where = where;
    } else if (entry.commit != commit || entry.where.line != where.line) {
        g_engine->fatal("wgmma", where, format("threads of warpgroup %u disagree: the first to get here issued %s at %s:%d", wg.index,
                                               entry.commit ? "wgmma.commit_group" : "wgmma.mma_async", entry.where.file, entry.where.line));
    }
    if (!commit) hb_view(entry.warps[t.index / 32 % 4], t);
    return entry;
}

void submit_ready(Warpgroup& wg) {
    while (wg.offered < wg.base + wg.queue.size() && wg.queue[wg.offered - wg.base].arrivals == 128) {
        ++wg.offered;
        auto op = std::make_unique<AsyncOp>();
        op->kind = AsyncOp::kMma;
        op->cta = wg.cta;
        op->warpgroup = &wg;
        op->issuer = g_thread;
        g_engine->submit(std::move(op));
    }
}

struct Operand {
    const u8* base;
    u32 start;
};

void load_operand(Cta& cta, u64 desc, u32 rows, float* out, bool transposed) {
    const u64 start = (desc & 0x3FFFull) << 4;
    for (u32 r = 0; r < rows; ++r) {
        const u64 line = start + (r / 8) * 1024 + (r % 8) * 128;
        for (u32 half = 0; half < 2; ++half) {
            u64 address = line + 16 * half;
            address ^= (address >> 3) & 0x70;
            const u8* src = cta.smem + (address - kSmemWindow);
            if (transposed)
                for (u32 k = 0; k < 16; ++k) out[(16 * half + k) * rows + r] = kE4m3Values[src[k]];
            else
                for (u32 k = 0; k < 16; ++k) out[r * 32 + 16 * half + k] = kE4m3Values[src[k]];
        }
    }
}

void check_descriptor(Thread& t, u64 desc, u32 rows, const Where& where, const char* name) {
    const u64 start = (desc & 0x3FFFull) << 4, stride = ((desc >> 32) & 0x3FFF) << 4, mode = desc >> 62, base_offset = (desc >> 49) & 7;
    if (mode != 1 || stride != 1024 || base_offset != 0)
        g_engine->fatal("wgmma", where, format("descriptor of %s: swizzle mode %llu, stride %llu, base offset %llu; only 128-byte swizzle with stride 1024 exists here", name, mode, stride, base_offset));
    if (start % 1024 > 96)
        g_engine->fatal("wgmma", where, format("descriptor of %s starts at shared address %llu: a tile starts at a multiple of 1024, K steps add 32", name, start));
    if (start < kSmemWindow || start / 1024 * 1024 - kSmemWindow + rows * 128 > cta_of(t).smem_bytes)
        g_engine->fatal("bounds", where, format("wgmma operand %s: %u rows from shared address %llu leave shared memory", name, rows, start));
}

void shadow_operand(const AsyncOp& op, Cta& cta, u64 desc, u32 rows) {
    const u64 start = (desc & 0x3FFFull) << 4;
    for (u32 r = 0; r < rows; ++r) {
        const u64 line = start + (r / 8) * 1024 + (r % 8) * 128;
        for (u32 half = 0; half < 2; ++half) {
            u64 address = line + 16 * half;
            address ^= (address >> 3) & 0x70;
            shadow_async(op, cta.smem + (address - kSmemWindow), 16, false);
        }
    }
}

void execute(Warpgroup& wg, MmaEntry& entry) {
    static thread_local float a[64 * 32], b[256 * 32];
    Cta& cta = *wg.cta;
    Engine& e = *g_engine;
    ++e.stats.wgmmas;
    if (e.options.races) {
        AsyncOp op;
        op.kind = AsyncOp::kMma;
        op.where = entry.where;
        op.issuer = g_issuer;
        op.cta = &cta;
        op.agent = wg.agent;
        op.epoch = e.agents.next(wg.agent);
        // The instruction is executed by whole warps, each on its own: what a warp's threads know together counts,
        // but every warp must know it.
        op.clock = entry.warps[0];
        for (u32 w = 1; w < 4; ++w) op.clock.meet(entry.warps[w]);
        op.clock.raise(wg.agent, op.epoch);
        shadow_operand(op, cta, entry.desc_a, 64);
        shadow_operand(op, cta, entry.desc_b, entry.n);
    }
    load_operand(cta, entry.desc_a, 64, a, false);
    load_operand(cta, entry.desc_b, entry.n, b, true);
    if (!entry.accumulate) std::fill(entry.acc->tile.begin(), entry.acc->tile.end(), 0.0f);
    if (e.options.fp8_sum_bits == 0) gemm_m64k32(entry.acc->tile.data(), a, b, entry.n);
    else gemm_m64k32_truncated(entry.acc->tile.data(), a, b, entry.n, e.options.fp8_sum_bits);
}

// Hands thread t its fragment and detaches it from the accumulator.
void deliver(Accumulator& acc, Thread& t) {
    const u32 lane = t.index % 128u;
    f32* d = acc.d[lane];
    for (u32 i = 0; i < acc.n / 2; ++i) {
        if (!is_poison(d + i)) {
            g_engine->report("wgmma", t.wait.where, "accumulator registers were written while a wgmma on them was in flight");
            break;
        }
    }
    for (u32 i = 0; i < acc.n / 2; ++i) d[i] = acc.tile[fragment_row(lane, i) * acc.n + fragment_column(lane, i)];
    acc.d[lane] = nullptr;
    --acc.attached;
}

}  // namespace

// A chain that is still being joined may not lose its accumulator.
static void drop_finished(Warpgroup& wg) {
    auto& list = wg.accumulators;
    list.erase(std::remove_if(list.begin(), list.end(), [&](const auto& acc) {
        if (acc->attached != 0) return false;
        for (const MmaEntry& entry : wg.queue)
            if (entry.acc == acc.get()) return false;
        return true;
    }), list.end());
}

bool mma_step(Warpgroup& wg) {
    MmaEntry& entry = wg.queue.front();
    if (entry.commit) {
        ++wg.groups_done;
        if (g_engine->options.races) wg.done_clock.join_epoch(g_engine->agents, wg.agent, g_engine->agents.epoch[wg.agent]);
    } else {
        execute(wg, entry);
    }
    const bool wake = entry.commit;
    wg.queue.pop_front();
    ++wg.base;
    ++g_engine->progress;
    if (wake) {
        std::vector<Thread*> waiters;
        waiters.swap(wg.waiters);
        for (Thread* t : waiters) g_engine->wake(*t);
    }
    return true;
}

void mma_drain_on_exit(Thread& t) {
    Cta& cta = cta_of(t);
    const u32 index = t.index / 128u;
    if (index >= cta.warpgroups.size()) return;
    Warpgroup& wg = cta.warpgroups[index];
    for (auto& acc : wg.accumulators)
        if (acc->d[t.index % 128u] != nullptr) g_engine->fatal("wgmma", Where{}, "thread exits with a wgmma it never waited for");
}

void wgmma_fence(const char* file, int line) {
    (void)file, (void)line;
    Thread& t = enter();
    t.mma_fenced = true;
}

void wgmma_issue(f32* d, u32 n, u64 desc_a, u64 desc_b, bool accumulate, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    Warpgroup& wg = group_of(t, where);
    check_descriptor(t, desc_a, 64, where, "A");
    check_descriptor(t, desc_b, n, where, "B");
    bool first;
    MmaEntry& entry = join_entry(wg, t, where, false, first);
    const u32 lane = t.index % 128u;
    Accumulator* mine = nullptr;  // an operation on this d is in flight
    for (auto& acc : wg.accumulators)
        if (acc->d[lane] == d) mine = acc.get();
    if (first) {
        entry.n = n;
        entry.desc_a = desc_a;
        entry.desc_b = desc_b;
        entry.accumulate = accumulate;
        if (mine == nullptr) {
            wg.accumulators.push_back(std::make_unique<Accumulator>());
            entry.acc = wg.accumulators.back().get();
            entry.acc->n = n;
            entry.acc->tile.resize(64 * n);
        } else {
            entry.acc = mine;
        }
        entry.acc->last_group = t.commits + 1;
    }
    if (entry.n != n || entry.desc_a != desc_a || entry.desc_b != desc_b || entry.accumulate != accumulate || entry.acc->n != n)
        g_engine->fatal("wgmma", where, format("threads of warpgroup %u issue this wgmma with different operands (N %u, A 0x%llx, B 0x%llx, accumulate %d against N %u, A 0x%llx, B 0x%llx, accumulate %d)",
                                               wg.index, n, desc_a, desc_b, accumulate, entry.n, entry.desc_a, entry.desc_b, entry.accumulate));
    if (mine == nullptr) {
        if (!t.mma_fenced)
            g_engine->report("wgmma", where, "wgmma on accumulators the thread may have touched since its last wgmma.fence");
        if (entry.acc->d[lane] != nullptr) g_engine->fatal("wgmma", where, "threads of the warpgroup disagree about which accumulator this wgmma continues");
        entry.acc->d[lane] = d;
        ++entry.acc->attached;
        u32 bits = kPoisonBits;
        for (u32 i = 0; i < n / 2; ++i) {
            if (accumulate) entry.acc->tile[fragment_row(lane, i) * n + fragment_column(lane, i)] = d[i];
            std::memcpy(d + i, &bits, 4);
        }
    } else if (mine != entry.acc) {
        g_engine->fatal("wgmma", where, "threads of the warpgroup disagree about which accumulator this wgmma continues");
    }
    submit_ready(wg);
}

void wgmma_commit(const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    Warpgroup& wg = group_of(t, where);
    bool first;
    join_entry(wg, t, where, true, first);
    ++t.commits;
    hb_tick(t);
    submit_ready(wg);
}

void wgmma_wait(f32* d, u32 regs, u32 pending, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter();
    const Where where = MM_HERE;
    Warpgroup& wg = group_of(t, where);
    const u64 target = t.commits > pending ? t.commits - pending : 0;
    while (wg.groups_done < target) {
        wg.waiters.push_back(&t);
        e.block(t, WaitKind::kWgmma, where, pending);
    }
    t.clock.join(wg.done_clock);
    t.wait.where = where;
    const u32 lane = t.index % 128u;
    for (auto& acc : wg.accumulators) {
        if (acc->d[lane] != d) continue;
        if (acc->n != 2 * regs) e.fatal("wgmma", where, format("wgmma_wait on %u registers; the wgmma in flight has %u", regs, acc->n / 2));
        if (acc->last_group > t.commits && pending == 0)
            e.report("wgmma", where, "wgmma.wait_group 0 on accumulators whose last wgmma was never committed");
        if (acc->last_group > target) break;
        deliver(*acc, t);
        t.mma_fenced = false;  // the thread may touch these registers from here on
        if (acc->attached == 0) drop_finished(wg);
        break;
    }
}

void wgmma_pin(f32* d, u32 regs) { (void)d, (void)regs; }

}  // namespace megamoe::emu
