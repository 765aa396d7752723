"""``megamoe trace --loop``: the main loop's parts alone on one GPU (kernels/mma/loop_probe.cuh), to find what each costs."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .config import KernelConfig, resolve
from .errors import BuildFailed, TimedOut, UsageError
from .layout import smem_bytes
from .paths import kernels_dir
from .shapes import parse_shape

KERNEL = "loop_probe"
# What a run contains beside the products; promotion, barriers and copies add up. `in-place`: all of a warpgroup's columns in
# one product, whose sums stay in the tensor core's accumulators; `multiplied`: by two factors between two K-blocks. The bits
# are the enum ProbePart.
PARTS = {"products": 0, "promotion": 1, "barriers": 3, "copies": 7,
         "in-place": 8, "in-place-multiplied": 9, "in-place-copies": 15}  # fmt: skip
BLOCKS = 40_000  # K-blocks a CTA works through: some 30 ms, so that the clock has settled
STAGES_OF_SOURCE = 4  # operands that a CTA's copies go through again and again: L2 holds those of all CTAs
_PARAMS = struct.Struct("<QQQIIII")
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class LoopTime:
    """``cycles``: of one K-block of the tile (mean over CTAs, the slower warpgroup). ``mhz``: of the SMs while it ran."""

    config: str
    part: str
    offset: int
    cycles: float
    us: float
    mhz: float
    tflops: float


def entry_text(config: KernelConfig, part: str) -> str:
    """C++ text of one probe. ``config`` must be resolved."""
    from .compile.entry import config_text

    return (f'#include "mma/loop_probe.cuh"\n{config_text("combine", config)}'
            f"MM_DEVICE void probe(const megamoe::LoopProbeParams& p) {{ megamoe::loop_probe<Config, {PARTS[part]}>(p); }}\n"
            f"MM_KERNEL_ENTRY({KERNEL}, {config.threads}, 1, megamoe::LoopProbeParams, probe)\n")  # fmt: skip


def check(config: KernelConfig) -> KernelConfig:
    """The configuration with its stages. UsageError for what the probe has no loop for."""
    config = resolve(config, parse_shape("flash"), 8)
    if config.policy == "mma_sync" or config.promotion == "rescale" or config.cluster != 1:
        raise UsageError(f"the loop alone is there for WGMMA, classic promotion and cluster=1, not for {config.name()}", rule="loop-probe")
    return config


def build(config: KernelConfig, part: str) -> Any:
    """The cached cubin of a probe. BuildFailed, also when something spills or products are serialized: its time would mean nothing."""
    from .compile import nvrtc
    from .compile.cache import BuildCache, key_of
    from .compile.driver import compile_judged
    from .compile.sources import closure

    text = entry_text(config, part)
    sources = closure(text, kernels_dir(), emulator=False)

    def produce() -> tuple[bytes, dict[str, Any]]:
        cubin, log, found = compile_judged(text, sources, KERNEL, f"{KERNEL}.cu")
        if found.spills or found.notes:
            why = f"spills {found.spill_stores} bytes" if found.spills else found.notes[0].text
            raise BuildFailed(f"the probe of {config.name()} with {part}: {why}", log=log)
        return cubin, {"resources": found.to_dict()}

    key = key_of(target="sm_90a", options=list(nvrtc.OPTIONS), compiler=nvrtc.find_compiler().fingerprint, sources=sources.digest, text=text)
    return BuildCache().get_or_build(key, ".cubin", produce)


def measure(configs: Sequence[KernelConfig], parts: Sequence[str], offsets: Sequence[int], blocks: int = BLOCKS, operands: str = "normal") -> list[LoopTime]:
    """Every configuration with every part and offset, of operands that are "normal" or "zeros". EnvironmentUnfit without a GPU; TimedOut when a probe does not end."""
    from .backends.cuda_runtime import CudaRuntime

    cuda = CudaRuntime()
    return [_run(cuda, config, part, offset, blocks, operands) for config in configs for part in parts for offset in offsets]


def _run(cuda: Any, config: KernelConfig, part: str, offset: int, blocks: int, operands: str) -> LoopTime:
    import numpy
    import torch

    size = smem_bytes(config, parse_shape("flash"), 8)
    kernel = cuda.load(build(config, part).path, KERNEL, size)
    grid, groups = cuda.gpu.sms, config.math_warpgroups
    span = STAGES_OF_SOURCE * (max(config.block_m, 64) + config.block_n) * 128
    # Power depends on the data: normal, the largest of some hundred at the end of the format's range, as quantized operands are.
    source = (torch.randn(grid * span, device="cuda") * 140).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if operands == "zeros":
        source.zero_()
    cycles, sink = cuda.alloc(grid * groups * 4), cuda.alloc(grid * groups * 128 * 4)
    stream, begin, end = cuda.stream(), cuda.event(), cuda.event()

    def launch(count: int) -> None:
        params = _PARAMS.pack(cycles.data_ptr(), sink.data_ptr(), source.data_ptr(), span, count, offset, 0)
        with stream:
            kernel((grid,), (config.threads,), (numpy.void(params),), shared_mem=size)

    cuda.synchronize()
    launch(blocks // 4)
    cuda.record(begin, stream)
    launch(blocks)
    cuda.record(end, stream)
    deadline = time.monotonic() + _TIMEOUT_S
    while not cuda.is_done(stream):
        if time.monotonic() > deadline:
            raise TimedOut(f"the loop of {config.name()} with {part} did not end within {_TIMEOUT_S:g} s")
        time.sleep(0.001)
    seconds = cuda.elapsed_ms(begin, end) / 1e3
    spent = cycles.view(torch.int32).view(grid, groups).amax(1).double().mean().item()
    flops = 2.0 * config.block_m * config.block_n * 128 * blocks * grid
    return LoopTime(config.name(), part, offset, spent / blocks, 1e6 * seconds / blocks, spent / seconds / 1e6, flops / seconds / 1e12)
