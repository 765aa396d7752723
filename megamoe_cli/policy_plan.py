"""Cases that prove every policy: each legal combination of compile-time choices, at phases l1, l2 and combine, on 1, 2 and
8 ranks. ``megamoe test --policy all`` runs them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megamoe_cli import combinations, testplan
from megamoe_cli import config as kernel_config
from megamoe_cli.config import ALLOWED, KernelConfig
from megamoe_cli.errors import UsageError
from megamoe_cli.plan_values import split, uneven_counts
from megamoe_cli.shapes import MAX_RANKS, Problem, nearest_name, parse_shape
from megamoe_cli.testplan import Case

PHASES = ("l1", "l2", "combine")
RANKS = (1, 2, 8)
COVERING = "covering"

# Per rank: experts (odd counts, one that is a power of two, many), hidden and intermediate (H that a 256-wide tile
# overhangs, an odd number of K-blocks, more than 16 of them), top-k, tokens, routing. A combination meets one of them on
# each rank count, the next combination the next.
_SIZES: tuple[tuple[int, str, int, str, str], ...] = (
    (3, "384x256", 2, "uneven:45", "uniform"),
    (1, "256x128", 1, "uneven:70", "uniform"),
    (7, "128x384", 3, "uneven:20", "powerlaw:1.2"),
    (9, "384x128", 2, "uneven:25", "masked:0.3"),
    (48, "128x128", 4, "uneven:12", "uniform"),
    (2, "640x256", 2, "33", "one-hot-expert:0"),
    (129, "128x128", 2, "uneven:9", "uniform"),
)
# Rescaling carries its sums every 8 K-blocks.
_LONG = (3, "2432x128", 2, "uneven:9", "uniform")
_LAGS = ((0, 1), (1, 3), (5, 2), (1000, 8))  # lag (of a wave: its units) and unit_blocks, in turn
_ORDERS = ("auto", "auto", "wave")


@dataclass(frozen=True)
class PolicyPlan:
    """``cases`` of ``chosen`` combinations out of ``found``."""

    cases: list[Case]
    chosen: tuple[KernelConfig, ...]
    found: combinations.Combinations

    def sentence(self) -> str:
        ranks = sorted({case.ranks for case in self.cases})
        phases = list(dict.fromkeys(case.phase for case in self.cases))
        return (f"{self.found.sentence()}; {len(self.chosen)} chosen, each at {', '.join(phases)} on {', '.join(map(str, ranks))} ranks: "
                f"{len(self.cases)} cases")  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {"total": self.found.total, "legal": len(self.found.legal), "refused": self.found.refused, "chosen": len(self.chosen),
                "cases": len(self.cases)}  # fmt: skip


def selection(text: str) -> tuple[tuple[str, ...], bool]:
    """``all``, ``covering`` or policies by name to (policies, only a covering subset?). UsageError with the nearest name."""
    words = split(text)
    for word in words:
        if word not in (*ALLOWED["policy"], "all", COVERING):
            raise UsageError(f"--policy: {word!r} is no policy; nearest name: {nearest_name(word, (*ALLOWED['policy'], 'all', COVERING))} "
                             f"(all, {COVERING}, {', '.join(ALLOWED['policy'])})", rule="policy-name")  # fmt: skip
    if not words or ("all" in words and len(words) > (COVERING in words) + 1):
        raise UsageError(f"--policy: name policies, or all, or {COVERING}", rule="policy-name")
    named = tuple(word for word in ALLOWED["policy"] if word in words)
    return named or ALLOWED["policy"], COVERING in words


def plan(text: str, *, ranks: Sequence[int] = RANKS, phases: Sequence[str] = PHASES, seed: int = 0, backend: str = "auto",
         timeout_s: float = 120.0, options: Mapping[str, Any] | None = None) -> PolicyPlan:  # fmt: skip
    """The cases of ``--policy text``. UsageError for an unknown policy or a rank count outside 1..32."""
    for count in ranks:
        if not 1 <= count <= MAX_RANKS:
            raise UsageError(f"ranks={count} is outside 1..{MAX_RANKS}, one NVLink domain", rule="ranks-limit")
    policies, covering = selection(text)
    found = combinations.enumerate_all(replace(KernelConfig(), stages=2), policies=policies)
    chosen = tuple(combinations.covering(found.legal)) if covering else found.legal
    cases = [replace(_case(config, number, phase, count, seed, timeout_s), backend=backend, options=dict(options or {}))
             for number, config in enumerate(chosen) for phase in phases for count in ranks]  # fmt: skip
    return PolicyPlan(cases, chosen, found)


def _case(config: KernelConfig, number: int, phase: str, ranks: int, seed: int, timeout_s: float) -> Case:
    long = config.promotion == "rescale" and number % 2 == 0 and ranks == 1
    turn = number + (ranks.bit_length() - 1) * 2
    experts, size, topk, tokens, routing = _LONG if long else _SIZES[turn % len(_SIZES)]
    shape = parse_shape(f"{size}x{experts * ranks}x{min(topk, experts * ranks)}")
    lag, unit_blocks = _LAGS[(number + ranks) % len(_LAGS)]
    order = _ORDERS[number % len(_ORDERS)] if config.policy != "serial_n" else "auto"
    config = replace(config, lag=lag, unit_blocks=unit_blocks, order=order)
    halved = replace(config, tail=1)
    if number % 2 and kernel_config.check(halved):  # where it is allowed: the last L2 tiles are cut in two
        config = halved
    counts = uneven_counts(int(tokens[7:]), ranks, seed + number) if tokens.startswith("uneven:") else (int(tokens),) * ranks
    problem = Problem.make(shape, ranks, counts)
    kernel_config.require(config, shape, ranks)
    launches = testplan.FEWER_LAUNCHES.get(phase, 2 if phase != "combine" else testplan.LAUNCHES)
    clamp = 0.5 if number % 5 == 3 else None
    case = Case("", phase, problem, routing, clamp, seed, config, launches, "auto", timeout_s)
    return replace(case, id=testplan.identity(case))
