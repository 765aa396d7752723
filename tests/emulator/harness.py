"""Builds small kernels for the emulator with nothing but g++ (cached by content), and runs them on numpy buffers."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from megamoe_cli.backends.emu_binding import EmuKernel, EmuOptions, EmuProgram, EmuReport, EmuRuntime
from megamoe_cli.compile import build_runtime
from megamoe_cli.compile.sources import closure

ROOT = Path(__file__).resolve().parents[2]
EMU = ROOT / "kernels" / "hw" / "emu"
CACHE = Path(tempfile.gettempdir()) / f"megamoe-emulator-tests-{os.getuid()}"
COMPILE = ("g++", "-std=c++17", "-g1", "-fPIC", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-strict-aliasing", "-I", str(ROOT / "kernels"))
TSAN = ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")

PRELUDE = """
#include "hw/hw.cuh"
using namespace megamoe;
"""


def _digest(text: str, *parts: str) -> str:
    """Of the text and of all kernel sources that it includes."""
    return hashlib.sha256("\0".join([text, *parts, closure(text, ROOT / "kernels", emulator=True).digest]).encode()).hexdigest()[:20]


def _gcc(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr


@functools.cache
def runtime() -> EmuRuntime:
    """The product's own build of it: a process can hold only one."""
    return EmuRuntime(build_runtime())


@functools.cache
def build(source: str, checked: bool = False, *defines: str) -> EmuKernel:
    """``source`` defines a kernel named mega_moe with MM_KERNEL_ENTRY; hw.cuh is included and megamoe is open."""
    text = PRELUDE + source
    out = CACHE / f"kernel-{_digest(text, str(checked), *defines)}.so"
    machine = runtime()
    if not out.exists():
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder, "kernel.cpp")
            unit.write_text(text)
            flags = [*COMPILE, "-O2", "-DMEGAMOE_EMULATOR", *(f"-D{d}" for d in defines), *(TSAN if checked else ())]
            _gcc(*flags, "-c", str(unit), "-o", f"{folder}/kernel.o")
            CACHE.mkdir(parents=True, exist_ok=True)
            temporary = CACHE / f"{out.name}.{os.getpid()}"
            _gcc("g++", "-shared", "-Wl,--no-undefined", f"{folder}/kernel.o", str(machine.path), "-o", str(temporary))
            os.replace(temporary, out)
    return machine.kernel(out)


class Run:
    """A program with numpy buffers as regions. ``params(rank, ...)`` packs 64-bit words and tensor maps."""

    def __init__(self, ranks: int = 1) -> None:
        self.program: EmuProgram = runtime().program(ranks)
        self.ranks = ranks
        self._keep: list[object] = []

    def region(self, array: np.ndarray, rank: int = 0, name: str = "data", symmetric: bool = False, initialised: bool = True) -> int:
        self._keep.append(array)
        self.program.add_region(array.ctypes.data, array.nbytes, rank, name, symmetric, initialised)
        return array.ctypes.data

    def launch(self, kernel: EmuKernel, *words: int | bytes, rank: int = 0, grid: int = 1, smem: int = 16384,
               roles: tuple[str, ...] = ()) -> None:
        blob = b"".join(word if isinstance(word, bytes) else int(word).to_bytes(8, "little", signed=word < 0) for word in words)
        self.program.launch(rank, kernel, blob.ljust(kernel.params_bytes, b"\0"), grid, smem, roles)

    def run(self, **options: object) -> EmuReport:
        options.setdefault("wall_limit_s", 20.0)
        return self.program.run(EmuOptions(**options))


class _Image(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_uint64) for name in ("magic", "base", "rows", "cols", "row_stride_bytes")),
                *((name, ctypes.c_uint32) for name in ("box_rows", "box_cols", "elem_bytes", "swizzle")),
                ("pad", ctypes.c_uint64 * 9)]


def tensor_map(base: int, rows: int, cols: int, box_rows: int, box_cols: int = 128) -> bytes:
    return bytes(_Image(0x50414D524F534E54, base, rows, cols, cols, box_rows, box_cols, 1, 128))


def e4m3_values() -> np.ndarray:
    """The 256 values of e4m3 from its definition, not from the emulator's table."""
    values = np.empty(256)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[code] = np.nan if exponent == 15 and mantissa == 7 else -value if sign else value
    return values


def random_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38  # no NaN
    return codes
