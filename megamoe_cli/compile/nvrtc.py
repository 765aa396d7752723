"""sm_90a cubins from NVRTC through CuPy's binding. Needs no GPU and no driver.

The compiler runs in a child process (``python -m megamoe_cli.compile.nvrtc``): the caller never imports
CuPy, several phases compile side by side, and a compiler that crashes or hangs takes nothing with it.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from megamoe_cli.compile.child import run_child
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit, UsageError

ARCH = "sm_90a"
OPTIONS = (f"--gpu-architecture={ARCH}", "-std=c++17", "--ptxas-options=-v", "-lineinfo", "-default-device")
_ARCH_FLAGS = re.compile(r"^-{1,2}(arch|gpu-architecture|gpu-code|code|gencode|generate-code)\b")
_INSTALL = "install the packages cupy-cuda13x and nvidia-cuda-nvrtc"


@dataclass(frozen=True)
class Compiler:
    """The NVRTC in use. ``fingerprint`` goes into cache keys; it does not depend on where the library lies."""

    version: tuple[int, int]
    library: str
    fingerprint: str


def check_options(extra: tuple[str, ...]) -> tuple[str, ...]:
    """User options as given; one that names an architecture is refused, because the build owns it."""
    for option in extra:
        if _ARCH_FLAGS.match(option):
            raise UsageError(f"compiler option {option!r} names an architecture; the build always compiles for {ARCH}",
                             hint="leave it out; --target chooses between sm_90a and emulator", rule="architecture")
    return extra


def find_compiler() -> Compiler:
    """The NVRTC library CuPy will load, found without importing CuPy where possible (0.1 s instead of 0.7 s).

    EnvironmentUnfit, naming the packages, when there is none.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError:
        answer = _ask_child({"task": "version"}, timeout_s=60)
        return _compiler(tuple(answer["version"]), answer["library"])
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        library = ctypes.CDLL(path)
    except Exception as error:  # pathfinder has exceptions of its own for each way not to find it
        raise EnvironmentUnfit(f"NVRTC cannot be loaded: {' '.join(str(error).split())[:200]}", hint=_INSTALL) from None
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        raise EnvironmentUnfit(f"{path} does not answer nvrtcVersion", hint=_INSTALL)
    return _compiler((major.value, minor.value), path)


def _compiler(version: tuple[int, int], library: str) -> Compiler:
    # Patch releases share major.minor but not their size.
    size = os.path.getsize(library) if library and os.path.isfile(library) else 0
    return Compiler(version, library, f"nvrtc {version[0]}.{version[1]} size {size}")


def compile_cubin(text: str, headers: dict[str, str], *, extra: tuple[str, ...] = (), name: str = "mega_moe.cu",
                  timeout_s: float = 300) -> tuple[bytes, str]:
    """Compiles ``text`` with in-memory ``headers`` (include name -> text). Returns (cubin, log).

    The cubin is checked to be a whole sm_90a ELF image. BuildFailed carries the compiler's log.
    """
    options = OPTIONS + check_options(extra)
    answer = _ask_child({"task": "compile", "text": text, "headers": headers, "options": options, "name": name}, timeout_s)
    if not answer["ok"]:
        raise BuildFailed(_first_error(answer["log"]) or f"NVRTC failed: {answer['error']}", log=answer["log"])
    return check_cubin(base64.b64decode(answer["cubin"])), answer["log"]


def check_cubin(data: bytes) -> bytes:
    """The whole ELF image; BuildFailed when it is something else, is cut short, or is not for sm_90a.

    CuPy drops the last byte of every cubin (it strips the terminating zero that PTX text has); that byte
    belongs to the last program header and is restored here.
    """
    if data[:4] != b"\x7fELF":
        kind = "PTX text" if b".version" in data[:4096] else "no ELF image"
        raise BuildFailed(f"the compiler returned {kind} instead of a cubin")
    if len(data) < 64:
        raise BuildFailed("the cubin is cut short: no ELF header")
    phoff, shoff, flags, _, phsize, phnum, shsize, shnum = struct.unpack_from("<QQIHHHHH", data, 32)
    size = max(phoff + phsize * phnum, shoff + shsize * shnum)
    if len(data) == size - 1:
        data += b"\0"
    if len(data) < size:
        raise BuildFailed(f"the cubin is cut short: {len(data)} of {size} bytes")
    # ELF ABI 8 keeps the SM number in bits 8-15, older ones in bits 0-7; the `a` shows only in the notes.
    sm = (flags >> 8 if data[8] >= 8 else flags) & 0xFF
    names = set(re.findall(rb"sm_[0-9]+[af]?", data))
    if sm != 90 or ARCH.encode() not in names:
        raise BuildFailed(f"the cubin is for sm_{sm} ({', '.join(sorted(n.decode() for n in names)) or 'unnamed'}), not {ARCH}")
    return data


def _first_error(log: str) -> str:
    for line in log.splitlines():
        if "error" in line or line.startswith("ptxas fatal"):
            return " ".join(line.split())
    return ""


def _ask_child(job: dict, timeout_s: float) -> dict:
    result = run_child([sys.executable, "-m", "megamoe_cli.compile.nvrtc"], json.dumps(job).encode(), timeout_s)
    try:
        answer = json.loads(result.stdout)
    except ValueError:
        raise BuildFailed(f"the NVRTC process {result.ending}", log=result.stderr.decode(errors="replace")) from None
    if "unfit" in answer:
        raise EnvironmentUnfit(answer["unfit"], hint=_INSTALL)
    return answer


def _serve(job: dict) -> dict:
    """In the child: one job, one answer."""
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except Exception as error:
        return {"unfit": f"NVRTC through CuPy does not work: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"}
    if job["task"] == "version":
        return {"version": list(version), "library": _loaded_library()}
    headers = job["headers"]
    program = nvrtc.createProgram(job["text"], job["name"], tuple(t.encode() for t in headers.values()),
                                  tuple(n.encode() for n in headers))
    try:
        nvrtc.compileProgram(program, tuple(job["options"]))
    except nvrtc.NVRTCError as error:
        return {"ok": False, "error": str(error), "log": nvrtc.getProgramLog(program)}
    return {"ok": True, "log": nvrtc.getProgramLog(program), "cubin": base64.b64encode(nvrtc.getCUBIN(program)).decode()}


def _loaded_library() -> str:
    """Path of the libnvrtc this process has mapped, or ''."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if re.search(r"/libnvrtc\.so", path):
            return path
    return ""


def _main() -> None:
    from megamoe_cli.processes import die_with_parent

    die_with_parent()
    stdout = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not mix with the answer
    answer = json.dumps(_serve(json.load(sys.stdin)))
    with os.fdopen(stdout, "w") as stream:
        stream.write(answer)


if __name__ == "__main__":
    _main()
