"""What this machine can run: probes for ``megamoe doctor``. Works without a GPU, a driver, torch or cupy.

Whatever may crash, hang or load slowly (driver, torch, cupy) is asked in a child process with a time limit.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from megamoe_cli.errors import MegamoeError

CHILD_TIMEOUT_S = 60
_PROBE_KERNEL = """\
#include "hw/hw.cuh"
extern "C" __global__ void __launch_bounds__(384, 1) mega_moe(megamoe::u32* out) {
    if (megamoe::hw::warp_idx() < 4) megamoe::hw::reg_dealloc<40>();
    else megamoe::hw::reg_alloc<232>();
    out[megamoe::hw::thread_idx()] = megamoe::hw::lane_idx();
}
"""
_PROBE_LIBRARY = "#include <cstdint>\n#include <atomic>\nextern \"C\" std::int32_t probe() { return sizeof(std::atomic<int>) == 4; }\n"


@dataclass(frozen=True)
class Finding:
    """One probe's answer. ``state``: ok, missing (something needs it), note (nothing depends on it)."""

    name: str
    state: str
    text: str
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Diagnosis:
    """``paths``: way of running -> empty string when it works, else what stops it. ``next_command``: one line."""

    findings: list[Finding]
    paths: dict[str, str]
    next_command: str

    @property
    def usable(self) -> bool:
        """Can anything prove a kernel here? (Compiling alone does not.)"""
        return not self.paths["emulator"] or not self.paths["gpu"]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "megamoe.doctor/1", "usable": self.usable, "paths": self.paths,
                "next_command": self.next_command, "findings": [asdict(f) for f in self.findings]}


def diagnose(report: Callable[[Finding], None] = lambda finding: None) -> Diagnosis:
    """Runs all probes; ``report`` sees each finding as it comes (some take seconds)."""
    found: dict[str, Finding] = {}
    with tempfile.TemporaryDirectory(prefix="megamoe-doctor-") as scratch:
        # CuPy makes its cache folder on import: where ours cannot be written, that is the cache's fault and not CuPy's.
        chosen = os.environ.get("CUPY_CACHE_DIR")
        os.environ["CUPY_CACHE_DIR"] = chosen or scratch
        try:
            _probe_all(found, report)
        finally:
            if not chosen:
                del os.environ["CUPY_CACHE_DIR"]
    return conclude(list(found.values()))


def _probe_all(found: dict[str, Finding], report: Callable[[Finding], None]) -> None:
    for probe in (_python, _host, _sources, _cache, _torch, _host_compiler, _nvrtc, _headers, _cupy, _gpu, _nvml):
        finding = probe()
        found[finding.name] = finding
        report(finding)


def conclude(findings: list[Finding]) -> Diagnosis:
    """Which ways of running work, and the one next command, from findings alone."""
    by_name = {f.name: f for f in findings}

    def stopped_by(*names: str) -> str:
        return "; ".join(f"{n}: {by_name[n].text}" for n in names if by_name[n].state != "ok")

    base = ("python", "host", "kernel sources", "build cache")
    paths = {
        "build": stopped_by(*base, "nvrtc"),
        "emulator": stopped_by(*base, "torch", "g++"),
        "gpu": stopped_by(*base, "torch", "nvrtc", "cupy", "gpu"),
    }
    if not paths["gpu"] and not by_name["torch"].facts.get("cuda_available"):
        paths["gpu"] = "torch: this build of torch sees no CUDA device"
    if not paths["gpu"]:
        command = "megamoe test --ranks 8 --phase all --backend virtual"
    elif not paths["emulator"]:
        command = "megamoe test --ranks 8 --phase all"
    else:
        command = next((f.fix for f in findings if f.state == "missing" and f.fix), "")
    return Diagnosis(findings, paths, command)


def _python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 10):
        return Finding("python", "missing", f"{text}: 3.10 or newer is needed", "install Python 3.10 or newer")
    return Finding("python", "ok", text)


def _host() -> Finding:
    from megamoe_cli.compile.parallel import available_memory, default_jobs, usable_cores

    memory = available_memory()
    facts = {"cores": usable_cores(), "memory_available_bytes": memory, "build_jobs": default_jobs()}
    text = f"{platform.platform()}, {facts['cores']} cores"
    if memory is not None:
        text += f", {memory / 2**30:.1f} GiB available"
    if sys.platform != "linux":
        return Finding("host", "missing", f"{text}: only Linux is supported", "use a Linux machine", facts)
    return Finding("host", "ok", text, facts=facts)


def _sources() -> Finding:
    from megamoe_cli.paths import kernel_source_digest, kernels_dir

    try:
        return Finding("kernel sources", "ok", f"{kernels_dir()} ({kernel_source_digest()})")
    except FileNotFoundError as error:
        return Finding("kernel sources", "missing", str(error), "reinstall megamoe; its kernel sources are not there")


def _cache() -> Finding:
    from megamoe_cli.compile.cache import BuildCache

    cache = BuildCache()
    counts = cache.statistics()
    text = (f"{cache.root}: {counts['entries']} builds, {counts['bytes'] / 2**20:.1f} MiB, "
            f"{counts['hits']} hits, {counts['misses']} misses")
    try:  # really: permission bits say nothing about read-only and special file systems
        cache.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.root):
            pass
    except OSError as error:
        return Finding("build cache", "missing", f"{text}; it cannot be written: {error.strerror}",
                       "export MEGAMOE_CACHE_DIR=/a/folder/you/may/write", counts)
    return Finding("build cache", "ok", text, facts=counts)


def _torch() -> Finding:
    answer = _ask("torch")
    if "error" in answer:
        return Finding("torch", "missing", answer["error"], "pip install torch")
    cuda = f"CUDA {answer['cuda']}" if answer["cuda"] else "CPU build"
    state = "sees a GPU" if answer["cuda_available"] else "sees no GPU"
    return Finding("torch", "ok", f"{answer['version']} ({cuda}, {state})", facts=answer)


def _cupy() -> Finding:
    answer = _ask("cupy")
    if "error" in answer:
        return Finding("cupy", "missing", answer["error"], "pip install cupy-cuda13x")
    return Finding("cupy", "ok", answer["version"], facts=answer)


def _host_compiler() -> Finding:
    """Found, runs, and makes a shared library (headers and linker are there too)."""
    from megamoe_cli.compile import emu_build
    from megamoe_cli.compile.sources import SourceSet

    try:
        compiler = emu_build.find_host_compiler()
        emu_build.compile_runtime(compiler, ["probe.cpp"], SourceSet({"probe.cpp": _PROBE_LIBRARY}, ""), timeout_s=CHILD_TIMEOUT_S)
    except MegamoeError as error:
        return Finding("g++", "missing", str(error), error.hint or "install the package g++ (Debian and Ubuntu: apt-get install g++)")
    return Finding("g++", "ok", compiler.version, facts={"command": list(compiler.command)})


def _nvrtc() -> Finding:
    """Found, and compiles a small kernel with setmaxnreg for sm_90a."""
    from megamoe_cli.compile import nvrtc
    from megamoe_cli.compile.ptxas import parse_log
    from megamoe_cli.compile.sources import closure
    from megamoe_cli.paths import kernels_dir

    fix = "pip install cupy-cuda13x nvidia-cuda-nvrtc"
    try:
        compiler = nvrtc.find_compiler()
        sources = closure(_PROBE_KERNEL, kernels_dir(), emulator=False)
        cubin, log = nvrtc.compile_cubin(sources.canonical(_PROBE_KERNEL), sources.flattened(), timeout_s=CHILD_TIMEOUT_S)
        notes = parse_log(log, "mega_moe").of_kind("setmaxnreg")
    except (MegamoeError, FileNotFoundError) as error:
        return Finding("nvrtc", "missing", str(error), fix)
    facts = {"version": list(compiler.version), "library": compiler.library, "probe_bytes": len(cubin)}
    if notes:
        return Finding("nvrtc", "missing", f"{compiler.fingerprint} ignores setmaxnreg: {notes[0].text}", fix, facts)
    version = ".".join(map(str, compiler.version))
    return Finding("nvrtc", "ok", f"{version}, compiles for {nvrtc.ARCH} ({compiler.library})", facts=facts)


def _headers() -> Finding:
    """Versions of the NVRTC and CUDA runtime header packages; our kernels use neither, other code of the user may."""
    versions = {name: version for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12")
                if (version := _version(name))}
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) or "no CUDA header packages (our kernels need none)"
    releases = {".".join(version.split(".")[:2]) for version in versions.values()}
    if len(releases) > 1:
        return Finding("cuda packages", "note", f"{text}: library and headers of different releases", facts=versions)
    return Finding("cuda packages", "ok" if versions else "note", text, facts=versions)


def _gpu() -> Finding:
    answer = _ask("gpu")
    if "error" in answer:
        return Finding("gpu", "note", answer["error"], "", answer)
    devices = answer["devices"]
    lines = [f"{n}: {d['name']}, {d['sms']} SMs, {d['memory_bytes'] / 2**30:.0f} GiB, sm_{d['capability']}" for n, d in enumerate(devices)]
    text = "; ".join(lines) + f"; driver CUDA {answer['driver_cuda']}"
    if len(devices) > 1:
        text += "; peer access " + ("between all" if answer["all_peers"] else "not between all: " + answer["missing_peers"])
    if not any(d["capability"] == "90" for d in devices):
        return Finding("gpu", "note", f"{text}; none is SM90 (Hopper), so only the emulator can run the kernel", "", answer)
    return Finding("gpu", "ok", text, facts=answer)


def _nvml() -> Finding:
    answer = _ask("nvml")
    if "error" in answer:
        return Finding("nvml", "note", answer["error"], "", answer)
    lines = [f"{n}: {d['sm_clock_mhz']} MHz SM, {d['power_w']:.0f} W of {d['power_limit_w']:.0f}, MIG {d['mig']}"
             for n, d in enumerate(answer["devices"])]
    return Finding("nvml", "ok", f"driver {answer['driver']}; " + "; ".join(lines), facts=answer)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask(probe: str) -> dict[str, Any]:
    """``python -m megamoe_cli.doctor_probe PROBE``: its JSON answer, or ``{"error": one line}``."""
    from megamoe_cli.compile.child import run_child

    try:
        ended = run_child([sys.executable, "-m", "megamoe_cli.doctor_probe", probe], timeout_s=CHILD_TIMEOUT_S)
        return json.loads(ended.stdout)
    except MegamoeError as error:
        return {"error": str(error)}
    except ValueError:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return {"error": f"the {probe} probe {ended.ending}: {last[0] if last else 'it said nothing'}"}
