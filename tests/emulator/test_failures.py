"""What the emulator must notice: one small broken kernel per rule. Each comes with a correct twin, so that no check
passes by reporting everything."""

from __future__ import annotations

import time

import numpy as np
import pytest

from megamoe_cli.errors import UsageError

from .harness import Run, build

# BUG selects one mistake; 0 is correct. One CTA of 64 threads.
KERNEL = """
struct Params { u64 out, words; };
MM_DEVICE void body(const Params& p) {
    u8* smem = hw::dynamic_smem();
    u64* bar = reinterpret_cast<u64*>(smem + 1024);
    u32* out = reinterpret_cast<u32*>(p.out);
    const u32 t = hw::thread_idx();
    if (t == 0) {
        hw::mbarrier_init(bar, BUG == 1 ? 65 : 64);
        if (BUG == 2) hw::mbarrier_init(bar, 64);
        if (BUG != 22) hw::fence_mbarrier_init();
    }
    hw::cta_sync<64>();
    if (BUG == 22 && t == 0) {
        hw::bulk_load(smem, reinterpret_cast<const void*>(p.out), 16, bar);
        return;
    }
    hw::mbarrier_arrive(bar);
    if (BUG == 3 && t == 0) hw::mbarrier_arrive(bar + 1);
    while (!hw::mbarrier_try_wait(bar, BUG == 4 ? 1 : 0)) {}
    if (BUG == 5) hw::bar_sync(1, t < 32 ? 64 : 32);
    if (BUG == 6 && t < 32) hw::bar_sync(1, 64);
    if (BUG == 7) hw::st_u32(out + p.words, 1);
    if (BUG == 8) hw::sts_u32(reinterpret_cast<u32*>(smem + hw::dynamic_smem_bytes() - 2), 1);
    if (BUG == 9) hw::st_u32(reinterpret_cast<u32*>(p.out + 2), 1);
    if (BUG == 10) hw::trap();
    if (BUG == 11 && t == 3) hw::warp_sync(0xf0);
    if (BUG == 12) { if (t % 2) hw::shfl(t, 0); else hw::ballot(true); }
    if (BUG == 13) { if (t == 5) return; hw::shfl(t, 0); }
    if (BUG == 14) hw::lds_u32(out);
    if (BUG == 15) hw::ld_u32(reinterpret_cast<u32*>(smem));
    if (BUG == 16) while (hw::ld_acquire<Scope::kGpu>(out + 70) == 0) hw::nap(20);
    if (BUG == 17) while (hw::lds_u32(reinterpret_cast<u32*>(smem)) != 1) {}
    if (BUG == 18 && t == 0) hw::bulk_load(smem + 8, reinterpret_cast<const void*>(p.out), 16, bar);
    if (BUG == 19) hw::reg_dealloc<24>(), hw::reg_alloc<256>(), hw::reg_dealloc<64>(), hw::reg_dealloc<72>();
    if (BUG == 20 && t == 0) { hw::bulk_store(reinterpret_cast<void*>(p.out), smem, 16); }
    if (BUG == 23) out[0] = hw::uniform(t % 64 == 40 ? 1 : 0);
    if (BUG == 21 && t == 0) hw::mbarrier_arrive_cluster(bar, 1);
    hw::st_u32(out + t, t + 1);
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""

EXPECTED = {
    1: ("deadlock", "pending arrivals 1 of 65"),
    2: ("mbarrier", "already initialised"),
    3: ("mbarrier", "not an initialised mbarrier"),
    4: (None, ""),  # parity 1 of a fresh phase 1: completes one phase early only with the wrong count; see below
    5: ("barrier", "expects"),
    6: ("deadlock", "barrier 1 (32 of 64 threads arrived)"),
    7: ("bounds", "past the end of out of rank 0"),
    8: ("bounds", "past the 2048 bytes"),
    9: ("misaligned", "4-byte aligned"),
    10: ("trap", "trap"),
    11: ("warp", "does not contain the calling lane"),
    12: ("warp", "disagree"),
    13: ("warp", "exited"),
    14: ("bounds", "shared access to out"),
    15: ("bounds", "global access to shared memory"),
    16: ("deadlock", "polling out of rank 0 + 280 = 0"),
    18: ("misaligned", "multiples of 16"),
    19: ("register", "owns 64"),
    20: ("bulk", "never committed"),
    21: ("cluster", "CTA 1 of a cluster of 1"),
    22: ("race", "fence_mbarrier_init missing"),
    23: ("warp", "values that differ"),
}


def run_bug(bug: int, **options: object):
    out = np.zeros(80, np.uint32)
    run = Run()
    run.launch(build(KERNEL, False, f"BUG={bug}"), run.region(out, name="out"), 80, smem=2048)
    return run.run(**options), out


def test_the_correct_twin_is_clean() -> None:
    report, out = run_bug(0, schedule="random", seed=1)
    assert str(report) == ""
    assert (out[:64] == np.arange(64) + 1).all()


@pytest.mark.parametrize("bug", [bug for bug, (kind, _) in EXPECTED.items() if kind])
def test_mistake_is_found(bug: int) -> None:
    report, _ = run_bug(bug)
    kind, text = EXPECTED[bug]
    assert kind in report.kinds(), str(report)
    finding = next(f for f in report.findings if f.kind == kind)
    assert text in finding.text
    if kind != "deadlock" and bug != 20:
        assert finding.file.endswith("kernel.cpp") and finding.line > 0
        assert (finding.rank, finding.cta) == (0, 0) and finding.warp in (0, 1)


def test_wrong_parity_waits_for_a_phase_that_never_comes() -> None:
    """Parity 1 passes at once on a fresh barrier; after the first phase it blocks."""
    report, _ = run_bug(4)
    assert report.kinds() <= {"deadlock"}


def test_loops_that_never_give_way_end_at_the_wall_limit() -> None:
    begin = time.monotonic()
    report, _ = run_bug(17, wall_limit_s=0.5)
    assert report.kinds() & {"livelock", "deadlock"}
    assert time.monotonic() - begin < 10


TIMEOUT = """
struct Params { u64 flag, fault, limit; };
MM_DEVICE void body(const Params& p) {
    const u64 begin = hw::global_timer_ns();
    u64* bar = reinterpret_cast<u64*>(hw::dynamic_smem());
    if (hw::thread_idx() == 0) hw::mbarrier_init(bar, 1);
    hw::cta_sync<64>();
    const bool local = hw::warp_idx() == 1;
    while (local ? !hw::mbarrier_try_wait(bar, 0) : hw::ld_acquire<Scope::kSys>(reinterpret_cast<const u32*>(p.flag)) == 0) {
        if (hw::global_timer_ns() - begin > p.limit) {
            hw::red_add_relaxed<Scope::kSys>(reinterpret_cast<u32*>(p.fault) + local, 1);
            return;
        }
        hw::nap(100);
    }
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


@pytest.mark.parametrize("limit_s", [1e-3, 5, 300, 30000])
def test_device_timeouts_fire_after_the_deadlock_report(limit_s: float) -> None:
    fault = np.zeros(2, np.uint32)
    flag = np.zeros(1, np.uint32)
    run = Run()
    run.launch(build(TIMEOUT), run.region(flag, name="flag"), run.region(fault, name="fault"), int(limit_s * 1e9))
    report = run.run()
    assert report.kinds() == {"deadlock"}
    assert (fault == 32).all()
    text = report.findings[0].text
    assert "polling flag of rank 0" in text and "mbarrier.try_wait smem+0 parity 0 (phase 0, pending arrivals 1 of 1" in text


def test_the_shorter_timeout_fires_first_even_if_it_looks_at_the_time_rarely() -> None:
    """64 polls between two looks at the clock, as real wait loops do, against a local wait of eight times the bound."""
    source = TIMEOUT.replace("u32*>(p.flag)) == 0)", "u32*>(p.flag)) == 0 && spin(p))").replace("> p.limit", "> p.limit * (local ? 8 : 1)").replace(
        "MM_DEVICE void body", """
MM_DEVICE bool spin(const Params& p) {
    for (u32 i = 0; i < 63; ++i) if (hw::ld_acquire<Scope::kSys>(reinterpret_cast<const u32*>(p.flag))) return false;
    return true;
}
MM_DEVICE void body""").replace("        hw::nap(100);\n", "        if (hw::ld_relaxed<Scope::kSys>(reinterpret_cast<u32*>(p.fault))) return;\n")
    fault, flag = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    run = Run()
    run.launch(build(source), run.region(flag, name="flag"), run.region(fault, name="fault"), 5 * 10**9)
    assert run.run().kinds() == {"deadlock"}
    assert fault[0] > 0 and fault[1] == 0


def test_private_memory_of_another_rank_is_foreign() -> None:
    out = np.zeros(80, np.uint32)
    run = Run(2)
    address = run.region(out, 1, "secret")
    run.launch(build(KERNEL, False, "BUG=0"), address, 80, rank=0, smem=2048)
    report = run.run()
    assert report.kinds() == {"foreign"} and "rank 1's private memory by rank 0" in report.findings[0].text


CRASH = """
struct Params { u64 address; };
MM_DEVICE u32 deep(u32 n) { volatile u32 big[1024]; big[0] = n; return n == 0 ? big[0] : deep(n - 1) + big[0]; }
MM_DEVICE void body(const Params& p) {
    if (p.address == 1) { hw::nap(deep(1000)); return; }
    if (p.address == 2) for (volatile u32 i = 0;; i = i + 1) {}
    *reinterpret_cast<volatile u32*>(p.address) = 1;
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


@pytest.mark.parametrize(("address", "kind"), [(64, "bounds"), (1, "stack"), (2, "livelock")])
def test_crashes_become_findings(address: int, kind: str) -> None:
    run = Run()
    run.launch(build(CRASH), address)
    report = run.run(wall_limit_s=0.3)
    assert kind in report.kinds(), str(report)
    # The process and the runtime survive.
    assert str(run_bug(0)[0]) == ""


def test_bad_programs_are_refused() -> None:
    run = Run(2)
    memory = np.zeros(64, np.uint8)
    run.region(memory, 0)
    kernel = build(KERNEL, False, "BUG=0")
    for action, text in (
        (lambda: run.region(memory[8:16], 1), "overlaps"),
        (lambda: run.program.launch(0, kernel, b"\0" * 8, 1, 0), "takes 16 bytes"),
        (lambda: run.launch(kernel, rank=2), "rank 2 of 2"),
        (lambda: run.launch(kernel, grid=0), "grid of 0"),
        (lambda: run.launch(kernel, smem=240000), "at most 232448"),
        (lambda: run.run(schedule="fair"), "unknown schedule"),
    ):
        with pytest.raises(UsageError, match=text):
            action()
    run.launch(kernel, memory.ctypes.data, 16, rank=0)
    with pytest.raises(UsageError, match="checked flavour"):
        run.run(races=True)
