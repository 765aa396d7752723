// The whole shared-memory plan of a CTA. Offsets that the math loop uses are compile-time constants;
// parts whose size depends on the shape come last.
#pragma once
#include "tile_shape.cuh"

namespace megamoe {

constexpr u32 kTileSlots = 4;
constexpr u32 kRowChunkMax = 4096;   // bytes of a row staged at a time

// Cumulative phases: each runs everything before it.
enum class Phase : u32 { kStub, kDispatch, kL1, kL2, kCombine };

enum TileKind : u32 { kTileL1, kTileL2, kTileEnd };

// What the scheduler publishes for one tile: 16 bytes, and few registers while the math loop holds it.
struct Tile {
    u32 head;      // TileKind | arrival bank << 4 | maxima buffer << 5 | half a tile << 6 | which half << 7 | valid << 8
    u32 expert;    // local expert
    u32 n;         // column tile
    u32 row0;      // first pool row, as a place in memory
    u32 block;     // its row block (of BLOCK_M) among all of the pool: names its counters
    MM_HOST_DEVICE static u32 make_head(u32 kind, u32 bank, u32 valid) { return kind | bank << 4 | valid << 8; }
    MM_HOST_DEVICE u32 kind() const { return head & 0xf; }
    MM_HOST_DEVICE u32 bank() const { return head >> 4 & 1; }
    MM_HOST_DEVICE u32 maxima_buffer() const { return head >> 5 & 1; }   // alternates between L1 tiles of a CTA
    MM_HOST_DEVICE void set_maxima_buffer(u32 buffer) { head |= buffer << 5; }
    // Of a tile cut in two, only the columns of column part `half()`.
    MM_HOST_DEVICE bool is_half() const { return head >> 6 & 1; }
    MM_HOST_DEVICE u32 half() const { return head >> 7 & 1; }
    MM_HOST_DEVICE bool covers(u32 part) const { return !is_half() || part == half(); }
    MM_HOST_DEVICE u32 without_rows() const { return head & 0xff; }      // this head with valid() = 0
    MM_HOST_DEVICE u32 valid() const { return head >> 8; }   // rows of this block that exist: 1..BLOCK_M, in a pair 0..BLOCK_M
    // 16 bytes in the ring. Experts of a rank and column tiles each stay below 2^16.
    MM_HOST_DEVICE Vec4 packed() const { return {head, expert | n << 16, row0, block}; }
    static MM_HOST_DEVICE Tile unpacked(Vec4 v) { return {v.x, v.y & 0xffff, v.y >> 16, v.z, v.w}; }
};
constexpr u32 kTileBytes = 16;
constexpr u32 kWeightTileRows = 256;   // rows of weights that lie together for each K-block
constexpr u32 kSideBytesPerRow = 12;   // per row of a tile: routing weight (L1) or metadata (L2)

template <class C>
struct SharedPlan {
    static constexpr u32 kARows = C::kBlockM < 64 ? 64 : C::kBlockM;   // WGMMA reads 64 rows
    static constexpr u32 kABytes = kARows * 128;
    static constexpr u32 kBBytes = C::kBlockN * 128;
    static constexpr u32 kSfaBytes = (C::kBlockM < 32 ? 32 : C::kBlockM) * 4;
    static constexpr u32 kNumPull = C::kDispatchWarps * C::kRowDepth;

    static constexpr u32 kA = 0;
    static constexpr u32 kB = kA + C::kStages * kABytes;
    static constexpr u32 kSfa = kB + C::kStages * kBBytes;
    static constexpr u32 kCarry = kSfa + C::kStages * kSfaBytes;          // rescaling: f32[accumulator][math thread]
    static constexpr u32 kAmax = kCarry + TileShape<C>::kCarryBytes;      // f32[2 buffers][column parts][kARows]
    static constexpr u32 kSide = kAmax + 2 * TileShape<C>::kParts * kARows * 4;   // per tile slot: what its epilogue needs of its rows
    static constexpr u32 kSideBytes = C::kBlockM * kSideBytesPerRow;
    static constexpr u32 kRing = kSide + (kTileSlots * kSideBytes + 127) / 128 * 128;
    static constexpr u32 kBarriers = kRing + kTileSlots * kTileBytes;
    static constexpr u32 kNumBarriers = 2 * C::kStages + 2 * kTileSlots + kNumPull + 1;
    static constexpr u32 kRows = (kBarriers + kNumBarriers * 8 + 127) / 128 * 128;
    static_assert(kRows % 128 == 0 && kB % 1024 == 0, "TMA and bulk copies need the alignment");

    static MM_HOST_DEVICE u32 row_chunk(u32 hidden) {
        return static_cast<u32>(round_up(ceil_div(hidden, ceil_div(hidden, kRowChunkMax)), 128));
    }
    static MM_HOST_DEVICE u32 row_prefix(u32 hidden) { return kRows + kNumPull * row_chunk(hidden); }
    static MM_HOST_DEVICE u32 list_base(u32 hidden, u32 local, u32 ranks) {
        return row_prefix(hidden) + static_cast<u32>(round_up(4 * (local * ranks + 1), 16));
    }
    static MM_HOST_DEVICE u32 pool_base(u32 hidden, u32 local, u32 ranks) {
        return list_base(hidden, local, ranks) + static_cast<u32>(round_up(4 * local * ranks, 16));
    }
    static MM_HOST_DEVICE u32 counts(u32 hidden, u32 local, u32 ranks) {
        return pool_base(hidden, local, ranks) + static_cast<u32>(round_up(4 * (local + 1), 16));
    }
    // Experts that got rows, in order: their indices and row counts.
    static MM_HOST_DEVICE u32 active(u32 hidden, u32 local, u32 ranks) {
        return counts(hidden, local, ranks) + static_cast<u32>(round_up(4 * local, 16));
    }
    static MM_HOST_DEVICE u32 send(u32 hidden, u32 local, u32 ranks) {
        return active(hidden, local, ranks) + static_cast<u32>(round_up(4 * (2 * local + 1), 16));
    }
    static MM_HOST_DEVICE u32 bytes(u32 hidden, u32 local, u32 ranks) {
        return send(hidden, local, ranks) + 2 * static_cast<u32>(round_up(4 * local * ranks, 16)) + 64;
    }
};

}  // namespace megamoe
