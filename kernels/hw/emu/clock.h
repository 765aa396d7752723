// Vector clocks for the happens-before check. Agents are warps, TMA engines (several per CTA, so that copies in
// flight are not ordered by accident), one WGMMA engine per warpgroup, and one per stream. Every thread has a clock of
// its own; since lanes of a warp mostly know the same, a clock holds one number per agent (what is known of all its
// lanes) and a short list of lanes of which more is known. So a warp_sync that is missing shows, at the price of a
// clock per warp.
//   all             what happened before
//   shared, global  the part of it that also passed a proxy fence for that state space, and so is ordered
//                   before later accesses through the async proxy
// With the race check off every clock is empty and every operation here is a no-op.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "../types.cuh"

namespace megamoe::emu {

struct Agents;
struct Thread;

constexpr u32 kLanes = 32;
enum class Known : u32 { kAll, kShared, kGlobal };

struct Clock {
    struct Lane {
        u32 key;       // agent * 32 + lane
        u32 known[3];  // by Known
    };
    std::vector<u32> base[3];   // by Known, then by agent: known of each of its lanes
    std::vector<Lane> lanes;    // known beyond that, sorted by key

    bool empty() const { return base[0].empty(); }
    void clear();
    void join(const Clock& other);
    void meet(const Clock& other);                 // elementwise minimum; an empty clock takes the other's value
    void raise(u32 agent, u32 epoch);              // an agent's work up to `epoch` is complete and visible
    void join_epoch(const Agents& agents, u32 agent, u32 epoch);  // the same on a clock that may be empty
    void raise_lane(u32 agent, u32 lane, const u32 (&known)[3]);
    void proxy_fence(bool shared_space, bool global_space);
    void fence_everything() { proxy_fence(true, true); }
    // Everything that the lanes in `lanes` of `agent` did up to `epoch` is known.
    bool covers(u32 agent, u32 lanes, u32 epoch, Known which = Known::kAll) const;

  private:
    void normalise();
};

// One side of a synchronises-with edge: who released, at which scope.
struct SyncRecord {
    Scope scope;
    u32 rank, cta;
    Clock clock;
};

// fence.acq_rel turns later relaxed stores into releases and earlier relaxed loads into acquires.
struct FenceState {
    std::vector<SyncRecord> released;   // one per scope at most
    std::vector<SyncRecord> observed;   // seen by relaxed loads, not yet acquired
};

struct SyncVariable {
    std::vector<SyncRecord> records;
};

struct Agents {
    bool on = false;
    std::vector<u32> epoch;                        // latest epoch of every agent
    std::vector<u32> streams;                      // agent of each rank's stream
    std::vector<std::vector<u32>> cta_first;       // [rank][cta] first agent of that CTA
    std::vector<u32> rank_of, cta_of;              // by agent
    u32 max_warps = 0, max_warpgroups = 0;
    std::unordered_map<const void*, SyncVariable> variables;

    void prepare(bool enabled, const std::vector<u32>& grids, u32 warps);
    u32 next(u32 agent) { return ++epoch[agent]; }
    Clock fresh() const;
    std::string name(u32 agent, u32 lanes, int issuer) const;  // issuer: a warp, or -1
};

bool scopes_meet(Scope a, Scope b, u32 rank_a, u32 cta_a, u32 rank_b, u32 cta_b);
void merge_record(std::vector<SyncRecord>& records, const SyncRecord& record);

// Flag operations of a thread (hooks of memory_ops.cpp; no-ops with the race check off).
void hb_load(Thread& t, const void* p, bool acquire, Scope scope);
void hb_store(Thread& t, const void* p, bool release, Scope scope, bool rmw);
void hb_fence(Thread& t, Scope scope);
void hb_proxy_fence(Thread& t, bool shared_space, bool global_space);
void hb_tick(Thread& t);                           // work after a release is not covered by it
void hb_view(Clock& into, const Thread& t);        // `into` learns what `t` did and knows
void hb_publish(Clock& into, Thread& t);           // the same, and `t` ticks
void hb_warp_sync(Thread* lanes, u32 mask);        // bar.warp.sync of the lanes in `mask`
void hb_align(Thread* lanes, u32 mask);            // a collective without memory ordering

}  // namespace megamoe::emu
