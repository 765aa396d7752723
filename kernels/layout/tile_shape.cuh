// How a CTA's math threads share a tile: what each policy means, in one place. The roles are written against these
// names and have no branch on a policy.
//
//   fused      two warpgroups cut the tile along N, or (kRowSplits) along M: then each has whole requantization groups
//              and neither waits for the other; L1 and L2 tiles interleave
//   serial_n   the same cut, but a warpgroup that owns 256 columns takes them as two M64N128 products one after the
//              other, each with its own accumulator; the L1 tiles of a wave, then its L2 tiles
//   wide_n     one warpgroup owns all 256 columns in one M64N256 product, accumulated in place
//   mma_sync   warp-level m16n8k32 products, the columns cut between all math warps (BLOCK_M 16 and 32)
//
// Everywhere a thread's accumulators come as units of 64 (mma_sync: 16) rows and kUnitColumns columns, and inside a
// unit as 8-column chunks of four: rows `row`, `row`, `row + 8`, `row + 8`, columns `column` and the next.
#pragma once
#include "symmetric_buffer.cuh"

namespace megamoe {

enum class Policy : u32 { kFused, kSerialN, kWideN, kMmaSync };
enum class Promotion : u32 { kClassic, kRescale };

template <class C>
struct TileShape {
    static constexpr bool kWarpMma = C::kPolicy == Policy::kMmaSync;
    static constexpr u32 kWarps = 4 * C::kMathWarpgroups;
    static constexpr u32 kUnitRows = kWarpMma ? 16 : 64;
    static constexpr u32 kRowSplits = C::kRowSplits;   // 2: each of two warpgroups has 64 of 128 rows
    static constexpr u32 kColumns = kWarpMma ? C::kBlockN / kWarps : C::kBlockN * kRowSplits / C::kMathWarpgroups;   // of a part
    static constexpr u32 kParts = C::kBlockN / kColumns;      // column parts of the tile
    static constexpr u32 kUnitColumns = C::kPolicy != Policy::kWideN && kColumns > 128 ? 128 : kColumns;
    static constexpr u32 kRowUnits = C::kBlockM / kRowSplits > kUnitRows ? C::kBlockM / kRowSplits / kUnitRows : 1;
    static constexpr u32 kColumnUnits = kColumns / kUnitColumns;
    static constexpr u32 kUnits = kRowUnits * kColumnUnits;   // unit u: rows u / kColumnUnits, columns u % kColumnUnits
    static constexpr u32 kRegs = kUnitColumns / 2;            // accumulators of a unit per thread
    static constexpr u32 kChunks = kRegs / 4;
    static constexpr u32 kScaleBlocks = kColumns > 128 ? 2 : 1;   // 128-column blocks of weight scales in a part
    // An L1 tile always yields 128 activations, one requantization group: at BLOCK_N 128 it takes two passes over K.
    static constexpr u32 kPasses = 256 / C::kBlockN;
    static constexpr u32 kCarryBytes = C::kPromotion == Promotion::kRescale ? 128 * C::kMathWarpgroups * kUnits * kRegs * 4 : 0;
    static_assert(kRowSplits == 1 || (kRowSplits == 2 && C::kBlockM == 128 && C::kMathWarpgroups == 2 && !kWarpMma));
    static_assert(kPasses * C::kBlockN == 256 && kColumns * kParts == C::kBlockN);
    static_assert(kWarpMma ? C::kBlockM <= 32 : kUnitColumns == 64 || kUnitColumns == 128 || kUnitColumns == 256);
    static_assert(C::kPolicy != Policy::kWideN || (kUnitColumns == 256 && C::kPromotion == Promotion::kRescale));
};

}  // namespace megamoe
