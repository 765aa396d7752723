"""The one translation unit of a variant: ``Config`` as constants, then the kernel entry. See docs/internals.md."""

from __future__ import annotations

from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError
from megamoe_cli.layout import ROW_DEPTH
from megamoe_cli.shapes import nearest_name

# In the order of the kernel's enum Phase; each phase contains the ones before it.
PHASES: dict[str, str] = {"stub": "kStub", "dispatch": "kDispatch", "l1": "kL1", "l2": "kL2", "combine": "kCombine"}
POLICIES = {"fused": "kFused", "serial_n": "kSerialN", "wide_n": "kWideN", "mma_sync": "kMmaSync"}
PROMOTIONS = {"classic": "kClassic", "rescale": "kRescale"}
KERNEL_NAME = "mega_moe"
ROOT_HEADER = "sm90_fp8_mega_moe.cuh"


def check_phase(phase: str) -> str:
    """The phase itself; an unknown one is a UsageError that names the nearest."""
    if phase not in PHASES:
        raise UsageError(f"unknown phase {phase!r}; nearest name: {nearest_name(phase, PHASES)} "
                         f"(phases: {', '.join(PHASES)})", rule="phase-name")
    return phase


def config_text(phase: str, config: KernelConfig) -> str:
    """C++ text of ``struct Config``. ``config`` must be resolved (stages > 0)."""
    if config.stages < 2:
        raise UsageError("the entry text needs a resolved configuration: stages is still automatic", rule="stages")
    dispatch, tma, math = config.register_plan()
    return f"""\
struct Config {{
    static constexpr megamoe::Phase kPhase = megamoe::Phase::{PHASES[check_phase(phase)]};
    static constexpr megamoe::u32 kBlockM = {config.block_m}, kBlockN = {config.block_n}, kStages = {config.stages}, kCluster = {config.cluster}, kRowSplits = {config.m_splits};
    static constexpr megamoe::u32 kMathWarpgroups = {config.math_warpgroups}, kDispatchWarps = {config.dispatch_warps}, kTmaWarps = {config.tma_warps};
    static constexpr megamoe::Policy kPolicy = megamoe::Policy::{POLICIES[config.policy]};
    static constexpr megamoe::Promotion kPromotion = megamoe::Promotion::{PROMOTIONS[config.promotion]};
    static constexpr megamoe::u32 kRegsDispatch = {dispatch}, kRegsTma = {tma}, kRegsMath = {math};
    static constexpr megamoe::u32 kRowDepth = {ROW_DEPTH};
    static constexpr bool kTrace = {"true" if config.trace else "false"};
}};
"""


def entry_text(phase: str, config: KernelConfig) -> str:
    """C++ text of a variant. ``config`` must be resolved (stages > 0)."""
    return (f'#include "{ROOT_HEADER}"\n{config_text(phase, config)}'
            f"MM_KERNEL_ENTRY({KERNEL_NAME}, {config.threads}, {config.cluster}, megamoe::KernelParams, megamoe::run<Config>)\n")  # fmt: skip
