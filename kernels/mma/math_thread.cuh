// A math thread's place in the tile (layout/tile_shape.cuh says how tiles are shared).
#pragma once
#include "../comm/pipeline.cuh"

namespace megamoe {

template <class C>
struct MathThread {
    using Shape = TileShape<C>;
    u32 warpgroup, thread;   // thread within the warpgroup
    u32 quarter;             // warp within the warpgroup
    MM_DEVICE explicit MathThread(u32 math_thread) : warpgroup(math_thread / 128), thread(math_thread % 128), quarter(thread / 32) {}
    MM_DEVICE u32 lane() const { return thread % 32; }
    MM_DEVICE u32 quad_lane() const { return thread % 4; }
    MM_DEVICE u32 warp() const { return warpgroup * 4 + quarter; }
    MM_DEVICE u32 part() const { return Shape::kWarpMma ? warp() : Shape::kParts > 1 ? warpgroup : 0; }
    MM_DEVICE u32 first_row() const { return Shape::kRowSplits > 1 ? warpgroup * 64 : 0; }
    // Row of the tile: the upper of this thread's two in a row unit.
    MM_DEVICE u32 row(u32 row_unit) const {
        return first_row() + row_unit * Shape::kUnitRows + (Shape::kWarpMma ? 0 : quarter * 16) + thread % 32 / 4;
    }
    MM_DEVICE u32 pair_column() const { return quad_lane() * 2; }   // within a chunk
    // First weight row (column of the product) of a column unit, in the tile.
    MM_DEVICE u32 column(u32 column_unit) const { return part() * Shape::kColumns + column_unit * Shape::kUnitColumns; }
    // Does the row unit hold a row that exists? Unit 0 of an unsplit tile always does, but in a cluster one CTA of a
    // pair may have no rows.
    MM_DEVICE bool has(u32 row_unit, u32 valid) const {
        if (row_unit == 0 && Shape::kRowSplits == 1 && C::kCluster == 1) return true;
        return first_row() + row_unit * Shape::kUnitRows < valid;
    }
    // And do this warp's 16 rows of it hold one?
    MM_DEVICE bool warp_has(u32 row_unit, u32 valid) const {
        return first_row() + row_unit * Shape::kUnitRows + (Shape::kWarpMma ? 0 : quarter * 16) < valid;
    }
    MM_DEVICE void sync_warpgroup() const { hw::bar_sync(kBarWarpgroup0 + warpgroup, 128); }
    static MM_DEVICE void sync_math() { hw::bar_sync(kBarMath, C::kMathWarpgroups * 128); }
};

}  // namespace megamoe
