// Vector clocks for the happens-before check. Agents are warps, TMA engines (several per CTA, so that copies in
// flight are not ordered by accident), one WGMMA engine per warpgroup, and one per stream.
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

struct Clock {
    std::vector<u32> all, shared, global;

    bool empty() const { return all.empty(); }
    void clear() {
        all.clear();
        shared.clear();
        global.clear();
    }
    void join(const Clock& other);
    void meet(const Clock& other);                 // elementwise minimum; an empty clock takes the other's value
    void raise(u32 agent, u32 epoch);              // one agent's work up to `epoch` is complete and visible
    void join_epoch(const Agents& agents, u32 agent, u32 epoch);  // the same on a clock that may be empty
    void proxy_fence(bool shared_space, bool global_space);
    void fence_everything() { proxy_fence(true, true); }
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

struct Warp;

struct Agents {
    bool on = false;
    std::vector<u32> epoch;                        // current epoch of every agent
    std::vector<u32> streams;                      // agent of each rank's stream
    std::vector<std::vector<u32>> cta_first;       // [rank][cta] first agent of that CTA
    std::vector<u32> rank_of, cta_of;              // by agent
    u32 max_warps = 0, max_warpgroups = 0;
    std::unordered_map<const void*, SyncVariable> variables;

    void prepare(bool enabled, const std::vector<u32>& grids, u32 warps);
    u32 next(u32 agent) { return ++epoch[agent]; }
    Clock fresh() const;
    std::string name(u32 agent) const;
};

bool scopes_meet(Scope a, Scope b, u32 rank_a, u32 cta_a, u32 rank_b, u32 cta_b);
void merge_record(std::vector<SyncRecord>& records, const SyncRecord& record);

// Flag operations of a warp (hooks of memory_ops.cpp; no-ops with the race check off).
void hb_load(Warp& w, const void* p, bool acquire, Scope scope);
void hb_store(Warp& w, const void* p, bool release, Scope scope, bool rmw);
void hb_fence(Warp& w, Scope scope);
void hb_tick(Warp& w);                             // work after a release is not covered by it

}  // namespace megamoe::emu
