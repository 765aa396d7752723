// Ordered and weak loads, stores and atomics. Each performs its access at once: interleavings are sequentially
// consistent, and a missing fence or too narrow a scope shows in the race report, not in the value.
#include <cstring>

#include "engine.h"
#include "shadow.h"

namespace megamoe::emu {

namespace {

void check_space(const void* p, bool shared, const Where& where) {
    const bool is_shared = smem_owner(p) != nullptr;
    if (shared != is_shared)
        g_engine->fatal("bounds", where, format("%s access to %s", shared ? "shared" : "global", describe_address(p).c_str()));
}

template <class T> T load(const void* p, bool shared, const Where& where) {
    Thread& t = enter(true);
    spin_guard(t, where);
    check_space(p, shared, where);
    check_access(p, sizeof(T), sizeof(T), false, Access::kWeak, Scope::kCta, where);
    T v;
    std::memcpy(&v, p, sizeof(T));
    return v;
}

template <class T> void store(void* p, const T& v, bool shared, const Where& where) {
    enter();
    check_space(p, shared, where);
    check_access(p, sizeof(T), sizeof(T), true, Access::kWeak, Scope::kCta, where);
    std::memcpy(p, &v, sizeof(T));
    g_engine->wrote(p, sizeof(T));
}

}  // namespace

u32 weak_load_u32(const void* p, bool shared, const char* file, int line) { return load<u32>(p, shared, MM_HERE); }
u64 weak_load_u64(const void* p, bool shared, const char* file, int line) { return load<u64>(p, shared, MM_HERE); }
Vec4 weak_load_vec4(const void* p, bool shared, const char* file, int line) { return load<Vec4>(p, shared, MM_HERE); }
void weak_store_u32(void* p, u32 v, bool shared, const char* file, int line) { store(p, v, shared, MM_HERE); }
void weak_store_u64(void* p, u64 v, bool shared, const char* file, int line) { store(p, v, shared, MM_HERE); }
void weak_store_vec4(void* p, Vec4 v, bool shared, const char* file, int line) { store(p, v, shared, MM_HERE); }

void store_vec4_cluster(void* p, u32 cta, Vec4 v, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    check_space(p, true, where);
    Cluster& cluster = *cta_of(t).cluster;
    if (cta >= cluster.ctas.size()) g_engine->fatal("cluster", where, format("CTA %u of a cluster of %zu", cta, cluster.ctas.size()));
    Cta& target = *cluster.ctas[cta];
    if (target.live == 0) g_engine->fatal("cluster", where, format("CTA %u of the cluster has exited", cta));
    u8* to = target.smem + (static_cast<u8*>(p) - cta_of(t).smem);
    check_access(to, sizeof(v), sizeof(v), true, Access::kCluster, Scope::kCta, where);
    std::memcpy(to, &v, sizeof(v));
    g_engine->wrote(to, sizeof(v));
}

// Reading the same words again and finding the same values means the thread spins: it sleeps until one changes.
u32 ordered_load(const u32* p, Order order, Scope scope, const char* file, int line) {
    Engine& e = *g_engine;
    Thread& t = enter(true, p);
    const Where where = MM_HERE;
    spin_guard(t, where);
    e.maybe_preempt(t, 4);
    check_access(p, 4, 4, false, Access::kOrdered, scope, where);
    const bool polling = t.num_polls != 0;  // another look inside a wait loop, such as at an abort word
    u32 v = *p;
    u32 i = 0;
    while (i < t.num_polls && t.polls[i].address != p) ++i;
    if (i < t.num_polls && t.polls[i].value == v) {
        e.park_poll(t, where);
        v = *p;
        i = 0;
    } else if (i < t.num_polls) {
        t.num_polls = i = 0;
    }
    if (i < t.polls.size()) {
        t.polls[i] = Poll{p, v};
        t.num_polls = i + 1;
    }
    hb_load(t, p, order == Order::kAcquire, scope);
    if (e.options.races && order == Order::kRelaxed && !polling) note_unordered_load(t, p, where);
    return v;
}

void ordered_store(u32* p, u32 v, Order order, Scope scope, const char* file, int line) {
    Thread& t = enter();
    const Where where = MM_HERE;
    g_engine->maybe_preempt(t, 4);
    check_access(p, 4, 4, true, Access::kOrdered, scope, where);
    hb_store(t, p, order == Order::kRelease, scope, false);
    *p = v;
    g_engine->wrote(p, 4);
}

u32 atomic(u32* p, Rmw op, u32 a, u32 b, Order order, Scope scope, const char* file, int line) {
    Thread& t = enter(true);
    const Where where = MM_HERE;
    spin_guard(t, where);
    g_engine->maybe_preempt(t, 4);
    check_access(p, 4, 4, false, Access::kAtomic, scope, where);
    const u32 old = *p;
    const u32 value = op == Rmw::kAdd ? old + a : (old == a ? b : old);
    const bool writes = op == Rmw::kAdd || old == a;
    if (order == Order::kAcqRel || order == Order::kRelaxed) hb_load(t, p, order == Order::kAcqRel, scope);
    if (writes) {
        check_access(p, 4, 4, true, Access::kAtomic, scope, where);
        hb_store(t, p, order == Order::kAcqRel || order == Order::kRelease, scope, true);
    }
    if (value != old) {
        *p = value;
        t.num_polls = 0;
        g_engine->wrote(p, 4);
    }
    return old;
}

void fence_acq_rel(Scope scope) {
    g_thread->unordered = nullptr;  // an acquire pattern: relaxed load, then fence
    Thread& t = enter(true);
    hb_fence(t, scope);
}

}  // namespace megamoe::emu
