// Named barriers, the cluster barrier and mbarriers.
#include <algorithm>

#include "async.h"
#include "engine.h"
#include "shadow.h"

namespace megamoe::emu {

namespace {

// Everyone who waited learns what everyone who arrived did.
void release_waiters(std::vector<Thread*>& waiters, const Clock& clock) {
    Engine& e = *g_engine;
    for (Thread* t : waiters) {
        t->clock.join(clock);
        e.wake(*t);
    }
    waiters.clear();
}

void named_barrier(u32 id, u32 threads, bool wait, const Where& where) {
    Engine& e = *g_engine;
    Thread& t = enter();
    Cta& cta = cta_of(t);
    if (id >= cta.barriers.size()) e.fatal("barrier", where, format("barrier %u does not exist (0..15)", id));
    if (threads == 0 || threads % 32 != 0 || threads > cta.threads.size())
        e.fatal("barrier", where, format("barrier %u with %u threads in a CTA of %zu", id, threads, cta.threads.size()));
    e.maybe_preempt(t, 8);
    NamedBarrier& b = cta.barriers[id];
    if (b.arrived == 0) {
        b.expected = threads;
        b.first = where;
    } else if (b.expected != threads) {
        e.fatal("barrier", where, format("barrier %u: this thread expects %u threads, the first to arrive (%s:%d) expects %u", id,
                                         threads, b.first.file, b.first.line, b.expected));
    }
    hb_publish(b.clock, t);
    ++b.arrived;
    if (b.arrived < b.expected) {
        if (!wait) return;
        b.waiters.push_back(&t);
        e.block(t, WaitKind::kNamedBarrier, where, id, reinterpret_cast<u64>(&b));
        return;
    }
    b.arrived = 0;
    release_waiters(b.waiters, b.clock);
    if (wait) t.clock.join(b.clock);
    b.clock.clear();
}

void finish_cluster_phase(Cluster& c) {
    c.arrived = 0;
    ++c.phase;
    c.done_clock = c.clock;
    c.clock.clear();
    release_waiters(c.waiters, c.done_clock);
}

u32 cluster_live(const Cluster& c) {
    u32 live = 0;
    for (const Cta* cta : c.ctas) live += cta->live;
    return live;
}

Mbarrier& find(Cta& cta, u32 offset, const Where& where) {
    auto it = cta.mbarriers.find(offset);
    if (it == cta.mbarriers.end()) g_engine->fatal("mbarrier", where, format("smem+%u of CTA %u is not an initialised mbarrier", offset, cta.index));
    return it->second;
}

Mbarrier& use(Thread& t, Cta& cta, u64* bar, const Where& where, u32& offset, const char* what) {
    offset = smem_offset(cta_of(t), bar, 8, where, what);
    if (offset % 8 != 0) g_engine->fatal("misaligned", where, format("mbarrier at smem+%u is not 8-byte aligned", offset));
    Mbarrier& b = find(cta, offset, where);
    if (!knows_init(t, b))
        g_engine->report("race", where, format("mbarrier at smem+%u is used, but its initialisation at %s:%d by warp %u is not ordered before this", offset,
                                               b.init.file, b.init.line, b.init_warp));
    return b;
}

void advance(Mbarrier& b) {
    if (b.pending != 0 || b.tx != 0) return;
    ++g_engine->progress;
    ++b.phase;
    b.pending = b.count;
    b.cta_done = b.cta_now;
    b.cluster_done = b.cluster_now;
    b.cta_now.clear();
    b.cluster_now.clear();
    std::vector<Thread*> waiters;
    waiters.swap(b.waiters);
    for (Thread* t : waiters) g_engine->wake(*t);
}

void check_tx(const Mbarrier& b, u32 offset, const Where& where) {
    if (b.tx > 0xFFFFF || b.tx < -0xFFFFF)
        g_engine->fatal("mbarrier", where, format("transaction count of the mbarrier at smem+%u is %lld, outside +-(2^20-1)", offset, static_cast<long long>(b.tx)));
}

void arrive(Mbarrier& b, u32 offset, const Where& where) {
    if (b.pending == 0) g_engine->fatal("mbarrier", where, format("more than %u arrivals in one phase of the mbarrier at smem+%u", b.count, offset));
    --b.pending;
    advance(b);
}

}  // namespace

bool knows_init(const Thread& t, const Mbarrier& b) {
    if (t.clock.empty() || (b.init_agent == t.warp->agent && b.init_lane == t.lane)) return true;
    return t.clock.covers(b.init_agent, 1u << b.init_lane, b.init_epoch);
}

void bar_sync(u32 id, u32 threads, const char* file, int line) { named_barrier(id, threads, true, MM_HERE); }
void bar_arrive(u32 id, u32 threads, const char* file, int line) { named_barrier(id, threads, false, MM_HERE); }

void cluster_arrive(const char* file, int line) {
    Thread& t = enter();
    Cluster& c = *cta_of(t).cluster;
    if (t.cluster_arrived) g_engine->fatal("barrier", MM_HERE, "cluster_arrive twice without cluster_wait");
    t.cluster_arrived = true;
    t.cluster_phase = c.phase;
    hb_publish(c.clock, t);
    if (++c.arrived == cluster_live(c)) finish_cluster_phase(c);
}

void cluster_wait(const char* file, int line) {
    Thread& t = enter();
    Cluster& c = *cta_of(t).cluster;
    const Where where = MM_HERE;
    if (!t.cluster_arrived) g_engine->fatal("barrier", where, "cluster_wait without cluster_arrive");
    while (c.phase == t.cluster_phase) {
        c.waiters.push_back(&t);
        g_engine->block(t, WaitKind::kClusterBarrier, where, c.arrived, cluster_live(c));
    }
    t.cluster_arrived = false;
    t.clock.join(c.done_clock);
}

// The barrier waits for the threads of the cluster that have not exited.
void cluster_thread_exit(Cta& cta) {
    Cluster& c = *cta.cluster;
    if (c.arrived != 0 && c.arrived == cluster_live(c)) finish_cluster_phase(c);
}

void fence_proxy_async(Proxy space) {
    Thread& t = enter();
    hb_proxy_fence(t, space != Proxy::kGlobal, space != Proxy::kShared);
    if (space != Proxy::kGlobal) fence_mbarrier_init();
}

void fence_mbarrier_init() {
    Thread& t = enter();
    for (auto& [offset, b] : cta_of(t).mbarriers)
        if (b.init_warp == t.warp->index) b.fenced = true;
}

void mbarrier_init(u64* bar, u32 arrivals, const char* file, int line) {
    Thread& t = enter();
    Cta& cta = cta_of(t);
    const Where where = MM_HERE;
    const u32 offset = smem_offset(cta, bar, 8, where, "mbarrier.init");
    if (offset % 8 != 0) g_engine->fatal("misaligned", where, format("mbarrier at smem+%u is not 8-byte aligned", offset));
    if (arrivals == 0 || arrivals > 0xFFFFF) g_engine->fatal("mbarrier", where, format("mbarrier.init with %u arrivals (1..2^20-1)", arrivals));
    if (cta.mbarriers.count(offset) != 0) g_engine->fatal("mbarrier", where, format("the mbarrier at smem+%u is already initialised", offset));
    Mbarrier& b = cta.mbarriers[offset];
    b.count = b.pending = arrivals;
    b.init_warp = t.warp->index;
    b.init_agent = t.warp->agent;
    b.init_lane = t.lane;
    b.init_epoch = t.epoch;
    b.init = where;
    mark_written(bar, 8);
}

void mbarrier_arrive(u64* bar, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    g_engine->maybe_preempt(t, 8);
    u32 offset;
    Mbarrier& b = use(t, cta_of(t), bar, where, offset, "mbarrier.arrive");
    hb_publish(b.cta_now, t);
    arrive(b, offset, where);
}

void mbarrier_arrive_expect_tx(u64* bar, u32 bytes, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    g_engine->maybe_preempt(t, 8);
    u32 offset;
    Mbarrier& b = use(t, cta_of(t), bar, where, offset, "mbarrier.arrive.expect_tx");
    b.tx += bytes;
    check_tx(b, offset, where);
    hb_publish(b.cta_now, t);
    arrive(b, offset, where);
}

void mbarrier_arrive_cluster(u64* bar, u32 cta, bool release_cluster, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    g_engine->maybe_preempt(t, 8);
    Cluster& cluster = *cta_of(t).cluster;
    if (cta >= cluster.ctas.size()) g_engine->fatal("cluster", where, format("CTA %u of a cluster of %zu", cta, cluster.ctas.size()));
    Cta& target = *cluster.ctas[cta];
    if (target.live == 0) g_engine->fatal("cluster", where, format("CTA %u of the cluster has exited", cta));
    u32 offset;
    Mbarrier& b = use(t, target, bar, where, offset, "mbarrier.arrive (cluster)");
    hb_publish(b.cluster_now, t);
    if (!release_cluster) hb_publish(b.cta_now, t);   // the default form: a plain wait sees what was done with shared memory (and here the rest)
    arrive(b, offset, where);
}

bool mbarrier_test_wait(u64* bar, u32 parity, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    u32 offset;
    Mbarrier& b = use(t, cta_of(t), bar, where, offset, "mbarrier.test_wait");
    if (parity > 1) g_engine->fatal("mbarrier", where, format("parity %u", parity));
    if ((b.phase & 1u) == parity) return false;
    t.clock.join(b.cta_done);
    return true;
}

bool mbarrier_try_wait(u64* bar, u32 parity, bool cluster_scope, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter(true);
    const Where where = MM_HERE;
    u32 offset;
    Mbarrier& b = use(t, cta_of(t), bar, where, offset, "mbarrier.try_wait");
    if (parity > 1) e.fatal("mbarrier", where, format("parity %u", parity));
    // The hardware may give up early, so a random schedule sometimes does.
    if (e.options.schedule != Schedule::kFifo && (b.phase & 1u) == parity && e.random(8) == 0) {
        e.yield(t);
        if ((b.phase & 1u) == parity) return false;
    }
    while ((b.phase & 1u) == parity) {
        b.waiters.push_back(&t);
        e.block(t, WaitKind::kMbarrier, where, offset, parity);
        if (!t.released) break;  // the phase completed, even if a later one has begun meanwhile
        b.waiters.erase(std::remove(b.waiters.begin(), b.waiters.end(), &t), b.waiters.end());
        if ((b.phase & 1u) == parity) return false;
    }
    t.num_polls = 0;
    t.clock.join(b.cta_done);
    if (cluster_scope) t.clock.join(b.cluster_done);
    return true;
}

void mbarrier_complete_tx(Cta& cta, u32 offset, u32 bytes, u32 agent, u32 epoch, const Where& where) {
    Mbarrier& b = find(cta, offset, where);
    b.tx -= bytes;
    check_tx(b, offset, where);
    if (g_engine->options.races) {
        if (b.cta_now.empty()) b.cta_now = g_engine->agents.fresh();
        b.cta_now.raise(agent, epoch);
    }
    advance(b);
}

}  // namespace megamoe::emu
