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
BLOCK, PLACE, STREAM = "mma/kblock.cuh", "mma/math_thread.cuh", "scheduler/tile_stream.cuh"

_FLAG = "hw::st_release<Scope::kSys>(peer_region<u32>(p, thread, kCountFlag) + p.rank, epoch + 1);"
_DONE = "hw::st_release<Scope::kSys>(peer_region<u32>(p, math_thread, kDoneFlag) + p.rank, epoch + 1);"
_L1_ADD = "hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL1Arrival, epoch & 1) + block, 1);"
_L2_ADD = "hw::red_add_release<Scope::kGpu>(arrival_bank(p, kL2Arrival, tile.bank()) + tile.block, 1);"
_RING_WRITE = "hw::sts_vec4(to, tile.packed());"
_RING_FULL = "hw::mbarrier_arrive(bars.tile_full(slot));"
_FREE = "wait_stage_empty<C>(p, bars, stage);"
_RELEASE = "hw::mbarrier_arrive_cluster(bars.stage_empty(slot), lane);"
_TELL = "hw::mbarrier_arrive_release_cluster(bars.tile_full(slot), cta);"
_RATIO = "hw::div_exact(now[row_unit].at[half][b][parity], next.at[half][b][parity])"
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
    Mutant(107, "dispatch", PULL, "group * p.ring_rows + r.place", "group * (p.ring_rows - 1) + r.place", "wrong stride of the scales"),
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
    Mutant(301, "rings", ACTS, _FREE, "", "activations are loaded into a stage in use"),
    Mutant(302, "rings", WEIGHTS, _FREE, "", "weights are loaded into a stage in use"),
    Mutant(303, "rings", LOOP, "stage.parity()", "stage.parity() ^ 1", "wrong parity: the stage before is waited for", near="bars.stage_full(slot), "),
    Mutant(304, "rings", BLOCK, "hw::wgmma_wait<0>(d);", "", "the product is used before it is there"),
    Mutant(305, "rings", PIPE, "hw::warp_sync();", "", "lane 0 releases a stage that other lanes read", near="void finish_stage("),
    Mutant(306, "rings", LOOP, "finish_stage<C>(bars, before, me.lane());", "if (me.warpgroup == 0) finish_stage<C>(bars, before, me.lane());", "one warpgroup never releases a tile's last stage",
           near="        before = slot;\n        stage.advance();\n    }\n"),
    Mutant(307, "rings", LOOP, "if (k != 0) finish_stage<C>(bars, before, me.lane());", "if (k != 0) finish_stage<C>(bars, slot, me.lane());", "a stage is released while its product reads it", cases=("tall",)),
    Mutant(308, "rings", WEIGHTS, _RING_WRITE + "\n        " + _RING_FULL, _RING_FULL + " " + _RING_WRITE, "a tile is published before it is written"),
    Mutant(309, "rings", ACTS, "ring.advance();", "", "the A loader stays at its tile"),
    Mutant(310, "rings", ACTS, "(load == 0 ? side_bytes : 0)", "0", "the side data's bytes are not expected"),
    Mutant(311, "rings", PIPE, "(bits & 0x100) ^ 0x100", "bits & 0x100", "the parity never flips"),
    Mutant(312, "rings", PIPE, "hw::fence_mbarrier_init();", "", "mbarriers not made visible to the copy engine"),
    Mutant(313, "rings", TOP, "hw::cta_sync<C::kThreads>();", "", "mbarriers used before they are initialised"),
    Mutant(314, "rings", PIPE, "C::kCluster * kMathWarps", "C::kCluster * kMathWarps - 1", "a stage is free with one reader left", near="hw::mbarrier_init(stage_empty(s), "),

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
    Mutant(410, "signals", EPI1, _L2_ADD, _L2_ADD.replace("tile.block", "tile.block + 1"), "the next block is signalled"),
    Mutant(411, "signals", ACTS, "tile.bank()", "(tile.bank() ^ 1)", "arrivals of the launch before"),
    Mutant(412, "signals", ACTS, "tile.valid()", "tile.valid() - 1", "one row is not waited for", near="const u32 expected"),

    # ---- epilogues
    Mutant(501, "epilogues", WEIGHTS, "l1_tiles & 1", "0", "row maxima of two tiles share a buffer", near="set_maxima_buffer"),
    Mutant(502, "epilogues", EPI1, "MathThread<C>::sync_math();", "", "the other warpgroup's maxima are read before they are written"),
    Mutant(503, "epilogues", EPI1, "amax + part * Plan::kARows + row", "amax + me.part() * Plan::kARows + row", "each warpgroup scales by its own maximum"),
    Mutant(504, "epilogues", EPI1, "static_cast<u64>(tile.n) * p.ring_rows", "static_cast<u64>(tile.n) * (p.ring_rows / 2)", "wrong stride of the scales"),
    Mutant(505, "epilogues", EPI1, "hw::lds_f32(weights + row)", "hw::lds_f32(weights + row + 1)", "routing weight of the next row"),
    Mutant(506, "epilogues", EPI1, "i < 2 ? weight_lo : weight_hi", "i < 2 ? weight_hi : weight_lo", "routing weights of the row halves swapped"),
    Mutant(507, "epilogues", EPI1, "hw::min_nan(acc[8 * j + i], p.clamp)", "acc[8 * j + i]", "the gate is not clamped", cases=("mixed",)),
    Mutant(508, "epilogues", EPI2, "row >= tile.valid()", "row > tile.valid()", "one row past the block's end is sent"),
    Mutant(509, "epilogues", EPI2, "static_cast<u64>(slot) * p.capacity + token", "static_cast<u64>(slot) * p.num_tokens + token", "wrong combine slot"),
    Mutant(510, "epilogues", EPI2, "column < columns", "true", "columns past H are stored", cases=("overhang",)),
    Mutant(511, "epilogues", EPI2, "me.warp_has(r, tile.valid())", "me.warp_has(r, tile.valid() - 1)", "a lone row in the second half is dropped", cases=("tall",)),
    Mutant(512, "epilogues", LOOP, "(tile.n * C::kBlockN + me.column(0)) / 128", "tile.n * C::kBlockN / 128", "both warpgroups take the first column scale"),
    Mutant(513, "epilogues", LOOP, "me.has(r, tile.valid())", "me.has(r, tile.valid() - 1)", "a lone row in the second half is not computed", cases=("tall",)),
    Mutant(516, "epilogues", LOOP, "lane / 16 != k / 16 % 2", "lane / 16 == k / 16 % 2", "the lanes whose scales are in use take the next ones", cases=("long",)),
    Mutant(517, "epilogues", LOOP, "k + 16 + lane % 16", "k + lane % 16", "the scales of the K-blocks that are done are taken again", cases=("long",)),
    Mutant(518, "epilogues", LOOP, "hw::shfl(hw::f32_to_bits(second), k % 32)", "hw::shfl(hw::f32_to_bits(second), 0)", "every K-block has the first one's up scale"),

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

    # ---- clusters: a pair of CTAs that share weights
    Mutant(801, "clusters", PIPE, "C::kCluster * kMathWarps", "kMathWarps", "a stage is free when one CTA has read it",
           near="hw::mbarrier_init(stage_empty(s), ", cases=("pair",)),
    Mutant(802, "clusters", PIPE, _RELEASE, f"if (lane == hw::cluster_cta_rank()) {_RELEASE}", "only the own CTA hears that a stage is free", cases=("pair",)),
    Mutant(803, "clusters", WEIGHTS, _TELL, "", "the other CTA never hears of a tile", cases=("pair",)),
    Mutant(804, "clusters", WEIGHTS, "(1 << C::kCluster) - 1", "1 << cta_in_cluster<C>()", "weights arrive in one CTA only", cases=("pair",)),
    Mutant(805, "clusters", TOP, "cluster_sync<C>();", "", "no cluster barrier before the first arrival on the other CTA's barriers",
           near="hw::cta_sync<C::kThreads>();", cases=("pair",)),
    Mutant(807, "clusters", EPI1, "me.thread == 0 && tile.valid() != 0", "me.thread == 0", "a tile without rows is counted as done", cases=("pair",)),
    Mutant(808, "clusters", WEIGHTS, "stream.current(epoch & 1, cta)", "stream.current(epoch & 1, 0)", "both CTAs take the first row block", cases=("pair",)),
    Mutant(809, "clusters", ACTS, "C::kCluster == 1 || tile.valid() != 0", "true", "a CTA without rows waits for some", cases=("pair",)),
    Mutant(810, "clusters", WEIGHTS, "cta_in_cluster<C>() * bytes", "0", "both halves of the weights go to the same place", near="place = first * 128", cases=("pair",)),
    Mutant(811, "clusters", PIPE, "C::kCluster * (1 + kMathWarps) + C::kCluster - 1", "1 + kMathWarps",
           "a tile's slot is free with half of its readers left", cases=("pair",)),
    Mutant(812, "clusters", PIPE, "hw::mbarrier_arrive_cluster(bars.tile_empty(slot), 0);",
           "hw::mbarrier_arrive_cluster(bars.tile_empty(slot), hw::cluster_cta_rank());", "the scheduler never hears that the other CTA is done with a tile",
           cases=("pair",)),
    Mutant(813, "clusters", WEIGHTS, "C::kCluster * C::kBlockM", "C::kBlockM", "the pairs overlap by a block", cases=("pair",)),

    # ---- policies: what only some of them do
    Mutant(901, "policies", WEIGHTS, "from = from - num_k * kStep + Plan::kBBytes;", "from = from - num_k * kStep;", "the second pass takes the first one's weights again", cases=("narrow",)),
    Mutant(902, "policies", MATH, "L1::hold(acc, held);", "", "the first pass's activations are lost", cases=("narrow",)),
    Mutant(903, "policies", MATH, "L1{p, tile, me}.activate(side_data<C>(smem, ring), acc, pass);", "", "the first pass is not activated", cases=("narrow",)),
    Mutant(904, "policies", ACTS, "k + 1 == num_k ? 0 : k + 1", "k + 1", "the second pass reads on past K", cases=("narrow",)),
    Mutant(905, "policies", EPI1, "(pass * C::kBlockN + me.column(c)) / 2", "me.column(c) / 2", "the second pass's columns go where the first one's are",
           cases=("narrow",)),
    Mutant(911, "policies", BLOCK, "has_carry(row_unit, half)", "false", "the second carry forgets the first",
           near="each_sum(acc, row_unit, half, has_carry(row_unit, half), [](f32& value, f32* place", cases=("rescaled",)),
    Mutant(912, "policies", BLOCK, "has_carry(row_unit, half)", "false", "the carry is not added",
           near="each_sum(acc, row_unit, half, has_carry(row_unit, half), [](f32& value, f32*,", cases=("rescaled",)),
    Mutant(913, "policies", BLOCK, _RATIO, "hw::div_exact(next.at[half][b][parity], now[row_unit].at[half][b][parity])", "the ratio is upside down",
           cases=("rescaled",)),
    Mutant(914, "policies", BLOCK, "usable && k % kCarryEvery != 0", "k % kCarryEvery != 0", "the ratio to a scale of zero is used", cases=("extreme",)),
    Mutant(915, "policies", LOOP, "(l1 ? second : first)", "second", "the second column block's scale for odd chunks of the first", near="f.at[half][0][0] = row[half] * first;\n            f.at[half][0][1] = row[half] * (",
           cases=("rescaled",)),
    Mutant(921, "policies", LOOP, "c * Shape::kUnitColumns * 128 / 16", "0", "the second column unit takes the first one's weights", cases=("serial",)),
    Mutant(922, "policies", PLACE, "column_unit * Shape::kUnitColumns", "0", "the second column unit is stored in the first one's place", cases=("serial",)),
    Mutant(923, "policies", BLOCK, "(column_unit * TileShape<C>::kChunks + chunk) / 16", "chunk / 16", "the second column unit takes the first one's scale",
           cases=("serial",)),
    Mutant(931, "policies", BLOCK, "word(a, row + 8, k + byte)", "word(a, row, k + byte)", "the lower row's operand is the upper row's", cases=("warp",)),
    Mutant(932, "policies", BLOCK, "word(b, 8 * chunk + row, k + byte + 16)", "word(b, 8 * chunk + row, k + byte)", "the low half of K twice", cases=("warp",)),
    Mutant(941, "policies", STREAM, "++step_;", "step_ += 2;", "a wave's second GEMM reaches into the next wave", near="bool next_of_wave()", cases=("waves",)),
)
