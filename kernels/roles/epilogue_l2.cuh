// L2 epilogue: BF16, four lanes trade words so that each stores 16 bytes, straight into the combine slot
// of the row's owner (a peer pointer; stores cross NVLink when the owner is another GPU).
#pragma once
#include "epilogue_l1.cuh"

namespace megamoe {

template <class C>
struct EpilogueL2 {
    using Shape = TileShape<C>;
    const KernelParams& p;
    const Tile& tile;
    const MathThread<C>& me;

    // Address of the tile's columns of the row, or null for rows past the block's end.
    MM_DEVICE u8* destination(const u8* side, u32 row) const {
        if (row >= tile.valid()) return nullptr;
        const u32* meta = reinterpret_cast<const u32*>(side) + row * 3;
        const u32 source = hw::lds_u32(meta), token = hw::lds_u32(meta + 1), slot = hw::lds_u32(meta + 2);
        const u64 element = (static_cast<u64>(slot) * p.capacity + token) * p.hidden + tile.n * C::kBlockN;
        return peer_region<u8>(p, source, kCombine) + element * 2;
    }

    // Columns `first`... of the tile from a unit's accumulators; those at `columns` and beyond do not exist.
    MM_DEVICE void store_row(const f32 (&acc)[Shape::kRegs], u32 half, u8* out, u32 first, u32 columns) const {
#pragma unroll
        for (u32 group = 0; group < (Shape::kChunks + 3) / 4; ++group) {
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                const u32 chunk = 4 * group + w;
                words[w] = chunk < Shape::kChunks ? hw::cvt_bf16x2(acc[4 * chunk + 2 * half], acc[4 * chunk + 2 * half + 1]) : 0;
            }
            quad_transpose(words, me.quad_lane());
            const u32 chunk = 4 * group + me.quad_lane(), column = first + chunk * 8;
            if (out != nullptr && chunk < Shape::kChunks && column < columns) hw::st_vec4(out + column * 2, {words[0], words[1], words[2], words[3]});
        }
    }

    MM_DEVICE void run(const u8* side, const f32 (&acc)[Shape::kUnits][Shape::kRegs]) const {
        if (kCanHalve<C> && !tile.covers(me.part())) return;
        const u32 columns = p.hidden - tile.n * C::kBlockN;   // the last tile may overhang H
#pragma unroll
        for (u32 r = 0; r < Shape::kRowUnits; ++r) {
            if (!me.warp_has(r, tile.valid())) break;
            u8* lo = destination(side, me.row(r));
            u8* hi = destination(side, me.row(r) + 8);
#pragma unroll
            for (u32 c = 0; c < Shape::kColumnUnits; ++c) {
                store_row(acc[r * Shape::kColumnUnits + c], 0, lo, me.column(c), columns);
                store_row(acc[r * Shape::kColumnUnits + c], 1, hi, me.column(c), columns);
            }
        }
    }

    // Of a ring: the tile's rows need not stay. All copies of them are complete, since this thread has waited for every
    // stage; said before the stores, so that the release does not wait for those.
    MM_DEVICE void free_rows() const {
        if (pool_is_ring(p) && me.thread == 0 && tile.valid() != 0 && (!kCanHalve<C> || tile.covers(me.part())))
            hw::red_add_release<Scope::kGpu>(pool_free_bank(p, tile.bank()) + tile.block / (kTokenAlignment / C::kBlockM), 1);
    }
};

}  // namespace megamoe
