// L2 epilogue: BF16, four lanes trade words so that each stores 16 bytes, straight into the combine slot
// of the row's owner (a peer pointer; stores cross NVLink when the owner is another GPU).
#pragma once
#include "epilogue_l1.cuh"

namespace megamoe {

template <class C>
struct EpilogueL2 {
    static constexpr u32 kSubTiles = MathThread<C>::kSubTiles;
    const KernelParams& p;
    const Tile& tile;
    const MathThread<C>& me;

    // Address of the row's columns of this warpgroup, or null for rows past the block's end.
    MM_DEVICE u8* destination(const u8* side, u32 row) const {
        if (row >= tile.valid()) return nullptr;
        const u32* meta = reinterpret_cast<const u32*>(side) + row * 3;
        const u32 source = hw::lds_u32(meta), token = hw::lds_u32(meta + 1), slot = hw::lds_u32(meta + 2);
        const u64 element = (static_cast<u64>(slot) * p.capacity + token) * p.hidden + tile.n * C::kBlockN + me.warpgroup * 128;
        return peer_region<u8>(p, source, kCombine) + element * 2;
    }

    MM_DEVICE void store_row(const f32 (&acc)[64], u32 half, u8* out, u32 columns) const {
#pragma unroll
        for (u32 group = 0; group < 4; ++group) {
            u32 words[4];
#pragma unroll
            for (u32 w = 0; w < 4; ++w) {
                const u32 at = 16 * group + 4 * w + 2 * half;
                words[w] = hw::cvt_bf16x2(acc[at], acc[at + 1]);
            }
            quad_transpose(words, me.quad_lane());
            const u32 column = (4 * group + me.quad_lane()) * 8;
            if (out != nullptr && column < columns) hw::st_vec4(out + column * 2, {words[0], words[1], words[2], words[3]});
        }
    }

    MM_DEVICE void run(const u8* side, const f32 (&acc)[kSubTiles][64]) const {
        const u32 first = tile.n * C::kBlockN + me.warpgroup * 128;
        const u32 columns = first >= p.hidden ? 0 : p.hidden - first;   // the last tile may overhang H
#pragma unroll
        for (u32 s = 0; s < kSubTiles; ++s) {
            if (s * 64 >= tile.valid()) break;
            const u32 row = s * 64 + me.fragment.row;
            u8* lo = destination(side, row);
            u8* hi = destination(side, row + 8);
            store_row(acc[s], 0, lo, columns);
            store_row(acc[s], 1, hi, columns);
        }
    }
};

}  // namespace megamoe
