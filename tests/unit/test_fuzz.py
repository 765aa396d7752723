"""The fuzzer draws legal cases, the same for the same seed, of every kind; the corpus keeps them exactly. And the seed
campaign covers every phase under every policy."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megamoe_cli import config, fuzz, sanitize, seed_campaign, testplan
from megamoe_cli.backends.sm_share import check_emulated_grid
from megamoe_cli.case_options import HARNESS_OPTIONS, parse_mix
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import check_problem
from megamoe_cli.skew import backend_options


def drawn(seed: int = 0, groups: int = 12) -> list[testplan.Case]:
    source = fuzz.Fuzzer(seed)
    return [case for _ in range(groups) for case in source.group(10)]


def test_random_cases_are_legal_and_repeatable() -> None:
    cases = drawn()
    assert cases == drawn() and cases != drawn(1)
    for case in cases:
        check_problem(case.problem)
        for each in (case.config, *parse_mix(case.options.get("mix", ""), case.config)):
            config.require(each, case.problem.shape, case.ranks)
            assert case.options["ctas"] >= each.cluster
        check_emulated_grid(case.config, case.options)
        testplan.routing_fits(case.routing, case.problem, False)
        if "skew" in case.options:
            backend_options(case.options["skew"], case.ranks, case.seed)
        assert set(case.options) - set(HARNESS_OPTIONS) <= {"races", "preempt", "uninit", "schedule", "completion", "ctas"}


def test_random_cases_are_of_every_kind() -> None:
    cases = drawn(groups=40)
    assert {case.phase for case in cases} == {"combine", "l2", "l1", "dispatch"} and {case.ranks for case in cases} == {1, 2, 3, 4, 5}
    assert len({case.routing.partition(":")[0] for case in cases}) == 7
    assert {case.config.block_m for case in cases} == {16, 32, 64, 128} and {case.config.frontend for case in cases} == {"compact", "standard"}
    seen = Counter(key for case in cases for key in case.options)
    assert all(seen[key] > 10 for key in ("races", "skew", "vary_tokens", "mix", "replay", "tokens_bound", "snapshot")), seen
    assert any(0 in case.problem.tokens for case in cases) and any(case.clamp for case in cases)
    assert any(case.problem.capacity % 128 for case in cases)


def test_cases_survive_the_corpus(tmp_path: Path) -> None:
    path, cases = tmp_path / "corpus.jsonl", drawn(groups=2)
    for case in cases:
        assert fuzz.add_to_corpus(path, case, "test")
    assert not fuzz.add_to_corpus(path, cases[3], "again")
    assert fuzz.read_corpus(path) == cases
    path.write_text(path.read_text() + '{"why": "", "case": {"phase": "l1"}}\n')
    with pytest.raises(UsageError, match="corpus.jsonl line 21 is no case"):
        fuzz.read_corpus(path)


def test_the_kept_corpus_is_legal_and_short_enough() -> None:
    path = sanitize.corpus_path()
    assert path is not None
    cases = fuzz.read_corpus(path)
    assert 8 <= len(cases) <= 60, "a corpus that grows without bound is not run by anyone: drop what a later case covers"
    assert len({case.config for case in cases}) <= 12, "each configuration is a compile"


def test_the_campaign_covers_every_phase_and_policy() -> None:
    cases = seed_campaign.seeds(200)
    assert len(cases) == 200 and len({case.id for case in cases}) == 200 and len({case.seed for case in cases}) == 200
    cells = Counter((case.phase, case.config.policy) for case in cases)
    assert set(cells) == {(phase, policy) for phase in testplan.phase_names() for policy in seed_campaign.policies()}
    assert min(cells.values()) >= seed_campaign.LEAST_PER_CELL
    for case in cases:
        assert all(case.options[name] == value for name, value in sanitize.CHECKS.items())
        config.require(case.config, case.problem.shape, case.ranks)
    assert len({(c.options["schedule"], c.options["completion"]) for c in cases}) == 4
    assert {case.options.get("skew") for case in cases} == {None, "late:any", "slow:any"}
    with pytest.raises(UsageError, match="need 8 seeds each"):
        seed_campaign.seeds(20)


def test_every_policy_that_exists_has_configurations() -> None:
    for policy in seed_campaign.policies():
        some = seed_campaign.variants(policy)
        assert some and len(set(some)) == len(some) <= seed_campaign.VARIANTS
        assert all(each.policy == policy and config.check(each) for each in some)
        assert some == seed_campaign.variants(policy)
