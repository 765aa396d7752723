"""The launch ABI as Python sees it: ctypes mirrors of ``kernels/layout/params.cuh``. No torch.

A test compiles that header and compares every size and offset with these.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_float, c_uint8, c_uint32, c_uint64
from enum import IntEnum, IntFlag

from .layout import MAX_RANKS, NUM_REGIONS

ABI_VERSION = 2
TENSOR_MAP_BYTES = 128
PARAMS_ALIGNMENT = 64


class ParamFlags(IntFlag):
    NONE = 0
    FAST_MATH = 1
    HAS_CLAMP = 2
    WAVE_ORDER = 4
    HALVE_TAIL = 8


class FaultCode(IntEnum):
    NONE = 0
    WAIT_TIMEOUT = 1
    BAD_EXPERT_ID = 2
    ABI_MISMATCH = 3
    LOCAL_WAIT_TIMEOUT = 4


class WaitId(IntEnum):
    NONE = 0
    COUNT_BARRIER = 1
    COUNT_FLAG = 2
    L1_ARRIVAL = 3
    L2_ARRIVAL = 4
    DONE_BARRIER = 5
    DONE_FLAG = 6
    STAGE_FULL = 7
    STAGE_EMPTY = 8
    TILE_FULL = 9
    TILE_EMPTY = 10
    TABLES = 11
    PULL = 12
    POOL_FREE = 13


# What is waited for, said with the record's index.
_WAITED_FOR = {
    WaitId.COUNT_BARRIER: "the expert counts of this rank's CTAs",
    WaitId.COUNT_FLAG: "the expert counts of rank {index}",
    WaitId.L1_ARRIVAL: "the rows of pool block {index} to arrive",
    WaitId.L2_ARRIVAL: "the L1 tiles of pool block {index}",
    WaitId.DONE_BARRIER: "this rank's CTAs to write their combine slots",
    WaitId.DONE_FLAG: "rank {index} to write its combine slots",
    WaitId.STAGE_FULL: "pipeline stage {index} to fill",
    WaitId.STAGE_EMPTY: "pipeline stage {index} to drain",
    WaitId.TILE_FULL: "the scheduler to publish tile slot {index}",
    WaitId.TILE_EMPTY: "tile slot {index} to be handed back",
    WaitId.TABLES: "the expert tables of this CTA",
    WaitId.PULL: "row staging buffer {index} to fill",
    WaitId.POOL_FREE: "the L2 tiles of pool rows 128 * {index} and on, whose places it needs",
}


class TensorMap(ctypes.Structure):
    """Opaque 128 bytes: a CUtensorMap, or the emulator's image of one. Alignment 64 is kept by its place in KernelParams."""

    _fields_ = [("bytes", c_uint8 * TENSOR_MAP_BYTES)]


class KernelParams(ctypes.Structure):
    """One launch on one rank; field meanings, shapes and dtypes are in params.cuh. Addresses are plain integers."""

    _fields_ = [
        ("l1_acts", TensorMap), ("l2_acts", TensorMap),
        ("peer_base", c_uint64 * MAX_RANKS),
        ("region", c_uint64 * NUM_REGIONS),
        ("y", c_uint64), ("w13", c_uint64), ("w2", c_uint64), ("w13_sf", c_uint64), ("w2_sf", c_uint64), ("stats", c_uint64), ("l1_raw", c_uint64),
        ("fault", c_uint64), ("report", c_uint64), ("timeout_ns", c_uint64),
        ("local_base", c_uint64),
        ("abi_version", c_uint32), ("params_bytes", c_uint32),
        ("rank", c_uint32), ("num_ranks", c_uint32), ("num_tokens", c_uint32), ("capacity", c_uint32),
        ("hidden", c_uint32), ("intermediate", c_uint32), ("num_experts", c_uint32), ("topk", c_uint32),
        ("pool_rows", c_uint32), ("dispatch_ctas", c_uint32), ("lag", c_uint32), ("unit_blocks", c_uint32),
        ("flags", c_uint32), ("clamp", c_float), ("smem_bytes", c_uint32), ("prefetch_blocks", c_uint32), ("ring_rows", c_uint32),
        ("stagger", c_uint32), ("ahead", c_uint32), ("reserved", c_uint32 * 11),
    ]  # fmt: skip

    def set_tensor_map(self, name: str, image: bytes) -> None:
        """Stores the 128 bytes of an encoded tensor map in field ``name`` (l1_acts, l2_acts)."""
        if len(image) != TENSOR_MAP_BYTES:
            raise ValueError(f"a tensor map is {TENSOR_MAP_BYTES} bytes, got {len(image)}")
        field = getattr(self, name)
        if not isinstance(field, TensorMap):
            raise ValueError(f"{name} is not a tensor map")
        ctypes.memmove(field.bytes, image, TENSOR_MAP_BYTES)

    def tensor_map(self, name: str) -> bytes:
        return bytes(getattr(self, name).bytes)

    def pack(self) -> bytes:
        """The blob the kernel takes by value: ``sizeof(KernelParams)`` bytes."""
        return bytes(self)


PARAMS_BYTES = ctypes.sizeof(KernelParams)
if PARAMS_BYTES % PARAMS_ALIGNMENT:  # the device struct is alignas(64); ctypes would pad differently
    raise AssertionError(f"KernelParams packs to {PARAMS_BYTES} bytes, not a multiple of {PARAMS_ALIGNMENT}")


def _signed(word: int) -> int:
    return word - (1 << 32) if word & 0x80000000 else word


def _duration(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns} ns"


class FaultRecord(ctypes.Structure):
    """Who waited, on what, since when: 64 bytes the device writes to host-visible memory, ``code`` last."""

    _fields_ = [
        ("code", c_uint32), ("wait", c_uint32), ("rank", c_uint32), ("cta", c_uint32), ("warp", c_uint32),
        ("index", c_uint32), ("observed", c_uint32), ("expected", c_uint32), ("epoch", c_uint32),
        ("reserved", c_uint32), ("waited_ns", c_uint64), ("at_ns", c_uint64), ("pad", c_uint64),
    ]  # fmt: skip

    @classmethod
    def from_bytes(cls, data: bytes) -> FaultRecord:
        if len(data) != FAULT_BYTES:
            raise ValueError(f"a fault record is {FAULT_BYTES} bytes, got {len(data)}")
        return cls.from_buffer_copy(data)

    def __bool__(self) -> bool:
        return self.code != FaultCode.NONE

    @property
    def code_name(self) -> str:
        return FaultCode(self.code).name.lower() if self.code in FaultCode._value2member_map_ else f"code {self.code}"

    @property
    def wait_name(self) -> str:
        return WaitId(self.wait).name.lower() if self.wait in WaitId._value2member_map_ else f"wait {self.wait}"

    def describe(self, topk: int | None = None) -> str:
        """One readable sentence. ``topk`` splits a bad id's position into token and slot."""
        where = f"rank {self.rank}, CTA {self.cta}, warp {self.warp}, launch {self.epoch}"
        if self.code == FaultCode.NONE:
            return "no fault"
        if self.code == FaultCode.BAD_EXPERT_ID:
            at = f"token {self.index // topk} slot {self.index % topk}" if topk else f"token*topk+slot {self.index}"
            return (f"{where}: {at} names expert {_signed(self.observed)}, but experts are 0..{self.expected - 1} "
                    f"(or -1 for a masked slot); the slot was dropped")
        if self.code == FaultCode.ABI_MISMATCH:
            return (f"{where}: the kernel and the host disagree on launch parameter {self.index}: "
                    f"host {self.observed}, kernel {self.expected}; rebuild the kernel")
        if self.code in (FaultCode.WAIT_TIMEOUT, FaultCode.LOCAL_WAIT_TIMEOUT):
            known = self.wait in WaitId._value2member_map_
            goal = _WAITED_FOR.get(WaitId(self.wait) if known else WaitId.NONE, f"{self.wait_name} [{self.index}]")
            goal = goal.format(index=self.index)
            if self.code == FaultCode.LOCAL_WAIT_TIMEOUT:
                # An mbarrier has no readable count: observed and expected are phase parities; the kernel trapped.
                return (f"rank {self.rank}, CTA {self.cta}, warp {self.warp}: waited {_duration(self.waited_ns)} for "
                        f"{goal} (phase parity {self.expected} never completed) and trapped")
            return f"{where}: waited {_duration(self.waited_ns)} for {goal}: saw {self.observed}, expected {self.expected}"
        return f"{where}: unknown fault code {self.code} (wait {self.wait}, index {self.index})"

    def to_dict(self) -> dict:
        names = ("rank", "cta", "warp", "index", "observed", "expected", "epoch", "waited_ns", "at_ns")
        return {"code": self.code_name, "wait": self.wait_name, **{n: getattr(self, n) for n in names},
                "text": self.describe()}


FAULT_BYTES = ctypes.sizeof(FaultRecord)


# The emulator's content of a TensorMap, in the order docs/internals.md lists it.
_IMAGE = struct.Struct("<QQQQQIIII")
IMAGE_MAGIC = 0x50414D524F534E54  # "TNSORMAP" in memory: emu::TensorMapImage::kMagic


def pack_tensor_map_image(base: int, rows: int, cols: int, row_stride_bytes: int, box_rows: int, box_cols: int,
                          elem_bytes: int = 1, swizzle: int = 128, magic: int = IMAGE_MAGIC) -> bytes:
    """TensorMapImage of the emulator, zero-padded to 128 bytes."""
    image = _IMAGE.pack(magic, base, rows, cols, row_stride_bytes, box_rows, box_cols, elem_bytes, swizzle)
    return image.ljust(TENSOR_MAP_BYTES, b"\0")
