// The host-includable parts of the kernel, for tests/unit/test_tile_stream.py and test_shared_plan.py.
#include "scheduler/tile_stream.cuh"

using namespace megamoe;

namespace {
struct Words {
    const u32* words;
    u32 operator()(u32 i) const { return words[i]; }
};
template <u32 kM, u32 kStagesValue, u32 kFrontend>
struct Variant {
    static constexpr u32 kBlockM = kM, kBlockN = 256, kStages = kStagesValue, kDispatchWarps = kFrontend, kRowDepth = 2;
};
template <class V>
u32 plan_bytes(u32 hidden, u32 local, u32 ranks) { return SharedPlan<V>::bytes(hidden, local, ranks); }
}  // namespace

extern "C" {

// Tiles of CTA `cta` of `grid` as rows of (kind, expert, n, row0, valid); returns how many.
u32 walk_stream(const u32* counts, const u32* pool_base, u32 local, u32 block_m, u32 unit_blocks, u32 lag, u32 l1_columns,
                u32 l2_columns, u32 cta, u32 grid, u32* out, u32 room) {
    u32 active[4096], rows[4096], n_active = 0;
    for (u32 e = 0; e < local; ++e)
        if (counts[e] != 0) {
            active[n_active] = e;
            rows[n_active++] = counts[e];
        }
    const StreamShape shape{n_active, block_m, unit_blocks, lag, l1_columns, l2_columns};
    TileStream<Words, Words, Words> stream(shape, Words{rows}, Words{active}, Words{pool_base});
    u32 n = 0;
    for (bool more = stream.skip(cta); more && n < room; more = stream.skip(grid)) {
        const Tile t = stream.current(1);
        const u32 row[5] = {t.kind(), t.expert, t.n, t.row0, t.valid()};
        for (u32 i = 0; i < 5; ++i) out[5 * n + i] = row[i];
        ++n;
    }
    return n;
}

u32 shared_bytes(u32 block_m, u32 stages, u32 dispatch_warps, u32 hidden, u32 local, u32 ranks) {
#define CASE(m, s, d) \
    if (block_m == m && stages == s && dispatch_warps == d) return plan_bytes<Variant<m, s, d>>(hidden, local, ranks);
    CASE(128, 4, 2) CASE(128, 3, 4) CASE(64, 4, 2) CASE(64, 5, 4) CASE(32, 4, 2) CASE(16, 2, 4)
#undef CASE
    return 0;
}

u64 buffer_offset(u32 ranks, u32 capacity, u32 hidden, u32 intermediate, u32 experts, u32 topk, u32 region) {
    return region_offset({ranks, capacity, hidden, intermediate, experts, topk}, region);
}
}
