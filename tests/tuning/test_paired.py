"""Verdicts from paired samples, on times with known truth."""

from __future__ import annotations

import math
import random

import pytest

from megamoe_cli.tuning.paired import MIN_PAIRS, Ratio, outliers, ratio, times, usable, verdict


def pairs(gain: float, noise: float, count: int, seed: int, drift: float = 0.0) -> list[list[float]]:
    """a is ``gain`` faster than b; each sample has its own noise, a pair shares its drift."""
    draw = random.Random(seed)
    out = []
    for _ in range(count):
        shared = math.exp(draw.gauss(0, drift))
        out.append([(1 - gain) * shared * math.exp(draw.gauss(0, noise)) * 100, shared * math.exp(draw.gauss(0, noise)) * 100])
    return out


def judged(gain: float, noise: float, count: int, seed: int, drift: float = 0.0) -> str:
    aa = ratio(pairs(0.0, noise, 24, seed + 10_000, drift)).half_width
    return verdict(ratio(pairs(gain, noise, count, seed, drift)), aa, 0.01)


def test_a_small_true_gain_in_noise_is_not_claimed() -> None:
    """3 % noise, 1 % gain: the incumbent stays."""
    said = [judged(0.01, 0.03, 16, seed) for seed in range(200)]
    assert said.count("better") <= 2 and said.count("worse") == 0


def test_a_large_gain_is_seen_through_drift() -> None:
    said = [judged(0.10, 0.01, 16, seed, drift=0.2) for seed in range(100)]
    assert said.count("better") >= 98


def test_a_loss_is_seen() -> None:
    assert [judged(-0.10, 0.01, 16, seed) for seed in range(50)].count("worse") >= 49


def test_nothing_is_claimed_of_equals() -> None:
    said = [judged(0.0, 0.01, 16, seed) for seed in range(300)]
    assert said.count("better") + said.count("worse") <= 6


def test_the_interval_covers_the_truth() -> None:
    """About 95 % of intervals do; 90 % is what a test may ask of 300."""
    inside = 0
    for seed in range(300):
        found = ratio(pairs(0.05, 0.02, 16, seed))
        inside += found.low <= 0.95 <= found.high
    assert inside >= 270


def test_few_pairs_decide_nothing() -> None:
    assert verdict(ratio([[50, 100]] * (MIN_PAIRS - 1)), 0.0, 0.01) == "unclear"
    assert verdict(ratio([[50, 100]] * MIN_PAIRS), 0.0, 0.01) == "better"


@pytest.mark.parametrize(("low", "high", "expected"), [
    (0.90, 0.95, "better"), (1.05, 1.10, "worse"), (0.995, 1.005, "same"), (0.97, 1.0, "unclear"), (0.9, 1.1, "unclear")])
def test_the_four_verdicts(low, high, expected) -> None:
    assert verdict(Ratio((low * high) ** 0.5, low, high, 16), 0.0, 0.01) == expected
    assert verdict(Ratio((low * high) ** 0.5, low, high, 16), 0.5, 0.01) == "same", "within the noise"


def test_times_that_cannot_be() -> None:
    for bad in (0.0, -3.0, math.nan, math.inf, "nan", None):
        assert not usable([[1.0, 2.0], [bad, 2.0]]) and not usable([[1.0, bad]])
    assert usable([[1.0, 2.0]])


def test_outliers_are_flagged_and_kept() -> None:
    values = [100.0, 101, 99, 100.5, 99.5, 100.2, 400.0]
    assert outliers(values) == [6] and outliers([1.0, 1.0, 1.0, 1.0]) == [] and outliers([1.0, 9.0]) == []
    assert times([[v, 1.0] for v in values], 0)[0] == 100.2
