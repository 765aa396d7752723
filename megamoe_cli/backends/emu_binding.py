"""ctypes binding of the CPU emulator's runtime (``kernels/hw/emu/c_api.h``). No torch.

``EmuRuntime(path)`` loads the runtime library, ``runtime.kernel(path)`` one kernel library, ``runtime.program(ranks)``
collects regions and each rank's ordered operations; ``program.run(EmuOptions(...))`` executes them and returns an
:class:`EmuReport`. Memory belongs to the caller and is addressed by plain integers.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import ClassVar

from ..errors import BuildFailed, EnvironmentUnfit, MegamoeError, UsageError
from .emu_symbols import Symbolizer

API_VERSION = 3
MOST_SUM_BITS = 23
SCHEDULES = ("fifo", "random", "pct")
COMPLETIONS = ("eager", "random", "lazy")
_STOP_PATIENCE_S = 10.0

_u32, _u64, _int = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int


class _Options(ctypes.Structure):
    _fields_ = [("seed", _u64), *((name, _u32) for name in (
        "schedule", "completion", "races", "preempt", "uninit", "resident_ctas", "max_findings", "mutant", "fp8_sum_bits")),
        ("max_slices", _u64), ("jump_ns", _u64), ("wall_limit_s", ctypes.c_double)]


class _Finding(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_char_p), ("text", ctypes.c_char_p), ("file", ctypes.c_char_p), ("pc", _u64),
                *((name, _int) for name in ("line", "rank", "cta", "warp", "lane", "reserved"))]


class _Stats(ctypes.Structure):
    _fields_ = [*((name, _u64) for name in ("slices", "switches", "wgmmas", "tensor_loads", "bulk_copies", "idle_rounds",
                                            "launches", "mutant_hits", "virtual_ns")), ("seconds", ctypes.c_double)]


class _KernelInfo(ctypes.Structure):
    _fields_ = [*((name, _u32) for name in ("threads", "cluster", "params_bytes", "checked")), ("image_begin", _u64)]


@dataclass(frozen=True)
class EmuOptions:
    """How one run is scheduled and checked.

    ``schedule`` fifo, random or pct; ``completion`` of asynchronous copies and WGMMA: eager (at issue), random, or
    lazy (only when no thread can run). Unless eager, their destinations hold NaN patterns until they complete.
    ``races`` needs kernels of the checked flavour. ``preempt`` also switches at plain accesses (checked, not fifo).
    ``uninit`` reports reads of bytes never written (checked kernels). ``resident_ctas`` per rank, 0 = all.
    Per rank: ``start_delay`` in virtual ns; ``slow`` n > 1: a warp of it runs one time in n while others could;
    ``stop_after`` n > 0: it dies after n turns of its warps (a ``rank-stopped`` finding), and if others then wait for
    it, that is ``waits-for-dead`` instead of a deadlock. ``mutant``: the fault that ``hw::mutant`` switches on (tests/mutants). ``jump_ns``: the clock's first jump
    when nothing can run (0: 1 s; each jump doubles). ``fp8_sum_bits`` n > 0 (at most 23): in a K=32 step of wgmma and mma,
    products and accumulator are cut toward zero n bits below the largest exponent among them before they are added (an
    H200 agrees best with 13); 0 sums exactly. ``max_slices`` and ``wall_limit_s`` (0 = none) end a run as a livelock.
    """

    seed: int = 0
    schedule: str = "fifo"
    completion: str = "eager"
    races: bool = False
    preempt: bool = False
    uninit: bool = True
    resident_ctas: int = 0
    start_delay: Sequence[int] = ()
    slow: Sequence[int] = ()
    stop_after: Sequence[int] = ()
    mutant: int = 0
    fp8_sum_bits: int = 0
    jump_ns: int = 0
    max_findings: int = 32
    max_slices: int = 0
    wall_limit_s: float = 0.0


@dataclass(frozen=True)
class EmuFinding:
    """One thing found wrong. ``kind``: deadlock, race, bounds, uninit, misaligned, foreign, barrier, mbarrier, warp,
    wgmma, bulk, async, register, cluster, tensormap, trap, stack, livelock, stopped, and, told
    to happen, rank-stopped and waits-for-dead. ``chain``: the inlined calls that
    led there, innermost first (``file:line``), when the library has line tables. Ids are -1 where they do not apply."""

    kind: str
    text: str
    file: str
    line: int
    rank: int
    cta: int
    warp: int
    lane: int
    seed: int
    chain: tuple[str, ...] = ()
    role: str = ""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file else ""
        who = f"rank {self.rank} CTA {self.cta} warp {self.warp} lane {self.lane}" if self.rank >= 0 else ""
        if self.role:
            who += f" ({self.role})"
        called = "".join(f"\n    called from {link}" for link in self.chain if link != f"{self.file}:{self.line}")
        return f"{self.kind}: {place}{who + ': ' if who else ''}{self.text}{called}"


@dataclass(frozen=True)
class EmuStats:
    """Counts of one run; ``virtual_ns`` is the emulated clock (not a performance figure), ``seconds`` wall time."""

    slices: int
    switches: int
    wgmmas: int
    tensor_loads: int
    bulk_copies: int
    idle_rounds: int
    launches: int
    mutant_hits: int  # times an operation asked for the fault that is switched on
    virtual_ns: int
    seconds: float


@dataclass(frozen=True)
class EmuReport:
    findings: list[EmuFinding]
    stats: EmuStats
    options: EmuOptions = field(default_factory=EmuOptions)

    @property
    def ok(self) -> bool:
        return not self.findings

    def kinds(self) -> set[str]:
        return {finding.kind for finding in self.findings}

    def __str__(self) -> str:
        return "\n".join(str(finding) for finding in self.findings)


class EmuRuntime:
    """The loaded runtime library. EnvironmentUnfit when it cannot be loaded or speaks another API version."""

    _loaded: ClassVar[tuple[str, Path, ctypes.CDLL] | None] = None  # digest, path, library

    def __init__(self, lib_path: str | Path) -> None:
        self.path = Path(lib_path).resolve()
        try:
            digest = hashlib.sha256(self.path.read_bytes()).hexdigest()
        except OSError as error:
            raise EnvironmentUnfit(f"cannot read the emulator runtime {self.path}: {error.strerror}") from None
        # A kernel library binds to whichever runtime was loaded first: two different ones must not meet.
        if EmuRuntime._loaded is not None and EmuRuntime._loaded[0] != digest:
            raise EnvironmentUnfit(f"this process has loaded another emulator runtime ({EmuRuntime._loaded[1]})",
                                   hint=f"load {self.path} in a new process")
        if EmuRuntime._loaded is None:
            try:
                # Kernel libraries find the operations they call through the global scope.
                library = ctypes.CDLL(str(self.path), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise EnvironmentUnfit(f"cannot load the emulator runtime {self.path}: {error}") from None
            EmuRuntime._loaded = (digest, self.path, library)
        self._lib = EmuRuntime._loaded[2]
        self._declare()
        found = self._lib.mm_emu_abi()
        if found != API_VERSION:
            raise EnvironmentUnfit(f"emulator runtime {self.path} has API version {found}, this package needs {API_VERSION}")

    def _declare(self) -> None:
        ptr, text = ctypes.c_void_p, ctypes.c_char_p
        for name, result, arguments in (
            ("mm_emu_error", text, []),
            ("mm_emu_abi", _u32, []),
            ("mm_emu_kernel_open", ptr, [text, text, ctypes.POINTER(_KernelInfo)]),
            ("mm_emu_kernel_close", None, [ptr]),
            ("mm_emu_program_new", ptr, [_u32]),
            ("mm_emu_program_free", None, [ptr]),
            ("mm_emu_start_delay", _int, [ptr, _u32, _u64]),
            ("mm_emu_slow", _int, [ptr, _u32, _u32]),
            ("mm_emu_stop_after", _int, [ptr, _u32, _u64]),
            ("mm_emu_add_region", _int, [ptr, _u64, _u64, _int, text, _int, _int]),
            ("mm_emu_copy", _int, [ptr, _u32, _u64, _u64, _u64]),
            ("mm_emu_fill", _int, [ptr, _u32, _u64, _u32, _u64]),
            ("mm_emu_undefine", _int, [ptr, _u32, _u64, _u64]),
            ("mm_emu_launch", _int, [ptr, _u32, ptr, text, _u64, _u32, _u32]),
            ("mm_emu_run", _int, [ptr, ctypes.POINTER(_Options)]),
            ("mm_emu_stop", None, [ptr]),
            ("mm_emu_num_findings", _u32, [ptr]),
            ("mm_emu_get_finding", _int, [ptr, _u32, ctypes.POINTER(_Finding)]),
            ("mm_emu_get_stats", None, [ptr, ctypes.POINTER(_Stats)]),
        ):
            function = getattr(self._lib, name)
            function.restype, function.argtypes = result, arguments

    def error(self) -> str:
        return self._lib.mm_emu_error().decode(errors="replace")

    def check(self, status: int) -> None:
        if status:
            raise UsageError(self.error())

    def kernel(self, path: str | Path, name: str = "mega_moe") -> EmuKernel:
        return EmuKernel(self, path, name)

    def program(self, ranks: int) -> EmuProgram:
        return EmuProgram(self, ranks)


class EmuKernel:
    """One loaded kernel library: ``threads`` per CTA, ``cluster`` size, ``params_bytes``, ``checked`` flavour."""

    def __init__(self, runtime: EmuRuntime, path: str | Path, name: str = "mega_moe") -> None:
        info = _KernelInfo()
        self.runtime, self.path, self.name = runtime, Path(path), name
        self.handle = runtime._lib.mm_emu_kernel_open(str(self.path).encode(), name.encode(), ctypes.byref(info))
        if not self.handle:
            raise BuildFailed(f"cannot load the emulated kernel: {runtime.error()}")
        self.threads, self.cluster, self.params_bytes = info.threads, info.cluster, info.params_bytes
        self.checked, self.image_begin = bool(info.checked), info.image_begin

    def close(self) -> None:
        """Unloads the library; no program may run it afterwards."""
        if self.handle:
            self.runtime._lib.mm_emu_kernel_close(self.handle)
            self.handle = None


class EmuProgram:
    """Regions and one ordered list of operations per rank. Addresses are integers; memory stays the caller's and must
    outlive ``run``. UsageError for what the runtime refuses."""

    def __init__(self, runtime: EmuRuntime, ranks: int) -> None:
        self.runtime, self.ranks = runtime, ranks
        self._lib = runtime._lib
        self._handle = self._lib.mm_emu_program_new(ranks)
        if not self._handle:
            raise UsageError(runtime.error())
        self._kernels: dict[int, EmuKernel] = {}
        self._roles: dict[int, tuple[str, ...]] = {}  # as _kernels, by where the library lies

    def add_region(self, address: int, nbytes: int, rank: int, name: str, symmetric: bool, initialised: bool) -> None:
        """Memory kernels may touch: by every rank if ``symmetric``, else by ``rank`` only (-1: all, as symmetric).
        ``initialised``: all its bytes count as written."""
        self.runtime.check(self._lib.mm_emu_add_region(self._handle, address, nbytes, rank, name.encode(), symmetric, initialised))

    def copy(self, rank: int, dst: int, src: int, nbytes: int) -> None:
        self.runtime.check(self._lib.mm_emu_copy(self._handle, rank, dst, src, nbytes))

    def fill(self, rank: int, dst: int, value: int, nbytes: int) -> None:
        if not 0 <= value <= 255:
            raise UsageError(f"fill value {value} is not a byte")
        self.runtime.check(self._lib.mm_emu_fill(self._handle, rank, dst, value, nbytes))

    def undefine(self, rank: int, dst: int, nbytes: int) -> None:
        """From here on in the rank's list, these bytes count as never written (with ``uninit``)."""
        self.runtime.check(self._lib.mm_emu_undefine(self._handle, rank, dst, nbytes))

    def launch(self, rank: int, kernel: EmuKernel, params: bytes, grid: int, smem_bytes: int,
               warp_roles: Sequence[str] = ()) -> None:  # fmt: skip
        """Appends a launch of ``grid`` CTAs with ``smem_bytes`` of dynamic shared memory. ``warp_roles[i]`` names warp i
        in reports."""
        if kernel.handle is None:
            raise MegamoeError("launch of a closed kernel")
        self.runtime.check(self._lib.mm_emu_launch(self._handle, rank, kernel.handle, bytes(params), len(params), grid, smem_bytes))
        self._kernels[kernel.image_begin] = kernel
        self._roles[kernel.image_begin] = tuple(warp_roles)

    def run(self, options: EmuOptions | None = None) -> EmuReport:
        """Executes all lists. The run lives in a thread of its own, so that Ctrl-C stops it: KeyboardInterrupt."""
        options = options or EmuOptions()
        raw = self._raw_options(options)
        outcome: list[tuple[int, str]] = []

        def body() -> None:
            status = self._lib.mm_emu_run(self._handle, ctypes.byref(raw))
            outcome.append((status, self.runtime.error() if status else ""))

        thread = threading.Thread(target=body, name="megamoe-emulator", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(0.2)
        except BaseException:
            self._lib.mm_emu_stop(self._handle)
            thread.join(_STOP_PATIENCE_S)
            if thread.is_alive():
                self._handle = None  # still in use: leaking it beats freeing it
            raise
        status, why = outcome[0]
        if status:
            raise UsageError(why)
        return self._report(options)

    def _raw_options(self, options: EmuOptions) -> _Options:
        for value, allowed, what in ((options.schedule, SCHEDULES, "schedule"), (options.completion, COMPLETIONS, "completion")):
            if value not in allowed:
                raise UsageError(f"unknown {what} '{value}' (one of {', '.join(allowed)})")
        if options.races and not all(kernel.checked for kernel in self._kernels.values()):
            raise UsageError("the race check needs kernels of the checked flavour")
        for name in ("start_delay", "slow", "stop_after"):
            values = getattr(options, name)
            if len(values) > self.ranks:
                raise UsageError(f"{name} has {len(values)} entries for {self.ranks} ranks")
            for rank, value in enumerate([*values, *[0] * (self.ranks - len(values))]):
                self.runtime.check(getattr(self._lib, f"mm_emu_{name}")(self._handle, rank, value))
        return _Options(
            seed=options.seed, schedule=SCHEDULES.index(options.schedule), completion=COMPLETIONS.index(options.completion),
            races=options.races, preempt=options.preempt, uninit=options.uninit, resident_ctas=options.resident_ctas,
            max_findings=options.max_findings, mutant=options.mutant, fp8_sum_bits=options.fp8_sum_bits,
            max_slices=options.max_slices, jump_ns=options.jump_ns, wall_limit_s=options.wall_limit_s)

    def _report(self, options: EmuOptions) -> EmuReport:
        # A mention of a warp does not say which launch it was of: it gets a role where all kernels agree.
        shared = tuple(each[0] if len(set(each)) == 1 else "" for each in zip_longest(*self._roles.values(), fillvalue=""))
        symbols = Symbolizer({kernel.image_begin: kernel.path for kernel in self._kernels.values()}, shared)
        findings = []
        for index in range(self._lib.mm_emu_num_findings(self._handle)):
            raw = _Finding()
            self.runtime.check(self._lib.mm_emu_get_finding(self._handle, index, ctypes.byref(raw)))
            findings.append(self._finding(raw, options.seed, shared))
        findings = symbols.resolve(findings)
        stats = _Stats()
        self._lib.mm_emu_get_stats(self._handle, ctypes.byref(stats))
        return EmuReport(findings, EmuStats(*(getattr(stats, name) for name, _ in _Stats._fields_)), replace(options))

    def _finding(self, raw: _Finding, seed: int, shared: Sequence[str]) -> tuple[EmuFinding, int]:
        image = max((begin for begin in self._roles if begin <= raw.pc), default=None)
        roles = shared if image is None else self._roles[image]
        role = roles[raw.warp] if 0 <= raw.warp < len(roles) else ""
        return EmuFinding(raw.kind.decode(), raw.text.decode(errors="replace").rstrip(), raw.file.decode(errors="replace"),
                          raw.line, raw.rank, raw.cta, raw.warp, raw.lane, seed, role=role), raw.pc

    def close(self) -> None:
        if self._handle:
            self._lib.mm_emu_program_free(self._handle)
            self._handle = None
