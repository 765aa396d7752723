"""The few CUDA driver calls that are made directly (ctypes on libcuda): asking which GPUs there are without making a
context, encoding tensor maps, occupancy, and a gate that holds streams until all are filled. No torch, no cupy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

from ..abi import TENSOR_MAP_BYTES
from ..errors import EnvironmentUnfit, MegamoeError
from ..paths import cupy_env

# Must be in the environment before the context exists. With the default of 8 hardware queues a ninth stream can sit
# behind a kernel that spins for it; lazily loaded modules can wait for running kernels to end.
CONTEXT_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}

NOT_READY = 600  # CUDA_ERROR_NOT_READY
_ATTRIBUTES = {"sms": 16, "cc_major": 75, "cc_minor": 76, "smem_optin": 97}  # CUdevice_attribute
_WAIT_VALUE_GEQ = 0


@dataclass(frozen=True)
class Gpu:
    """A device as the driver lists it (CUDA_VISIBLE_DEVICES applies). ``smem_optin``: bytes a block may opt in to."""

    index: int
    name: str
    cc: tuple[int, int]
    sms: int
    smem_optin: int

    @property
    def is_sm90(self) -> bool:
        return self.cc == (9, 0)


class DriverError(MegamoeError):
    """A driver call failed; the message has its name and error name."""


class Driver:
    """libcuda, loaded and initialised. ``library`` replaces it in tests."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._lib = library or _load()
        self.call("cuInit", c_uint(0))

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            raise DriverError(f"{name} failed: {self.error_name(code)}")

    def has(self, name: str) -> bool:
        return hasattr(self._lib, name)

    def error_name(self, code: int) -> str:
        text = c_char_p()
        if self.has("cuGetErrorName") and self._lib.cuGetErrorName(c_int(code), byref(text)) == 0 and text.value:
            return f"{text.value.decode()} ({code})"
        return f"CUDA error {code}"

    def gpus(self) -> list[Gpu]:
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return [self._gpu(i) for i in range(count.value)]

    def _gpu(self, index: int) -> Gpu:
        device, name = c_int(), ctypes.create_string_buffer(96)
        self.call("cuDeviceGet", byref(device), c_int(index))
        self.call("cuDeviceGetName", name, c_int(len(name)), device)
        values = {}
        for key, attribute in _ATTRIBUTES.items():
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), c_int(attribute), device)
            values[key] = value.value
        return Gpu(index, name.value.decode(), (values["cc_major"], values["cc_minor"]), values["sms"], values["smem_optin"])

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        """As ``encode_tensor_map`` below, through this library."""
        storage = (ctypes.c_uint8 * (TENSOR_MAP_BYTES + 64))()
        at = -(-ctypes.addressof(storage) // 64) * 64  # the driver wants the 64-byte alignment of CUtensorMap
        self.call(
            "cuTensorMapEncodeTiled", c_void_p(at), c_int(0), c_uint32(2), c_void_p(address),  # 0: UINT8
            (c_uint64 * 2)(cols, rows), (c_uint64 * 1)(cols), (c_uint32 * 2)(box_cols, box_rows), (c_uint32 * 2)(1, 1),
            c_int(0), c_int(3), c_int(3), c_int(0),  # no interleave, 128B swizzle, L2 promotion 256B, zero fill
        )  # fmt: skip
        return ctypes.string_at(at, TENSOR_MAP_BYTES)

    def resident_blocks(self, function: int, threads: int, smem: int) -> int:
        """Blocks of a loaded kernel that fit on one SM."""
        blocks = c_int()
        self.call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), c_void_p(function), c_int(threads), c_size_t(smem))
        return blocks.value

    def resident_clusters(self, function: int, cluster: int, threads: int, smem: int, grid: int) -> int:
        """Clusters of a loaded kernel that fit on the device at once (GPCs with odd SM counts lose one)."""
        attribute = _LaunchAttribute(4)  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value[0:3] = [cluster, 1, 1]
        config = _LaunchConfig((c_uint * 3)(grid, 1, 1), (c_uint * 3)(threads, 1, 1), smem, None, ctypes.pointer(attribute), 1)
        clusters = c_int()
        self.call("cuOccupancyMaxActiveClusters", byref(clusters), c_void_p(function), byref(config))
        return clusters.value

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """Holds a stream until the 32-bit word at a device address is >= ``value``."""
        name = "cuStreamWaitValue32_v2" if self.has("cuStreamWaitValue32_v2") else "cuStreamWaitValue32"
        self.call(name, c_void_p(stream), c_uint64(address), c_uint32(value), c_uint(_WAIT_VALUE_GEQ))


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("pad", c_int), ("value", c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("smem", c_uint), ("stream", c_void_p),
                ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", c_uint)]  # fmt: skip


def _load() -> ctypes.CDLL:
    for name in ("libcuda.so.1", "libcuda.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise EnvironmentUnfit("no CUDA driver on this machine (libcuda.so.1 cannot be loaded)", hint="use --backend emulator")


def prepare_environment() -> None:
    """Sets what must be set before the CUDA context; values the user chose are kept."""
    global _few_queues
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ and _context_exists():
        _few_queues = True
    for key, value in CONTEXT_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    os.environ.update(cupy_env())


_few_queues = False


def has_few_queues() -> bool:
    """True when a context was made before the queue count was set: it has 8 hardware queues, and more streams than
    queues can deadlock."""
    return _few_queues


def _context_exists() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch and torch.cuda.is_initialized())


@lru_cache(maxsize=1)
def _driver() -> Driver:
    prepare_environment()
    return Driver()


def driver() -> Driver:
    """The process's driver; EnvironmentUnfit when there is none or it does not start."""
    try:
        return _driver()
    except DriverError as error:
        raise EnvironmentUnfit(f"the CUDA driver does not start: {error}", hint="use --backend emulator") from error


def visible_gpus() -> list[Gpu]:
    """All GPUs this process sees; empty without a driver or a device. Makes no context."""
    try:
        return driver().gpus()
    except EnvironmentUnfit:
        return []


def encode_tensor_map(address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
    """128 bytes of a CUtensorMap: row-major bytes (e4m3 as UINT8) [rows, cols], box [box_rows, box_cols].

    Through cuda-bindings where installed, else straight from libcuda. MegamoeError when the driver refuses.
    """
    check_map(address, rows, cols, box_rows, box_cols)
    try:
        from cuda.bindings import driver as cu
    except ImportError:
        return driver().encode_tensor_map(address, rows, cols, box_rows, box_cols)
    wide, word = cu.cuuint64_t, cu.cuuint32_t
    code, image = cu.cuTensorMapEncodeTiled(
        cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, address, [wide(cols), wide(rows)], [wide(cols)],
        [word(box_cols), word(box_rows)], [word(1), word(1)],
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if int(code):
        raise DriverError(f"cuTensorMapEncodeTiled failed: {code.name} for {rows}x{cols} bytes at {address:#x}, "
                          f"box {box_rows}x{box_cols}")  # fmt: skip
    return ctypes.string_at(int(image.getPtr()), TENSOR_MAP_BYTES)


def check_map(address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> None:
    """What the TMA unit demands; the driver would only say 'invalid value'."""
    if address % 16 or cols % 16:
        raise MegamoeError(f"tensor map: address {address:#x} and row pitch {cols} must be multiples of 16 bytes")
    if not (1 <= box_rows <= 256 and 16 <= box_cols <= 128 and box_cols % 16 == 0):
        raise MegamoeError(f"tensor map: box {box_rows}x{box_cols} is outside 256 rows x 128 bytes")
    if not (1 <= rows < 1 << 32 and 1 <= cols < 1 << 32):
        raise MegamoeError(f"tensor map: {rows}x{cols} does not fit in 32-bit extents")
