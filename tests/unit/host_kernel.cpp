// The host-includable parts of the kernel, for tests/unit/test_tile_stream.py and test_shared_plan.py.
#include "scheduler/tile_stream.cuh"

using namespace megamoe;

namespace {
struct Words {
    const u32* words;
    u32 operator()(u32 i) const { return words[i]; }
};
template <u32 kM, u32 kN, u32 kStagesValue, u32 kFrontend, u32 kMath, Policy kPolicyValue, Promotion kPromotionValue, u32 kSplits = 1>
struct Variant {
    static constexpr u32 kBlockM = kM, kBlockN = kN, kStages = kStagesValue, kDispatchWarps = kFrontend, kRowDepth = 2, kMathWarpgroups = kMath / 128,
                         kRowSplits = kSplits;
    static constexpr Policy kPolicy = kPolicyValue;
    static constexpr Promotion kPromotion = kPromotionValue;
};
template <class V>
u32 plan_bytes(u32 hidden, u32 local, u32 ranks) { return SharedPlan<V>::bytes(hidden, local, ranks); }
}  // namespace

extern "C" {

// Tiles of CTA `cta` of `grid` as rows of (kind, expert, n, row0, valid, 0 or 1 + which half); returns how many.
u32 walk_stream(const u32* counts, const u32* pool_base, u32 local, u32 block_m, u32 unit_blocks, u32 lag, u32 l1_columns,
                u32 l2_columns, u32 wave, u32 halve_last, u32 cta, u32 grid, u32* out, u32 room) {
    u32 active[4096], rows[4096], n_active = 0;
    for (u32 e = 0; e < local; ++e)
        if (counts[e] != 0) {
            active[n_active] = e;
            rows[n_active++] = counts[e];
        }
    StreamShape shape{n_active, block_m, unit_blocks, lag, l1_columns, l2_columns, wave != 0};
    shape.halve_last = halve_last;
    TileStream<Words, Words, Words> stream(shape, Words{rows}, Words{active}, Words{pool_base});
    u32 n = 0;
    for (bool more = stream.skip(cta); more && n < room; more = stream.skip(grid)) {
        const Tile t = stream.current(1);
        const u32 row[6] = {t.kind(), t.expert, t.n, t.row0, t.valid(), t.is_half() ? 1 + t.half() : 0};
        for (u32 i = 0; i < 6; ++i) out[6 * n + i] = row[i];
        ++n;
    }
    return n;
}

// The plan of one of the variants below, by its place in this list (tests/unit/test_shared_plan.py has the same list).
u32 shared_bytes(u32 variant, u32 hidden, u32 local, u32 ranks) {
    constexpr auto kClassic = Promotion::kClassic, kRescale = Promotion::kRescale;
    switch (variant) {
        case 0: return plan_bytes<Variant<128, 256, 4, 2, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 1: return plan_bytes<Variant<128, 256, 3, 4, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 2: return plan_bytes<Variant<64, 256, 4, 2, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 3: return plan_bytes<Variant<64, 256, 5, 4, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 4: return plan_bytes<Variant<32, 256, 4, 2, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 5: return plan_bytes<Variant<16, 256, 2, 4, 256, Policy::kFused, kClassic>>(hidden, local, ranks);
        case 6: return plan_bytes<Variant<128, 128, 4, 2, 256, Policy::kFused, kClassic, 2>>(hidden, local, ranks);
        case 7: return plan_bytes<Variant<64, 128, 4, 4, 128, Policy::kFused, kRescale>>(hidden, local, ranks);
        case 8: return plan_bytes<Variant<128, 256, 2, 2, 256, Policy::kFused, kRescale>>(hidden, local, ranks);
        case 9: return plan_bytes<Variant<64, 256, 2, 2, 128, Policy::kSerialN, kClassic>>(hidden, local, ranks);
        case 10: return plan_bytes<Variant<64, 256, 2, 2, 128, Policy::kSerialN, kRescale>>(hidden, local, ranks);
        case 11: return plan_bytes<Variant<64, 256, 2, 4, 128, Policy::kWideN, kRescale>>(hidden, local, ranks);
        case 12: return plan_bytes<Variant<32, 256, 3, 2, 256, Policy::kMmaSync, kClassic>>(hidden, local, ranks);
        case 13: return plan_bytes<Variant<16, 128, 3, 2, 128, Policy::kMmaSync, kRescale>>(hidden, local, ranks);
        case 14: return plan_bytes<Variant<128, 256, 2, 2, 256, Policy::kFused, kRescale, 2>>(hidden, local, ranks);
    }
    return 0;
}

u64 buffer_offset(u32 ranks, u32 capacity, u32 hidden, u32 intermediate, u32 experts, u32 topk, u32 region) {
    return region_offset({ranks, capacity, hidden, intermediate, experts, topk}, region);
}
}
