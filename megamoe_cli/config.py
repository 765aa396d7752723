"""What one kernel variant is, and the ONE predicate that says whether it is legal. No torch, no cupy.

``KernelConfig`` holds the compile-time and scheduling choices; ``check`` names the first rule a
configuration breaks. Builder, tuner, table checker and launcher all call it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from megamoe_cli.errors import UsageError
from megamoe_cli.layout import SMEM_LIMIT, smem_plan
from megamoe_cli.register_plans import MATH_OVERHEAD, compiler_spills, planned_registers
from megamoe_cli.shapes import Shape, check_shape

REGISTER_FILE = 65536  # 32-bit registers of one SM
MAX_STAGES = 8
MAX_THREAD_REGISTERS = 255  # what an instruction can name, whatever setmaxnreg grants
SETMAXNREG_RANGE = range(24, 257, 8)

ALLOWED: dict[str, tuple] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (128, 256),
    "block_k": (128,),
    "cluster": (1, 2),
    "math_threads": (128, 256),
    "policy": ("fused", "serial_n", "wide_n", "mma_sync"),
    "promotion": ("classic", "rescale"),
    "frontend": ("compact", "standard"),
    "order": ("auto", "lag", "wave"),
    "split": ("auto", "m", "n"),
    "trace": (0, 1),
}
BOUNDS: dict[str, tuple[int, int]] = {"lag": (0, 65535), "unit_blocks": (1, 65535), "prefetch": (0, 64), "stagger": (0, 65535), "tail": (0, 1), "ahead": (0, 64)}
# Told to a launch rather than compiled in: variants that differ in nothing else share a binary.
LAUNCH_FIELDS = ("order", "lag", "unit_blocks", "prefetch", "stagger", "tail", "ahead")
# (field, value) pairs the rules above allow and the kernel does not implement yet. Shrinks as it grows.
NOT_IMPLEMENTED: frozenset[tuple[str, Any]] = frozenset()
# frontend -> (dispatch warps, TMA warps). In `compact` both share one warpgroup.
FRONTENDS = {"compact": (2, 2), "standard": (4, 4)}


@dataclass(frozen=True)
class Verdict:
    """``ok``, or the name of the first broken ``rule`` and a one-line ``explanation``."""

    ok: bool
    rule: str = ""
    explanation: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True)
class Role:
    """Consecutive warps with one job. ``warps`` is half-open; ``registers`` per thread, by setmaxnreg."""

    name: str
    warps: tuple[int, int]
    registers: int

    @property
    def threads(self) -> int:
        return 32 * (self.warps[1] - self.warps[0])


@dataclass(frozen=True)
class KernelConfig:
    """One kernel variant. ``stages`` 0 = as many as fit; ``regs_*`` 0 = from the plan table."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    stages: int = 0
    cluster: int = 1
    math_threads: int = 256
    policy: str = "fused"
    promotion: str = "classic"
    frontend: str = "compact"
    order: str = "auto"
    split: str = "auto"  # how two warpgroups cut a tile
    lag: int = 32
    unit_blocks: int = 8
    prefetch: int = 6  # K-blocks of its likely first tile that a CTA asks into L2 before it knows the counts
    stagger: int = 0  # split=m: cycles by which the second warpgroup starts later, so that epilogues and products overlap
    tail: int = 0  # 1: the last L2 tiles are cut in two, so that they spread over more CTAs (two warpgroups, split along N)
    ahead: int = 0  # K-blocks by which weights are asked into L2 ahead of their load
    regs_dispatch: int = 0
    regs_tma: int = 0
    regs_math: int = 0
    trace: int = 0  # 1: count where the cycles go (KernelParams.report); for looking, not for timing

    # --- derived -----------------------------------------------------------------------------------
    @property
    def dispatch_warps(self) -> int:
        return FRONTENDS[self.frontend][0]

    @property
    def tma_warps(self) -> int:
        return FRONTENDS[self.frontend][1]

    @property
    def math_warpgroups(self) -> int:
        return self.math_threads // 128

    @property
    def threads(self) -> int:
        return 32 * (self.dispatch_warps + self.tma_warps) + self.math_threads

    @property
    def launch_registers(self) -> int:
        """Registers per thread the launch owns: the register file over the threads, rounded down to 8."""
        return REGISTER_FILE // self.threads // 8 * 8

    @property
    def tile_order(self) -> str:
        """The order of tiles: what ``order`` says, else the policy's own."""
        return ("wave" if self.policy == "serial_n" else "lag") if self.order == "auto" else self.order

    @property
    def m_splits(self) -> int:
        """How often the tile is cut along M between warpgroups (1 or 2); else it is cut along N."""
        if self.split == "auto":
            along_m = (self.block_m, self.block_n, self.math_warpgroups) == (128, 128, 2) and self.policy != "mma_sync"
            return 2 if along_m else 1
        return 2 if self.split == "m" else 1

    @property
    def column_parts(self) -> int:
        """Parts the tile's columns are cut into; each belongs to a warpgroup (``mma_sync``: to a warp)."""
        return 4 * self.math_warpgroups if self.policy == "mma_sync" else self.math_warpgroups // self.m_splits

    @property
    def columns_per_warpgroup(self) -> int:
        return self.block_n * self.m_splits // self.math_warpgroups

    @property
    def unit_columns(self) -> int:
        """Columns of one tensor-core product."""
        columns = self.block_n // self.column_parts
        return columns if self.policy == "wide_n" else min(columns, 128)

    @property
    def sums(self) -> int:
        """FP32 accumulators of the tile per math thread, without the promotion scratch."""
        if self.policy == "mma_sync":  # the tile is spread over all math threads
            return self.block_m * self.block_n // self.math_threads
        return max(1, self.block_m // 64 // self.m_splits) * self.columns_per_warpgroup // 2

    @property
    def accumulators(self) -> int:
        """FP32 registers per math thread that live through the main loop: sums, promotion scratch, and at BLOCK_N 128
        the activations of the first pass (half as many as sums)."""
        scratch = self.unit_columns // 2 if self.promotion == "classic" else 0
        return self.sums + scratch + (self.sums // 2 if self.block_n == 128 else 0)

    def register_plan(self) -> tuple[int, int, int]:
        """Registers per thread of (dispatch, TMA, math): explicit values first, then the plan table."""
        return tuple(own or planned for own, planned in zip(
            (self.regs_dispatch, self.regs_tma, self.regs_math), planned_registers(self)))  # type: ignore[return-value]

    def roles(self) -> list[Role]:
        """Warp -> role -> registers, in thread order: dispatch, TMA, math."""
        dispatch, tma, math = self.register_plan()
        d, t = self.dispatch_warps, self.dispatch_warps + self.tma_warps
        named = [Role("dispatch", (0, d), dispatch), Role("tma", (d, t), tma)]
        return named + [Role(f"math{g}", (t + 4 * g, t + 4 * g + 4), math) for g in range(self.math_warpgroups)]

    # --- text ----------------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KernelConfig:
        """From plain data. Unknown keys and wrong types: UsageError, rule ``config-key`` / ``config-value``."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        for key, value in values.items():
            if key not in kinds:
                near = get_close_matches(str(key), kinds, 1, 0.5)
                meant = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(kinds)}"
                raise UsageError(f"unknown configuration key {key!r}{meant}", rule="config-key")
            if type(value) is not kinds[key]:
                raise UsageError(f"{key} must be {_KIND[kinds[key]]}, not {value!r}", rule="config-value")
        return cls(**values)

    @classmethod
    def parse(cls, text: str, base: KernelConfig | None = None) -> KernelConfig:
        """``KEY=VAL,KEY=VAL`` on top of ``base`` (default: the default configuration)."""
        values: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals or not key or not value:
                raise UsageError(f"configuration item {item!r} is not KEY=VALUE", rule="config-syntax")
            if key in values:
                raise UsageError(f"configuration key {key!r} is given twice", rule="config-syntax")
            values[key] = int(value) if value.lstrip("-").isdecimal() and value.isascii() else value
        return cls.from_dict({**(base or cls()).to_dict(), **values})

    def digest(self) -> str:
        """16 hex digits over all fields: equal configurations, equal digests, in every process."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def name(self) -> str:
        """``m128n256s4c1-fused-classic-compact``; what differs from the defaults is appended."""
        stages = self.stages or "auto"
        text = f"m{self.block_m}n{self.block_n}s{stages}c{self.cluster}-{self.policy}-{self.promotion}-{self.frontend}"
        for key, short in _NAME_EXTRAS.items():
            if getattr(self, key) != getattr(_DEFAULT, key):
                text += f"-{short}{getattr(self, key)}"
        if self.register_plan() != planned_registers(self):
            text += "-r" + "/".join(map(str, self.register_plan()))
        return text


_KIND = {int: "an integer", str: "a word"}
_NAME_EXTRAS = {"block_k": "k", "math_threads": "t", "order": "", "split": "split-", "lag": "lag", "unit_blocks": "unit", "prefetch": "pre", "stagger": "stag", "tail": "tail", "ahead": "ahead"}
_DEFAULT = KernelConfig()


def ring_order(config: KernelConfig, ring: int) -> tuple[int, int]:
    """(lag, unit_blocks) of a launch whose activation pool is a ring of ``ring`` rows.

    An L1 tile waits for rows whose places are free once the L2 tiles of the rows ``ring`` before them are done; those
    must come earlier in the order, or nothing would ever move. They do when the ring holds lag + 1 units, each at most
    ``unit_blocks`` row blocks, in segments of 128 rows. So a small ring shortens the lag, then the units.
    """
    block = config.block_m * config.cluster
    unit_blocks = max(1, min(config.unit_blocks, ring // 2 // block))
    span = -(-unit_blocks * block // 128) * 128
    if ring < span:
        raise UsageError(f"a ring of {ring} rows does not hold one unit of {span} rows", rule="ring")
    return min(config.lag, ring // span - 1), unit_blocks


def grid_ctas(config: KernelConfig, ranks: int, sms: int) -> int:
    """CTAs each of ``ranks`` virtual ranks may launch on a device of ``sms`` SMs (0: they do not fit)."""
    return sms // ranks // config.cluster * config.cluster


def largest_stages(config: KernelConfig, shape: Shape, ranks: int) -> int:
    """Most stages (at most 8) whose shared memory fits; 0 when not even 2 do."""
    for stages in range(MAX_STAGES, 1, -1):
        if sum(smem_plan(config, shape, ranks, stages).values()) <= SMEM_LIMIT:
            return stages
    return 0


def resolve(config: KernelConfig, shape: Shape, ranks: int) -> KernelConfig:
    """The same variant with stages and registers filled in. UsageError naming the rule when it is illegal."""
    require(config, shape, ranks)
    dispatch, tma, math = config.register_plan()
    return replace(config, stages=config.stages or largest_stages(config, shape, ranks),
                   regs_dispatch=dispatch, regs_tma=tma, regs_math=math)


def require(config: KernelConfig, shape: Shape | None = None, ranks: int | None = None,
            sms: int | None = None, grid: int | None = None) -> None:
    """``check``, as an exception: UsageError with the rule's name."""
    verdict = check(config, shape, ranks, sms, grid)
    if not verdict:
        raise UsageError(f"illegal configuration ({verdict.rule}): {verdict.explanation}", rule=verdict.rule)


def check(config: KernelConfig, shape: Shape | None = None, ranks: int | None = None,
          sms: int | None = None, grid: int | None = None) -> Verdict:
    """Is ``config`` legal, here? Without ``shape`` the rules that need one test what every shape needs.

    ``ranks``: number of ranks; with ``sms`` they share one device of that many SMs. ``grid``: CTAs per
    rank (default: as many as fit). Legal but unimplemented is refused last, by rule ``not-implemented``.
    """
    for rule, explanation in _violations(config, shape, ranks, sms, grid):
        return Verdict(False, rule, explanation)
    return Verdict(True)


def _violations(c: KernelConfig, shape: Shape | None, ranks: int | None, sms: int | None,
                grid: int | None) -> Iterator[tuple[str, str]]:
    for broken in (_values(c), _policy(c), _registers(c)):
        found = list(broken)
        yield from found
        if found:  # later rules compute with these values
            return
    yield from compiler_spills(c)
    yield from _shared_memory(c, shape, ranks)
    yield from _residency(c, ranks, sms, grid)
    for key, value in sorted(NOT_IMPLEMENTED, key=str):
        if getattr(c, key) == value:
            yield "not-implemented", f"{key}={value} is a legal choice this kernel does not implement yet"


def _values(c: KernelConfig) -> Iterator[tuple[str, str]]:
    for key, allowed in ALLOWED.items():
        if getattr(c, key) not in allowed:
            yield "allowed-values", f"{key}={getattr(c, key)} is not one of {', '.join(map(str, allowed))}"
    for key, (low, high) in BOUNDS.items():
        if not low <= getattr(c, key) <= high:
            yield "allowed-values", f"{key}={getattr(c, key)} is outside {low}..{high}"
    if c.stages != 0 and not 2 <= c.stages <= MAX_STAGES:
        yield "stages", f"stages={c.stages}: a ring needs 2 to {MAX_STAGES} stages (0 = as many as fit)"


def _policy(c: KernelConfig) -> Iterator[tuple[str, str]]:
    if c.policy == "wide_n" and (c.block_n, c.columns_per_warpgroup, c.promotion) != (256, 256, "rescale"):
        yield "policy-tile", ("wide_n gives one math warpgroup a whole 256-wide tile and promotes by rescale: it needs "
                              f"block_n=256, math_threads=128, promotion=rescale, not {c.block_n}/{c.math_threads}/{c.promotion}")
    if c.split == "m" and (c.block_m, c.math_warpgroups, c.policy) not in ((128, 2, "fused"), (128, 2, "serial_n")):
        yield "policy-tile", ("split=m gives each of two warpgroups 64 of 128 rows (policies fused and serial_n), not "
                              f"{c.policy} with block_m={c.block_m} and {c.math_warpgroups} math warpgroup(s)")
    if c.stagger and c.m_splits == 1:
        yield "policy-tile", "stagger delays one of two warpgroups that do not wait for each other: it needs split=m"
    if c.tail and (c.column_parts, c.math_warpgroups) != (2, 2):
        yield "policy-tile", "tail=1 gives half a tile to one of two warpgroups: it needs two that cut tiles along N"
    if c.policy == "fused" and c.math_warpgroups == 1 and c.block_n > 128:
        yield "policy-tile", ("one warpgroup with 256 columns is policy wide_n (one product, rescale) or serial_n (two products, "
                              "one after the other), not fused")
    if c.policy == "serial_n" and c.tile_order != "wave":
        yield "policy-order", f"serial_n takes tiles wave by wave: order=wave (or auto), not {c.order}"
    if c.policy == "mma_sync" and c.block_m > 32:
        yield "policy-tile", f"mma_sync is for block_m 16 and 32, not {c.block_m}"


def _registers(c: KernelConfig) -> Iterator[tuple[str, str]]:
    roles = c.roles()
    for role in roles:
        if role.registers not in SETMAXNREG_RANGE:
            yield "setmaxnreg", f"{role.name} asks for {role.registers} registers; setmaxnreg takes multiples of 8 from 24 to 256"
    by_group: dict[int, Role] = {}
    for role in roles:
        for group in range(role.warps[0] // 4, (role.warps[1] + 3) // 4):
            first = by_group.setdefault(group, role)
            if first.registers != role.registers:
                yield "warpgroup-registers", (f"{first.name} ({first.registers}) and {role.name} ({role.registers}) share "
                                              f"warpgroup {group}, and setmaxnreg takes one number per warpgroup")
    planned = sum(role.threads * role.registers for role in roles)
    owned = c.threads * c.launch_registers
    if planned > owned:
        parts = " + ".join(f"{role.threads}x{role.registers} {role.name}" for role in roles)
        yield "register-budget", (f"the plan asks for {planned} registers ({parts}); "
                                  f"{c.threads} threads x {c.launch_registers} own {owned}")
    math = min(roles[-1].registers, MAX_THREAD_REGISTERS)
    if c.accumulators + MATH_OVERHEAD > math:
        yield "accumulators", (f"{c.promotion} promotion at {c.columns_per_warpgroup} columns per warpgroup holds {c.accumulators} "
                               f"accumulators per thread and needs about {MATH_OVERHEAD} more registers; math threads have {math}")


def _shared_memory(c: KernelConfig, shape: Shape | None, ranks: int | None) -> Iterator[tuple[str, str]]:
    # Without a shape: one that every other needs at least as much for.
    where = "the smallest shape" if shape is None else f"shape {shape}"
    shape = shape or Shape(128, 128, ranks or 1, 1)
    ranks = ranks or 1
    try:
        check_shape(shape, ranks)
    except UsageError as error:
        yield error.rule or "shape", str(error)
        return
    stages = c.stages or 2
    need = sum(smem_plan(c, shape, ranks, stages).values())
    if need > SMEM_LIMIT:
        most = largest_stages(c, shape, ranks)
        hint = f"at most {most} stages fit" if most else "not even 2 stages fit"
        yield "shared-memory", (f"{stages} stages of {c.block_m}x{c.block_n} need {need} bytes of shared memory for {where} "
                                f"on {ranks} ranks, over {SMEM_LIMIT}; {hint}")


def _residency(c: KernelConfig, ranks: int | None, sms: int | None, grid: int | None) -> Iterator[tuple[str, str]]:
    if grid is not None and (grid < 1 or grid % c.cluster):
        yield "cluster-grid", f"a grid of {grid} CTAs is not a positive multiple of the cluster size {c.cluster}"
    if sms is None:
        return
    ranks = ranks or 1
    fits = grid_ctas(c, ranks, sms)
    wanted = c.cluster if grid is None else grid
    if wanted > fits:
        yield "co-residency", (f"{ranks} ranks x {wanted} CTAs cannot all be resident on {sms} SMs with one CTA per SM and "
                               f"clusters of {c.cluster}: at most {fits} per rank")
