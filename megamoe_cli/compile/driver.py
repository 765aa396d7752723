"""Build one variant, or many side by side: resolve, look up, compile, check.

    build("l1", KernelConfig(), shape=parse_shape("flash"), ranks=8) -> BuiltKernel
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from megamoe_cli.compile import emu_build, nvrtc, prebuilt, sass
from megamoe_cli.compile.artifact import BuiltKernel, provenance
from megamoe_cli.compile.cache import BuildCache, Entry, key_of
from megamoe_cli.compile.entry import KERNEL_NAME, check_phase, entry_text
from megamoe_cli.compile.parallel import default_jobs, map_parallel
from megamoe_cli.compile.ptxas import Resources, parse_log
from megamoe_cli.compile.sources import SourceSet, closure, digest_of
from megamoe_cli.config import KernelConfig, require, resolve
from megamoe_cli.errors import BuildFailed, MegamoeError, UsageError
from megamoe_cli.layout import smem_bytes
from megamoe_cli.paths import kernels_dir
from megamoe_cli.shapes import Shape

TARGETS = ("sm_90a", "emulator")
_compiler_lock = Lock()


@dataclass(frozen=True)
class BuildRequest:
    """One variant to build. ``shape`` and ``ranks`` settle automatic stages and the shared-memory size."""

    phase: str
    config: KernelConfig
    target: str = "sm_90a"
    shape: Shape | None = None
    ranks: int = 8
    flavour: str = "plain"
    force: bool = False
    allow_spills: bool = False
    strict: bool = False
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What became of a request: ``kernel`` or ``error``; a kernel that was built but is unfit has both."""

    request: BuildRequest
    kernel: BuiltKernel | None
    error: MegamoeError | None

    def result(self) -> BuiltKernel:
        """The kernel; raises the error when there is one."""
        if self.error is not None:
            raise self.error
        assert self.kernel is not None
        return self.kernel


def build(phase: str, config: KernelConfig, target: str = "sm_90a", shape: Shape | None = None, ranks: int = 8,
          **options: Any) -> BuiltKernel:
    """Builds one variant or finds it in the cache; safe in any number of processes at once.

    ``options``: the remaining fields of BuildRequest. UsageError: illegal phase, target, configuration or option.
    BuildFailed: the compiler refused, or the kernel spills or lost its register plan and ``allow_spills`` is off.
    EnvironmentUnfit: no compiler, or no writable cache.
    """
    return run_request(BuildRequest(phase, config, target, shape, ranks, **options)).result()


def build_many(requests: Sequence[BuildRequest], jobs: int | None = None,
               on_done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """All requests, ``jobs`` compilers at a time (default: by cores and memory), in the given order.

    One that fails does not stop the others. Requests are checked before anything is compiled: UsageError.
    """
    for request in requests:
        prepare(request)
    return map_parallel(run_request, requests, jobs or default_jobs(), on_done)


@dataclass(frozen=True)
class Prepared:
    """A request with everything settled that does not need the compiler."""

    request: BuildRequest
    config: KernelConfig
    text: str
    sources: SourceSet
    smem: int | None


def prepare(request: BuildRequest) -> Prepared:
    """Checks a request, resolves its configuration and reads the sources it reaches."""
    check_phase(request.phase)
    if request.target not in TARGETS:
        raise UsageError(f"unknown target {request.target!r} (targets: {', '.join(TARGETS)})", rule="target")
    if request.flavour not in emu_build.FLAVOURS or (request.flavour != "plain" and request.target != "emulator"):
        raise UsageError(f"there is no {request.flavour!r} flavour of {request.target} (emulator: {', '.join(emu_build.FLAVOURS)})",
                         rule="flavour")
    nvrtc.check_options(request.options)
    smem = None
    if request.shape is not None:
        config = resolve(request.config, request.shape, request.ranks)
        smem = smem_bytes(config, request.shape, request.ranks)
    elif request.config.stages:
        config = request.config
        require(config)
    else:
        raise UsageError("automatic stages need a shape: as many as fit depends on it", rule="stages")
    text = entry_text(request.phase, config)
    sources = closure(text, kernels_dir(), emulator=request.target == "emulator")
    return Prepared(request, config, text, sources, smem)


def run_request(request: BuildRequest) -> Outcome:
    """``build`` with errors as values."""
    start = time.perf_counter()
    try:
        ready = prepare(request)
        entry = _sm90(ready) if request.target == "sm_90a" else _emulator(ready)
        stored = entry.manifest.get("resources")
        kernel = BuiltKernel(
            phase=request.phase, target=request.target, flavour=request.flavour, config=ready.config, path=entry.path,
            key=entry.manifest["key"], hit=entry.hit, seconds=time.perf_counter() - start, smem_bytes=ready.smem,
            resources=Resources.from_dict(stored) if stored else None, manifest=entry.manifest)
    except MegamoeError as error:
        return Outcome(request, None, error)
    problems = [] if request.allow_spills or request.config.trace else kernel.problems(request.strict)
    if problems and kernel.resources is not None and kernel.resources.spills:
        problems = [f"{problems[0]}; {spilling_text(kernel.path)}", *problems[1:]]
    failure = BuildFailed(f"phase {request.phase}: {'; '.join(problems)}", log=entry.manifest.get("log", ""),
                          hint="change the register plan or the tile, or pass --allow-spills to look at it anyway")
    return Outcome(request, kernel, failure if problems else None)


def spilling_text(path: Path) -> str:
    """``role: tma (weights) 8, dispatch 4 instructions``, or ``role: unknown`` where no disassembler tells."""
    roles = {role: count for role, count in sass.spilling_roles(path).items() if count}
    known = ", ".join(f"{role} {count}" for role, count in roles.items())
    return f"role: {known} spill instructions" if known else f"role: {sass.UNKNOWN}"


def compile_judged(text: str, sources: SourceSet, entry: str, name: str, extra: tuple[str, ...] = ()) -> tuple[bytes, str, Resources]:
    """(cubin, log, what ptxas says of kernel ``entry``). BuildFailed, also when the log has no verdict on it."""
    cubin, log = nvrtc.compile_cubin(sources.canonical(text), sources.flattened(), extra=extra, name=name)
    try:
        resources = parse_log(log, entry)
    except ValueError as error:
        raise BuildFailed(f"no verdict on registers and spills: {error}", log=log, hint="is NVRTC's own cache on (CUDA_CACHE_DISABLE=1 turns it off)?") from None
    if resources.arch != nvrtc.ARCH:
        raise BuildFailed(f"ptxas compiled for {resources.arch or 'an unnamed architecture'}, not {nvrtc.ARCH}", log=log)
    return cubin, log, resources


def _sm90(ready: Prepared) -> Entry:
    if (sent := prebuilt.lookup(ready)) is not None:
        return sent
    compiler = _nvrtc()
    options = ready.request.options

    def produce() -> tuple[bytes, dict[str, Any]]:
        start = time.perf_counter()
        cubin, log, resources = compile_judged(ready.text, ready.sources, KERNEL_NAME, f"{KERNEL_NAME}_{ready.request.phase}.cu", options)
        return cubin, _facts(ready, compiler.fingerprint, time.perf_counter() - start, log) | {"resources": resources.to_dict()}

    key = key_of(target="sm_90a", options=[*nvrtc.OPTIONS, *options], compiler=compiler.fingerprint,
                 sources=ready.sources.digest, text=ready.text)
    return BuildCache().get_or_build(key, ".cubin", produce, force=ready.request.force)


def _emulator(ready: Prepared) -> Entry:
    compiler = emu_build.find_host_compiler()
    flavour = ready.request.flavour

    def produce() -> tuple[bytes, dict[str, Any]]:
        runtime = build_runtime()
        start = time.perf_counter()
        library, log = emu_build.compile_kernel(compiler, ready.text, ready.sources, flavour, runtime)
        return library, _facts(ready, compiler.version, time.perf_counter() - start, log)

    flags = [*emu_build.KERNEL_FLAGS, *emu_build.FLAVOUR_FLAGS[flavour], *emu_build.KERNEL_LINK]
    key = key_of(target="emulator", options=flags, compiler=compiler.version, sources=ready.sources.digest, text=ready.text)
    return BuildCache().get_or_build(key, ".so", produce, force=ready.request.force)


def build_runtime(force: bool = False) -> Path:
    """``libmegamoe_emu.so``, built from kernels/hw/emu/*.cpp or found in the cache (under another file name).

    It must be loaded, with global symbols, before any kernel library.
    """
    compiler = emu_build.find_host_compiler()
    root = kernels_dir()
    units = sorted(path.relative_to(root).as_posix() for path in (root / "hw" / "emu").glob("*.cpp"))
    if not units:
        raise BuildFailed(f"the emulator's runtime sources are missing: {root / 'hw' / 'emu'}")
    files: dict[str, str] = {}
    for unit in units:
        text = (root / unit).read_text()
        files[unit] = text
        files.update(closure(f'#include "{unit}"\n', root, emulator=True).files)
    sources = SourceSet(dict(sorted(files.items())), digest_of(files))

    def produce() -> tuple[bytes, dict[str, Any]]:
        start = time.perf_counter()
        library, log = emu_build.compile_runtime(compiler, units, sources)
        return library, provenance(compiler.version, sources.digest, time.perf_counter() - start) | {"log": log}

    flags = [*emu_build.RUNTIME_FLAGS, *emu_build.RUNTIME_LINK, *emu_build.RUNTIME_LIBRARIES]
    key = key_of(target="emulator-runtime", options=flags, compiler=compiler.version, sources=sources.digest, text=units)
    return BuildCache().get_or_build(key, ".so", produce, force=force).path


def _facts(ready: Prepared, compiler: str, seconds: float, log: str) -> dict[str, Any]:
    return provenance(compiler, ready.sources.digest, seconds) | {
        "phase": ready.request.phase, "target": ready.request.target, "flavour": ready.request.flavour,
        "config": ready.config.to_dict(), "text": ready.text, "log": log}


def _nvrtc() -> nvrtc.Compiler:
    with _compiler_lock:  # the library is looked up and loaded once, not once per thread
        return _find_nvrtc()


@lru_cache(maxsize=1)
def _find_nvrtc() -> nvrtc.Compiler:
    return nvrtc.find_compiler()
