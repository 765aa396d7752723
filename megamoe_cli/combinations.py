"""Every combination of a configuration's compile-time choices: which are legal, which rule refuses the others, and small
subsets that still hold every pair of choices. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from megamoe_cli import config as kernel_config
from megamoe_cli.config import ALLOWED, KernelConfig
from megamoe_cli.shapes import Shape

# What makes another kernel. Order, lag and unit sizes are values of the launch: one kernel serves them all.
AXES = ("policy", "promotion", "block_m", "block_n", "math_threads", "split", "frontend", "cluster")
_SPLITS = ("n", "m")  # "auto" is one of the two


@dataclass(frozen=True)
class Combinations:
    """``legal`` in a fixed order; ``refused``: how many each rule turned away."""

    legal: tuple[KernelConfig, ...]
    refused: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.legal) + sum(self.refused.values())

    def sentence(self) -> str:
        """``280 of 1024 combinations are legal; refused: 652 by policy-tile, 92 by accumulators``."""
        words = ", ".join(f"{count} by {rule}" for rule, count in sorted(self.refused.items(), key=lambda item: -item[1]))
        return f"{len(self.legal)} of {self.total} combinations are legal" + (f"; refused: {words}" if words else "")


def enumerate_all(base: KernelConfig | None = None, shape: Shape | None = None, ranks: int | None = None,
                  policies: Sequence[str] = ALLOWED["policy"], fixed: Collection[str] = ()) -> Combinations:  # fmt: skip
    """All combinations of ``AXES`` on top of ``base`` (its stages, registers, trace and launch values), judged for the shape
    and rank count; without them by what every shape needs. Axes in ``fixed`` keep the value of ``base``. A split that
    ``auto`` would choose is written as ``auto``."""
    start, legal, refused = base or KernelConfig(), [], Counter[str]()
    choices = {name: ALLOWED[name] for name in AXES} | {"policy": tuple(policies), "split": _SPLITS}
    choices |= {name: (getattr(start, name),) for name in AXES if name in fixed}
    for values in product(*choices.values()):
        config = replace(start, **dict(zip(choices, values)))
        verdict = kernel_config.check(config, shape, ranks)
        if verdict:
            legal.append(settled(config))
        else:
            refused[verdict.rule] += 1
    return Combinations(tuple(legal), dict(refused))


def settled(config: KernelConfig) -> KernelConfig:
    """The configuration with ``split`` as ``auto`` where that means the same."""
    automatic = replace(config, split="auto")
    return automatic if automatic.m_splits == config.m_splits else config


def covering(configs: Sequence[KernelConfig], fields: Sequence[str] = AXES) -> list[KernelConfig]:
    """Few of ``configs`` that hold every pair of field values which occurs in any of them (greedy, in a fixed order).

    ``split`` counts as what it comes to: rows or columns.
    """
    def values(config: KernelConfig) -> list[tuple[str, object]]:
        return [(name, config.m_splits if name == "split" else getattr(config, name)) for name in fields]

    pairs = {config: set(combinations(values(config), 2)) for config in configs}
    missing: set[tuple[tuple[str, object], ...]] = set().union(*pairs.values()) if pairs else set()
    chosen: list[KernelConfig] = []
    while missing:
        best = max(configs, key=lambda config: len(pairs[config] & missing))  # the first of the best
        chosen.append(best)
        missing -= pairs[best]
    return chosen
