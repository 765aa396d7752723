"""The checked flavour: plain accesses (bounds, owner, alignment, never-written bytes) and data races."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Run, build, tensor_map

PLAIN = """
struct Params { u64 a, b; };
__attribute__((noinline)) void poke(u32* p) { *p = 7; }
MM_DEVICE void body(const Params& p) {
    u32* a = reinterpret_cast<u32*>(p.a);
    u32* smem = reinterpret_cast<u32*>(hw::dynamic_smem());
    static const u32 table[4] = {1, 2, 3, 4};
    const u32 t = hw::thread_idx();
    u32 local[8];
    for (u32 i = 0; i < 8; ++i) local[(i * 5 + t) % 8] = table[i % 4];
    if (t == 0) {
        smem[0] = local[t];
        if (BUG == 1) a[16] = 1;
        if (BUG == 2) smem[256] = 1;
        if (BUG == 3) *reinterpret_cast<u32*>(p.a + 2) = 1;
        if (BUG == 4) a[1] = smem[1];
        if (BUG == 5) *reinterpret_cast<u32*>(p.b) = 1;
        if (BUG == 6) poke(const_cast<u32*>(&table[1]));
        if (BUG == 7) a[1] = hw::lds_u32(smem + 1);
        if (BUG == 8) *const_cast<u64*>(&p.a) = 1;
        if (BUG == 9) a[2] = a[3];
        a[0] = smem[0];
    }
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


def run_plain(bug: int):
    run = Run(2)
    a, b = np.zeros(16, np.uint32), np.zeros(16, np.uint32)
    address = run.region(a, 0, "a", initialised=False)
    run.launch(build(PLAIN, True, f"BUG={bug}"), address, run.region(b, 1, "b"), smem=1024)
    return run.run(), a


def test_plain_accesses_of_a_correct_kernel_are_clean() -> None:
    report, a = run_plain(0)
    assert str(report) == "" and a[0] == 1


@pytest.mark.parametrize(("bug", "kind", "text"), [
    (1, "bounds", "0 bytes past the end of a of rank 0"), (2, "bounds", "smem+1024"), (3, "misaligned", "a of rank 0 + 2"),
    (4, "uninit", "never written"), (5, "foreign", "rank 1's private memory"), (6, "bounds", "outside every region"),
    (7, "uninit", "never written"), (8, "foreign", "kernel parameters"), (9, "uninit", "a of rank 0 + 12"),
])
def test_plain_access_is_checked(bug: int, kind: str, text: str) -> None:
    report, _ = run_plain(bug)
    assert kind in report.kinds(), str(report)
    finding = next(f for f in report.findings if f.kind == kind)
    assert text in finding.text
    assert finding.file.endswith("kernel.cpp") and finding.line > 0 and finding.warp == 0


# Message passing: warp 0 writes data and raises a flag, the reader is another warp, CTA or rank.
MESSAGE = """
struct Params { u64 data, flag, out, rank; };
MM_DEVICE void body(const Params& p) {
    u32* data = reinterpret_cast<u32*>(p.data);
    u32* flag = reinterpret_cast<u32*>(p.flag);
    const u32 t = hw::thread_idx();
    const bool writer = p.rank == 0 && hw::cta_idx() == 0 && hw::warp_idx() == 0;
    const bool reader = p.rank == READER_RANK && hw::cta_idx() == READER_CTA && hw::warp_idx() == READER_WARP;
    if (writer) {
        data[t] = t + 1;
        hw::st_u32(data + 32 + t, t + 2);
        hw::warp_sync();
        if (t == 0) { SEND; }
    }
    if (reader) {
        if (hw::lane_idx() == 0) { RECEIVE; }
        hw::warp_sync();
        hw::st_u32(reinterpret_cast<u32*>(p.out) + hw::lane_idx(), data[hw::lane_idx()] + hw::ld_u32(data + 32 + hw::lane_idx()));
    }
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""
SPIN = "while (hw::{}(flag) == 0) hw::nap(10)"
RELEASE, ACQUIRE = "hw::st_release<Scope::k{}>(flag, 1)", "ld_acquire<Scope::k{}>"
PEERS = {"warp": (0, 0, 1), "cta": (0, 1, 0), "rank": (1, 0, 0)}


def pass_message(peer: str, send: str, receive: str, **options: object):
    rank, cta, warp = PEERS[peer]
    kernel = build(MESSAGE, True, f"SEND={send}", f"RECEIVE={receive}", f"READER_RANK={rank}", f"READER_CTA={cta}", f"READER_WARP={warp}")
    run = Run(2)
    data, flag, out = np.zeros(64, np.uint32), np.zeros(1, np.uint32), np.zeros(32, np.uint32)
    words = [run.region(data, 0, "data", True), run.region(flag, 0, "flag", True), run.region(out, 0, "out", True)]
    for r in range(2):
        run.launch(kernel, *words, r, rank=r, grid=2)
    options.setdefault("races", True)
    return run.run(**options), out


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("peer", "send", "receive"), [
    ("warp", RELEASE.format("Cta"), SPIN.format(ACQUIRE.format("Cta"))),
    ("cta", RELEASE.format("Gpu"), SPIN.format(ACQUIRE.format("Gpu"))),
    ("rank", RELEASE.format("Sys"), SPIN.format(ACQUIRE.format("Sys"))),
    ("rank", "hw::red_add_release<Scope::kSys>(flag, 1)", SPIN.format(ACQUIRE.format("Sys"))),
    ("rank", "hw::fence_acq_rel<Scope::kSys>(); hw::st_relaxed<Scope::kSys>(flag, 1)",
     SPIN.format("ld_relaxed<Scope::kSys>") + "; hw::fence_acq_rel<Scope::kSys>()"),
    ("cta", "hw::atom_add_acq_rel<Scope::kGpu>(flag, 1)", "while (hw::atom_add_acq_rel<Scope::kGpu>(flag, 0) == 0) hw::nap(10)"),
])
def test_ordered_message_is_clean(peer: str, send: str, receive: str, seed: int | None) -> None:
    options = {} if seed is None else {"schedule": "random", "seed": seed, "preempt": True}
    report, out = pass_message(peer, send, receive, **options)
    assert str(report) == ""
    assert (out == 2 * np.arange(32) + 3).all()


@pytest.mark.parametrize(("peer", "send", "receive"), [
    ("cta", RELEASE.format("Cta"), SPIN.format(ACQUIRE.format("Gpu"))),       # scope too narrow
    ("rank", RELEASE.format("Gpu"), SPIN.format(ACQUIRE.format("Sys"))),
    ("rank", RELEASE.format("Sys"), SPIN.format(ACQUIRE.format("Gpu"))),
    ("warp", "hw::st_relaxed<Scope::kCta>(flag, 1)", SPIN.format(ACQUIRE.format("Cta"))),  # no release
    ("rank", "hw::red_add_relaxed<Scope::kSys>(flag, 1)", SPIN.format(ACQUIRE.format("Sys"))),
    ("cta", RELEASE.format("Gpu"), SPIN.format("ld_relaxed<Scope::kGpu>")),   # no acquire
    ("rank", "hw::fence_acq_rel<Scope::kGpu>(); hw::st_relaxed<Scope::kSys>(flag, 1)", SPIN.format(ACQUIRE.format("Sys"))),
    ("warp", "hw::st_u32(flag, 1)", SPIN.format("ld_u32")),                  # not even an atomic flag
])
def test_weaker_message_is_a_race(peer: str, send: str, receive: str) -> None:
    report, out = pass_message(peer, send, receive)
    assert report.kinds() == {"race"}, str(report)
    assert (out == 2 * np.arange(32) + 3).all()  # the values were right: only the check can tell
    assert all(f.file.endswith("kernel.cpp") and f.line > 0 for f in report.findings)
    assert any("data of rank 0" in f.text or "flag of rank 0" in f.text for f in report.findings)
    # Without the option nothing is reported.
    assert str(pass_message(peer, send, receive, races=False)[0]) == ""


# Generic writes that the async proxy then reads, and the other way round.
PROXY = """
struct Params { TensorMap map; u64 src, dst; };
MM_DEVICE void body(const Params& p) {
    u8* smem = hw::dynamic_smem();
    u64* bar = reinterpret_cast<u64*>(smem + 4096);
    const u32 t = hw::thread_idx();
    if (t == 0) {
        hw::mbarrier_init(bar, 1);
        hw::mbarrier_init(bar + 1, 32);
        hw::fence_mbarrier_init();
    }
    hw::cta_sync<64>();
    if (hw::warp_idx() == 0) {
        for (u32 round = 0; round < 2; ++round) {
            if (round > 0 && BUG != 5) while (!hw::mbarrier_try_wait(bar + 1, 0)) {}
            if (t == 0) {
                hw::mbarrier_arrive_expect_tx(bar, 1024);
                hw::bulk_load(smem, reinterpret_cast<const void*>(p.src), 1024, bar);
            }
            hw::warp_sync();
        }
    } else {
        for (u32 round = 0; round < 2; ++round) {
            if (BUG != 1 || round > 0) while (!hw::mbarrier_try_wait(bar, round)) {}
            const Vec4 v = hw::lds_vec4(smem + (t - 32) * 16);
            hw::sts_vec4(smem + 1024 + (t - 32) * 16, v);
            if (BUG == 6) { if (t == 32) for (u32 i = 0; i < 32; ++i) hw::mbarrier_arrive(bar + 1); }
            else hw::mbarrier_arrive(bar + 1);
            if (BUG == 6) hw::st_u32(reinterpret_cast<u32*>(p.dst), hw::lds_u32(reinterpret_cast<u32*>(smem) + 31));
            if (BUG != 2) hw::fence_proxy_async_shared();
            if (BUG == 3) hw::fence_proxy_async_global();
            hw::warp_sync();
            if (t == 32) {
                hw::bulk_store(reinterpret_cast<void*>(p.dst), smem + 1024, 512);
                hw::bulk_commit();
                if (BUG == 4) hw::bulk_wait_read<0>();
                else hw::bulk_wait<0>();
            }
            hw::warp_sync();
            if (BUG == 4 && round == 0) hw::st_u32(reinterpret_cast<u32*>(p.dst) + t - 32, 0);
            if (BUG == 4) { if (t == 32) hw::bulk_wait<0>(); hw::warp_sync(); }
        }
    }
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


def run_proxy(bug: int, **options: object):
    run = Run()
    src, dst = np.arange(1024).astype(np.uint8), np.zeros(1024, np.uint8)
    words = [run.region(src, name="src"), run.region(dst, name="dst")]
    kernel = build(PROXY, True, f"BUG={bug}")
    run.launch(kernel, tensor_map(words[0], 8, 128, 8), *words, smem=4112)
    return run.run(races=True, **options)


@pytest.mark.parametrize("options", [{}, {"completion": "lazy", "seed": 1}, {"completion": "random", "schedule": "random", "seed": 2}])
def test_pipeline_with_proxy_fences_is_clean(options: dict) -> None:
    assert str(run_proxy(0, **options)) == ""


@pytest.mark.parametrize(("bug", "text"), [
    (1, "shared memory"),         # read without waiting for the copy
    (2, "no fence.proxy.async"),  # generic write, then an async read
    (4, "dst of rank 0"),         # generic write over an async write that is not known to be complete
    (5, "shared memory"),         # refill without waiting for the readers
    (6, "shared memory"),         # one lane releases the stage for lanes that still read
])
def test_pipeline_mistake_is_a_race(bug: int, text: str) -> None:
    # Lazy completion ends some of these earlier, with a more direct finding; eager hides others.
    reports = [run_proxy(bug, completion=completion) for completion in ("eager", "lazy")]
    races = [f for report in reports for f in report.findings if f.kind == "race"]
    assert any(text in f.text for f in races), "\n".join(map(str, reports))


def test_fence_for_the_other_state_space_does_not_count() -> None:
    """fence.proxy.async.global after a write to shared memory orders nothing the bulk store reads."""
    source = PROXY.replace("if (BUG != 2) hw::fence_proxy_async_shared();", "")
    run = Run()
    src, dst = np.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
    words = [run.region(src), run.region(dst, name="dst")]
    run.launch(build(source, True, "BUG=3"), tensor_map(words[0], 8, 128, 8), *words, smem=4112)
    assert any("no fence.proxy.async" in f.text for f in run.run(races=True).findings)


BARRIER = """
struct Params { u64 out; };
MM_DEVICE void body(const Params& p) {
    u32* smem = reinterpret_cast<u32*>(hw::dynamic_smem());
    const u32 t = hw::thread_idx();
    smem[t] = t;
    BETWEEN;
    reinterpret_cast<u32*>(p.out)[t] = smem[t ^ 32];
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


@pytest.mark.parametrize(("between", "racy"), [
    ("hw::cta_sync<64>()", False), ("hw::bar_sync(3, 64)", False), ("(void)0", True), ("hw::warp_sync()", True),
    ("if (t < 32) hw::bar_arrive(1, 64); else hw::bar_sync(1, 64)", True),
    ("if (t < 32) { hw::bar_arrive(1, 64); hw::bar_sync(2, 64); } else { hw::bar_arrive(2, 64); hw::bar_sync(1, 64); }", False),
])
def test_named_barriers_order_plain_accesses(between: str, racy: bool) -> None:
    out = np.zeros(64, np.uint32)
    run = Run()
    run.launch(build(BARRIER, True, f"BETWEEN={between}"), run.region(out))
    report = run.run(races=True, uninit=False)
    assert report.kinds() == ({"race"} if racy else set()), str(report)


def test_next_input_copied_over_what_a_slow_peer_still_reads_is_a_race() -> None:
    """The hazard between launches: no value is wrong here, the missing order alone is reported."""
    source = """
struct Params { u64 peer, out; };
MM_DEVICE void body(const Params& p) {
    reinterpret_cast<u32*>(p.out)[hw::thread_idx()] = reinterpret_cast<u32*>(p.peer)[hw::thread_idx()];
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""
    run = Run(2)
    kernel = build(source, True)
    inputs, outs, staged = np.zeros((2, 32), np.uint32), np.zeros((2, 32), np.uint32), np.zeros((2, 32), np.uint32)
    addresses = [run.region(inputs[r], r, "x", True) for r in range(2)]
    for r in range(2):
        out = run.region(outs[r], r, "y")
        run.launch(kernel, addresses[1 - r], out, rank=r)
        run.program.copy(r, addresses[r], staged[r].ctypes.data, 128)
    report = run.run(races=True)
    assert report.kinds() == {"race"} and any("x of rank" in f.text and "stream of rank" in f.text for f in report.findings)


COUNTER = """
struct Params { u64 count, flag, out; };
MM_DEVICE void body(const Params& p) {
    u32* count = reinterpret_cast<u32*>(p.count);
    u32* flag = reinterpret_cast<u32*>(p.flag);
    if (hw::thread_idx() != 0) return;
    hw::atom_add_relaxed<Scope::kGpu>(count, 5);
    ARRIVE;
    while (hw::ld_acquire<Scope::kGpu>(flag) != 2) {}
    hw::fence_proxy_async();  // the wait is over
    hw::st_u32(reinterpret_cast<u32*>(p.out) + hw::cta_idx(), hw::ld_relaxed<Scope::kGpu>(count));
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


@pytest.mark.parametrize(("arrive", "racy"), [("hw::red_add_release<Scope::kGpu>(flag, 1)", False), ("hw::red_add_relaxed<Scope::kGpu>(flag, 1)", True)])
def test_relaxed_load_that_may_be_stale_is_reported(arrive: str, racy: bool) -> None:
    """Every access is atomic, so this is no race of data; but without the release the sum might be an old one."""
    run, count, flag, out = Run(), np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(2, np.uint32)
    words = [run.region(count, name="count"), run.region(flag, name="flag"), run.region(out, name="out")]
    run.launch(build(COUNTER, True, f"ARRIVE={arrive}"), *words, grid=2)
    report = run.run(races=True, schedule="random", seed=3)
    assert (out == 10).all()
    assert report.kinds() == ({"race"} if racy else set()), str(report)
    assert not racy or "might see an older value" in report.findings[0].text


LANES = """
struct Params { u64 out; };
MM_DEVICE void body(const Params& p) {
    u8* smem = hw::dynamic_smem();
    u64* bar = reinterpret_cast<u64*>(smem + 1024);
    u32* words = reinterpret_cast<u32*>(smem);
    const u32 t = hw::thread_idx(), lane = hw::lane_idx();
    if (t == 0) hw::mbarrier_init(bar, 1);
    if (t < 32) hw::sts_u32(words + t, t);
    hw::cta_sync<64>();
    if (t < 32) {
        const u32 v = hw::lds_u32(words + (lane ^ 1));
        BEFORE_ARRIVE;
        if (lane == 0) hw::mbarrier_arrive(bar);
        hw::st_u32(reinterpret_cast<u32*>(p.out) + t, v);
    } else {
        if (lane == 0) while (!hw::mbarrier_try_wait(bar, 0)) {}
        BEFORE_USE;
        hw::sts_u32(words + lane, 7);
    }
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


@pytest.mark.parametrize(("before_arrive", "before_use", "racy"), [
    ("hw::warp_sync()", "hw::warp_sync()", False),
    ("(void)0", "hw::warp_sync()", True),         # lane 0 speaks for lanes it has not waited for
    ("hw::warp_sync()", "(void)0", True),         # and other lanes rely on what lane 0 alone has seen
    ("hw::shfl(v, 0)", "hw::warp_sync()", True),  # a shuffle moves registers; it orders no memory
])
def test_lanes_of_a_warp_are_ordered_by_warp_sync_only(before_arrive: str, before_use: str, racy: bool) -> None:
    run, out = Run(), np.zeros(32, np.uint32)
    kernel = build(LANES, True, f"BEFORE_ARRIVE={before_arrive}", f"BEFORE_USE={before_use}")
    run.launch(kernel, run.region(out, name="out"), smem=2048)
    report = run.run(races=True)
    assert report.kinds() == ({"race"} if racy else set()), str(report)
    if racy:
        assert any("lane" in f.text and "shared memory" in f.text for f in report.findings), str(report)


def test_lanes_that_write_one_word_race_with_each_other() -> None:
    source = """
struct Params { u64 out; };
MM_DEVICE void body(const Params& p) {
    u32* out = reinterpret_cast<u32*>(p.out);
    hw::st_u32(out + hw::lane_idx() / WIDTH, hw::lane_idx());
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""
    for width, racy in ((1, False), (2, True)):
        run, out = Run(), np.zeros(32, np.uint32)
        run.launch(build(source, True, f"WIDTH={width}"), run.region(out, name="out"))
        report = run.run(races=True)
        assert report.kinds() == ({"race"} if racy else set()), str(report)
        assert not racy or "lanes of one warp are ordered by warp_sync only" in report.findings[0].text


def test_what_is_declared_undefined_must_be_written_before_it_is_read() -> None:
    source = """
struct Params { u64 a, out; };
MM_DEVICE void body(const Params& p) {
    if (hw::thread_idx() == 0) hw::st_u32(reinterpret_cast<u32*>(p.out), hw::ld_u32(reinterpret_cast<u32*>(p.a) + AT));
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""
    for at, kinds in ((0, set()), (3, {"uninit"})):
        run, a, out = Run(), np.ones(8, np.uint32), np.zeros(1, np.uint32)
        address = run.region(a, name="a")
        run.program.undefine(0, address + 8, 8)
        run.launch(build(source, True, f"AT={at}"), address, run.region(out, name="out"))
        assert run.run().kinds() == kinds
