// Streams and launches: one ordered list per rank, CTAs started as room allows, threads prepared and retired.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>

#include "async.h"
#include "engine.h"
#include "shadow.h"

namespace megamoe::emu {

namespace {

// Shared-memory slots: one growing reservation for the process, like the stacks.
struct SmemPool {
    u8* base = nullptr;
    size_t count = 0;
    std::vector<Cta*> owner;

    void reserve(size_t n) {
        if (n > count) {
            if (base != nullptr) munmap(base, count * kSmemSlot);
            void* p = mmap(nullptr, n * kSmemSlot, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) throw std::runtime_error("cannot reserve shared memory");
            base = static_cast<u8*>(p);
            count = n;
        }
        owner.assign(count, nullptr);
    }
} g_smem;

u32 launch_registers(u32 threads) { return 65536 / threads / 8 * 8; }

void thread_main() {
    Thread& t = *g_thread;
    Launch& l = *cta_of(t).launch;
    l.kernel->body(l.params);
    g_engine->thread_exit(t);
    g_engine->block(t, WaitKind::kNone, Where{});
    __builtin_trap();  // a finished fiber is never resumed
}

}  // namespace

Cta* smem_owner(const void* p) {
    const u8* b = static_cast<const u8*>(p);
    if (b < g_smem.base || b >= g_smem.base + g_smem.count * kSmemSlot) return nullptr;
    return g_smem.owner[static_cast<size_t>(b - g_smem.base) / kSmemSlot];
}
void set_smem_owner(u8* slot, Cta* cta) { g_smem.owner[static_cast<size_t>(slot - g_smem.base) / kSmemSlot] = cta; }
u32 smem_slot_index(const u8* slot) { return static_cast<u32>(static_cast<size_t>(slot - g_smem.base) / kSmemSlot); }

void Engine::prepare() {
    rng_ = (options.seed + 1) * 0x9E3779B97F4A7C15ull | 1ull;
    for (int i = 0; i < 4; ++i) random(2);
    size_t threads = 0, ctas = 0;
    bool checked = true, any = false;
    u32 max_warps = 1;
    std::vector<u32> grids(streams.size(), 0);
    for (size_t r = 0; r < streams.size(); ++r) {
        size_t most = 0, most_ctas = 0;
        for (const StreamOp& op : streams[r].ops) {
            if (op.kind != StreamOp::kLaunch) continue;
            any = true;
            checked = checked && op.kernel->checked;
            const u32 resident = options.resident_ctas == 0 ? op.grid : std::min(op.grid, options.resident_ctas);
            most = std::max(most, size_t(resident) * op.kernel->threads);
            most_ctas = std::max(most_ctas, size_t(resident));
            max_warps = std::max(max_warps, op.kernel->threads / 32);
            grids[r] = std::max(grids[r], op.grid);
        }
        threads += most;
        ctas += most_ctas;
    }
    options.races = options.races && any;
    if (options.races && !checked) throw std::runtime_error("the race check needs kernels of the checked flavour");
    options.uninit = options.uninit && checked && any;
    stacks_.reserve(threads);
    g_smem.reserve(ctas);
    for (size_t i = threads; i > 0; --i) free_stacks_.push_back(i - 1);
    for (size_t i = ctas; i > 0; --i) free_smem_.push_back(g_smem.base + (i - 1) * kSmemSlot);
    regions.prepare(options.uninit, options.races);
    prepare_smem_shadow(ctas, options.uninit, options.races);
    agents.prepare(options.races, grids, max_warps);
    for (size_t r = 0; r < streams.size(); ++r) {
        streams[r].agent = options.races ? agents.streams[r] : 0;
        streams[r].clock = agents.fresh();
        streams[r].clock.raise(streams[r].agent, 1);
        streams[r].clock.fence_everything();
    }
    if (options.schedule == Schedule::kPct) {
        const u32 horizon = kPctHorizon << random(kPctHorizons);
        for (u32 i = 0; i < kPctPoints; ++i) pct_points_.push_back(random(horizon));
        std::sort(pct_points_.rbegin(), pct_points_.rend());
    }
}

bool Engine::advance_streams() {
    bool moved = false;
    const u32 n = static_cast<u32>(streams.size());
    const u32 first = options.schedule == Schedule::kFifo ? 0 : random(n);
    for (u32 i = 0; i < n; ++i) {
        const u32 r = (first + i) % n;
        Stream& s = streams[r];
        if (s.stopped || s.launch || s.next == s.ops.size() || s.start_delay > clock) continue;
        stream_op(s, r);
        moved = true;
        if (options.schedule != Schedule::kFifo) break;  // ranks drift apart
    }
    if (!moved) {
        streams_dirty_ = false;
        next_start_ = ~0ull;
        for (const Stream& s : streams)
            if (!s.stopped && !s.launch && s.next < s.ops.size()) next_start_ = std::min(next_start_, s.start_delay);
    }
    return moved;
}

void Engine::stream_op(Stream& s, u32 rank) {
    StreamOp& op = s.ops[s.next++];
    ++progress;
    if (op.kind == StreamOp::kLaunch) {
        start_launch(s, rank, op);
        return;
    }
    if (op.kind == StreamOp::kUndefine) {
        mark_written(op.dst, op.bytes, false);
        return;
    }
    if (op.kind == StreamOp::kCopy) {
        shadow_stream(s, op.src, op.bytes, false);
        shadow_stream(s, op.dst, op.bytes, true);
        std::memmove(op.dst, op.src, op.bytes);
    } else {
        shadow_stream(s, op.dst, op.bytes, true);
        std::memset(op.dst, op.value, op.bytes);
    }
    mark_written(op.dst, op.bytes);
    wrote(op.dst, op.bytes);
}

void Engine::start_launch(Stream& s, u32 rank, StreamOp& op) {
    ++stats.launches;
    s.launch = std::make_unique<Launch>();
    Launch& l = *s.launch;
    l.kernel = op.kernel;
    l.rank = rank;
    l.number = s.launches++;
    l.grid = op.grid;
    l.smem_bytes = op.smem_bytes;
    l.params = op.params.data()->bytes;
    regions.add(reinterpret_cast<u64>(l.params), op.params_bytes, static_cast<int>(rank), "kernel parameters", false, true, true);
    if (options.races) s.clock.raise(s.agent, agents.epoch[s.agent]);
    s.clock.fence_everything();
    l.start = s.clock;
    if (options.races) agents.next(s.agent);  // what the stream does after the launch, the launch does not know
    start_ctas(l);
}

void Engine::start_ctas(Launch& l) {
    const u32 resident = options.resident_ctas == 0 ? l.grid : options.resident_ctas;
    const Kernel& k = *l.kernel;
    while (l.next_cta < l.grid && l.live_ctas + k.cluster <= resident) {
        l.clusters.push_back(std::make_unique<Cluster>());
        Cluster& cluster = *l.clusters.back();
        for (u32 c = 0; c < k.cluster; ++c) {
            l.ctas.push_back(std::make_unique<Cta>());
            Cta& cta = *l.ctas.back();
            cluster.ctas.push_back(&cta);
            cta.launch = &l;
            cta.cluster = &cluster;
            cta.rank = l.rank;
            cta.index = l.next_cta++;
            cta.rank_in_cluster = c;
            cta.smem = free_smem_.back();
            free_smem_.pop_back();
            cta.smem_bytes = l.smem_bytes;
            set_smem_owner(cta.smem, &cta);
            std::memset(cta.smem, 0xFF, cta.smem_bytes);  // NaN in every format used here
            reset_smem_shadow(smem_slot_index(cta.smem));
            cta.live = k.threads;
            cta.free_registers = 65536 - i64(launch_registers(k.threads)) * k.threads;
            cta.threads.resize(k.threads);
            cta.warps.resize(k.threads / 32);
            cta.warpgroups.resize((k.threads + 127) / 128);
            const u32 agent = options.races ? agents.cta_first[l.rank][cta.index] : 0;
            cta.first_tma_agent = agent + agents.max_warps;
            for (u32 w = 0; w < cta.warps.size(); ++w) {
                Warp& warp = cta.warps[w];
                warp.cta = &cta;
                warp.index = w;
                warp.priority = kPctPoints + 1 + random(1u << 20);
                warp.agent = agent + w;
                if (options.races) agents.next(warp.agent);
            }
            for (u32 g = 0; g < cta.warpgroups.size(); ++g) {
                cta.warpgroups[g].cta = &cta;
                cta.warpgroups[g].index = g;
                cta.warpgroups[g].agent = agent + agents.max_warps + Cta::kTmaAgents + g;
            }
            for (u32 i = 0; i < k.threads; ++i) {
                Thread& t = cta.threads[i];
                t.warp = &cta.warps[i / 32];
                t.index = static_cast<u16>(i);
                t.lane = static_cast<u8>(i % 32);
                t.registers = launch_registers(k.threads);
                t.clock = l.start;
                t.epoch = options.races ? agents.epoch[t.warp->agent] : 0;
                t.stack = free_stacks_.back();
                free_stacks_.pop_back();
                fiber_prepare(t.fiber, stacks_.stack(t.stack), StackPool::kStackBytes, thread_main);
                wake(t);
            }
            ++l.live_ctas;
        }
    }
}

void Engine::thread_exit(Thread& t) {
    Warp& w = *t.warp;
    Cta& cta = *w.cta;
    const Where end{nullptr, 0, nullptr};
    t.num_polls = 0;
    t.done = true;
    ++progress;
    for (const Collective& c : w.collectives)
        if (c.mask >> t.lane & 1u) fatal("warp", c.where, format("lane %u exited while other lanes wait for it in a warp operation", t.lane));
    w.exited |= 1u << t.lane;
    mma_drain_on_exit(t);
    for (const BulkGroup* g : t.bulk_groups)
        if (g->unread != 0) report("bulk", end, "thread exits before a bulk store has read its shared memory (bulk_wait_read missing)", &t);
    if (t.bulk_open != nullptr) report("bulk", end, "thread exits with bulk stores it never committed", &t);
    // A thread that leaves counts as arrived from now on.
    cluster_thread_exit(cta);
    if (--cta.live != 0) return;
    for (const auto& [offset, b] : cta.mbarriers)
        if (b.tx != 0) report("mbarrier", b.init, format("CTA exits while the mbarrier at smem+%u still expects %lld bytes", offset, static_cast<long long>(b.tx)), &t);
    if (cta.async_pending != 0)
        fatal("async", end, format("CTA exits while %u asynchronous operations on its shared memory are in flight", cta.async_pending));
    finished_ctas_.push_back(&cta);
}

void Engine::recycle(Cta& cta) {
    Launch& l = *cta.launch;
    Stream& s = streams[l.rank];
    for (const Thread& t : cta.threads) s.clock.join(t.clock);
    for (const Warp& w : cta.warps)
        if (options.races) s.clock.raise(w.agent, agents.epoch[w.agent]);
    for (const Thread& t : cta.threads) free_stacks_.push_back(t.stack);
    set_smem_owner(cta.smem, nullptr);
    free_smem_.push_back(cta.smem);
    --l.live_ctas;
    if (l.next_cta < l.grid) {
        start_ctas(l);
    } else if (l.live_ctas == 0) {
        regions.remove(reinterpret_cast<u64>(l.params));
        s.clock.fence_everything();
        s.launch.reset();
        streams_dirty_ = true;
    }
}

}  // namespace megamoe::emu
