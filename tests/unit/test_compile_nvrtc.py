"""NVRTC: cubins that are whole and for sm_90a, readable failures, and every machine wrapper compiles."""

import re
import struct
import sys

import pytest

from megamoe_cli.compile import nvrtc
from megamoe_cli.compile.child import run_child
from megamoe_cli.compile.ptxas import parse_log
from megamoe_cli.compile.sources import closure
from megamoe_cli.errors import BuildFailed, ExitCode, TimedOut, UsageError
from megamoe_cli.paths import kernels_dir
from tests.unit.hw_wrappers import KERNEL, WRAPPERS

TINY = 'extern "C" __global__ void __launch_bounds__(384, 1) mega_moe(float* p) { p[threadIdx.x] = 1; }\n'


def compile_with_hw(text, **options):
    sources = closure(text, kernels_dir(), emulator=False)
    return nvrtc.compile_cubin(sources.canonical(text), sources.flattened(), **options)


@pytest.fixture(scope="module")
def tiny():
    return nvrtc.compile_cubin(TINY, {})


def test_a_cubin_is_a_whole_elf_image_for_sm_90a(tiny):
    cubin, log = tiny
    phoff, shoff = struct.unpack_from("<QQ", cubin, 32)
    _, phsize, phnum, shsize, shnum = struct.unpack_from("<HHHHH", cubin, 52)
    assert cubin[:4] == b"\x7fELF" and len(cubin) == max(phoff + phsize * phnum, shoff + shsize * shnum)
    assert b"sm_90a" in cubin
    assert parse_log(log, "mega_moe").arch == "sm_90a"


def test_the_byte_cupy_drops_is_restored(tiny):
    assert nvrtc.check_cubin(tiny[0][:-1]) == tiny[0]


@pytest.mark.parametrize("damage, words", [
    (lambda c: c[:len(c) // 2], "cut short"), (lambda c: c[:20], "cut short"), (lambda c: b"", "no ELF"),
    (lambda c: b"//\n.version 9.0\n.target sm_90a\n", "PTX text"),
    (lambda c: c.replace(b"sm_90a", b"sm_90\0"), "not sm_90a"),
    (lambda c: c[:48] + struct.pack("<I", 0x6006402) + c[52:], "sm_100"),
], ids=["half", "header only", "empty", "ptx", "plain sm_90", "sm_100"])
def test_anything_else_is_refused(tiny, damage, words):
    with pytest.raises(BuildFailed, match=words):
        nvrtc.check_cubin(damage(tiny[0]))


def test_a_compile_error_names_file_and_line():
    with pytest.raises(BuildFailed) as caught:
        nvrtc.compile_cubin('#include "kernels/x.cuh"\n' + TINY, {"kernels/x.cuh": "int f() {\n return q; }\n"})
    assert "kernels/x.cuh(2)" in str(caught.value) and '"q" is undefined' in str(caught.value)
    assert caught.value.exit_code == ExitCode.BUILD_FAILED and "1 error detected" in caught.value.log


def test_a_link_error_is_a_build_failure():
    with pytest.raises(BuildFailed, match="Unresolved extern function"):
        nvrtc.compile_cubin("extern __device__ void f(float*);\n" + TINY.replace("p[threadIdx.x] = 1", "f(p)"), {})


@pytest.mark.parametrize("option", ["-arch=sm_90", "--gpu-architecture=sm_90a", "-gencode=x", "--gpu-architecture", "-code=sm_90"])
def test_the_architecture_is_ours(option):
    with pytest.raises(UsageError) as caught:
        nvrtc.compile_cubin(TINY, {}, extra=(option,))
    assert caught.value.rule == "architecture" and caught.value.exit_code == ExitCode.USAGE


def test_other_options_pass():
    cubin, _ = nvrtc.compile_cubin("#ifndef WANTED\n#error no macro\n#endif\n" + TINY, {}, extra=("-DWANTED",))
    assert cubin
    with pytest.raises(BuildFailed, match="no macro"):
        nvrtc.compile_cubin("#ifndef WANTED\n#error no macro\n#endif\n" + TINY, {})


def test_a_lost_register_plan_is_seen():
    """Without a minimum of CTAs in the launch bounds ptxas cannot know what a thread enters with."""
    text = ('#include "hw/hw.cuh"\nextern "C" __global__ void {} mega_moe(float* p) {{\n'
            "    if (megamoe::hw::warp_idx() < 4) megamoe::hw::reg_dealloc<40>();\n"
            "    else {{ megamoe::hw::reg_alloc<232>(); p[megamoe::hw::thread_idx()] = 1; }}\n}}\n")
    _, log = compile_with_hw(text.format(""))
    assert parse_log(log, "mega_moe").of_kind("setmaxnreg")[0].code == "C7508"
    _, log = compile_with_hw(text.format("__launch_bounds__(384, 1)"))
    assert not parse_log(log, "mega_moe").notes


def test_the_compiler_is_identified_without_its_path():
    found = nvrtc.find_compiler()
    assert found.version >= (12, 3) and found.library and "/" not in found.fingerprint
    # The child asks CuPy: both must mean the same library, or the cache key would lie.
    assert tuple(nvrtc._ask_child({"task": "version"}, 60)["version"]) == found.version


def test_a_child_that_hangs_is_stopped_and_one_that_dies_is_reported():
    with pytest.raises(TimedOut, match="0.5 s"):
        run_child([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.5)
    ended = run_child([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"])
    assert ended.ending == "died with SIGSEGV"


def test_the_drivers_own_cache_is_off():
    """A hit there comes without ptxas's log, so two checkouts on one machine would leave the second without a verdict."""
    assert run_child([sys.executable, "-c", "import os; print(os.environ['CUDA_CACHE_DISABLE'])"]).stdout == b"1\n"


def test_every_wrapper_is_called_by_the_probe_kernel():
    declared = set()
    for path in (kernels_dir() / "hw" / "sm90").glob("*.cuh"):
        for match in re.finditer(r"^(?:template <[^>]*>\s*)?MM_DEVICE [\w ]+?[ *&]+(\w+)\(", path.read_text(), re.M):
            declared.add(match[1])
    assert declared >= {"lane_idx", "wgmma_e4m3", "tma_load_2d", "mbarrier_try_wait", "ld_acquire", "dynamic_smem"}
    missing = {name for name in declared if not re.search(rf"\bhw::{name}\b", WRAPPERS)}
    assert not missing, f"add them to tests/unit/hw_wrappers.py: {sorted(missing)}"


def test_every_wrapper_compiles_for_sm_90a():
    cubin, log = compile_with_hw(KERNEL)
    found = parse_log(log, "mega_moe")
    assert cubin and not found.of_kind("setmaxnreg")
