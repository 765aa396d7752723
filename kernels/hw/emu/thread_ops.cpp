// Identity, time, registers and warp collectives.
#include <algorithm>

#include "async.h"
#include "engine.h"

namespace megamoe::emu {

namespace {
constexpr u32 kMaxOpsPerSwitch = 20000;  // a loop of operations that never blocks gives way after this many

const char* name_of(WarpOp op) {
    switch (op) {
        case WarpOp::kSync: return "bar.warp.sync";
        case WarpOp::kShfl: return "shfl.idx";
        case WarpOp::kShflXor: return "shfl.bfly";
        case WarpOp::kShflUp: return "shfl.up";
        case WarpOp::kUniform: return "redux.or";
        case WarpOp::kBallot: return "vote.ballot";
        case WarpOp::kAll: return "vote.all";
        case WarpOp::kAny: return "vote.any";
        case WarpOp::kMma: return "mma.sync";
        default: return "elect.sync";
    }
}

// m16n8k32, every lane's share (hw/sm90/wgmma.cuh says which): products are exact, sums in FP32 with ascending k (or
// truncated, as those of wgmma).
void multiply(Warp& w) {
    Thread* lanes = &w.cta->threads[w.index * 32];
    const auto value = [&](u32 row, u32 k, bool left) {
        const u32* words = lanes[row % 8 * 4 + k % 16 / 4].mma_operands;
        const u32 word = left ? words[(k / 16) * 2 + row / 8] : words[4 + k / 16];
        return kE4m3Values[word >> (8 * (k % 4)) & 0xffu];
    };
    const u32 bits = g_engine->options.fp8_sum_bits;
    f32 a[16][32], b[8][32];
    for (u32 row = 0; row < 16; ++row)
        for (u32 k = 0; k < 32; ++k) a[row][k] = value(row, k, true);
    for (u32 row = 0; row < 8; ++row)
        for (u32 k = 0; k < 32; ++k) b[row][k] = value(row, k, false);
    for (u32 lane = 0; lane < 32; ++lane)
        for (u32 i = 0; i < 4; ++i) {
            f32 sum = lanes[lane].mma_sum[i];
            const f32 *left = a[lane / 4 + i / 2 * 8], *right = b[lane % 4 * 2 + i % 2];
            if (bits != 0) sum = sum_k32_truncated(sum, left, right, 1, bits);
            else for (u32 k = 0; k < 32; ++k) sum += left[k] * right[k];
            lanes[lane].mma_sum[i] = sum;
        }
}

void compute(const Collective& c, Warp& w) {
    if (c.op == WarpOp::kMma) multiply(w);
    u32 votes = 0;
    for (u32 lane = 0; lane < 32; ++lane)
        if ((c.mask >> lane & 1u) && c.value[lane] != 0) votes |= 1u << lane;
    // elect.sync leaves the choice open but stable: a lane that depends on the seed, one per mask.
    u32 leader = 0;
    if (c.op == WarpOp::kElect) {
        const u32 members = static_cast<u32>(__builtin_popcount(c.mask));
        u32 skip = static_cast<u32>(g_engine->options.seed * 2654435761u >> 7) % members;
        for (u32 lane = 0; lane < 32; ++lane)
            if ((c.mask >> lane & 1u) && skip-- == 0) {
                leader = lane;
                break;
            }
    }
    for (u32 lane = 0; lane < 32; ++lane) {
        if (!(c.mask >> lane & 1u)) continue;
        u32& out = w.cta->threads[w.index * 32 + lane].result;
        switch (c.op) {
            case WarpOp::kSync:
            case WarpOp::kMma: break;
            case WarpOp::kShfl: out = c.value[c.arg[lane] & 31u]; break;
            case WarpOp::kShflXor: out = c.value[(lane ^ c.arg[lane]) & 31u]; break;
            case WarpOp::kShflUp: out = lane >= c.arg[lane] ? c.value[lane - c.arg[lane]] : c.value[lane]; break;
            case WarpOp::kUniform: out = c.value[lane]; break;   // the same in all lanes
            case WarpOp::kBallot: out = votes; break;
            case WarpOp::kAll: out = votes == c.mask; break;
            case WarpOp::kAny: out = votes != 0; break;
            case WarpOp::kElect: out = lane == leader; break;
        }
    }
}
}  // namespace

u32 thread_idx() { return g_thread->index; }
u32 cta_idx() { return cta_of(*g_thread).index; }
u32 num_ctas() { return cta_of(*g_thread).launch->grid; }
u32 cluster_cta_rank() { return cta_of(*g_thread).rank_in_cluster; }
u32 dynamic_smem_bytes() { return cta_of(*g_thread).smem_bytes; }
u8* dynamic_smem() { return cta_of(*g_thread).smem; }

// The clock also moves with every look at it, so that a loop that only watches the time ends.
u64 global_timer_ns() {
    Engine& e = *g_engine;
    Thread& t = *g_thread;
    if (++t.ops > kMaxOpsPerSwitch) e.yield(t);
    return e.clock += 1;
}

void nap(u32 ns, const char* file, int line) {
    Thread& t = *g_thread;
    g_engine->clock += std::min(ns, 16u);
    g_engine->park_poll(t, MM_HERE);
}

[[noreturn]] void trap(const char* file, int line) {
    g_engine->fatal("trap", MM_HERE, "the kernel executed trap");
}

bool mutant(u32 id) {
    if (g_engine->options.mutant != id) return false;
    ++g_engine->stats.mutant_hits;
    return true;
}

void spin_guard(Thread& t, const Where& where) {
    if (++t.ops > kMaxOpsPerSwitch) g_engine->park_poll(t, where);
}

void set_max_registers(u32 regs, bool increase, const char* file, int line) {
    Thread& t = enter();
    Cta& cta = cta_of(t);
    const Where where = MM_HERE;
    if (increase ? regs < t.registers : regs > t.registers)
        g_engine->fatal("register", where, format("setmaxnreg.%s to %u, but the thread owns %u", increase ? "inc" : "dec", regs, t.registers));
    while (increase && cta.free_registers < i64(regs) - t.registers) {
        cta.register_waiters.push_back(&t);
        g_engine->block(t, WaitKind::kRegisters, where, regs - t.registers, regs);
    }
    cta.free_registers -= i64(regs) - t.registers;
    t.registers = regs;
    if (!increase) {
        std::vector<Thread*> waiters;
        waiters.swap(cta.register_waiters);
        for (Thread* other : waiters) g_engine->wake(*other);
    }
}

u32 warp_collective(WarpOp op, u32 mask, u32 value, u32 arg, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter(true);  // votes inside a polling loop are part of the poll
    Warp& w = *t.warp;
    const Where where = MM_HERE;
    if (++t.ops > kMaxOpsPerSwitch) e.park_poll(t, where);
    if (!(mask >> t.lane & 1u)) e.fatal("warp", where, format("%s with mask 0x%08x, which does not contain the calling lane %u", name_of(op), mask, t.lane));
    if (mask & w.exited) e.fatal("warp", where, format("%s waits for lanes 0x%08x, which have exited", name_of(op), mask & w.exited));
    if (op == WarpOp::kShfl && arg > 31) e.fatal("warp", where, format("shfl.idx from lane %u", arg));
    auto it = std::find_if(w.collectives.begin(), w.collectives.end(), [&](const Collective& c) { return c.mask & mask; });
    if (it == w.collectives.end()) {
        w.collectives.push_back(Collective{op, mask, 0, where, {}, {}});
        it = w.collectives.end() - 1;
    }
    Collective& c = *it;
    const bool same_line = op == WarpOp::kSync || (c.where.line == line && c.where.file == file) ||
                           (c.where.line == line && std::string(c.where.file) == file);
    if (c.mask != mask || c.op != op || !same_line)
        e.fatal("warp", where, format("lanes of a warp disagree: lane %u calls %s (mask 0x%08x) here, others %s (mask 0x%08x) at %s:%d",
                                      t.lane, name_of(op), mask, name_of(c.op), c.mask, c.where.file, c.where.line));
    c.value[t.lane] = value;
    c.arg[t.lane] = arg;
    c.arrived |= 1u << t.lane;
    if (c.arrived != mask) {
        e.block(t, WaitKind::kCollective, where, static_cast<u64>(op), mask);
        return t.result;
    }
    if (op == WarpOp::kUniform)
        for (u32 lane = 0; lane < 32; ++lane)
            if (c.value[lane] != value)
                e.fatal("warp", where, format("hw::uniform of values that differ: %u in lane %u, %u in lane %u", value, t.lane, c.value[lane], lane));
    compute(c, w);
    Thread* lanes = &w.cta->threads[w.index * 32];
    if (op == WarpOp::kSync) hb_warp_sync(lanes, mask);
    else hb_align(lanes, mask);
    for (u32 lane = 0; lane < 32; ++lane)
        if ((mask >> lane & 1u) && lane != t.lane) e.wake(w.cta->threads[w.index * 32 + lane]);
    w.collectives.erase(it);
    return t.result;
}

void warp_mma(f32* d, const u32* operands, const char* file, int line) {
    g_thread->mma_sum = d;
    g_thread->mma_operands = operands;
    warp_collective(WarpOp::kMma, ~0u, 0, 0, file, line);
}

}  // namespace megamoe::emu
