// Race check: for every 4 bytes, the last write and up to three reads, each with its agent, epoch, byte mask and
// proxy. An access conflicts with an earlier one that its clock does not cover.
#include "shadow.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>

#include "async.h"

namespace megamoe::emu {

struct Mark {
    u32 epoch;
    u16 agent;
    u8 mask;    // bytes of the word
    u8 flags;   // kAsync | kStrong | scope << 2
};
constexpr u8 kAsync = 1, kStrong = 2;

struct ShadowCell {
    Mark write, reads[3];
    u32 write_at, reads_at[3];  // interned places
};

u64 sizeof_shadow_cell() { return sizeof(ShadowCell); }

namespace {

LazyBytes g_smem_written, g_smem_cells;
constexpr u64 kCellsPerSlot = kSmemSlot / 4;

std::vector<Where> g_places{Where{}};
std::unordered_map<const void*, u32> g_place_ids;

u32 place_id(const Where& where) {
    static const void* cached_pc[256];
    static u32 cached_id[256];
    const u32 slot = static_cast<u32>(reinterpret_cast<u64>(where.pc) >> 1) & 255u;
    if (where.pc != nullptr && cached_pc[slot] == where.pc && cached_id[slot] < g_places.size()) return cached_id[slot];
    if (where.pc == nullptr) return 0;
    auto [it, fresh] = g_place_ids.try_emplace(where.pc, static_cast<u32>(g_places.size()));
    if (fresh) g_places.push_back(where);
    cached_pc[slot] = where.pc;
    cached_id[slot] = it->second;
    return it->second;
}

std::string place(u32 id) {
    const Where& w = g_places[id];
    std::string out = w.file != nullptr ? format(" at %s:%d", w.file, w.line) : std::string();
    if (w.pc != nullptr) out += format(" [[%llx]]", reinterpret_cast<u64>(w.pc));
    return out;
}

// One side of a conflict: who accesses, with which clock.
struct Actor {
    const Clock& clock;
    u32 agent, epoch;
    bool async, strong;
    Scope scope;
    const Where& where;
};

bool both_strong(const Actor& a, const Mark& m) {
    if (!a.strong || !(m.flags & kStrong)) return false;
    const Agents& agents = g_engine->agents;
    return scopes_meet(a.scope, static_cast<Scope>(m.flags >> 2), agents.rank_of[a.agent], agents.cta_of[a.agent], agents.rank_of[m.agent], agents.cta_of[m.agent]);
}

void conflict(const Actor& a, const Mark& m, u32 at, bool write, bool other_write, bool fence_missing, const void* p) {
    std::string text = format("%s of %s by %s is not ordered after the %s by %s%s", write ? "write" : "read", describe_address(p).c_str(),
                              g_engine->agents.name(a.agent).c_str(), other_write ? "write" : "read", g_engine->agents.name(m.agent).c_str(), place(at).c_str());
    if (fence_missing) text += "; they are synchronised, but no fence.proxy.async lies between the generic write and this access through the async proxy";
    if (a.strong && (m.flags & kStrong)) text += "; both are atomic, but their scopes do not include each other";
    g_engine->report("race", a.where, text);
}

void touch(ShadowCell& c, u8 mask, const Actor& a, const std::vector<u32>& proxied, bool write, const void* p) {
    if (c.write.mask & mask) {
        const Mark& m = c.write;
        const bool own = m.agent == a.agent && m.epoch == a.epoch;
        if (!own && !both_strong(a, m)) {
            const bool generic_before_async = a.async && !(m.flags & kAsync);
            const bool ordered = a.clock.all[m.agent] >= m.epoch;
            if (!ordered || (generic_before_async && proxied[m.agent] < m.epoch)) conflict(a, m, c.write_at, write, true, ordered, p);
        }
    }
    const u8 flags = static_cast<u8>((a.async ? kAsync : 0) | (a.strong ? kStrong : 0) | static_cast<u32>(a.scope) << 2);
    if (write) {
        for (u32 i = 0; i < 3; ++i) {
            Mark& m = c.reads[i];
            if (!(m.mask & mask)) continue;
            const bool own = m.agent == a.agent && m.epoch == a.epoch;
            if (!own && !both_strong(a, m) && a.clock.all[m.agent] < m.epoch) conflict(a, m, c.reads_at[i], true, false, false, p);
            m.mask &= static_cast<u8>(~mask);
        }
        const bool merge = c.write.agent == a.agent && c.write.epoch == a.epoch && c.write.flags == flags;
        c.write = Mark{a.epoch, static_cast<u16>(a.agent), static_cast<u8>(merge ? c.write.mask | mask : mask), flags};
        c.write_at = place_id(a.where);
        return;
    }
    u32 slot = 3;
    for (u32 i = 0; i < 3 && slot == 3; ++i)
        if (c.reads[i].mask != 0 && c.reads[i].agent == a.agent) slot = i;
    for (u32 i = 0; i < 3 && slot == 3; ++i)
        if (c.reads[i].mask == 0) slot = i;
    // A read this one is ordered after protects nothing the new one does not.
    for (u32 i = 0; i < 3 && slot == 3; ++i)
        if (a.clock.all[c.reads[i].agent] >= c.reads[i].epoch && !(c.reads[i].mask & ~mask)) slot = i;
    if (slot == 3) slot = a.epoch % 3;
    Mark& m = c.reads[slot];
    const bool merge = m.mask != 0 && m.agent == a.agent && m.epoch == a.epoch;
    m = Mark{a.epoch, static_cast<u16>(a.agent), static_cast<u8>(merge ? m.mask | mask : mask), flags};
    c.reads_at[slot] = place_id(a.where);
}

void touch_range(const Actor& a, const void* p, u64 bytes, bool write) {
    u64 room = 0;
    ShadowCell* cell = shadow_cells(p, room);
    if (cell == nullptr) return;
    const std::vector<u32>& proxied = smem_owner(p) != nullptr ? a.clock.shared : a.clock.global;
    const u64 begin = reinterpret_cast<u64>(p), end = begin + bytes;
    for (u64 word = begin & ~3ull; word < end && room > 0; word += 4, ++cell, --room) {
        u8 mask = 0xF;
        if (word < begin) mask &= static_cast<u8>(0xF << (begin - word));
        if (word + 4 > end) mask &= static_cast<u8>(0xF >> (word + 4 - end));
        touch(*cell, mask, a, proxied, write, reinterpret_cast<const void*>(std::max(word, begin)));
    }
}

}  // namespace

void prepare_smem_shadow(size_t slots, bool track_written, bool track_races) {
    g_smem_written.reset(track_written ? slots * kSmemSlot : 0);
    g_smem_cells.reset(track_races ? slots * kCellsPerSlot * sizeof(ShadowCell) : 0);
    g_places.assign(1, Where{});
    g_place_ids.clear();
}

void reset_smem_shadow(u32 slot) {
    if (g_smem_written.data() != nullptr) std::memset(g_smem_written.data() + u64(slot) * kSmemSlot, 0, kSmemSlot);
    if (g_smem_cells.data() != nullptr)
        madvise(g_smem_cells.data() + slot * kCellsPerSlot * sizeof(ShadowCell), kCellsPerSlot * sizeof(ShadowCell), MADV_DONTNEED);
}

u8* smem_written(const void* p) {
    if (g_smem_written.data() == nullptr) return nullptr;
    Cta* owner = smem_owner(p);
    if (owner == nullptr) return nullptr;
    return g_smem_written.data() + u64(smem_slot_index(owner->smem)) * kSmemSlot + (static_cast<const u8*>(p) - owner->smem);
}

ShadowCell* shadow_cells(const void* p, u64& room) {
    if (Cta* owner = smem_owner(p)) {
        if (g_smem_cells.data() == nullptr) return nullptr;
        const u64 word = static_cast<u64>(static_cast<const u8*>(p) - owner->smem) / 4;
        room = kCellsPerSlot - word;
        return reinterpret_cast<ShadowCell*>(g_smem_cells.data()) + u64(smem_slot_index(owner->smem)) * kCellsPerSlot + word;
    }
    Region* r = g_engine->regions.find(p);
    if (r == nullptr || r->cells.data() == nullptr) return nullptr;
    const u64 word = reinterpret_cast<u64>(p) / 4 - r->begin / 4;
    room = (r->end + 3) / 4 - reinterpret_cast<u64>(p) / 4;
    return reinterpret_cast<ShadowCell*>(r->cells.data()) + word;
}

void shadow_access(Warp& w, const void* p, u32 bytes, bool write, Access kind, Scope scope, const Where& where) {
    const bool strong = kind == Access::kOrdered || kind == Access::kAtomic;
    touch_range(Actor{w.clock, w.agent, w.clock.all[w.agent], false, strong, scope, where}, p, bytes, write);
}

void shadow_async(const AsyncOp& op, const void* p, u64 bytes, bool write) {
    if (!g_engine->options.races) return;
    touch_range(Actor{op.clock, op.agent, op.epoch, true, false, Scope::kCta, op.where}, p, bytes, write);
}

void shadow_stream(Stream& s, const void* p, u64 bytes, bool write) {
    if (!g_engine->options.races) return;
    const Where where{"(stream operation)", 0, nullptr};
    touch_range(Actor{s.clock, s.agent, s.clock.all[s.agent], false, false, Scope::kSys, where}, p, bytes, write);
}

}  // namespace megamoe::emu
