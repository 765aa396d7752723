"""Host-compiler builds for the emulator: its runtime library, and one kernel library per variant.

Flavours of a kernel library: ``plain``; ``checked`` adds the compiler's thread-sanitizer hooks, which the
runtime defines itself (libtsan is never linked), so that every plain load and store is seen.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megamoe_cli.compile.child import run_child
from megamoe_cli.compile.parallel import default_jobs, map_parallel
from megamoe_cli.compile.sources import PREFIX, SourceSet
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit

FLAVOURS = ("plain", "checked")
RUNTIME_SONAME = "libmegamoe_emu.so"
# -g1: line tables, from which the emulator's reports take file and line. kernels/hw/emu/c_api.h gives the
# reasons for the others; no contraction, so that the host rounds as the device does.
RUNTIME_FLAGS = ("-std=c++17", "-O3", "-g1", "-fPIC", "-pthread", "-I", PREFIX)
RUNTIME_LINK = ("-shared", "-pthread", f"-Wl,-soname,{RUNTIME_SONAME}")
RUNTIME_LIBRARIES = ("-ldl",)
KERNEL_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-DMEGAMOE_EMULATOR", "-I", PREFIX)
FLAVOUR_FLAGS = {"plain": (), "checked": ("-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0")}
KERNEL_LINK = ("-shared", "-Wl,--no-undefined")


@dataclass(frozen=True)
class HostCompiler:
    """``command``: program and leading arguments; ``version``: its first line about itself, and the machine."""

    command: tuple[str, ...]
    version: str


@lru_cache(maxsize=1)
def find_host_compiler() -> HostCompiler:
    """``CXX``, else ``g++`` in PATH. EnvironmentUnfit names the package when there is none."""
    named = os.environ.get("CXX", "").strip()
    command = tuple(shlex.split(named)) if named else ("g++",)
    program = shutil.which(command[0])
    if program is None:
        what = f"CXX={named} does not exist" if named else "there is no g++ in PATH"
        raise EnvironmentUnfit(f"the emulator needs a C++17 compiler, and {what}",
                               hint="install the package g++ (Debian and Ubuntu: apt-get install g++), or set CXX")
    answer = run_child([program, *command[1:], "--version"], timeout_s=30)
    if answer.code != 0:
        raise EnvironmentUnfit(f"the C++ compiler {' '.join(command)} {answer.ending} when asked for its version",
                               hint="install the package g++, or set CXX to a working compiler")
    first = answer.stdout.decode(errors="replace").splitlines()[0].strip()
    return HostCompiler((program, *command[1:]), f"{first} {platform.machine()}")


def compile_kernel(compiler: HostCompiler, text: str, sources: SourceSet, flavour: str, runtime: Path,
                   timeout_s: float = 300) -> tuple[bytes, str]:
    """The kernel library of one variant; returns (shared library, compiler messages).

    ``runtime`` answers its undefined names at link time; it is found again by its soname, so it must be loaded first.
    """
    return _compile_and_link(compiler, {"mega_moe.cpp": text}, sources, (*KERNEL_FLAGS, *FLAVOUR_FLAGS[flavour]), KERNEL_LINK,
                             (str(runtime),), timeout_s)


def compile_runtime(compiler: HostCompiler, units: list[str], sources: SourceSet, timeout_s: float = 300) -> tuple[bytes, str]:
    """The runtime library from ``units`` (names of .cpp files in ``sources``)."""
    return _compile_and_link(compiler, {f"{PREFIX}/{name}": None for name in units}, sources, RUNTIME_FLAGS, RUNTIME_LINK,
                             RUNTIME_LIBRARIES, timeout_s)


def _compile_and_link(compiler: HostCompiler, units: dict[str, str | None], sources: SourceSet, flags: tuple[str, ...],
                      link: tuple[str, ...], libraries: tuple[str, ...], timeout_s: float) -> tuple[bytes, str]:
    """Compiles exactly the bytes the cache key was made of, in a folder of their own, so that an edit in
    between cannot slip in and all paths in messages and line tables read ``kernels/...``."""
    with tempfile.TemporaryDirectory(prefix="megamoe-build-") as folder:
        for name, text in sources.files.items():
            path = Path(folder, PREFIX, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for unit, own in units.items():
            if own is not None:
                Path(folder, unit).write_text(own, encoding="utf-8")
        fixed = [*flags, f"-ffile-prefix-map={folder}=."]
        commands = {f"{n}.o": [*fixed, "-c", unit, "-o", f"{n}.o"] for n, unit in enumerate(units)}
        messages = map_parallel(lambda command: _run(compiler, command, folder, timeout_s), list(commands.values()), default_jobs())
        messages.append(_run(compiler, [*link, *commands, *libraries, "-o", "out.so"], folder, timeout_s))
        return Path(folder, "out.so").read_bytes(), "".join(messages)


def _run(compiler: HostCompiler, arguments: list[str], folder: str, timeout_s: float) -> str:
    ended = run_child([*compiler.command, *arguments], timeout_s=timeout_s, cwd=folder)
    log = (ended.stdout + ended.stderr).decode(errors="replace")
    if ended.code != 0:
        first = next((line for line in log.splitlines() if "error" in line or "undefined" in line), "")
        raise BuildFailed(" ".join(first.split()) or f"the C++ compiler {ended.ending}", log=log)
    return log
