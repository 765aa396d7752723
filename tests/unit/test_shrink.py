"""Making a failing case small: against a runner that fails by a rule, so that the smallest case is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megamoe_cli import shrink, testplan
from megamoe_cli.protocol import CaseResult
from megamoe_cli.testplan import Case, Request


def big(**options) -> Case:
    request = Request(ranks="4", phase="combine", shape="512x512x8x4", tokens_per_rank="40,0,13,72", config=["block_m=64"], backend="emulator",
                      seed=5, options={"races": True, "schedule": "pct", "completion": "lazy", "skew": "late:any", "replay": 2} | options)  # fmt: skip
    (case,) = testplan.expand(request)
    return case


def failure(case: Case, place: str = "kernels/a.cuh:7") -> CaseResult:
    return CaseResult(case.id, "fail", findings=[{"metric": "emulator_race", "place": place}], exit_code=1)


def runner(fails: Callable[[Case], bool], log: list[Case] | None = None) -> shrink.Run:
    def run(cases):
        (log if log is not None else []).extend(cases)
        return {n: failure(case) if fails(case) else CaseResult(case.id, "pass") for n, case in enumerate(cases)}

    return run


def test_everything_that_does_not_matter_goes() -> None:
    found = shrink.shrink(big(), failure(big()), runner(lambda case: case.ranks >= 2 and sum(case.problem.tokens) >= 5), 1e9)
    case = found.case
    assert found.done and found.tried > 20
    assert case.ranks == 2 and 5 <= sum(case.problem.tokens) <= 6 and case.launches == 1
    assert case.problem.shape.as_list() == [128, 128, 2, 1]
    assert case.options == {"races": True, "schedule": "fifo", "completion": "eager", "ctas": 1}
    assert case.config.block_m == 64, "the configuration is the user's"
    assert "--ranks 2" in case.repro() and "--repeat 1" in case.repro() and "--schedule fifo" in case.repro()


def test_what_the_failure_needs_stays() -> None:
    needs = big()
    found = shrink.shrink(needs, failure(needs), runner(lambda case: case.launches >= 3 and case.options["schedule"] == "pct"
                                                         and case.problem.tokens.count(0) >= 1 and "skew" in case.options), 1e9)  # fmt: skip
    assert found.case.launches == 3 and found.case.options["schedule"] == "pct" and "skew" in found.case.options
    assert 0 in found.case.problem.tokens


def test_a_different_failure_is_not_followed() -> None:
    case = big()

    def run(cases):
        return {n: failure(small, "kernels/b.cuh:1") for n, small in enumerate(cases)}

    found = shrink.shrink(case, failure(case), run, 1e9)
    assert found.case == case and found.done


def test_a_failure_that_only_some_seeds_show_is_followed() -> None:
    log: list[Case] = []
    found = shrink.shrink(big(), failure(big()), runner(lambda case: case.seed % 4 == 3, log), 1e9)
    assert found.case.seed % 4 == 3 and found.case.ranks == 1
    assert all(0 <= case.seed - 5 for case in log)


def test_time_is_bounded_and_results_may_be_missing() -> None:
    now = [0.0]

    def run(cases):
        now[0] += 10
        return {}

    found = shrink.shrink(big(), failure(big()), run, 25.0, clock=lambda: now[0])
    assert not found.done and now[0] == 30 and found.case == big()


def test_a_signal_ends_it_with_what_was_found() -> None:
    calls = [0]

    def run(cases):
        calls[0] += 1
        if calls[0] == 2:
            raise shrink.Interrupted(15)
        return {0: failure(cases[0])}

    found = shrink.shrink(big(), failure(big()), run, 1e9)
    assert found.interrupted == 15 and not found.done and calls == [2] and found.case != big()


@pytest.mark.parametrize(("first", "second", "same"), [
    (dict(status="fail", findings=[{"metric": "emulator_race", "place": "a:1"}]), dict(status="fail", findings=[{"metric": "emulator_race", "place": "a:1"}, {"metric": "x"}]), True),
    (dict(status="fail", findings=[{"metric": "emulator_race", "place": "a:1"}]), dict(status="fail", findings=[{"metric": "emulator_race", "place": "a:2"}]), False),
    (dict(status="fault", fault={"records": {"0": {"code": "wait_timeout", "wait": "done_flag"}}}),
     dict(status="fault", fault={"records": {"1": {"code": "wait_timeout", "wait": "done_flag"}}}), True),
    (dict(status="crash"), dict(status="crash"), True), (dict(status="crash"), dict(status="hang"), False),
    (dict(status="pass"), dict(status="pass"), False),
])
def test_signatures(first: dict, second: dict, same: bool) -> None:
    assert bool(shrink.signature(CaseResult("a", **first)) & shrink.signature(CaseResult("b", **second))) is same
