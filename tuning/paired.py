"""What paired samples say: interleaved times of a candidate and the incumbent on the same inputs, as log ratios.

Drift of clocks and neighbours moves both sides of a pair alike, so it cancels. Three verdicts, starting from *unclear*:
a claim must stand clear of the spread that the incumbent shows against itself (A/A), and of the least gain worth a change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megamoe_cli.bench import median_interval

MIN_PAIRS = 6  # fewer pairs decide nothing: the interval would be their extremes
OUTLIER_Z = 3.5  # modified z-score (median absolute deviation) from which a sample is flagged, never dropped


@dataclass(frozen=True)
class Ratio:
    """Time of a over time of b: median, an interval of about 95 %, number of pairs."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        """Of the interval, as a log ratio around 0: how far from 1 it reaches."""
        return max(abs(math.log(self.low)), abs(math.log(self.high)))


ONE = Ratio(1.0, 1.0, 1.0, 0)


def usable(pairs: Iterable[Sequence[float]]) -> bool:
    """Every time is finite and positive. Event times can come out negative or zero where timers are virtualised."""
    return all(isinstance(t, (int, float)) and math.isfinite(t) and t > 0 for pair in pairs for t in pair)


def ratio(pairs: Sequence[Sequence[float]]) -> Ratio:
    """ValueError without pairs."""
    logs = [math.log(a / b) for a, b in pairs]
    if not logs:
        raise ValueError("no pairs")
    low, high = median_interval(logs) if len(logs) >= MIN_PAIRS else (min(logs), max(logs))
    return Ratio(math.exp(statistics.median(logs)), math.exp(low), math.exp(high), len(logs))


def verdict(found: Ratio, noise: float, min_gain: float) -> str:
    """``better``, ``worse``, ``same`` or ``unclear``. ``noise``: log ratio that A/A reached; ``min_gain``: 0.01 is 1 %."""
    if found.pairs < MIN_PAIRS:
        return "unclear"
    claim = max(noise, math.log1p(min_gain))
    low, high = math.log(found.low), math.log(found.high)
    if high < -claim:
        return "better"
    if low > claim:
        return "worse"
    return "same" if -claim <= low and high <= claim else "unclear"


def times(pairs: Sequence[Sequence[float]], side: int) -> tuple[float, float, float]:
    """(median, low, high) of one side's own times, microseconds."""
    values = [pair[side] for pair in pairs]
    low, high = median_interval(values) if len(values) >= MIN_PAIRS else (min(values), max(values))
    return statistics.median(values), low, high


def outliers(values: Sequence[float]) -> list[int]:
    """Positions of samples that are far from the median; they are reported, not removed."""
    if len(values) < 4:
        return []
    middle = statistics.median(values)
    spread = statistics.median(abs(v - middle) for v in values)
    if spread == 0:
        return [i for i, v in enumerate(values) if v != middle]
    return [i for i, v in enumerate(values) if 0.6745 * abs(v - middle) / spread > OUTLIER_Z]
