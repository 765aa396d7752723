"""Builds the host-includable kernel headers into a shared object (once per process)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@functools.cache
def library() -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no host C++ compiler")
    out = Path(tempfile.mkdtemp(prefix="megamoe-host-")) / "host_kernel.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-I", str(HERE.parents[1] / "kernels"),
                    str(HERE / "host_kernel.cpp"), "-o", str(out)], check=True)
    lib = ctypes.CDLL(str(out))
    lib.walk_stream.restype = lib.shared_bytes.restype = ctypes.c_uint32
    lib.buffer_offset.restype = ctypes.c_uint64
    return lib
