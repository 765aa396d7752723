#include "clock.h"

#include <algorithm>
#include <stdexcept>

#include "engine.h"

namespace megamoe::emu {

namespace {
void join_into(std::vector<u32>& a, const std::vector<u32>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = std::max(a[i], b[i]);
}
void meet_into(std::vector<u32>& a, const std::vector<u32>& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = std::min(a[i], b[i]);
}
Scope narrower(Scope a, Scope b) { return static_cast<u32>(a) < static_cast<u32>(b) ? a : b; }
u32 cta_id(const Warp& w) { return w.cta->index; }
}  // namespace

void Clock::join(const Clock& other) {
    if (other.empty()) return;
    if (empty()) {
        *this = other;
        return;
    }
    join_into(all, other.all);
    join_into(shared, other.shared);
    join_into(global, other.global);
}

void Clock::meet(const Clock& other) {
    if (other.empty()) return;
    if (empty()) {
        *this = other;
        return;
    }
    meet_into(all, other.all);
    meet_into(shared, other.shared);
    meet_into(global, other.global);
}

void Clock::raise(u32 agent, u32 epoch) {
    if (!empty()) all[agent] = std::max(all[agent], epoch);
}

void Clock::join_epoch(const Agents& agents, u32 agent, u32 epoch) {
    if (empty()) *this = agents.fresh();
    raise(agent, epoch);
}

void Clock::proxy_fence(bool shared_space, bool global_space) {
    if (shared_space) shared = all;
    if (global_space) global = all;
}

void Agents::prepare(bool enabled, const std::vector<u32>& grids, u32 warps) {
    on = enabled;
    max_warps = warps;
    max_warpgroups = (warps + 3) / 4;
    variables.clear();
    streams.clear();
    cta_first.clear();
    epoch.clear();
    if (!on) return;
    u32 next_agent = 0, rank = 0;
    rank_of.clear();
    cta_of.clear();
    const u32 per_cta = max_warps + Cta::kTmaAgents + max_warpgroups;
    for (u32 grid : grids) {
        streams.push_back(next_agent++);
        cta_first.emplace_back();
        for (u32 c = 0; c < grid; ++c) {
            cta_first.back().push_back(next_agent);
            next_agent += per_cta;
            cta_of.resize(next_agent, c);
        }
        cta_of.resize(next_agent, 0);
        rank_of.resize(next_agent, rank++);
    }
    if (next_agent > 0xFFFF) throw std::runtime_error("too many warps for the race check (65,535 agents)");
    epoch.assign(next_agent, 1);
}

Clock Agents::fresh() const {
    Clock c;
    if (!on) return c;
    c.all.assign(epoch.size(), 0);
    c.shared = c.all;
    c.global = c.all;
    return c;
}

std::string Agents::name(u32 agent) const {
    for (size_t r = streams.size(); r-- > 0;) {
        if (agent < streams[r]) continue;
        if (agent == streams[r]) return format("the stream of rank %zu", r);
        for (size_t c = cta_first[r].size(); c-- > 0;) {
            if (agent < cta_first[r][c]) continue;
            const u32 i = agent - cta_first[r][c];
            if (i < max_warps) return format("rank %zu CTA %zu warp %u", r, c, i);
            if (i < max_warps + Cta::kTmaAgents) return format("an asynchronous copy of rank %zu CTA %zu", r, c);
            return format("a wgmma of rank %zu CTA %zu warpgroup %u", r, c, i - max_warps - Cta::kTmaAgents);
        }
    }
    return "unknown";
}

// Two operations are morally strong only when each one's scope includes the other thread.
bool scopes_meet(Scope a, Scope b, u32 rank_a, u32 cta_a, u32 rank_b, u32 cta_b) {
    const Scope scope = narrower(a, b);
    if (scope == Scope::kSys) return true;
    if (rank_a != rank_b) return false;
    return scope == Scope::kGpu || cta_a == cta_b;
}

void merge_record(std::vector<SyncRecord>& records, const SyncRecord& record) {
    for (SyncRecord& r : records)
        if (r.scope == record.scope && r.rank == record.rank && r.cta == record.cta) {
            r.clock.join(record.clock);
            return;
        }
    records.push_back(record);
}

void hb_tick(Warp& w) {
    if (w.clock.empty()) return;
    w.clock.all[w.agent] = g_engine->agents.next(w.agent);
}

void hb_load(Warp& w, const void* p, bool acquire, Scope scope) {
    if (w.clock.empty()) return;
    auto it = g_engine->agents.variables.find(p);
    if (it == g_engine->agents.variables.end()) return;
    for (const SyncRecord& r : it->second.records) {
        if (!scopes_meet(r.scope, scope, r.rank, r.cta, w.cta->rank, cta_id(w))) continue;
        if (acquire) w.clock.join(r.clock);
        else merge_record(w.fences.observed, r);
    }
}

void hb_store(Warp& w, const void* p, bool release, Scope scope, bool rmw) {
    if (w.clock.empty()) return;
    SyncVariable& v = g_engine->agents.variables[p];
    if (!rmw) v.records.clear();  // a plain store starts a new history; an atomic continues the one it read
    if (release) merge_record(v.records, SyncRecord{scope, w.cta->rank, cta_id(w), w.clock});
    else
        for (const SyncRecord& f : w.fences.released)
            merge_record(v.records, SyncRecord{narrower(scope, f.scope), f.rank, f.cta, f.clock});
    if (release) hb_tick(w);
}

void hb_fence(Warp& w, Scope scope) {
    if (w.clock.empty()) return;
    for (const SyncRecord& r : w.fences.observed)
        if (scopes_meet(r.scope, scope, r.rank, r.cta, w.cta->rank, cta_id(w))) w.clock.join(r.clock);
    // Records of a narrower fence stay pending for a wider one only as long as they can matter: all of them are
    // covered by a fence of system scope.
    if (scope == Scope::kSys) w.fences.observed.clear();
    std::vector<SyncRecord> mine{SyncRecord{scope, w.cta->rank, cta_id(w), w.clock}};
    for (SyncRecord& old : w.fences.released)
        if (old.scope != scope) mine.push_back(std::move(old));
    w.fences.released = std::move(mine);
    hb_tick(w);
}

}  // namespace megamoe::emu
