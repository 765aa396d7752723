"""The faults: one line each, of kinds that such kernels really have had. ``MUTANTS`` in order of id; hundreds are
categories. docs/memory-model.md refers to the ids: keep them when a line of the kernel moves, and never reuse one."""

from __future__ import annotations

from tests.mutants.patching import Mutant

SEND, PULL = "roles/dispatch_send.cuh", "roles/dispatch_pull.cuh"
ACTS, WEIGHTS = "roles/load_acts.cuh", "roles/load_weights.cuh"
MATH, LOOP = "roles/math.cuh", "roles/math_loop.cuh"
EPI1, EPI2 = "roles/epilogue_l1.cuh", "roles/epilogue_l2.cuh"
FINISH, COMBINE = "roles/finish.cuh", "roles/combine.cuh"
PIPE, WAIT, TOP = "comm/pipeline.cuh", "comm/wait.cuh", "sm90_fp8_mega_moe.cuh"

_FLAG = "hw::st_release<Scope::kSys>(peer_region<u32>(p, thread, kCountFlag) + p.rank, epoch + 1);"
_DONE = "hw::st_release<Scope::kSys>(peer_region<u32>(p, math_thread, kDoneFlag) + p.rank, epoch + 1);"
_L1_ADD = "hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL1Arrival, epoch & 1) + pool_row / C::kBlockM, 1);"
_L2_ADD = "hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL2Arrival, tile.bank()) + tile.row0 / C::kBlockM, 1);"
_RING_WRITE = "hw::sts_vec4(smem + Plan::kRing + ring.slot() * kTileBytes, {tile.head, tile.expert, tile.n, tile.row0});"
_RING_FULL = "hw::mbarrier_arrive(bars.tile_full(ring.slot()));"
_LIST = "hw::atom_add_acq_rel<Scope::kGpu>(control_word(p, kListBarrier), 1)"
_LAST = "hw::atom_add_acq_rel<Scope::kGpu>(control_word(p, kDoneBarrier), 1)"

MUTANTS: tuple[Mutant, ...] = (
    # ---- dispatch: lists, rows, side data
    Mutant(101, "dispatch", SEND, _FLAG, _FLAG.replace("st_release", "st_relaxed"), "count flag raised without release"),
    Mutant(102, "dispatch", SEND, _FLAG, _FLAG.replace("kSys", "kGpu"), "count flag released for this GPU only"),
    Mutant(103, "dispatch", SEND, "hw::lds_u32(histogram + e) + start", "hw::lds_u32(histogram + e)",
           "entries of every expert go to the front of the list"),
    Mutant(104, "dispatch", SEND, "sync();", "", "CTA barrier missing between clearing and counting the histogram",
           near="hw::sts_u32(histogram + e, 0);\n        sync();\n        each_entry"),
    Mutant(105, "dispatch", PULL, "lane < ranks", "lane + 1 < ranks", "the last source's counts are not waited for",
           near="MM_DEVICE void build_tables()"),
    Mutant(106, "dispatch", PULL, "mine.token() * p.topk + mine.slot()", "mine.token() * p.topk", "routing weight of slot 0 for every slot"),
    Mutant(107, "dispatch", PULL, "group * p.pool_rows + r.pool_row", "group * (p.pool_rows - 1) + r.pool_row", "wrong stride of the scales"),
    Mutant(108, "dispatch", PULL, "hw::warp_sync();", "", "a row is published before the other lanes' side data is ordered",
           near="copy_side_data(mine, rows);\n"),
    Mutant(109, "dispatch", PULL, "hw::bulk_wait<1>();", "", "a row is published while its store is in flight"),
    Mutant(110, "dispatch", PULL, "hw::bulk_wait<0>();", "hw::bulk_wait_read<0>();", "the last row is published once its source is read"),
    Mutant(111, "dispatch", PULL, "hw::bulk_wait_read<0>();", "", "a staging buffer is refilled while a store reads it", cases=("long",)),
    Mutant(112, "dispatch", PULL, "n / C::kRowDepth % 2", "0", "parity of the row buffers never flips"),
    Mutant(113, "dispatch", PULL, "(rows != 0)", "(rows > 1)", "experts with a single row are forgotten", cases=("few",), near="with_rows = hw::ballot"),

    # ---- barriers: between CTAs and ranks
    Mutant(201, "barriers", SEND, "hw::red_add_release<Scope::kGpu>(barrier, 1);", "hw::red_add_relaxed<Scope::kGpu>(barrier, 1);",
           "arrival on the count barrier without release", cases=("wide",)),
    Mutant(202, "barriers", SEND, "p.dispatch_ctas", "1", "the count barrier opens for the first CTA",
           near="wait_equal<Scope::kGpu>(p, barrier, ", cases=("wide",)),
    Mutant(203, "barriers", SEND, _LIST, _LIST.replace("acq_rel", "relaxed"), "last CTA of the lists found without ordering", cases=("wide",)),
    Mutant(204, "barriers", SEND, "hw::warp_sync();", "", "flags raised by lanes that lane 0's acquire did not reach", near="last = hw::shfl", cases=("wide",)),
    Mutant(205, "barriers", FINISH, _LAST, _LAST.replace("acq_rel", "relaxed"), "last CTA of the rank found without ordering"),
    Mutant(206, "barriers", FINISH, _DONE, _DONE.replace("st_release", "st_relaxed"), "done flag raised without release"),
    Mutant(207, "barriers", FINISH, _DONE, _DONE.replace("kSys", "kGpu"), "done flag released for this GPU only"),
    Mutant(208, "barriers", FINISH, "hw::warp_sync();", "", "done flags raised by lanes that lane 0's acquire did not reach"),
    Mutant(209, "barriers", PULL, "wait_equal<Scope::kSys>", "wait_equal<Scope::kGpu>", "count flags of peers acquired for this GPU only"),
    Mutant(210, "barriers", FINISH, "wait_equal<Scope::kSys>", "wait_equal<Scope::kGpu>", "done flags of peers acquired for this GPU only"),
    Mutant(211, "barriers", FINISH, "hw::bar_sync(kBarFinish, C::kThreads);", "", "the done barrier does not wait for the CTA's other warps"),
    Mutant(212, "barriers", WAIT, "hw::ld_acquire<kScope>(word)", "hw::ld_relaxed<kScope>(word)", "a wait whose first look succeeds acquires nothing",
           near="MM_DEVICE bool wait_equal"),
    Mutant(213, "barriers", FINISH, "MathThread<C>::sync_math();", "", "the verdict on the peers is read before it is written"),
    Mutant(214, "barriers", FINISH, "hw::num_ctas() - 1", "hw::num_ctas() - 2", "the last CTA but one announces the rank", near="const bool last ="),
    Mutant(215, "barriers", PULL, "sync();", "", "the tables are handed over before all of them are written",
           near="        sync();\n        if (thread == 0) hw::mbarrier_arrive(bars.tables());"),

    # ---- rings: mbarriers, stages, tiles
    Mutant(301, "rings", ACTS, "mbarrier_wait(p, bars.stage_empty(stage.slot()), stage.parity() ^ 1, kWaitStageEmpty, stage.slot());", "",
           "activations are loaded into a stage in use"),
    Mutant(302, "rings", WEIGHTS, "mbarrier_wait(p, bars.stage_empty(stage.slot()), stage.parity() ^ 1, kWaitStageEmpty, stage.slot());", "",
           "weights are loaded into a stage in use"),
    Mutant(303, "rings", LOOP, "stage.parity()", "stage.parity() ^ 1", "wrong parity: the stage before is waited for", near="bars.stage_full(slot), "),
    Mutant(304, "rings", LOOP, "hw::wgmma_wait<0>(scratch);", "", "the product is used before it is there"),
    Mutant(305, "rings", LOOP, "hw::warp_sync();", "", "lane 0 releases a stage that other lanes read"),
    Mutant(306, "rings", LOOP, "me.lane() == 0", "me.lane() == 0 && me.warpgroup == 0", "one warpgroup never releases the stage"),
    Mutant(307, "rings", LOOP, "s + 1 == kSubTiles || !second", "s == 0", "the stage is released with its second half unread", cases=("tall",)),
    Mutant(308, "rings", WEIGHTS, _RING_WRITE + "\n        " + _RING_FULL, _RING_FULL + " " + _RING_WRITE, "a tile is published before it is written"),
    Mutant(309, "rings", ACTS, "ring.advance();", "", "the A loader stays at its tile"),
    Mutant(310, "rings", ACTS, "(k == 0 ? side_bytes : 0)", "0", "the side data's bytes are not expected"),
    Mutant(311, "rings", PIPE, "(bits & 0x100) ^ 0x100", "bits & 0x100", "the parity never flips"),
    Mutant(312, "rings", PIPE, "hw::fence_mbarrier_init();", "", "mbarriers not made visible to the copy engine"),
    Mutant(313, "rings", TOP, "hw::cta_sync<C::kThreads>();", "", "mbarriers used before they are initialised"),
    Mutant(314, "rings", PIPE, "4 * C::kMathWarpgroups", "4 * C::kMathWarpgroups - 1", "a stage is free with one reader left", near="hw::mbarrier_init(stage_empty(s), "),

    # ---- signals: rows to L1, L1 to L2
    Mutant(401, "signals", PULL, _L1_ADD, _L1_ADD.replace("add_release", "add_relaxed"), "row published without release"),
    Mutant(402, "signals", EPI1, _L2_ADD, _L2_ADD.replace("add_release", "add_relaxed"), "L1 tile published without release"),
    Mutant(403, "signals", EPI1, _L2_ADD, _L2_ADD.replace("kGpu", "kCta"), "L1 tile published for its own CTA only"),
    Mutant(404, "signals", PULL, _L1_ADD, _L1_ADD.replace("kGpu", "kCta"), "row published for its own CTA only"),
    Mutant(405, "signals", ACTS, "p.intermediate / 128 * C::kMathWarpgroups", "p.intermediate / 128", "L2 starts when half of its block is written"),
    Mutant(406, "signals", EPI1, "me.sync_warpgroup();", "", "L1 tile published before the warpgroup has stored it"),
    Mutant(407, "signals", ACTS, "hw::fence_proxy_async();", "", "no proxy fence between ordinary stores and the copy engine"),
    Mutant(408, "signals", ACTS, "hw::fence_proxy_async();", "hw::fence_proxy_async_shared();", "proxy fence for the wrong state space"),
    Mutant(409, "signals", ACTS, "wait_equal<Scope::kGpu>", "wait_equal<Scope::kCta>", "arrivals acquired for the CTA only"),
    Mutant(410, "signals", EPI1, _L2_ADD, _L2_ADD.replace("tile.row0 / C::kBlockM", "tile.row0 / C::kBlockM + 1"), "the next block is signalled"),
    Mutant(411, "signals", ACTS, "tile.bank()", "(tile.bank() ^ 1)", "arrivals of the launch before"),
    Mutant(412, "signals", ACTS, "tile.valid()", "tile.valid() - 1", "one row is not waited for", near="const u32 expected"),

    # ---- epilogues
    Mutant(501, "epilogues", WEIGHTS, "l1_tiles & 1", "0", "row maxima of two tiles share a buffer", near="set_maxima_buffer"),
    Mutant(502, "epilogues", EPI1, "MathThread<C>::sync_math();", "", "the other warpgroup's maxima are read before they are written"),
    Mutant(503, "epilogues", EPI1, "(me.warpgroup ^ 1) * Plan::kARows", "me.warpgroup * Plan::kARows", "each warpgroup scales by its own maximum"),
    Mutant(504, "epilogues", EPI1, "static_cast<u64>(tile.n) * p.pool_rows", "static_cast<u64>(tile.n) * (p.pool_rows / 2)", "wrong stride of the scales"),
    Mutant(505, "epilogues", EPI1, "hw::lds_f32(weights + row)", "hw::lds_f32(weights + row + 1)", "routing weight of the next row"),
    Mutant(506, "epilogues", EPI1, "i < 2 ? weight_lo : weight_hi", "i < 2 ? weight_hi : weight_lo", "routing weights of the row halves swapped"),
    Mutant(507, "epilogues", EPI1, "hw::min_nan(acc[8 * j + i], p.clamp)", "acc[8 * j + i]", "the gate is not clamped", cases=("mixed",)),
    Mutant(508, "epilogues", EPI2, "row >= tile.valid()", "row > tile.valid()", "one row past the block's end is sent"),
    Mutant(509, "epilogues", EPI2, "static_cast<u64>(slot) * p.capacity + token", "static_cast<u64>(slot) * p.num_tokens + token", "wrong combine slot"),
    Mutant(510, "epilogues", EPI2, "column < columns", "true", "columns past H are stored", cases=("overhang",)),
    Mutant(511, "epilogues", EPI2, "s * 64 >= tile.valid()", "s * 64 + 1 >= tile.valid()", "a lone row in the second half is dropped", cases=("tall",)),
    Mutant(512, "epilogues", LOOP, "tile.n * 2 + warpgroup", "tile.n * 2", "both warpgroups take the first column scale"),
    Mutant(513, "epilogues", LOOP, "tile.valid() > 64", "tile.valid() > 65", "a lone row in the second half is not computed", near="main_loop(", cases=("tall",)),

    # ---- combine
    Mutant(601, "combine", FINISH, "math_thread < p.num_ranks", "math_thread + 1 < p.num_ranks", "the last peer's slots are not waited for", near="bool ok = true;"),
    Mutant(602, "combine", COMBINE, "static_cast<u64>(p.capacity) * p.hidden * 2", "static_cast<u64>(p.num_tokens) * p.hidden * 2", "wrong stride between slots"),
    Mutant(603, "combine", COMBINE, "id >= 0 && id < static_cast<i64>(p.num_experts)", "lane < p.topk", "masked slots are added too", cases=("mixed",)),
    Mutant(604, "combine", COMBINE, "p.num_tokens * pieces", "(p.num_tokens - 1) * pieces", "the last token is left out"),
    Mutant(605, "combine", COMBINE, "column + 256 * c < p.hidden", "column + 256 * c <= p.hidden", "columns past H are stored", near="const f32(&v)[8] = sum[c];"),
    Mutant(606, "combine", COMBINE, "used_slots(next / pieces)", "used_slots(token)", "slots of the token before", cases=("mixed",)),
    Mutant(607, "combine", COMBINE, "add(sum[c], rows[i][c]);", "if (i != 1) add(sum[c], rows[i][c]);", "slot 1 is left out"),
    Mutant(608, "combine", COMBINE, "(first + i) * slot_stride", "(p.topk - 1 - first - i) * slot_stride", "slots summed in descending order", cases=("mixed",)),

    # ---- cleanup: what a launch leaves to the next
    Mutant(701, "cleanup", PULL, "hw::st_u32(l1 + i, 0);", "", "arrival counters of rows are not cleared"),
    Mutant(702, "cleanup", PULL, "hw::st_u32(l2 + i, 0);", "", "arrival counters of L1 tiles are not cleared"),
    Mutant(703, "cleanup", PULL, "(epoch + 1) & 1", "epoch & 1", "reset in the wrong launch: this one's own counters", near="u32* l1 = arrival_bank"),
    Mutant(704, "cleanup", PULL, "hw::st_u32(tile_counter(p, (epoch + 1) & 1), 0);", "", "the tile counter is not cleared"),
    Mutant(705, "cleanup", PULL, "hw::st_u32(tile_counter(p, (epoch + 1) & 1), 0);", "hw::st_u32(tile_counter(p, epoch & 1), 0);", "this launch's tile counter is cleared"),
    Mutant(706, "cleanup", PULL, "hw::st_u32(sent + e, 0);", "", "send counts are not cleared", cases=("wide",)),
    Mutant(707, "cleanup", FINISH, "hw::st_relaxed<Scope::kGpu>(control_word(p, kDoneBarrier), 0);", "", "the done barrier is not reset"),
    Mutant(708, "cleanup", FINISH, "hw::st_relaxed<Scope::kGpu>(control_word(p, kEpoch), epoch + 1);", "", "launches are not counted"),
    Mutant(709, "cleanup", SEND, "hw::st_relaxed<Scope::kGpu>(control_word(p, kListBarrier), 0);", "", "the list barrier is not reset", cases=("wide",)),
    Mutant(710, "cleanup", SEND, "hw::st_relaxed<Scope::kGpu>(control_word(p, kCountBarrier), 0);", "", "the count barrier is not reset", cases=("wide",)),
    Mutant(711, "cleanup", PULL, "p.pool_rows / kArrivalGranularity", "p.pool_rows / kArrivalGranularity / 8", "only the first counters are cleared", near="MM_DEVICE void clear_next_bank()"),
)
