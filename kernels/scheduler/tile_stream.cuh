// The order of all tiles of a rank. Host-includable: tests walk it on the CPU.
//
// Work is cut into units: up to `unit_blocks` row blocks of one local expert. Step s of the stream is the
// L1 tiles of unit s, then the L2 tiles of unit s - lag; when L1 units run out, the remaining L2 units
// follow. Inside a segment tiles go column tile by column tile with row blocks innermost, so that
// neighbouring CTAs share a weight tile. CTA c takes tiles c, c + G, c + 2G, ...
//
// Every wait of a tile refers to tiles earlier in this order, and a CTA takes its tiles in order, so the
// earliest unfinished tile can always run: no deadlock for any lag, grid or expert counts.
#pragma once
#include "../layout/shared_plan.cuh"

namespace megamoe {

struct StreamShape {
    u32 local_experts, block_m, unit_blocks, lag;
    u32 l1_columns, l2_columns;   // column tiles of each GEMM; l2_columns = 0 leaves L2 out
};

// Units in expert order. `Counts` is a callable: local expert -> rows.
template <class Counts>
struct UnitCursor {
    u32 expert = 0, block = 0;

    MM_HOST_DEVICE u32 blocks_of(const StreamShape& s, const Counts& counts, u32 e) const {
        return ceil_div(counts(e), s.block_m);
    }
    // Moves to the first unit at or after the position; false when none is left.
    MM_HOST_DEVICE bool settle(const StreamShape& s, const Counts& counts) {
        while (expert < s.local_experts && block >= blocks_of(s, counts, expert)) {
            ++expert;
            block = 0;
        }
        return expert < s.local_experts;
    }
    MM_HOST_DEVICE u32 unit_size(const StreamShape& s, const Counts& counts) const {
        const u32 left = blocks_of(s, counts, expert) - block;
        return left < s.unit_blocks ? left : s.unit_blocks;
    }
};

template <class Counts, class PoolBase>
class TileStream {
public:
    MM_HOST_DEVICE TileStream(const StreamShape& shape, const Counts& counts, const PoolBase& pool_base)
        : shape_(shape), counts_(counts), pool_base_(pool_base) {
        l1_left_ = l1_.settle(shape_, counts_);
        l2_left_ = shape_.l2_columns != 0 && l2_.settle(shape_, counts_);
        next_segment();
    }

    // Skips `n` tiles; false when the stream ends before.
    MM_HOST_DEVICE bool skip(u32 n) {
        while (!done_ && at_ + n >= size_) {
            n -= size_ - at_;
            next_segment();
        }
        if (done_) return false;
        at_ += n;
        return true;
    }

    MM_HOST_DEVICE Tile current(u32 bank) const {
        const u32 block = unit_.block + at_ % blocks_;
        const u32 left = counts_(unit_.expert) - block * shape_.block_m;
        Tile tile;
        tile.head = Tile::make_head(is_l1_ ? kTileL1 : kTileL2, bank, left < shape_.block_m ? left : shape_.block_m);
        tile.expert = unit_.expert;
        tile.n = at_ / blocks_;
        tile.row0 = pool_base_(unit_.expert) + block * shape_.block_m;
        return tile;
    }

private:
    using Cursor = UnitCursor<Counts>;

    MM_HOST_DEVICE void open(Cursor& cursor, bool& left, bool is_l1, u32 columns) {
        unit_ = cursor;
        blocks_ = cursor.unit_size(shape_, counts_);
        cursor.block += blocks_;
        left = cursor.settle(shape_, counts_);
        is_l1_ = is_l1;
        at_ = 0;
        size_ = columns * blocks_;
    }
    MM_HOST_DEVICE void next_segment() {
        at_ = 0;
        size_ = 0;
        while (l1_left_ || l2_left_) {
            if (l1_turn_) {
                l1_turn_ = false;
                if (l1_left_) {
                    open(l1_, l1_left_, true, shape_.l1_columns);
                    return;
                }
            } else {
                l1_turn_ = true;
                ++step_;
                if (l2_left_ && (step_ > shape_.lag || !l1_left_)) {
                    open(l2_, l2_left_, false, shape_.l2_columns);
                    return;
                }
            }
        }
        done_ = true;
    }

    StreamShape shape_;
    Counts counts_;
    PoolBase pool_base_;
    Cursor l1_, l2_, unit_;
    u32 at_ = 0, size_ = 0, blocks_ = 1, step_ = 0;
    bool l1_left_ = false, l2_left_ = false, l1_turn_ = true, is_l1_ = true, done_ = false;
};

}  // namespace megamoe
