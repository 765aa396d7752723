"""Medians with intervals that assume nothing about how the samples are distributed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """A distribution-free interval of about 95 % for the median: order statistics n/2 -+ 0.98 sqrt(n)."""
    ordered, n = sorted(samples), len(samples)
    half = 0.98 * n**0.5
    low, high = int(n / 2 - half), int(n / 2 + half)
    return ordered[max(low, 0)], ordered[min(high, n - 1)]


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a launch: median, the interval around it, and every sample in the order it was taken."""

    us: float
    low_us: float
    high_us: float
    times_us: tuple[float, ...]

    @classmethod
    def of(cls, times_us: Sequence[float]) -> Estimate:
        """ValueError without samples."""
        if not times_us:
            raise ValueError("no samples")
        return cls(statistics.median(times_us), *median_interval(times_us), tuple(times_us))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def geomean(values: Iterable[float]) -> float:
    """ValueError without values."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("no values")
    return math.exp(statistics.fmean(logs))
