// The order of all tiles of a rank. Host-includable: tests walk it on the CPU.
//
// Work is cut into units: up to `unit_blocks` row blocks of one local expert. Two orders:
//   lag    step s of the stream is the L1 tiles of unit s, then the L2 tiles of unit s - lag; when L1 units run out,
//          the remaining L2 units follow
//   wave   the L1 tiles of `lag` units (at least one), then the L2 tiles of the same units, and so on
// Inside a segment tiles go column tile by column tile with row blocks innermost, so that
// neighbouring CTAs share a weight tile. CTA c takes tile c first, then whatever a counter hands out.
//
// The L2 tiles of the last experts may be cut in two (`halve_last`): what is left at the end then spreads over more CTAs.
//
// Every wait of a tile refers to tiles earlier in this order, and a CTA takes its tiles in order, so the
// earliest unfinished tile can always run: no deadlock for any lag, grid or expert counts.
#pragma once
#include "../layout/shared_plan.cuh"

namespace megamoe {

struct StreamShape {
    u32 experts;   // that got rows
    u32 block_m, unit_blocks, lag;
    u32 l1_columns, l2_columns;   // column tiles of each GEMM; l2_columns = 0 leaves L2 out
    bool wave = false;
    u32 pair = 1;           // CTAs that share a tile: block_m rows are so many row blocks
    u32 halve_last = 0;     // the last experts whose L2 tiles are together at most so many have them cut in two
    u32 ring_rows = ~0u;    // places in memory: pool row r lies in place r % ring_rows
};

// Units in expert order. Experts are counted among those that got rows; `Rows` is a callable: such an
// expert -> its rows (at least 1).
template <class Rows>
struct UnitCursor {
    u32 expert = 0, block = 0, blocks = 0;   // blocks: of this expert

    MM_HOST_DEVICE void open_expert(const StreamShape& s, const Rows& rows) {
        block = 0;
        blocks = expert < s.experts ? ceil_div(rows(expert), s.block_m) : 0;
    }
    MM_HOST_DEVICE bool left(const StreamShape& s) const { return expert < s.experts; }
    MM_HOST_DEVICE u32 unit_size(const StreamShape& s) const {
        const u32 rest = blocks - block;
        return rest < s.unit_blocks ? rest : s.unit_blocks;
    }
    MM_HOST_DEVICE void advance(const StreamShape& s, const Rows& rows) {
        block += unit_size(s);
        if (block == blocks) {
            ++expert;
            open_expert(s, rows);
        }
    }
};

// `Expert` and `PoolBase` are callables: expert among those with rows -> local expert; local expert -> first pool row.
template <class Rows, class Expert, class PoolBase>
class TileStream {
public:
    MM_HOST_DEVICE TileStream(const StreamShape& shape, const Rows& rows, const Expert& expert, const PoolBase& pool_base)
        : shape_(shape), rows_(rows), expert_(expert), pool_base_(pool_base) {
        l1_.open_expert(shape_, rows_);
        l2_ = l1_;
        if (shape_.l2_columns == 0) l2_.expert = shape_.experts;
        halves_from_ = first_halved();
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

    // The row block of CTA `cta` of a pair may be empty.
    MM_HOST_DEVICE Tile current(u32 bank, u32 cta = 0) const {
        const u32 slice = at_ / blocks_, column = slice / halves_, cta_rows = shape_.block_m / shape_.pair;
        const u32 first = (unit_.block + at_ % blocks_) * shape_.block_m + cta * cta_rows, rows = rows_(unit_.expert);
        const u32 left = rows > first ? rows - first : 0;
        Tile tile;
        tile.head = Tile::make_head(is_l1_ ? kTileL1 : kTileL2, bank, left < cta_rows ? left : cta_rows);
        if (halves_ > 1) tile.head |= 1u << 6 | slice % 2 << 7;
        tile.expert = expert_(unit_.expert);
        tile.n = column;
        const u32 row = pool_base_(tile.expert) + first;
        tile.row0 = row % shape_.ring_rows;
        tile.block = row / cta_rows;
        return tile;
    }

private:
    using Cursor = UnitCursor<Rows>;

    MM_HOST_DEVICE u32 first_halved() const {
        u32 expert = shape_.experts, tiles = 0;
        while (shape_.halve_last != 0 && expert > 0) {
            tiles += ceil_div(rows_(expert - 1), shape_.block_m) * shape_.l2_columns;
            if (tiles > shape_.halve_last) break;
            --expert;
        }
        return expert;
    }
    MM_HOST_DEVICE void open(Cursor& cursor, bool is_l1, u32 columns) {
        unit_ = cursor;
        blocks_ = cursor.unit_size(shape_);
        cursor.advance(shape_, rows_);
        is_l1_ = is_l1;
        halves_ = !is_l1 && unit_.expert >= halves_from_ ? 2 : 1;
        size_ = columns * halves_ * blocks_;
    }
    MM_HOST_DEVICE void next_segment() {
        at_ = 0;
        size_ = 0;
        while (l1_.left(shape_) || l2_.left(shape_)) {
            if (shape_.wave ? next_of_wave() : next_by_lag()) return;
        }
        done_ = true;
    }
    // Each opens the next segment, or only moves on to the other GEMM and returns false.
    MM_HOST_DEVICE bool next_by_lag() {
        const bool turn = l1_turn_;
        l1_turn_ = !turn || !l1_.left(shape_);
        if (turn && l1_.left(shape_)) {
            open(l1_, true, shape_.l1_columns);
            return true;
        }
        ++step_;
        if (!l2_.left(shape_) || (step_ <= shape_.lag && l1_.left(shape_))) return false;
        open(l2_, false, shape_.l2_columns);
        return true;
    }
    MM_HOST_DEVICE bool next_of_wave() {
        if (l1_turn_ && l1_.left(shape_) && step_ < (shape_.lag > 1 ? shape_.lag : 1)) {
            ++step_;   // L1 units of this wave whose L2 is still to come
            open(l1_, true, shape_.l1_columns);
            return true;
        }
        l1_turn_ = step_ == 0 || !l2_.left(shape_);
        if (l1_turn_) {
            step_ = 0;
            return false;
        }
        --step_;
        open(l2_, false, shape_.l2_columns);
        return true;
    }

    StreamShape shape_;
    Rows rows_;
    Expert expert_;
    PoolBase pool_base_;
    Cursor l1_, l2_, unit_;
    u32 at_ = 0, size_ = 0, blocks_ = 1, halves_from_ = 0, halves_ = 1, step_ = 0;
    bool l1_turn_ = true, is_l1_ = true, done_ = false;
};

}  // namespace megamoe
