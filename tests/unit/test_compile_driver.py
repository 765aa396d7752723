"""From request to artefact: entry text, what is refused before compiling, keys, unfit binaries."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from megamoe_cli.compile import BuildRequest, build, build_many, driver
from megamoe_cli.compile.cache import BuildCache
from megamoe_cli.compile.entry import PHASES, entry_text
from megamoe_cli.compile.ptxas import Note, Resources
from megamoe_cli.config import KernelConfig, resolve
from megamoe_cli.errors import BuildFailed, ExitCode, UsageError
from megamoe_cli.layout import SMEM_LIMIT, smem_bytes
from megamoe_cli.paths import kernels_dir
from megamoe_cli.shapes import NAMED_SHAPES

FLASH = NAMED_SHAPES["flash"]
TOY = """\
#include "hw/hw.cuh"
#include "layout/params.cuh"
#include "layout/tile_shape.cuh"
namespace megamoe {
enum class Phase { kStub, kDispatch, kL1, kL2, kCombine };
template <class C> MM_DEVICE void run(const KernelParams& params) {
    if (hw::warp_idx() < C::kDispatchWarps + C::kTmaWarps) hw::reg_dealloc<C::kRegsDispatch>();
    else hw::reg_alloc<C::kRegsMath>();
    if (C::kPhase == Phase::kL2) {  // more live values than any thread may have
        f32 d[400];
        for (u32 i = 0; i < 400; ++i) d[i] = hw::ld_f32(reinterpret_cast<f32*>(params.y) + i);
        hw::cta_sync<384>();
        for (u32 i = 0; i < 400; ++i) hw::st_f32(reinterpret_cast<f32*>(params.y) + i, d[i]);
    }
    hw::st_u32(reinterpret_cast<u32*>(params.y), static_cast<u32>(C::kPhase) + C::kStages);
}
}  // namespace megamoe
"""


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A kernel of a few lines over the real hw/ and layout/: compiles in about a second."""
    root = tmp_path / "kernels"
    for part in ("hw", "layout"):
        shutil.copytree(kernels_dir() / part, root / part)
    (root / "sm90_fp8_mega_moe.cuh").write_text(TOY)
    monkeypatch.setattr(driver, "kernels_dir", lambda: root)
    return root


def test_entry_text():
    text = entry_text("l1", resolve(KernelConfig(), FLASH, 8))
    for part in ("Phase::kL1;", "kBlockM = 128, kBlockN = 256, kStages = 4, kCluster = 1, kRowSplits = 1;",
                 "Policy::kFused;", "Promotion::kClassic;", "kMathWarpgroups = 2, kDispatchWarps = 2, kTmaWarps = 2;",
                 "kRegsDispatch = 56, kRegsTma = 56, kRegsMath = 224;", "kRowDepth = 2;",
                 "MM_KERNEL_ENTRY(mega_moe, 384, 1, megamoe::KernelParams, megamoe::run<Config>)"):
        assert part in text
    with pytest.raises(UsageError, match="resolved"):
        entry_text("l1", KernelConfig())
    assert len({entry_text(phase, resolve(KernelConfig(), FLASH, 8)) for phase in PHASES}) == 5


@pytest.mark.parametrize("request_, words", [
    (BuildRequest("l3", KernelConfig(), shape=FLASH), "nearest name: l2"),
    (BuildRequest("l1", KernelConfig(), "sm_90", FLASH), "sm_90a"),
    (BuildRequest("l1", KernelConfig(), shape=FLASH, flavour="checked"), "checked"),
    (BuildRequest("l1", KernelConfig(), "emulator", FLASH, flavour="fast"), "fast"),
    (BuildRequest("l1", KernelConfig()), "shape"),
    (BuildRequest("l1", KernelConfig(stages=8)), "shared-memory"),
    (BuildRequest("l1", KernelConfig(stages=5), shape=FLASH), "shared-memory"),
    (BuildRequest("l1", KernelConfig(policy="wide_n"), shape=FLASH), "policy-tile"),
    (BuildRequest("l1", KernelConfig(), shape=FLASH, options=("-arch=sm_90",)), "-arch=sm_90"),
], ids=lambda value: value if isinstance(value, str) else None)
def test_refused_before_anything_is_compiled(request_, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        build_many([BuildRequest("stub", KernelConfig(), shape=FLASH), request_])
    assert not (tmp_path / "cache").exists()


def test_built_then_found_then_changed(toy):
    first = build("stub", KernelConfig(), shape=FLASH)
    assert (first.hit, first.config.stages) == (False, 4)
    assert first.smem_bytes == smem_bytes(first.config, FLASH, 8) <= SMEM_LIMIT
    assert first.path.read_bytes()[:4] == b"\x7fELF" and first.resources.registers == 168
    assert first.manifest["build_host"]["name"] and first.manifest["compiler"].startswith("nvrtc")
    again = build("stub", KernelConfig(lag=3), shape=FLASH)  # lag is a run-time value: the same binary serves
    assert again.hit and again.key == first.key and again.config.lag == 3 and again.resources == first.resources
    (toy / "layout" / "unreached.cuh").write_text("int x;\n")
    (toy / "hw" / "emu" / "device.cuh").write_text("int changed;\n")
    assert build("stub", KernelConfig(), shape=FLASH).hit
    header = toy / "layout" / "params.cuh"
    header.write_text(header.read_text().replace("kAbiVersion = ", "kAbiVersion = 1000 + "))
    changed = build("stub", KernelConfig(), shape=FLASH)
    assert not changed.hit and changed.key != first.key and changed.source_digest != first.source_digest


def test_the_key_holds_configuration_and_options(toy):
    keys = [build("stub", KernelConfig(stages=s), shape=FLASH).key for s in (2, 3)]
    keys.append(build("stub", KernelConfig(stages=2), shape=FLASH, options=("-DX",)).key)
    assert len(set(keys)) == 3


def test_spills_fail_with_the_numbers_and_can_be_allowed(toy):
    with pytest.raises(BuildFailed, match="spill stores.*math0 224") as caught:
        build("l2", KernelConfig(), shape=FLASH)
    assert caught.value.exit_code == ExitCode.BUILD_FAILED
    kernel = build("l2", KernelConfig(), shape=FLASH, allow_spills=True)
    assert kernel.hit and kernel.resources.spills > 0


def test_one_failure_does_not_stop_the_others(toy):
    seen = []
    outcomes = build_many([BuildRequest(p, KernelConfig(), shape=FLASH) for p in ("l2", "stub")], jobs=2, on_done=seen.append)
    assert [o.request.phase for o in outcomes] == ["l2", "stub"] and len(seen) == 2
    assert isinstance(outcomes[0].error, BuildFailed) and outcomes[0].kernel is not None
    assert outcomes[1].error is None and outcomes[1].result().phase == "stub"


def test_a_syntax_error_names_the_repository_file(toy):
    header = toy / "layout" / "params.cuh"
    header.write_text(header.read_text() + "\nint broken = nothing_here;\n")
    with pytest.raises(BuildFailed, match=r"kernels/layout/params.cuh\(\d+\)") as caught:
        build("stub", KernelConfig(), shape=FLASH)
    assert "nothing_here" in caught.value.log


@pytest.mark.parametrize("kind, strict, refused", [("setmaxnreg", False, True), ("serialized", False, False), ("serialized", True, True),
                                                   ("injected-wait", True, False), ("warning", True, False)])
def test_which_notes_make_a_binary_unfit(toy, kind, strict, refused):
    kernel = build("stub", KernelConfig(), shape=FLASH)
    noted = replace(kernel, resources=replace(kernel.resources, notes=(Note(kind, "C7500", "some words"),)))
    assert bool(noted.problems(strict)) == refused
    assert isinstance(noted.resources, Resources) and not kernel.problems(strict=True)


def test_three_processes_cold_compile_once(toy, tmp_path):
    code = ("import sys; from pathlib import Path; from megamoe_cli.compile import driver; from megamoe_cli.config import KernelConfig\n"
            "from megamoe_cli.shapes import NAMED_SHAPES\n"
            "driver.kernels_dir = lambda: Path(sys.argv[1])\n"
            "print(driver.build('stub', KernelConfig(), shape=NAMED_SHAPES['flash']).hit)")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(toy)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert sorted(answers) == ["False", "True", "True"]
    assert BuildCache().statistics()["misses"] == 1
