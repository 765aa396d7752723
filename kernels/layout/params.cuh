// The launch ABI: everything a rank's kernel is told. megamoe_cli/abi.py packs the same struct; the
// stub phase compares the two (size, ABI word and every region offset).
#pragma once
#include "../hw/types.cuh"

namespace megamoe {

constexpr u32 kAbiVersion = 2;
constexpr u32 kMaxRanks = 32;
constexpr u32 kMaxTopk = 32;
constexpr u32 kTokenAlignment = 128;   // rows an expert's pool segment is aligned to
constexpr u32 kArrivalGranularity = 16;  // smallest BLOCK_M: sizes the arrival counters

// Regions of one rank's symmetric buffer, in this order, each starting at a multiple of 1024 bytes.
enum Region : u32 {
    kControl,        // u32[256]            see ControlWord
    kCountFlag,      // u32[32]             [src] = epoch+1 once src's counts and list are here   (peer-written)
    kDoneFlag,       // u32[32]             [src] = epoch+1 once src wrote all its combine slots  (peer-written)
    kRecvCount,      // u32[2][R][E_l]      plane 0: rows src sends to each local expert; plane 1: where they
                     //                     start in src's list                                   (peer-written)
    kRecvList,       // u32[R][C*K]         src's token*K+slot, grouped by local expert           (peer-written)
    kSendCount,      // u32[2][E]           bank = epoch & 1
    kL1Arrival,      // u32[2][P/16]        rows arrived, per BLOCK_M rows of the pool; bank = epoch & 1
    kL2Arrival,      // u32[2][P/16]        L1 tiles done (per math warpgroup), per BLOCK_M rows; bank = epoch & 1
    kPoolFree,       // u32[2][P/128]       L2 tiles done (per math warpgroup), per 128 rows; only when the pool is a ring
    kRecvCountSum,   // i32[E_l]            rows each local expert received in this launch
    kMetadata,       // i32[G][3]           source rank, token, slot of each pool row
    kX,              // e4m3[C][H]
    kXSf,            // f32[C][H/128]
    kTopkIdx,        // i64[C][K]           -1 = masked
    kTopkWeights,    // f32[C][K]
    kL1Acts,         // e4m3[G][H]          the pool: rows grouped by local expert, segments aligned to 128
    kL1ActsSf,       // f32[H/128][G]       MN-major
    kL1TopkWeights,  // f32[G]
    kL2Acts,         // e4m3[G][I]
    kL2ActsSf,       // f32[I/128][G]       MN-major
    kCombine,        // bf16[K][C][H]       one row per (slot, token), written by the expert's rank (peer-written)
    kNumRegions
};
// P = align(R*C*K + E_l*127, 128). G = P, or fewer: then pool row r lies in place r % G, and is written again once the
// L2 tiles of the rows it held are done (a ring).

// Words of the control region. Each counter has a 128-byte line of its own.
enum ControlWord : u32 {
    kEpoch = 0,            // launches completed on this buffer
    kAbort = 32,           // nonzero: a wait of this launch ran out; all waits return at once
    kCountBarrier = 64,    // CTAs whose expert counts are in kSendCount      (self-resetting)
    kListBarrier = 96,     // CTAs whose list entries are pushed              (self-resetting)
    kDoneBarrier = 128,    // CTAs whose combine slots are written            (self-resetting)
    kFaultClaim = 160,     // 0 until one thread owns the fault record
    kTileCounter = 192,    // tiles handed out beyond the first per CTA; + 32 for the odd bank
};

enum ParamFlags : u32 { kFastMath = 1, kHasClamp = 2, kWaveOrder = 4, kHalveTail = 8 };

struct alignas(64) KernelParams {
    TensorMap l1_acts;    // [P, H]        e4m3, box 128 x min(BLOCK_M, 64), 128B swizzle
    TensorMap l2_acts;    // [P, I]        as l1_acts
    u64 peer_base[kMaxRanks];      // byte address of each rank's symmetric buffer, as this rank maps it
    u64 region[kNumRegions];       // byte offsets into a symmetric buffer
    u64 y;                // bf16 [num_tokens][H] output
    u64 w13;              // e4m3 [E_l][I/128][H/128][256][128]: gate and up rows interleaved by 8, in tiles as WGMMA reads
                          // them: 256 rows x 128 of K, contiguous, with the 128-byte swizzle
    u64 w2;               // e4m3 [E_l][ceil(H/256)][I/128][256][128], as w13; rows past H are zero
    u64 w13_sf;           // f32 [E_l][2I/128][H/128], natural order (gate blocks, then up blocks)
    u64 w2_sf;            // f32 [E_l][H/128][I/128]
    u64 stats;            // i32 [E_l] accumulated receive counts, or 0
    u64 l1_raw;           // f32 [P][2I] raw scaled L1 accumulators, natural order, or 0 (phase l1 only)
    u64 fault;            // FaultRecord of this rank, host-visible
    u64 report;           // phase stub: u64[kNumRegions + 8]; trace builds: u32[grid][kTraceWords]; or 0
    u64 timeout_ns;       // bound of every device-side wait
    u64 local_base;       // peer_base[rank], where no index has to be computed
    u32 abi_version;
    u32 params_bytes;     // sizeof(KernelParams) as the host packed it
    u32 rank;
    u32 num_ranks;        // R
    u32 num_tokens;       // this rank's tokens, <= capacity
    u32 capacity;         // C
    u32 hidden;           // H
    u32 intermediate;     // I
    u32 num_experts;      // E, all ranks
    u32 topk;             // K
    u32 pool_rows;        // P
    u32 dispatch_ctas;    // CTAs that take part in the send side (1 for small token counts)
    u32 lag;              // units by which L2 follows L1; with kWaveOrder the units of a wave
    u32 unit_blocks;      // row blocks in a scheduling unit
    u32 flags;            // ParamFlags
    f32 clamp;            // valid with kHasClamp
    u32 smem_bytes;       // dynamic shared memory of the launch
    u32 prefetch_blocks;  // K-blocks of its likely first tile that a CTA asks into L2 before it knows the counts; 0: none
    u32 ring_rows;        // G: rows of the pool that memory is there for, a multiple of 128
    u32 stagger;          // cycles by which the second of two warpgroups with rows of their own starts later
    u32 ahead;            // K-blocks by which weights are asked into L2 ahead of their load; 0: not at all
    u32 reserved[11];
};
static_assert(sizeof(KernelParams) % 64 == 0, "packed by the host as one blob");

// Who waited, on what, since when. 64 bytes; the first fault of a launch on a rank wins.
enum FaultCode : u32 { kNoFault = 0, kWaitTimeout = 1, kBadExpertId = 2, kAbiMismatch = 3, kLocalWaitTimeout = 4 };
enum WaitId : u32 {
    kWaitNone, kWaitCountBarrier, kWaitCountFlag, kWaitL1Arrival, kWaitL2Arrival, kWaitDoneBarrier, kWaitDoneFlag,
    kWaitStageFull, kWaitStageEmpty, kWaitTileFull, kWaitTileEmpty, kWaitTables, kWaitPull, kWaitPoolFree,
};
struct FaultRecord {
    u32 code;       // FaultCode; written last
    u32 wait;       // WaitId
    u32 rank, cta, warp;
    u32 index;      // peer rank, pool block, stage... by WaitId; token*K+slot for kBadExpertId
    u32 observed, expected;   // counter values; for kBadExpertId the id (two's complement, low word) and E
    u32 epoch;
    u32 reserved;
    u64 waited_ns;
    u64 at_ns;      // %globaltimer when given up
    u64 pad;
};
static_assert(sizeof(FaultRecord) == 64, "host decodes 64 bytes");

}  // namespace megamoe
