#include "clock.h"

#include <algorithm>
#include <stdexcept>

#include "engine.h"

namespace megamoe::emu {

namespace {
Scope narrower(Scope a, Scope b) { return static_cast<u32>(a) < static_cast<u32>(b) ? a : b; }
u32 cta_id(const Thread& t) { return t.warp->cta->index; }
u32 rank_id(const Thread& t) { return t.warp->cta->rank; }
}  // namespace

void Clock::clear() {
    for (auto& part : base) part.clear();
    lanes.clear();
}

void Clock::join(const Clock& other) {
    if (other.empty()) return;
    if (empty()) {
        *this = other;
        return;
    }
    for (u32 k = 0; k < 3; ++k) {
        u32* mine = base[k].data();
        const u32* theirs = other.base[k].data();
        for (size_t i = 0, n = base[k].size(); i < n; ++i) mine[i] = std::max(mine[i], theirs[i]);
    }
    if (lanes.empty() && other.lanes.empty()) return;
    static std::vector<Lane> merged;
    merged.clear();
    auto a = lanes.begin();
    auto b = other.lanes.begin();
    while (a != lanes.end() || b != other.lanes.end()) {
        if (b == other.lanes.end() || (a != lanes.end() && a->key < b->key)) {
            merged.push_back(*a++);
        } else if (a == lanes.end() || b->key < a->key) {
            merged.push_back(*b++);
        } else {
            for (u32 k = 0; k < 3; ++k) a->known[k] = std::max(a->known[k], b->known[k]);
            merged.push_back(*a++);
            ++b;
        }
    }
    lanes.assign(merged.begin(), merged.end());
    normalise();
}

// Lanes known no further than their agent go; once all lanes of an agent are known, so is the agent.
void Clock::normalise() {
    for (size_t i = 0; i + kLanes <= lanes.size(); ++i) {
        if (lanes[i].key % kLanes != 0 || lanes[i + kLanes - 1].key != lanes[i].key + kLanes - 1) continue;
        for (u32 k = 0; k < 3; ++k) {
            u32 least = lanes[i].known[k];
            for (u32 lane = 1; lane < kLanes; ++lane) least = std::min(least, lanes[i + lane].known[k]);
            u32& agent = base[k][lanes[i].key / kLanes];
            agent = std::max(agent, least);
        }
    }
    auto known = [&](const Lane& l) {
        const u32 agent = l.key / kLanes;
        return l.known[0] <= base[0][agent] && l.known[1] <= base[1][agent] && l.known[2] <= base[2][agent];
    };
    lanes.erase(std::remove_if(lanes.begin(), lanes.end(), known), lanes.end());
}

void Clock::meet(const Clock& other) {
    if (other.empty()) return;
    if (empty()) {
        *this = other;
        return;
    }
    auto known = [](const Clock& c, u32 key, u32 k) {
        auto it = std::lower_bound(c.lanes.begin(), c.lanes.end(), key, [](const Lane& l, u32 v) { return l.key < v; });
        const u32 agent = c.base[k][key / kLanes];
        return it != c.lanes.end() && it->key == key ? std::max(agent, it->known[k]) : agent;
    };
    std::vector<Lane> both;
    for (const Clock* c : {static_cast<const Clock*>(this), &other})
        for (const Lane& l : c->lanes) {
            Lane least{l.key, {}};
            for (u32 k = 0; k < 3; ++k) least.known[k] = std::min(known(*this, l.key, k), known(other, l.key, k));
            both.push_back(least);
        }
    std::sort(both.begin(), both.end(), [](const Lane& x, const Lane& y) { return x.key < y.key; });
    both.erase(std::unique(both.begin(), both.end(), [](const Lane& x, const Lane& y) { return x.key == y.key; }), both.end());
    for (u32 k = 0; k < 3; ++k)
        for (size_t i = 0; i < base[k].size(); ++i) base[k][i] = std::min(base[k][i], other.base[k][i]);
    lanes = std::move(both);
    normalise();
}

void Clock::raise(u32 agent, u32 epoch) {
    if (!empty()) base[0][agent] = std::max(base[0][agent], epoch);
}

void Clock::join_epoch(const Agents& agents, u32 agent, u32 epoch) {
    if (empty()) *this = agents.fresh();
    raise(agent, epoch);
}

void Clock::raise_lane(u32 agent, u32 lane, const u32 (&known)[3]) {
    const u32 key = agent * kLanes + lane;
    auto it = std::lower_bound(lanes.begin(), lanes.end(), key, [](const Lane& l, u32 v) { return l.key < v; });
    if (it == lanes.end() || it->key != key) it = lanes.insert(it, Lane{key, {}});
    for (u32 k = 0; k < 3; ++k) it->known[k] = std::max({it->known[k], known[k], base[k][agent]});
    if (lanes.size() >= kLanes) normalise();
}

void Clock::proxy_fence(bool shared_space, bool global_space) {
    if (empty()) return;
    for (u32 k : {1u, 2u}) {
        if (!(k == 1 ? shared_space : global_space)) continue;
        base[k] = base[0];
        for (Lane& l : lanes) l.known[k] = l.known[0];
    }
}

bool Clock::covers(u32 agent, u32 mask, u32 epoch, Known which) const {
    const u32 k = static_cast<u32>(which);
    if (base[k][agent] >= epoch) return true;
    auto it = std::lower_bound(lanes.begin(), lanes.end(), agent * kLanes, [](const Lane& l, u32 v) { return l.key < v; });
    for (; mask != 0 && it != lanes.end() && it->key / kLanes == agent; ++it)
        if (it->known[k] >= epoch) mask &= ~(1u << it->key % kLanes);
    return mask == 0;
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
        cta_of.resize(next_agent, 0);
        for (u32 c = 0; c < grid; ++c) {
            cta_first.back().push_back(next_agent);
            next_agent += per_cta;
            cta_of.resize(next_agent, c);
        }
        rank_of.resize(next_agent, rank++);
    }
    if (next_agent > 0xFFFF) throw std::runtime_error("too many warps for the race check (65,535 agents)");
    epoch.assign(next_agent, 1);
}

Clock Agents::fresh() const {
    Clock c;
    if (!on) return c;
    for (auto& part : c.base) part.assign(epoch.size(), 0);
    return c;
}

std::string Agents::name(u32 agent, u32 lanes, int issuer) const {
    for (size_t r = streams.size(); r-- > 0;) {
        if (agent < streams[r]) continue;
        if (agent == streams[r]) return format("the stream of rank %zu", r);
        for (size_t c = cta_first[r].size(); c-- > 0;) {
            if (agent < cta_first[r][c]) continue;
            const u32 i = agent - cta_first[r][c];
            if (i < max_warps) {
                const std::string warp = format("rank %zu CTA %zu warp %u", r, c, i);
                if (__builtin_popcount(lanes) == 1) return warp + format(" lane %d", __builtin_ctz(lanes));
                return lanes == ~0u ? warp : warp + format(" lanes 0x%08x", lanes);
            }
            if (i < max_warps + Cta::kTmaAgents)
                return format("an asynchronous copy of rank %zu CTA %zu", r, c) + (issuer < 0 ? "" : format(" warp %d", issuer));
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

void hb_tick(Thread& t) {
    if (t.clock.empty()) return;
    u32& latest = g_engine->agents.epoch[t.warp->agent];
    latest = std::max(latest, ++t.epoch);
}

void hb_view(Clock& into, const Thread& t) {
    if (t.clock.empty()) return;
    into.join(t.clock);
    into.raise_lane(t.warp->agent, t.lane, {t.epoch, t.fenced[0], t.fenced[1]});
}

void hb_publish(Clock& into, Thread& t) {
    hb_view(into, t);
    hb_tick(t);
}

void hb_load(Thread& t, const void* p, bool acquire, Scope scope) {
    if (t.clock.empty()) return;
    auto it = g_engine->agents.variables.find(p);
    if (it == g_engine->agents.variables.end()) return;
    for (const SyncRecord& r : it->second.records) {
        if (!scopes_meet(r.scope, scope, r.rank, r.cta, rank_id(t), cta_id(t))) continue;
        if (acquire) t.clock.join(r.clock);
        else merge_record(t.fences.observed, r);
    }
}

void hb_store(Thread& t, const void* p, bool release, Scope scope, bool rmw) {
    if (t.clock.empty()) return;
    SyncVariable& v = g_engine->agents.variables[p];
    if (!rmw) v.records.clear();  // a plain store starts a new history; an atomic continues the one it read
    if (release) {
        SyncRecord record{scope, rank_id(t), cta_id(t), {}};
        hb_publish(record.clock, t);
        merge_record(v.records, record);
    } else {
        for (const SyncRecord& f : t.fences.released)
            merge_record(v.records, SyncRecord{narrower(scope, f.scope), f.rank, f.cta, f.clock});
    }
}

void hb_fence(Thread& t, Scope scope) {
    if (t.clock.empty()) return;
    for (const SyncRecord& r : t.fences.observed)
        if (scopes_meet(r.scope, scope, r.rank, r.cta, rank_id(t), cta_id(t))) t.clock.join(r.clock);
    // Records of a narrower fence stay pending for a wider one only as long as they can matter: all of them are
    // covered by a fence of system scope.
    if (scope == Scope::kSys) t.fences.observed.clear();
    std::vector<SyncRecord> mine{SyncRecord{scope, rank_id(t), cta_id(t), {}}};
    hb_publish(mine[0].clock, t);
    for (SyncRecord& old : t.fences.released)
        if (old.scope != scope) mine.push_back(std::move(old));
    t.fences.released = std::move(mine);
}

void hb_proxy_fence(Thread& t, bool shared_space, bool global_space) {
    if (t.clock.empty()) return;
    t.clock.proxy_fence(shared_space, global_space);
    if (shared_space) t.fenced[0] = t.epoch;
    if (global_space) t.fenced[1] = t.epoch;
    hb_tick(t);
}

void hb_align(Thread* lanes, u32 mask) {
    if (lanes[0].clock.empty()) return;
    u32 latest = 0;
    for (u32 lane = 0; lane < kLanes; ++lane)
        if (mask >> lane & 1u) latest = std::max(latest, lanes[lane].epoch);
    for (u32 lane = 0; lane < kLanes; ++lane)
        if (mask >> lane & 1u) lanes[lane].epoch = latest;
}

void hb_warp_sync(Thread* lanes, u32 mask) {
    if (lanes[0].clock.empty()) return;
    hb_align(lanes, mask);
    Clock joined;
    for (u32 lane = 0; lane < kLanes; ++lane)
        if (mask >> lane & 1u) hb_publish(joined, lanes[lane]);
    for (u32 lane = 0; lane < kLanes; ++lane)
        if (mask >> lane & 1u) lanes[lane].clock = joined;
}

}  // namespace megamoe::emu
