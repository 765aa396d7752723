"""The table ``megamoe.table/1``: what a heuristic table holds, read strictly, with the line and the rule of every fault.

A table answers, for one geometry on one kind of machine (``match``), which configuration to launch for a load on its
``axis``. Ranges are half-open and cover [0, inf). ``table_reader.py`` reads, ``table_check.py`` judges, ``table_writer.py`` writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError

SCHEMA = "megamoe.table/1"
KERNEL = "sm90_fp8_mega_moe"
EXPECTED, TOKENS = "expected_tokens_per_local_expert", "tokens"
AXES = (EXPECTED, TOKENS)
SOURCES = ("measured", "baseline", "static")
VERDICTS = ("better", "same", "unclear", "worse")
FLOOR_SLACK = 0.9  # a time below this share of the floor cannot be one
BACKENDS = ("virtual", "processes", "nvlink", "fake")
ANY = "*"
INTEGER_KEYS = ("sms", "sms_per_rank", "ranks", "experts", "topk", "hidden", "intermediate")
TEXT_KEYS = {"arch": ("sm_90a",), "backend": BACKENDS, "dtype": ("e4m3",), "scale": ("block128",)}
MATCH_KEYS = ("arch", "sms", "backend", "sms_per_rank", "ranks", "experts", "topk", "hidden", "intermediate", "dtype", "scale")


@dataclass(frozen=True)
class Span:
    """Integers in [low, high); only a hand-written baseline may match a span."""

    low: int
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and self.low <= value < self.high

    def __str__(self) -> str:
        return f"[{self.low}, {'inf' if math.isinf(self.high) else int(self.high)})"


@dataclass(frozen=True)
class Match:
    """What a table is for. Each value is exact, or (baselines only) ``*`` or a :class:`Span`."""

    values: Mapping[str, int | str | Span]

    def mismatches(self, query: Mapping[str, int | str]) -> list[str]:
        """``sms is 78, the table's is 132`` for every key of ``query`` that this match does not cover."""
        return [f"{key} is {query[key]}, the table's is {wanted}" for key, wanted in self.values.items()
                if key in query and not _covers(wanted, query[key])]

    @property
    def exact(self) -> bool:
        return all(value != ANY and not isinstance(value, Span) for value in self.values.values())

    def get(self, key: str) -> int | None:
        """The value where it is one exact number, else None."""
        value = self.values.get(key)
        return value if isinstance(value, int) else None


def _covers(wanted: int | str | Span, value: int | str) -> bool:
    return wanted == ANY or (value in wanted if isinstance(wanted, Span) else value == wanted)


@dataclass(frozen=True)
class Choice:
    """What a range picks: a kernel variant and its grid. ``ctas`` per rank, 0 = as many as fit."""

    config: KernelConfig
    ctas: int = 0

    def name(self) -> str:
        return self.config.name() + (f"-grid{self.ctas}" if self.ctas else "")

    def to_dict(self) -> dict[str, Any]:
        """All fields; ``trace`` is for looking, never part of a choice."""
        values = {key: value for key, value in self.config.to_dict().items() if key != "trace"}
        return values | ({"ctas": self.ctas} if self.ctas else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Choice:
        """UsageError for an unknown key or a wrong type."""
        rest = dict(values)
        ctas = rest.pop("ctas", 0)
        if type(ctas) is not int or ctas < 0:
            raise UsageError(f"ctas must be a number of CTAs or 0, not {ctas!r}", rule="config-value")
        if rest.get("trace"):
            raise UsageError("trace=1 is for looking at a kernel, not for a table", rule="config-value")
        return cls(KernelConfig.from_dict(rest), ctas)


@dataclass(frozen=True)
class Range:
    """[start, end) of the axis picks configuration ``use``; ``evidence`` names measured rows. Empty: not measured. A baseline may
    name one to take while the kernel does not implement the one it wants: then ``use`` is what is taken, ``wanted`` what is
    waited for; once it is there, ``use`` is that, and ``otherwise`` what is not needed any more."""

    start: float
    end: float
    use: str
    evidence: tuple[str, ...]
    line: int = field(default=0, compare=False)
    note: str = ""
    wanted: str = ""
    otherwise: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Every configuration that is named."""
        return tuple(filter(None, (self.use, self.wanted, self.otherwise)))


@dataclass(frozen=True)
class Evidence:
    """One configuration at one size. Times in microseconds, the slowest rank's; ratios are time over time.

    ``vs_incumbent`` (with its interval) is paired and interleaved; ``vs_default`` is derived from it. A static table has
    ``model_us`` in place of all of them.
    """

    id: str
    config: str
    tokens: int
    routing: str
    median_us: float | None = None
    ci_us: tuple[float, float] | None = None
    vs_incumbent: float | None = None
    vs_incumbent_ci: tuple[float, float] | None = None
    vs_default: float | None = None
    verdict: str = ""
    rounds: int = 0
    machine: str = ""
    stage: str = ""  # what measured it last: final, confirm (in a fresh process), validate, noise (the incumbent itself)
    floor_us: float | None = None
    model_us: float | None = None
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Policy:
    enabled: bool
    reason: str
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Table:
    """A decoded table. ``lines`` holds where things stand: ``match``, ``default``, ``configs.NAME``, ``axis``, ..."""

    path: Path | None
    match: Match
    axis: str
    default: str
    ranges: tuple[Range, ...]
    configs: Mapping[str, Choice]
    policies: Mapping[str, Policy] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
    validation: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    title: str = ""
    notes: tuple[str, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def source(self) -> str:
        return str(self.provenance.get("source", ""))

    @property
    def partial(self) -> bool:
        return bool(self.provenance.get("partial", False))

    def axis_value(self, tokens: int, ranks: int, topk: int, experts: int) -> float:
        """Where ``tokens`` per rank stand on this table's axis."""
        return tokens * ranks * topk / experts if self.axis == EXPECTED else float(tokens)

    def range_at(self, value: float) -> Range | None:
        return next((r for r in self.ranges if r.start <= value < r.end), None)

    def measured(self, name: str) -> list[Evidence]:
        """The evidence of one configuration, by size."""
        return sorted((e for e in self.evidence if e.config == name), key=lambda e: e.tokens)
