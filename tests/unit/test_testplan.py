"""Options to cases: what is expanded, what is refused before anything starts, and that a case's command means that case."""

from __future__ import annotations

import json
import shlex

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli import testplan
from megamoe_cli.cases import load_cases
from megamoe_cli.cli import test_cmd
from megamoe_cli.config import NOT_IMPLEMENTED
from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.plan_values import clamps, integers, names, parse_options, routings, split, uneven_counts
from megamoe_cli.routing import ROUTINGS
from megamoe_cli.testplan import Request, expand, named, phase_names, select

PHASES = ("stub", "dispatch", "l1", "l2", "combine")


def test_phases_are_found_in_order_and_match_their_modules() -> None:
    assert phase_names() == PHASES
    from importlib import import_module

    for index, name in enumerate(PHASES):
        module = import_module(f"megamoe_cli.phases.{name}")
        assert (module.NAME, module.INDEX) == (name, index)


def test_a_phase_is_one_more_file(tmp_path, monkeypatch) -> None:
    for name, index in (("later", 7), ("first", 0)):
        (tmp_path / f"{name}.py").write_text(f'NAME = "{name}"\nINDEX: int = {index}\nimport missing_module\n')
    (tmp_path / "_private.py").write_text('NAME = "private"\nINDEX = 3\n')
    (tmp_path / "notes.py").write_text("NAME = 'no index'\n")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    phase_names.cache_clear()
    try:
        assert phase_names() == ("first", "later")
    finally:
        phase_names.cache_clear()


def test_defaults_are_five_phases_on_eight_ranks() -> None:
    cases = expand(Request())
    assert [case.phase for case in cases] == [phase for phase in PHASES for _ in range(4)]
    assert {case.problem.tokens for case in cases} == {(0,) * 8, (8,) * 8, (48,) * 8, uneven_counts(40, 8, 0)}
    assert {phase: {case.launches for case in cases if case.phase == phase} for phase in PHASES} == {
        "stub": {1}, "dispatch": {3}, "l1": {3}, "l2": {3}, "combine": {3}}
    assert len({case.id for case in cases}) == len(cases)


def test_every_option_multiplies() -> None:
    request = Request(ranks="1,2", phase="l1,l2", tokens="3,5", shape="tiny,256x384x8x3", block_m="64,128",
                      routing="uniform,local", clamp="none,10", seeds=2, seed=4)
    cases = expand(request)
    assert len(cases) == len({case.id for case in cases}) == 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2
    assert {case.seed for case in cases} == {4, 5} and {case.clamp for case in cases} == {None, 10.0}
    assert {case.config.block_m for case in cases} == {64, 128}


def test_repeated_values_are_one_case() -> None:
    assert len(expand(Request(phase="stub,stub", tokens="8,8", ranks="2,2"))) == 1


def test_protocol_object() -> None:
    case = expand(Request(ranks="2", phase="combine", tokens_per_rank="3,0", clamp="7.5", routing="masked:0.5",
                          options={"races": True}, backend="emulator", timeout_s=9))[0]
    data = json.loads(json.dumps(case.to_dict()))
    assert {key: data[key] for key in ("phase", "shape", "ranks", "tokens", "capacity", "routing", "clamp", "seed",
                                       "launches", "timeout_s", "options")} == {
        "phase": "combine", "shape": [256, 256, 16, 2], "ranks": 2, "tokens": [3, 0], "capacity": 128,
        "routing": "masked:0.5", "clamp": 7.5, "seed": 0, "launches": 3, "timeout_s": 9, "options": {"races": True}}
    assert data["config"]["block_m"] == 128 and "case" not in data


@pytest.mark.parametrize("change, rule, words", [
    ({"shape": "256x200x16x2"}, "intermediate-multiple", ["200"]),
    ({"shape": "200x256x16x2"}, "hidden-multiple", ["200"]),
    ({"shape": "256x256x10x2", "ranks": "4"}, "experts-divisible", ["10", "4"]),
    ({"shape": "256x256x66x2", "ranks": "33"}, "ranks-limit", ["33"]),
    ({"ranks": "0"}, "ranks-limit", ["0"]),
    ({"shape": "256x256x4x5", "ranks": "1"}, "topk-range", ["5", "4"]),
    ({"shape": "256x256x64x33", "ranks": "1"}, "topk-range", ["33"]),
    ({"shape": "flsh"}, "shape-name", ["flsh", "flash"]),
    ({"phase": "dispach"}, "phase-name", ["dispach", "dispatch"]),
    ({"routing": "powrlaw"}, "routing-name", ["powrlaw", "powerlaw"]),
    ({"routing": "remote", "ranks": "1"}, "routing-name", ["remote"]),
    ({"routing": "fixed:0,99"}, "expert-id", ["rank 0", "token 0", "slot 1", "99"]),
    ({"routing": "fixed:0,1;1,-2", "tokens": "2"}, "expert-id", ["rank 0", "token 1", "slot 1", "-2"]),
    ({"routing": "one-hot-expert:16"}, "expert-id", ["16"]),
    ({"routing": "fixed:1"}, "routing-name", ["1 ids", "topk=2"]),
    ({"tokens": "300", "capacity": "128"}, "tokens-capacity", ["300", "128"]),
    ({"ranks": "2", "capacity": "64,128"}, "capacity-equal", ["64", "128"]),
    ({"ranks": "2", "capacity": "64,64,64"}, "capacity-equal", ["3", "2"]),
    ({"tokens_per_rank": "1,2"}, "tokens-per-rank", ["2", "8"]),
    ({"clamp": "-1"}, "clamp", ["-1"]),
    ({"clamp": "nan"}, "clamp", ["nan"]),
    ({"clamp": "soft"}, "clamp", ["soft"]),
    ({"backend": "emulater"}, "backend-name", ["emulater", "emulator"]),
    ({"config": ["block=3"]}, "config-key", ["block"]),
    ({"config": ["block_m=64"], "block_m": "64"}, "config-syntax", ["block_m"]),
    ({"block_m": "48"}, "allowed-values", ["48"]),
    ({"block_m": "big"}, None, ["--block-m", "big"]),
    ({"tokens": "-1"}, None, ["--tokens", "-1"]),
    ({"tokens": ""}, "tokens-per-rank", ["--tokens"]),
    ({"seeds": 0}, None, ["--seeds"]),
    ({"repeat": 0}, None, ["--repeat"]),
    ({"seed": -1}, None, ["--seed"]),
    ({"timeout_s": 0.0}, None, ["--timeout"]),
    ({"timeout_s": float("nan")}, None, ["--timeout"]),
])
def test_bad_requests_are_one_line_with_the_rule(change, rule, words) -> None:
    with pytest.raises(UsageError) as caught:
        expand(Request(**change))
    text = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in text
    assert all(word in text for word in words), text
    if rule is not None:
        assert caught.value.rule == rule


def test_a_bad_id_in_a_row_no_rank_has_is_no_error() -> None:
    assert len(expand(Request(routing="fixed:0,1;1,99", tokens="1", phase="stub"))) == 1


def test_no_phases_is_said(monkeypatch) -> None:
    monkeypatch.setattr(testplan, "phase_names", lambda: ())
    with pytest.raises(EnvironmentUnfit):
        expand(Request())


def test_all_routings() -> None:
    assert set(routings("all")) == set(ROUTINGS) - {"fixed"}
    eight = {case.routing for case in expand(Request(phase="l1", tokens="8", routing="all"))}
    one = {case.routing for case in expand(Request(phase="l1", tokens="8", routing="all", ranks="1"))}
    assert eight - one == {"remote"}
    assert routings("local, fixed:0,1;2,3") == ["local", "fixed:0,1;2,3"]


def test_text_values() -> None:
    assert split(" a, ,b ") == ["a", "b"]
    assert integers("3,1,3", "--x") == [3, 1]
    assert clamps("none,10,10.0,2.5") == [None, 10.0, 2.5]
    assert names("all", PHASES, "phase") == list(PHASES)
    assert names("l2,l1", PHASES, "phase") == ["l2", "l1"]
    assert parse_options(["races=true,seed=3", "late-by=0.5", "schedule=pct"]) == {
        "races": True, "seed": 3, "late_by": 0.5, "schedule": "pct"}
    with pytest.raises(UsageError):
        parse_options(["races"])


@given(st.integers(0, 512), st.integers(1, 32), st.integers(0, 1000))
def test_uneven_counts(largest, ranks, seed) -> None:
    counts = uneven_counts(largest, ranks, seed)
    assert counts == uneven_counts(largest, ranks, seed)
    assert len(counts) == ranks and max(counts) == largest and min(counts) >= 0
    assert ranks < 3 or 0 in counts


def test_uneven_tokens_become_explicit_in_the_command() -> None:
    case = expand(Request(tokens="uneven:40", phase="l1", seed=3))[0]
    assert "--tokens-per-rank " + ",".join(map(str, uneven_counts(40, 8, 3))) in case.repro()


# Every choice that is in a case is in its command, and the command, parsed by the real option parser, is that case.
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_command_of_a_case_is_that_case(data) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4, 8]))
    counts = data.draw(st.one_of(st.integers(0, 200).map(lambda n: [n] * ranks),
                                 st.lists(st.integers(0, 200), min_size=ranks, max_size=ranks)))
    implemented = {key for key, _ in NOT_IMPLEMENTED}
    config = data.draw(st.lists(st.sampled_from([f"{k}={v}" for k, v in (("lag", 4), ("unit_blocks", 2), ("stages", 3))
                                                 if k not in implemented]), unique=True))
    backend = data.draw(st.sampled_from(["auto", "emulator", "virtual"]))  # races and schedules are the emulator's alone
    request = Request(
        ranks=str(ranks), phase=data.draw(st.sampled_from(PHASES)), tokens_per_rank=",".join(map(str, counts)),
        capacity=data.draw(st.sampled_from([None, "256", "1024"])),
        shape=data.draw(st.sampled_from(["tiny", "flash", "512x384x24x5"])),
        block_m=data.draw(st.sampled_from([None, "16", "64", "128"])), config=config,
        routing=data.draw(st.sampled_from(["uniform", "masked:0.25", "one-hot-expert:3", "balanced"])),
        clamp=data.draw(st.one_of(st.just("none"), st.floats(0, 1e6, allow_subnormal=False).map(repr))),
        seed=data.draw(st.integers(0, 2**40)), repeat=data.draw(st.sampled_from([None, 1, 3, 7])),
        backend=backend,
        options=data.draw(st.sampled_from([{}, {"races": True, "schedule": "pct"}])) if backend == "emulator" else {},
    )
    (case,) = expand(request)
    words = shlex.split(case.repro())
    assert cases_of(words[words.index("test") + 1:]) == [case]


def cases_of(words: list[str]) -> list[testplan.Case]:
    with test_cmd.test_command.make_context("test", words) as ctx:
        return test_cmd.selected_cases(ctx, ctx.params)


def test_the_command_of_a_named_case_is_that_case() -> None:
    (case,) = named(Request(phase="l2", config=["stages=3"], seed=2, backend="emulator"), ["S06"])
    assert case.named == "S06" and case.problem.ranks == 2 and case.to_dict()["case"] == "S06"
    words = shlex.split(case.repro())
    assert cases_of(words[words.index("test") + 1:]) == [case]


def test_all_named_cases() -> None:
    ids = {entry.id for entry in load_cases() if entry.expect == "match"}
    assert {case.named for case in named(Request(phase="combine"), ["all"])} == ids
    assert len({case.id for case in named(Request(), ["all"])}) == 5 * len(ids)
    with pytest.raises(UsageError, match="nearest id"):
        named(Request(), ["S99"])
    other = next(entry.id for entry in load_cases() if entry.expect != "match")
    with pytest.raises(UsageError, match="launches nothing"):
        named(Request(), [other])


def test_select() -> None:
    cases = expand(Request(routing="uniform,local", phase="l1,l2", tokens="0,8,48"))

    def kept(*filters: str) -> int:
        return len(select(cases, filters))

    assert (len(cases), kept(), kept("L1"), kept("l1", "local"), kept("!local"), kept("l?-*t48*"), kept("nothing")) == (
        12, 12, 6, 3, 6, 4, 0)


def test_options_of_the_command_have_the_defaults_of_the_request() -> None:
    defaults = {p.name: p.default for p in test_cmd.test_command.params if isinstance(p, click.Option)}
    for name in ("ranks", "phase", "tokens", "shape", "routing", "clamp", "seed", "seeds", "backend"):
        assert defaults[name] == getattr(Request(), name)
