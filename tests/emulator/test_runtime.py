"""The runtime as a library: determinism, limits on resident CTAs, interruption, the portable fiber switch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megamoe_cli.backends.emu_binding import EmuRuntime
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit

from .harness import EMU, ROOT, Run, build, runtime

# CTAs of a rank count themselves in and wait for each other; ranks wait for their left neighbour.
RENDEZVOUS = """
struct Params { u64 mine, left, out; };
MM_DEVICE void body(const Params& p) {
    u32* mine = reinterpret_cast<u32*>(p.mine);
    if (hw::thread_idx() == 0) {
        const u32 order = hw::atom_add_acq_rel<Scope::kSys>(mine, 1);
        hw::st_relaxed<Scope::kSys>(reinterpret_cast<u32*>(p.out) + hw::cta_idx(), order);
        while (hw::ld_acquire<Scope::kSys>(mine) < hw::num_ctas()) hw::nap(50);
        while (hw::ld_acquire<Scope::kSys>(reinterpret_cast<const u32*>(p.left)) < hw::num_ctas()) hw::nap(50);
    }
    hw::cta_sync<64>();
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


def rendezvous(**options: object):
    ranks, grid = 3, 4
    counters, out = np.zeros((ranks, 32), np.uint32), np.zeros((ranks, grid), np.uint32)
    run = Run(ranks)
    addresses = [run.region(counters[r], r, "counter", True) for r in range(ranks)]
    for r in range(ranks):
        run.launch(build(RENDEZVOUS), addresses[r], addresses[r - 1], run.region(out[r], r, "out"), rank=r, grid=grid)
    return run.run(**options), out


@pytest.mark.parametrize("schedule", ["fifo", "random", "pct"])
def test_a_seed_fixes_the_schedule(schedule: str) -> None:
    def trace(seed: int):
        report, out = rendezvous(schedule=schedule, seed=seed, completion="random")
        assert str(report) == ""
        stats = report.stats
        return stats.slices, stats.switches, stats.virtual_ns, out.tobytes()

    assert trace(1) == trace(1)
    if schedule != "fifo":
        assert len({trace(seed) for seed in range(6)}) > 1


def test_ranks_may_start_far_apart() -> None:
    report, _ = rendezvous(start_delay=(0, 10**12, 5))
    assert str(report) == "" and report.stats.virtual_ns > 10**12


def test_too_few_resident_ctas_deadlock_is_reported() -> None:
    assert str(rendezvous(resident_ctas=4)[0]) == ""
    report, _ = rendezvous(resident_ctas=3)
    assert "deadlock" in report.kinds() and "3 CTAs live" in report.findings[0].text
    assert "polling counter of rank 0 + 0 = 3" in report.findings[0].text


def test_warp_roles_and_call_chain_are_named() -> None:
    source = """
struct Params { u64 flag; };
template <class T> MM_DEVICE void
wait_for(const T* flag) {
    while (hw::ld_acquire<Scope::kGpu>(flag) == 0) hw::nap(100);
}
MM_DEVICE void body(const Params& p) {
    if (hw::warp_idx() == 1)
        wait_for(reinterpret_cast<const u32*>(p.flag));
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""
    flag = np.zeros(1, np.uint32)
    run = Run()
    run.launch(build(source), run.region(flag, name="flag"), roles=("loader", "math 0"))
    (finding,) = run.run(max_slices=10**6).findings[:1]
    assert "warp 1 (math 0): polling flag of rank 0 + 0 = 0" in finding.text
    if shutil.which("addr2line"):
        assert re.search(r"at \S*kernel\.cpp:\d+ <- \S*kernel\.cpp:\d+", finding.text), finding.text


SLOW = """
struct Params { u64 rounds; };
MM_DEVICE void body(const Params& p) {
    for (u64 i = 0; i < p.rounds; ++i) hw::cta_sync<64>();
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


def test_step_and_wall_limits() -> None:
    run = Run()
    run.launch(build(SLOW), 10**12)
    assert run.run(max_slices=1000).kinds() == {"livelock"}
    begin = time.monotonic()
    assert run.run(wall_limit_s=0.3).kinds() == {"livelock"}
    assert time.monotonic() - begin < 5


def test_stop_from_another_thread() -> None:
    run = Run()
    run.launch(build(SLOW), 10**12)
    timer = threading.Timer(0.3, lambda: runtime()._lib.mm_emu_stop(run.program._handle))
    timer.start()
    assert run.run().kinds() == {"stopped"}


def test_ctrl_c_ends_a_run() -> None:
    """A real SIGINT in a process of its own: KeyboardInterrupt arrives within a second or two."""
    kernel = build(SLOW)
    script = f"""
import sys
from megamoe_cli.backends.emu_binding import EmuRuntime
program = EmuRuntime({str(runtime().path)!r}).program(1)
program.launch(0, program.runtime.kernel({str(kernel.path)!r}), (10**12).to_bytes(8, "little"), 1, 0)
print("ready", flush=True)
try:
    program.run()
except KeyboardInterrupt:
    sys.exit(42)
"""
    child = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.3)
        child.send_signal(2)
        assert child.wait(timeout=15) == 42
    finally:
        child.kill()
        child.wait()


def test_missing_or_foreign_libraries_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfit, match="cannot read"):
        EmuRuntime(tmp_path / "none.so")
    other = tmp_path / "other.so"
    other.write_bytes(runtime().path.read_bytes() + b"\0")
    with pytest.raises(EnvironmentUnfit, match="another emulator runtime"):
        EmuRuntime(other)
    with pytest.raises(BuildFailed, match="exports no kernel"):
        runtime().kernel(build(SLOW).path, "no_such_kernel")
    with pytest.raises(BuildFailed, match="cannot load"):
        runtime().kernel(tmp_path / "none.so")


def _functions(text: str) -> set[str]:
    code = re.sub(r"//[^\n]*", "", text)
    return set(re.findall(r"MM_DEVICE\s+(?:constexpr\s+)?[\w:]+\*?\s+(\w+)\s*[(<]", code))


def test_every_machine_operation_has_its_emulation() -> None:
    """hw/sm90 and hw/emu offer the same names; the emulator's own helpers carry its name."""
    machine = set().union(*(_functions(path.read_text()) for path in (ROOT / "kernels/hw/sm90").glob("*.cuh")))
    emulated = _functions((EMU / "device.cuh").read_text()) | _functions((EMU / "device_math.cuh").read_text())
    assert len(machine) > 60
    assert machine - emulated == set()
    assert {name for name in emulated - machine if not name.startswith("emu_")} == set()


@pytest.mark.slow
def test_portable_fiber_switch(tmp_path: Path) -> None:
    """The ucontext fallback, in a process of its own; also the one place where warnings of the runtime are errors."""
    library = tmp_path / "runtime.so"
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", "-DMEGAMOE_EMU_UCONTEXT", "-Wl,-soname,libmegamoe_emu.so",
               *map(str, sorted(EMU.glob("*.cpp"))), "-ldl", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    script = f"""
from megamoe_cli.backends.emu_binding import EmuOptions, EmuRuntime
program = EmuRuntime({str(library)!r}).program(1)
program.launch(0, program.runtime.kernel({str(build(SLOW).path)!r}), (1000).to_bytes(8, "little"), 3, 0)
report = program.run(EmuOptions(schedule="random"))
print(report.findings, report.stats.launches)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[] 1\n", ran.stdout + ran.stderr
