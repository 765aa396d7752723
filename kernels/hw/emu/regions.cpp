#include "regions.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>

#include "engine.h"
#include "shadow.h"

namespace megamoe::emu {

void LazyBytes::reset(u64 bytes) {
    release();
    if (bytes == 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("cannot reserve shadow memory");
    data_ = static_cast<u8*>(p);
    bytes_ = bytes;
}

void LazyBytes::release() {
    if (data_ != nullptr) munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
}

std::string RegionMap::add(u64 begin, u64 bytes, int rank, const char* name, bool symmetric, bool initialised, bool constant, bool undefined) {
    if (bytes == 0) return "";
    const u64 end = begin + bytes;
    auto at = std::find_if(regions_.begin(), regions_.end(), [&](const auto& r) { return r->end > begin; });
    if (at != regions_.end() && (*at)->begin < end)
        return format("region '%s' of rank %d overlaps region '%s' of rank %d", name, rank, (*at)->name.c_str(), (*at)->rank);
    auto r = std::make_unique<Region>();
    r->begin = begin;
    r->end = end;
    r->rank = rank;
    r->name = name;
    r->symmetric = symmetric;
    r->initialised = initialised;
    r->constant = constant;
    r->undefined = undefined;
    regions_.insert(at, std::move(r));
    last_ = nullptr;
    return "";
}

void RegionMap::remove(u64 begin) {
    last_ = nullptr;
    regions_.erase(std::remove_if(regions_.begin(), regions_.end(), [&](const auto& r) { return r->begin == begin; }), regions_.end());
}

Region* RegionMap::search(u64 a) {
    auto it = std::upper_bound(regions_.begin(), regions_.end(), a, [](u64 v, const auto& r) { return v < r->end; });
    if (it == regions_.end() || (*it)->begin > a) return nullptr;
    return last_ = it->get();
}

void RegionMap::prepare(bool track_written, bool track_races) {
    track_written_ = track_written;
    track_races_ = track_races;
    for (auto& r : regions_) {
        r->written.reset(track_written_ && (!r->initialised || r->undefined) ? r->end - r->begin : 0);
        if (r->written.data() != nullptr && r->initialised) std::memset(r->written.data(), 1, r->end - r->begin);
        // One word of slack: a region need not begin on a word boundary.
        r->cells.reset(track_races_ ? ((r->end - r->begin) / 4 + 2) * sizeof_shadow_cell() : 0);
    }
}

std::string RegionMap::describe(const void* p) {
    const u64 a = reinterpret_cast<u64>(p);
    if (const Region* r = find(p)) return format("%s of rank %d + %llu", r->name.c_str(), r->rank, a - r->begin);
    const Region* below = nullptr;
    for (const auto& r : regions_)
        if (r->end <= a) below = r.get();
    if (below != nullptr && a - below->end < (1u << 20))
        return format("0x%llx, outside every region; %llu bytes past the end of %s of rank %d", a, a - below->end, below->name.c_str(), below->rank);
    return format("0x%llx, outside every region", a);
}

std::string describe_address(const void* p) {
    if (Cta* c = smem_owner(p)) return format("shared memory of rank %u CTA %u + %lld", c->rank, c->index, static_cast<long long>(static_cast<const u8*>(p) - c->smem));
    if (g_engine->stacks_.contains(p)) return "a thread's local memory";
    return g_engine->regions.describe(p);
}

u32 smem_offset(Cta& cta, const void* p, u64 bytes, const Where& where, const char* what) {
    const u8* b = static_cast<const u8*>(p);
    if (b < cta.smem || b >= cta.smem + kSmemSlot)
        g_engine->fatal("foreign", where, format("%s: %s is not in this CTA's shared memory", what, describe_address(p).c_str()));
    const u64 offset = static_cast<u64>(b - cta.smem);
    if (offset + bytes > cta.smem_bytes)
        g_engine->fatal("bounds", where, format("%s: smem+%llu, %llu bytes, ends past the %u bytes of the launch", what, offset, bytes, cta.smem_bytes));
    return static_cast<u32>(offset);
}

u32 smem_addr(const void* p, const char* file, int line) {
    return kSmemWindow + smem_offset(cta_of(*g_thread), p, 0, MM_HERE, "shared address");
}

namespace {

const char* verb(bool write) { return write ? "write" : "read"; }

// The bytes must have been written by someone since the launch (shared memory) or since allocation.
void check_written(u8* written, const void* p, u32 bytes, bool write, const Where& where) {
    if (written == nullptr) return;
    if (write) {
        std::memset(written, 1, bytes);
        return;
    }
    for (u32 i = 0; i < bytes; ++i) {
        if (written[i]) continue;
        std::memset(written, 1, bytes);  // once per place
        g_engine->report("uninit", where, format("read of %u bytes at %s, which were never written", bytes, describe_address(p).c_str()));
        return;
    }
}

Region& check_owner(const void* p, u64 bytes, bool write, const Where& where, const char* what) {
    Engine& e = *g_engine;
    Region* r = e.regions.find(p);
    if (r == nullptr) e.fatal("bounds", where, format("%s: %s of %llu bytes at %s", what, verb(write), bytes, e.regions.describe(p).c_str()));
    const u64 a = reinterpret_cast<u64>(p);
    if (a + bytes > r->end)
        e.fatal("bounds", where, format("%s: %s of %llu bytes at %s runs %llu bytes past its end", what, verb(write), bytes, e.regions.describe(p).c_str(), a + bytes - r->end));
    const int rank = static_cast<int>(cta_of(*g_thread_or_issuer()).rank);
    if (!r->symmetric && r->rank >= 0 && r->rank != rank)
        e.fatal("foreign", where, format("%s: %s of rank %d's private memory by rank %d (%s)", what, verb(write), r->rank, rank, e.regions.describe(p).c_str()));
    if (r->constant && write) e.fatal("foreign", where, format("%s: write to %s", what, e.regions.describe(p).c_str()));
    return *r;
}

}  // namespace

void check_access(const void* p, u32 bytes, u32 align, bool write, Access kind, Scope scope, const Where& where) {
    Engine& e = *g_engine;
    Thread& t = *g_thread;
    if (align > 1 && (reinterpret_cast<u64>(p) & (align - 1)) != 0)
        e.report("misaligned", where, format("%s of %u bytes at %s is not %u-byte aligned", verb(write), bytes, describe_address(p).c_str(), align));
    Cta* owner = smem_owner(p);
    u8* written;
    if (owner != nullptr) {
        if (owner != t.warp->cta && !(kind == Access::kCluster && owner->cluster == t.warp->cta->cluster))
            e.fatal("foreign", where, format("%s of %s by rank %u CTA %u", verb(write), describe_address(p).c_str(), cta_of(t).rank, cta_of(t).index));
        const u64 offset = static_cast<u64>(static_cast<const u8*>(p) - owner->smem);
        if (offset + bytes > owner->smem_bytes)
            e.fatal("bounds", where, format("%s of %u bytes at smem+%llu, past the %u bytes of the launch", verb(write), bytes, offset, owner->smem_bytes));
        written = smem_written(p);
    } else {
        if (e.stacks_.contains(p)) {
            if (e.stacks_.index_of(p) == t.stack) return;
            e.fatal("foreign", where, format("%s of another thread's local memory", verb(write)));
        }
        Region& r = check_owner(p, bytes, write, where, kind == Access::kPlain ? "plain access" : "access");
        if (r.constant) return;
        written = r.written.data() == nullptr ? nullptr : r.written.data() + (reinterpret_cast<u64>(p) - r.begin);
    }
    check_written(written, p, bytes, write, where);
    if (e.options.races) shadow_access(t, p, bytes, write, kind, scope, where);
}

void check_global_range(const void* p, u64 bytes, bool write, const Where& where, const char* what) {
    check_owner(p, bytes, write, where, what);
}

void mark_written(const void* p, u64 bytes, bool written) {
    if (u8* w = smem_written(p)) {
        std::memset(w, written, bytes);
        return;
    }
    Region* r = g_engine->regions.find(p);
    if (r == nullptr || r->written.data() == nullptr) return;
    const u64 offset = reinterpret_cast<u64>(p) - r->begin;
    std::memset(r->written.data() + offset, written, std::min(bytes, r->end - r->begin - offset));
}

}  // namespace megamoe::emu
