"""Whole runs in virtual time: does the default plan fit the budget it is advertised with, does it find the best, and does a run
that was cut anywhere end as one that was not."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from megamoe_cli import config as kernel_config
from megamoe_cli.bench import slice_of
from megamoe_cli.config import KernelConfig
from megamoe_cli.shapes import parse_shape
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.run import Request
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.search import FINALISTS
from megamoe_cli.tuning.space import kernels_of
from megamoe_cli.tuning.summary import expected_trials
from megamoe_cli.tuning.table_check import check_table, errors_of
from megamoe_cli.tuning.table_merge import diff
from megamoe_cli.tuning.table_writer import to_yaml
from tests.tuning.rig import SCRIPT, SPACE, WIDE
from tests.tuning.simulated import COSTS, Done, plan_of, simulate
from tests.tuning.tables_at_hand import SHAPE

FLASH = parse_shape("flash")


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.tuning.journal.os.fsync", lambda handle: None)


@pytest.fixture
def everything(monkeypatch) -> None:
    """The kernel implements all that the space holds: the largest plan there can be."""
    monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", frozenset())


def script_of(seed: int, ranks: int = 1, **more: Any) -> dict[str, Any]:
    # Eight ranks' inputs and references are made one rank after another.
    costs = COSTS if ranks == 1 else COSTS | {"weights_s": 10.0, "inputs_s": 1.8, "trial_s": 0.1}
    return {"model": True, "landscape": 0.05, "landscape_seed": seed, "noise": 0.006, "seed": seed, "costs": costs, **more}


# -- the budget ------------------------------------------------------------------------------------


def checked(done: Done, budget_s: float) -> None:
    """All sizes, confirmed, validated, in time; every pick near the best candidate of its size."""
    plan = done.plan
    assert 60 <= len(kernels_of(plan.candidates)) <= 110 and len(plan.candidates) > 1000
    assert done.outcome is not None and done.table is not None
    assert done.seconds <= budget_s and done.outcome.stopped is None and not done.table.partial
    assert done.outcome.searched == set(plan.sizes) and sum(expected_trials(plan).values()) / 2 < done.trials < 2 * sum(expected_trials(plan).values())
    assert errors_of(check_table(done.table)) == [] and done.table.validation["worst_slowdown"] <= 1.03
    # 2 % is the price of few configurations, 1 % the noise.
    regret = done.regret(done.measurer.group.script)
    assert max(regret.values()) < 1.04 and statistics.geometric_mean(regret.values()) < 1.012, regret


def test_the_default_plan_of_one_rank_fits_its_budget_and_finds_the_best(everything, tmp_path) -> None:
    """Kernels of 60 to 2400 us, 8 s for a process, 0.1 s for a cubin."""
    script = script_of(3)
    plan = plan_of(script, Request(slice_of(FLASH, 8), seed=3, incumbent="baseline"))
    done = simulate(script, plan, tmp_path / "trials.jsonl", 240)
    checked(done, 240)
    # Coverage by halving: few sizes screen every kernel; those between two of them only what was good at one.
    screened = {t: sum(x.stage == "screen" and x.tokens == t for x in done.measurer.journal.trials.values()) for t in plan.sizes}
    whole = [t for t, count in screened.items() if count > 0.8 * len(kernels_of(plan.candidates))]
    assert {1, 64, 8192} <= set(whole) and len(whole) <= 8, screened
    plan.write(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4e6, "what a run leaves is small"


def test_the_default_plan_of_eight_virtual_ranks_fits_six_minutes(everything, tmp_path) -> None:
    script = script_of(3, 8)
    plan = plan_of(script, Request(FLASH, 8, seed=3, incumbent="baseline"))
    checked(simulate(script, plan, tmp_path / "trials.jsonl", 360), 360)


@pytest.mark.slow
def test_the_default_plan_of_large_experts_fits_six_minutes(everything, tmp_path) -> None:
    """Kernels of 140 to 6000 us."""
    script = script_of(3)
    plan = plan_of(script, Request(slice_of(parse_shape("pro"), 8), seed=3, incumbent="baseline"))
    checked(simulate(script, plan, tmp_path / "trials.jsonl", 360), 360)


def test_with_half_the_time_there_is_a_table_and_it_says_partial_or_is_whole(everything, tmp_path) -> None:
    script = script_of(4, 8)
    plan = plan_of(script, Request(FLASH, 8, seed=4, incumbent="baseline"))
    done = simulate(script, plan, tmp_path / "trials.jsonl", 150)
    assert done.table is not None and done.outcome is not None
    assert done.seconds < 160 and done.table.partial and done.outcome.stopped == "budget"
    assert {p.rule for p in errors_of(check_table(done.table))} <= {"validation"} and max(done.regret(script).values()) < 1.5
    again = simulate(script, plan, tmp_path / "trials.jsonl", None)
    assert again.table is not None and not again.table.partial and max(again.regret(script).values()) < 1.04


@pytest.mark.parametrize("kind", ["fault", "hang"])
def test_half_of_the_kernels_broken_does_not_eat_the_budget(everything, tmp_path, kind) -> None:
    """Every cluster of two ends in a fault after 5 s, or in a kill after 20 s, and in new processes."""
    script = script_of(5, faults=[{"match": {"cluster": 2}, "kind": kind}])
    plan = plan_of(script, Request(slice_of(FLASH, 8), seed=5, incumbent="default"))
    done = simulate(script, plan, tmp_path / "trials.jsonl", 360)
    assert done.outcome is not None and done.outcome.stopped is None and done.seconds <= 360
    lost = [t for t in done.measurer.journal.trials.values() if t.status == kind]
    assert 3 <= len(lost) <= 8 and any("cluster=2" in note for note in done.outcome.notes)
    assert {c.config.cluster for c in done.outcome.fitted.choices} == {1}


# -- which kernels are varied ----------------------------------------------------------------------


def test_one_kernel_with_many_hints_does_not_keep_the_others_from_being_varied(tmp_path) -> None:
    """At every other size another ``lag`` of 32 rows is best, so all of them are tried first at 256 tokens, where they come
    before 128 rows; but with the right ``lag`` 128 rows are best there: the places are for kernels, not for their variants."""
    best = {1: 16, 4: 4, 16: 8, 64: 24, 1024: 48}
    script = {**SCRIPT, "noise": 0.001, "effects": [
        *({"match": {"block_m": 32, "lag": lag}, "from": tokens, "to": tokens + 1, "factor": 0.9} for tokens, lag in best.items()),
        {"match": {"block_m": 32}, "factor": 0.95}, {"match": {"block_m": 128}, "factor": 0.98},
        {"match": {"block_m": 128, "lag": 16}, "from": 200, "to": 300, "factor": 0.85}]}
    (tmp_path / "space.yaml").write_text(SPACE.replace("[8, 16]", "[4, 8, 16, 24, 48]"))
    plan = plan_of(script, Request(SHAPE, sizes=(*best, 256), space=f"{tmp_path / 'space.yaml'}:default", seed=1))
    done = simulate(script, plan, tmp_path / "trials.jsonl")
    trials = [t for t in done.measurer.journal.trials.values() if t.tokens == 256]
    assert len({t.a["lag"] for t in trials if t.stage == "second" and t.a["block_m"] == 32}) > FINALISTS, "hints for every place there is"
    assert {t.a["block_m"] for t in trials if t.stage == "launch"} == {32, 128}
    tried = [t.key for t in trials if t.stage in ("second", "launch")]
    assert len(tried) == len({(t.a["block_m"], t.a["lag"]) for t in trials if t.stage in ("second", "launch")}), "nothing is tried twice"
    picked = done.outcome.fitted.choice_at(256).config
    assert (picked.block_m, picked.lag) == (128, 16)


# -- cut anywhere ----------------------------------------------------------------------------------


def text_of(done: Done) -> str:
    """The table's file, without the moment it was written."""
    assert done.table is not None
    return "\n".join(line for line in to_yaml(done.table).splitlines() if not line.startswith("  created:"))


@pytest.fixture
def small(tmp_path) -> tuple[dict[str, Any], Plan]:
    (tmp_path / "space.yaml").write_text(WIDE)
    script = {**SCRIPT, "faults": [{"match": {"block_m": 64, "stages": 3}, "kind": "wrong"}]}
    return script, plan_of(script, Request(SHAPE, sizes=(4, 16, 64, 256), space=f"{tmp_path / 'space.yaml'}:default", seed=1))


def test_a_run_that_ends_after_any_trial_is_resumed_to_the_same_table(small, tmp_path) -> None:
    script, plan = small
    whole = simulate(script, plan, tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert whole.trials == len(lines) > 50
    for count in range(1, len(lines), 6):
        path = tmp_path / f"cut{count}.jsonl"
        assert simulate(script, plan, path, cut=count).table is None
        kept = path.read_bytes().splitlines()
        again = simulate(script, plan, path)
        assert len(kept) == count and path.read_bytes().splitlines()[:count] == kept
        assert text_of(again) == text_of(whole) and again.trials == whole.trials - count, f"cut after {count} trials"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_a_power_loss_leaves_of_the_file_is_resumed_to_the_same_table(small, tmp_path, seed) -> None:
    script, plan = small
    path, draw = tmp_path / "trials.jsonl", random.Random(seed)
    whole = simulate(script, plan, path)
    data = path.read_bytes()
    cut = draw.randrange(1, len(data))
    path.write_bytes(data[:cut] + draw.choice([b"", b"\0" * draw.randrange(1, 600), bytes(draw.randrange(256) for _ in range(40))]))
    finished = data[:cut].count(b"\n")
    again = simulate(script, plan, path)
    assert text_of(again) == text_of(whole) and again.trials == whole.trials - finished


# -- twice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_pick_the_same_or_say_same(tmp_path, seed) -> None:
    """Other inputs, other noise, many candidates that are nearly equal: where picks differ, the evidence has them within 2 %."""
    (tmp_path / "space.yaml").write_text(WIDE.replace("[8, 16]", "[32, 4, 8, 16, 24, 64]"))

    def run(number: int) -> Any:
        script = script_of(seed) | {"seed": number, "landscape": 0.03}
        plan = plan_of(script, Request(SHAPE, sizes=(1, 8, 64, 512, 4096), space=f"{tmp_path / 'space.yaml'}:default", seed=number))
        return simulate(script, plan, tmp_path / f"{number}.jsonl").table

    found = diff(run(1), run(2))
    assert all(d.verdict == "same" for d in found), found


def test_a_second_run_keeps_what_the_first_one_found(small, tmp_path) -> None:
    """With the first run's table as what is to be beaten, ties go to it: the picks are the same, or proven better."""
    from dataclasses import replace

    script, plan = small
    first = simulate(script, plan, tmp_path / "1.jsonl")
    assert first.outcome is not None and first.table is not None
    steps = [(0 if n == 0 else int(s.start) + 1, s.choice) for n, s in enumerate(first.outcome.fitted.segments)]
    again = replace(plan, incumbents=steps, seed=2, incumbent_from="the first")
    second = simulate({**script, "seed": 9}, again, tmp_path / "2.jsonl")
    assert second.outcome is not None and second.table is not None
    assert [second.outcome.fitted.choice_at(t) for t in plan.sizes] == [first.outcome.fitted.choice_at(t) for t in plan.sizes]


def test_a_candidate_named_by_hand_costs_one_measurement_at_each_size(small, tmp_path) -> None:
    from dataclasses import replace

    from megamoe_cli.tuning.space import resolved

    script, plan = small
    path = tmp_path / "trials.jsonl"
    first = simulate(script, plan, path)
    named = resolved(Choice(KernelConfig(block_m=16, lag=77)), plan.shape, plan.ranks)
    again = simulate(script, replace(plan, candidates=[*plan.candidates, named], named=[named]), path)
    added = list(again.measurer.journal.trials.values())[first.trials:]
    assert all(t.a["lag"] == 77 for t in added)
    assert {t.tokens for t in added if t.stage == "final"} == set(plan.sizes) and len([t for t in added if t.stage in ("final", "final-more")]) <= 8


def test_the_fake_device_draws_by_the_task() -> None:
    """Not by its name, in which the kernel's sources are, nor by how long it may take; by everything else."""
    from megamoe_cli.tuning.fake_device import FakeRunner

    choice = {"block_m": 64, "lag": 8, "ctas": 0}
    task = {"stage": "final", "shape": [256, 128, 8, 2], "tokens": 16, "routing": "uniform", "seed": 1, "rounds": 3, "a": choice, "b": choice}

    def pairs(name: str, **changes: object) -> object:
        return FakeRunner({"base_us": 50, "us_per_token": 0.25}, 1).run({"id": name, "task": {**task, **changes}}).metrics["pairs"]

    assert pairs("a") == pairs("b") == pairs("a", wait_s=1.0, run_s=9.0)
    assert pairs("a") != pairs("a", seed=2) and pairs("a") != pairs("a", stage="second")
