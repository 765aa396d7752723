"""Which backend is picked, and the driver calls behind the choice (against a stand-in for libcuda)."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megamoe_cli.backends import driver as cuda_driver
from megamoe_cli.backends.driver import Driver, DriverError, check_map
from megamoe_cli.backends.picking import pick
from megamoe_cli.errors import EnvironmentUnfit, MegamoeError, UsageError
from tests.unit.fake_cuda import H200

A100 = replace(H200, name="NVIDIA A100", cc=(8, 0))


@pytest.mark.parametrize(
    ("name", "ranks", "gpus", "expected", "reason"),
    [
        ("auto", 8, [], "emulator", "no GPU is visible"),
        ("auto", 8, [A100], "emulator", "only NVIDIA A100 (sm_80)"),
        ("auto", 8, [H200], "virtual", "8 ranks share 1xNVIDIA H200"),
        ("auto", 1, [H200], "virtual", "one rank on 1xNVIDIA H200"),
        ("auto", 1, [H200] * 8, "virtual", "one rank on"),
        ("auto", 8, [H200] * 8, "nvlink", "one of 8 SM90 GPUs for each rank"),
        ("auto", 8, [H200] * 4, "virtual", "4 SM90 GPUs are fewer than 8 ranks"),
        ("emulator", 8, [H200], "emulator", "asked for"),
        ("virtual", 8, [A100, H200], "virtual", "asked for"),
        ("processes", 2, [H200], "processes", "asked for"),
        ("nvlink", 2, [H200] * 2, "nvlink", "asked for"),
    ],
)
def test_pick(name: str, ranks: int, gpus: list, expected: str, reason: str) -> None:
    choice = pick(name, ranks, gpus)
    assert choice.name == expected and reason in choice.reason
    assert choice.text.startswith(f"backend: {expected} ({ranks} rank")


def test_what_this_machine_cannot_do_is_exit_3() -> None:
    for name in ("virtual", "nvlink", "processes"):
        with pytest.raises(EnvironmentUnfit, match="needs an SM90 GPU and no GPU is visible") as caught:
            pick(name, 2, [])
        assert caught.value.exit_code == 3 and "--backend emulator" in caught.value.hint
    with pytest.raises(EnvironmentUnfit, match="8 ranks, 2 SM90 GPUs") as caught:
        pick("nvlink", 8, [H200] * 2)
    assert "--backend virtual" in caught.value.hint


def test_bad_requests_are_exit_2() -> None:
    with pytest.raises(UsageError, match="unknown backend 'emulater'; nearest name: emulator"):
        pick("emulater", 8, [])
    for ranks in (0, 33):
        with pytest.raises(UsageError, match=f"ranks={ranks} is outside 1..32"):
            pick("auto", ranks, [])


def test_unknown_options_of_a_backend() -> None:
    with pytest.raises(UsageError, match="unknown emulator option 'sed'; nearest name: seed"):
        pick("emulator", 2).open(sed=1)


def test_picking_imports_no_torch_and_no_cupy() -> None:
    code = ("import sys; from megamoe_cli.backends import pick; pick('emulator', 2); "
            "sys.exit(bool({'torch', 'cupy', 'numpy'} & set(sys.modules)))")  # fmt: skip
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=root)


def test_the_environment_is_set_once_and_respects_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16")
    cuda_driver.prepare_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16" and os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert not cuda_driver.has_few_queues()


_LIBCUDA = r"""
#include <cstdint>
#include <cstring>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* n) { *n = 2; return 0; }
int cuDeviceGet(int* d, int i) { *d = 40 + i; return 0; }
int cuDeviceGetName(char* s, int, int d) { strcpy(s, d == 40 ? "GPU A" : "GPU B"); return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) {
    *v = a == 16 ? 132 : a == 75 ? (d == 40 ? 9 : 8) : a == 76 ? 0 : a == 97 ? 232448 : -1;
    return 0;
}
int cuGetErrorName(int c, const char** s) { *s = "CUDA_ERROR_INVALID_VALUE"; return c != 1; }
int cuTensorMapEncodeTiled(void* out, int type, uint32_t rank, void* base, const uint64_t* dims, const uint64_t* strides,
                           const uint32_t* box, const uint32_t* steps, int inter, int swizzle, int l2, int oob) {
    if (reinterpret_cast<uintptr_t>(out) % 64 || rank != 2) return 1;
    const uint64_t words[] = {uint64_t(type), uint64_t(base), dims[0], dims[1], strides[0], box[0], box[1], steps[0], steps[1],
                              uint64_t(inter), uint64_t(swizzle), uint64_t(l2), uint64_t(oob), 0, 0, 77};
    memcpy(out, words, 128);
    return base == nullptr;
}
struct Attribute { int id, pad; uint32_t value[16]; };
struct Config { unsigned grid[3], block[3], smem; void* stream; const Attribute* attributes; unsigned count; };
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* n, void* f, int threads, size_t smem) {
    *n = f == reinterpret_cast<void*>(5) && threads == 384 && smem == 200000 ? 1 : 9;
    return 0;
}
int cuOccupancyMaxActiveClusters(int* n, void* f, const Config* c) {
    *n = c->grid[0] * 100000 + c->block[0] * 100 + c->attributes->id * 10 + c->attributes->value[0] + (c->count != 1) + (c->smem != 7)
         + (c->stream != nullptr) + (sizeof(Config) != 56);
    return 0;
}
int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
    *reinterpret_cast<uint32_t*>(address) = value + 10 * flags + (stream == reinterpret_cast<void*>(3) ? 100 : 0);
    return 0;
}
}
"""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("libcuda")
    (folder / "cuda.cpp").write_text(_LIBCUDA)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(folder / "libcuda.so"), str(folder / "cuda.cpp")], check=True, timeout=60)
    return Driver(ctypes.CDLL(str(folder / "libcuda.so")))


def test_listing_gpus(fake: Driver) -> None:
    a, b = fake.gpus()
    assert (a.index, a.name, a.cc, a.sms, a.smem_optin, a.is_sm90) == (0, "GPU A", (9, 0), 132, 232448, True)
    assert (b.name, b.cc, b.is_sm90) == ("GPU B", (8, 0), False)


def test_tensor_map_arguments(fake: Driver) -> None:
    words = struct.unpack("<16Q", fake.encode_tensor_map(0x7F0012340000, 300, 256, 64, 128))
    # UINT8, base, extents and pitch with the contiguous dimension first, box, steps, no interleave, 128B swizzle, 256B, zeros
    assert words == (0, 0x7F0012340000, 256, 300, 256, 128, 64, 1, 1, 0, 3, 3, 0, 0, 0, 77)
    with pytest.raises(DriverError, match=r"cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        fake.encode_tensor_map(0, 300, 256, 64, 128)


def test_constants_agree_with_cuda_bindings() -> None:
    cu = pytest.importorskip("cuda.bindings.driver")
    assert int(cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8) == 0
    assert int(cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B) == 3
    assert int(cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B) == 3
    assert int(cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) == 4
    assert int(cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == 0
    assert int(cu.CUresult.CUDA_ERROR_NOT_READY) == cuda_driver.NOT_READY
    a = cu.CUdevice_attribute
    assert cuda_driver._ATTRIBUTES == {
        "sms": int(a.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), "cc_major": int(a.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        "cc_minor": int(a.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        "smem_optin": int(a.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
    }  # fmt: skip


def test_occupancy_and_gate(fake: Driver) -> None:
    assert fake.resident_blocks(5, 384, 200_000) == 1
    assert fake.resident_clusters(5, 2, 384, 7, grid=16) == 16 * 100000 + 384 * 100 + 42
    word = ctypes.c_uint32(0)
    fake.wait_value(3, ctypes.addressof(word), 1)
    assert word.value == 101


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((8, 4, 256, 64, 128), "16 bytes"), ((16, 4, 200, 64, 128), "16 bytes"), ((16, 4, 256, 257, 128), "256 rows"),
     ((16, 4, 256, 64, 256), "128 bytes"), ((16, 0, 256, 64, 128), "32-bit extents")])  # fmt: skip
def test_what_the_tma_unit_cannot_do(arguments: tuple, text: str) -> None:
    with pytest.raises(MegamoeError, match=text):
        check_map(*arguments)
