// Race check: for every 4 bytes, the last write and up to four reads, each with its agent, lanes, epoch, byte mask and
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
    u32 lanes;  // of the warp; 1 for other agents
    u16 agent;
    u8 mask;    // bytes of the word
    u8 flags;   // kAsync | kStrong | scope << 2
};
constexpr u8 kAsync = 1, kStrong = 2;
constexpr u32 kReads = 4;

struct ShadowCell {
    Mark write, reads[kReads];
    u32 write_at, reads_at[kReads];  // interned places
};

u64 sizeof_shadow_cell() { return sizeof(ShadowCell); }

namespace {

LazyBytes g_smem_written, g_smem_cells;
constexpr u64 kCellsPerSlot = kSmemSlot / 4;

std::vector<Where> g_places{Where{}};
std::unordered_map<u64, u32> g_place_ids;  // by address and issuing warp

struct CachedPlace {
    u64 key;
    u32 id;
} g_cached_places[256];

u32 place_id(const Where& where) {
    if (where.pc == nullptr) return 0;
    const u64 key = reinterpret_cast<u64>(where.pc) ^ u64(where.issuer + 1) << 48;
    CachedPlace& cached = g_cached_places[(key >> 1 ^ key >> 48) & 255u];
    if (cached.key == key) return cached.id;
    auto [it, fresh] = g_place_ids.try_emplace(key, static_cast<u32>(g_places.size()));
    if (fresh) g_places.push_back(where);
    cached = CachedPlace{key, it->second};
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
    u32 agent, lanes, epoch;
    bool async, strong;
    Scope scope;
    const Where& where;

    // What it did itself comes before it; of its own warp that is its own lane only.
    bool after(const Mark& m, Known which = Known::kAll) const {
        const u32 others = m.agent == agent ? m.lanes & ~lanes : m.lanes;
        return others == 0 || clock.covers(m.agent, others, m.epoch, which);
    }
};

bool both_strong(const Actor& a, const Mark& m) {
    if (!a.strong || !(m.flags & kStrong)) return false;
    const Agents& agents = g_engine->agents;
    return scopes_meet(a.scope, static_cast<Scope>(m.flags >> 2), agents.rank_of[a.agent], agents.cta_of[a.agent], agents.rank_of[m.agent], agents.cta_of[m.agent]);
}

void conflict(const Actor& a, const Mark& m, u32 at, bool write, bool other_write, bool fence_missing, const void* p) {
    const Agents& agents = g_engine->agents;
    const u32 others = m.agent == a.agent ? m.lanes & ~a.lanes : m.lanes;
    std::string text = format("%s of %s by %s is not ordered after the %s by %s%s", write ? "write" : "read", describe_address(p).c_str(),
                              agents.name(a.agent, a.lanes, a.where.issuer).c_str(), other_write ? "write" : "read", agents.name(m.agent, others, g_places[at].issuer).c_str(), place(at).c_str());
    if (fence_missing) text += "; they are synchronised, but no fence.proxy.async lies between the generic write and this access through the async proxy";
    if (m.agent == a.agent) text += "; lanes of one warp are ordered by warp_sync only";
    if (a.strong && (m.flags & kStrong)) text += "; both are atomic, but their scopes do not include each other";
    g_engine->report("race", a.where, text);
}

// The same mark may stand for several lanes, or for several bytes, but not for a mix of both.
bool can_merge(const Mark& m, const Actor& a, u8 mask, u8 flags) {
    return m.mask != 0 && m.agent == a.agent && m.epoch == a.epoch && m.flags == flags && (m.mask == mask || m.lanes == a.lanes);
}

void record(Mark& m, u32& at, const Actor& a, u8 mask, u8 flags) {
    const bool merge = can_merge(m, a, mask, flags);
    m = Mark{a.epoch, merge ? m.lanes | a.lanes : a.lanes, static_cast<u16>(a.agent), static_cast<u8>(merge ? m.mask | mask : mask), flags};
    at = place_id(a.where);
}

void touch(ShadowCell& c, u8 mask, const Actor& a, Known proxied, bool write, const void* p) {
    if (c.write.mask & mask) {
        const Mark& m = c.write;
        if (!both_strong(a, m)) {
            const bool generic_before_async = a.async && !(m.flags & kAsync);
            const bool ordered = a.after(m);
            if (!ordered || (generic_before_async && !a.after(m, proxied))) conflict(a, m, c.write_at, write, true, ordered, p);
        }
    }
    const u8 flags = static_cast<u8>((a.async ? kAsync : 0) | (a.strong ? kStrong : 0) | static_cast<u32>(a.scope) << 2);
    if (write) {
        for (u32 i = 0; i < kReads; ++i) {
            Mark& m = c.reads[i];
            if (!(m.mask & mask)) continue;
            if (!both_strong(a, m) && !a.after(m)) conflict(a, m, c.reads_at[i], true, false, false, p);
            m.mask &= static_cast<u8>(~mask);
        }
        record(c.write, c.write_at, a, mask, flags);
        return;
    }
    u32 slot = kReads;
    for (u32 i = 0; i < kReads && slot == kReads; ++i)
        if (can_merge(c.reads[i], a, mask, flags)) slot = i;
    // A read this one is ordered after protects nothing the new one does not.
    for (u32 i = 0; i < kReads && slot == kReads; ++i)
        if (c.reads[i].mask == 0 || (!(c.reads[i].mask & ~mask) && a.after(c.reads[i]))) slot = i;
    if (slot == kReads) slot = a.epoch % kReads;
    record(c.reads[slot], c.reads_at[slot], a, mask, flags);
}

void touch_range(const Actor& a, const void* p, u64 bytes, bool write) {
    u64 room = 0;
    ShadowCell* cell = shadow_cells(p, room);
    if (cell == nullptr) return;
    const Known proxied = smem_owner(p) != nullptr ? Known::kShared : Known::kGlobal;
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
    std::fill(std::begin(g_cached_places), std::end(g_cached_places), CachedPlace{});
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

void shadow_access(Thread& t, const void* p, u32 bytes, bool write, Access kind, Scope scope, const Where& where) {
    const bool strong = kind == Access::kOrdered || kind == Access::kAtomic;
    touch_range(Actor{t.clock, t.warp->agent, 1u << t.lane, t.epoch, false, strong, scope, where}, p, bytes, write);
}

void note_unordered_load(Thread& t, const void* p, const Where& where) {
    u64 room = 0;
    const ShadowCell* cell = shadow_cells(p, room);
    t.unordered = nullptr;
    if (cell == nullptr || cell->write.mask == 0) return;
    const Actor a{t.clock, t.warp->agent, 1u << t.lane, t.epoch, false, true, Scope::kSys, where};
    if (a.after(cell->write)) return;
    t.unordered = p;
    t.unordered_at = where;
    t.unordered_text = format("relaxed load of %s sees the write by %s%s, but is not ordered after it: it might see an older value", describe_address(p).c_str(),
                              g_engine->agents.name(cell->write.agent, cell->write.lanes, -1).c_str(), place(cell->write_at).c_str());
}

void report_unordered_load(Thread& t) {
    t.unordered = nullptr;
    g_engine->report("race", t.unordered_at, t.unordered_text, &t);
}

void shadow_async(const AsyncOp& op, const void* p, u64 bytes, bool write) {
    if (!g_engine->options.races) return;
    touch_range(Actor{op.clock, op.agent, 1, op.epoch, true, false, Scope::kCta, op.where}, p, bytes, write);
}

void shadow_stream(Stream& s, const void* p, u64 bytes, bool write) {
    if (!g_engine->options.races) return;
    const Where where{"(stream operation)", 0, nullptr};
    touch_range(Actor{s.clock, s.agent, 1, g_engine->agents.epoch[s.agent], false, false, Scope::kSys, where}, p, bytes, write);
}

}  // namespace megamoe::emu
