"""From points to ranges: cover, fewest configurations, ties, what was not confirmed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli.config import KernelConfig
from megamoe_cli.tuning.fit import Point, boundary, fit
from megamoe_cli.tuning.paired import Ratio
from megamoe_cli.tuning.schema import Choice

INC, A, B, C = (Choice(KernelConfig(lag=n)) for n in (1, 2, 3, 4))


def point(tokens: int, ratios: dict[Choice, float], banned=(), incumbent: Choice = INC, width: float = 0.002) -> Point:
    found = {c: Ratio(r, r * (1 - width), r * (1 + width), 16) for c, r in ratios.items()}
    said = {c: "better" if r < 0.99 else "worse" if r > 1.01 else "same" for c, r in ratios.items()}
    return Point(tokens, incumbent, found, said, banned)


def picks(points, tolerance=0.02, registers=lambda c: 0) -> list[Choice]:
    found = fit(points, tolerance, registers)
    return [found.choice_at(p.tokens) for p in points]


def test_one_configuration_where_one_will_do() -> None:
    """A and B win in turn by 1 %: A is within 2 % everywhere."""
    assert picks([point(1, {A: 0.90, B: 0.91}), point(8, {A: 0.91, B: 0.90}), point(64, {A: 0.90, B: 0.91})]) == [A, A, A]


def test_two_where_two_are_needed() -> None:
    assert picks([point(1, {A: 0.9, B: 1.1}), point(8, {A: 0.9, B: 1.1}), point(64, {A: 1.1, B: 0.9}), point(512, {A: 1.1, B: 0.9})]) == [A, A, B, B]


def test_ties_go_to_the_incumbent() -> None:
    assert picks([point(1, {A: 0.995, B: 1.0}), point(8, {A: 0.995, B: 1.0})]) == [INC, INC]


def test_then_to_fewer_registers() -> None:
    rows = [point(1, {A: 0.9, B: 0.9}), point(8, {A: 0.9, B: 0.9})]
    assert picks(rows, registers=lambda c: {A: 224, B: 168}.get(c, 0)) == [B, B]
    assert picks(rows, registers=lambda c: {A: 168, B: 224}.get(c, 0)) == [A, A]


def test_a_proven_gain_is_not_given_away_to_a_tie() -> None:
    assert picks([point(1, {A: 0.9}), point(8, {A: 0.9})]) == [A, A]


def test_what_was_not_confirmed_or_failed_is_not_picked() -> None:
    assert picks([point(1, {A: 0.5, B: 0.9}, banned=[A]), point(8, {A: 0.5, B: 0.9}, banned=[A])]) == [B, B]


def test_what_was_not_measured_everywhere_holds_only_where_it_was() -> None:
    assert picks([point(1, {A: 0.8}), point(8, {A: 0.8}), point(64, {B: 1.0}), point(512, {})]) == [A, A, INC, INC]


def test_an_unproven_best_does_not_push_the_incumbent_out() -> None:
    """A's median is 5 % better but its interval is wide: unclear."""
    wide = Point(1, INC, {A: Ratio(0.95, 0.8, 1.1, 16)}, {A: "unclear"})
    assert picks([wide]) == [INC]


def test_a_single_size_does_not_get_a_range_for_nothing() -> None:
    """B is as good as A at 8; a range of its own there would be noise."""
    rows = [point(1, {A: 0.9, B: 0.95}), point(8, {A: 0.9, B: 0.9}), point(64, {A: 0.9, B: 0.95}), point(512, {A: 1.2, B: 0.9})]
    assert picks(rows) == [A, A, A, B]


def test_incumbents_of_several_ranges() -> None:
    rows = [point(t, {A: 1.0}, incumbent=INC if t < 100 else B) for t in (1, 10, 100, 1000)]
    assert picks(rows) == [INC, INC, B, B], "what is nowhere better takes nobody's place, also not to save a configuration"
    rows = [point(t, {A: 0.9 if t == 1 else 1.0}, incumbent=INC if t < 100 else B) for t in (1, 10, 100, 1000)]
    assert picks(rows) == [A, A, A, A], "better somewhere, the same elsewhere: one configuration for all"
    rows = [point(t, {A: 1.05}, incumbent=INC if t < 100 else B) for t in (1, 10, 100, 1000)]
    assert picks(rows) == [INC, INC, B, B]


def test_routings_of_one_size_must_agree() -> None:
    uniform, skewed = point(64, {A: 0.9, B: 0.93}), replace(point(64, {A: 1.2, B: 0.93}), routing="powerlaw")
    assert picks([uniform, skewed]) == [B, B]


@given(low=st.integers(1, 10**6), step=st.integers(1, 10**6))
def test_boundaries_lie_between_token_counts(low, step) -> None:
    at = boundary(low, low + step)
    assert at % 1 == 0.5 and low < at < low + step


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ranges_cover_every_size_once_and_are_within_tolerance(data) -> None:
    sizes = sorted(data.draw(st.sets(st.integers(1, 9000), min_size=1, max_size=9)))
    rows = []
    for tokens in sizes:
        names = data.draw(st.sets(st.sampled_from([A, B, C])))
        rows.append(point(tokens, {c: data.draw(st.floats(0.6, 1.4)) for c in names}))
    found = fit(rows, 0.02)
    assert found.segments[0].start == 0 and found.segments[-1].end == sizes[-1] + 0.5
    for before, after in zip(found.segments, found.segments[1:]):
        assert before.end == after.start and before.choice != after.choice
    for row in rows:
        holders = [s for s in found.segments if s.start <= row.tokens < s.end]
        assert len(holders) == 1 and row in holders[0].points
        assert row.loss(holders[0].choice) <= 0.02 + 1e-9
    assert found == fit(rows, 0.02), "the same points, the same ranges"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_smaller_set_would_do(data) -> None:
    import itertools

    rows = [point(t, {c: data.draw(st.sampled_from([0.8, 0.81, 0.9, 1.2])) for c in (A, B, C)}) for t in (1, 2, 4, 8, 16)]
    used = fit(rows, 0.02).choices
    for count in range(1, len(used)):
        for subset in itertools.combinations([INC, A, B, C], count):
            assert not all(any(row.allowed(c, 0.02) for c in subset) for row in rows)


def test_nothing_measured_nothing_fitted() -> None:
    assert fit([], 0.02).segments == [] and fit([], 0.02).choice_at(5) is None


def test_edges_are_what_to_hold_out() -> None:
    found = fit([point(1, {A: 0.9, B: 1.1}), point(8, {A: 0.9, B: 1.1}), point(64, {A: 1.1, B: 0.9}), point(512, {A: 1.1, B: 0.9})], 0.02)
    assert found.edges() == [(22, 23)]


@pytest.mark.parametrize("noise_seed", range(3))
def test_the_fit_is_the_same_on_two_noisy_runs_of_one_truth(noise_seed) -> None:
    import random

    def run(seed: int) -> list[Choice]:
        draw = random.Random(seed)
        truth = {1: {A: 0.9, B: 1.1}, 8: {A: 0.9, B: 1.1}, 64: {A: 1.1, B: 0.9}, 512: {A: 1.1, B: 0.9}}
        return picks([point(t, {c: r * (1 + draw.gauss(0, 0.004)) for c, r in found.items()}) for t, found in truth.items()])

    assert run(noise_seed) == run(noise_seed + 100) == [A, A, B, B]
