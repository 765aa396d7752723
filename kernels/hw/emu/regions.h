// Registered memory: whose it is, which bytes were ever written, and the race check's shadow cells.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../types.cuh"

namespace megamoe::emu {

struct ShadowCell;
struct Thread;
struct Cta;
struct Where;

u64 sizeof_shadow_cell();

// Zero-filled memory whose pages exist once touched.
class LazyBytes {
  public:
    LazyBytes() = default;
    LazyBytes(const LazyBytes&) = delete;
    LazyBytes& operator=(const LazyBytes&) = delete;
    ~LazyBytes() { release(); }
    void reset(u64 bytes);
    void release();
    u8* data() const { return data_; }

  private:
    u8* data_ = nullptr;
    u64 bytes_ = 0;
};

struct Region {
    u64 begin = 0, end = 0;
    int rank = -1;
    std::string name;
    bool symmetric = false, initialised = false, constant = false;
    bool undefined = false;  // parts of it are declared never written in the course of a run
    LazyBytes written;      // one byte per byte, when uninitialised reads are checked
    LazyBytes cells;        // ShadowCell per 4 bytes, when races are checked
};

class RegionMap {
  public:
    // Returns an error text, or an empty string.
    std::string add(u64 begin, u64 bytes, int rank, const char* name, bool symmetric, bool initialised, bool constant = false, bool undefined = false);
    void remove(u64 begin);
    Region* find(const void* p) {
        const u64 a = reinterpret_cast<u64>(p);
        if (last_ != nullptr && a >= last_->begin && a < last_->end) return last_;
        return search(a);
    }
    const std::vector<std::unique_ptr<Region>>& all() const { return regions_; }
    void prepare(bool track_written, bool track_races);
    std::string describe(const void* p);

  private:
    Region* search(u64 a);
    std::vector<std::unique_ptr<Region>> regions_;  // sorted by begin
    Region* last_ = nullptr;
    bool track_written_ = false, track_races_ = false;
};

enum class Access : u8 { kPlain, kWeak, kCluster, kOrdered, kAtomic };  // kCluster: weak, shared memory of a CTA of the cluster

// Checks one access of the running thread: alignment, bounds, owner, initialised, race. Ends the run when the
// access must not be performed. `align` is the required alignment in bytes (0 = none).
void check_access(const void* p, u32 bytes, u32 align, bool write, Access kind, Scope scope, const Where& where);
// The same for [p, p + bytes) of global memory touched by an asynchronous copy on behalf of `t`'s rank.
void check_global_range(const void* p, u64 bytes, bool write, const Where& where, const char* what);
// Marks bytes as written (any memory; unregistered memory is ignored).
void mark_written(const void* p, u64 bytes, bool written = true);

}  // namespace megamoe::emu
