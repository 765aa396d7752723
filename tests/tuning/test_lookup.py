"""Which table answers, which does not, and what is said about it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe_cli.backends.driver import Gpu
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import Shape, parse_shape
from megamoe_cli.tuning import lookup as lookup_module
from megamoe_cli.tuning.lookup import Library, Machine, Picker, Query, lookup
from tests.tuning.tables_at_hand import BIG, H200, MIDDLE, OWN, OWN_NAME, QUERY, SHAPE, SMALL, measured, saved


def library(*tables) -> Library:
    """These before a baseline for everything."""
    return Library([(t, []) for t in (*tables, OWN)])


def table(**more):
    return measured([(100.5, MIDDLE), (1024.5, BIG)], {64: {MIDDLE: 0.9}, 512: {BIG: 0.95}}, default=SMALL, **more)


@pytest.mark.parametrize(("tokens", "choice"), [(0, MIDDLE), (100, MIDDLE), (101, BIG), (1024, BIG)])
def test_a_measured_table_comes_before_a_baseline(tokens, choice) -> None:
    pick = lookup(QUERY, tokens, library(table()))
    assert (pick.choice, pick.source) == (choice, "measured")
    assert f"{tokens} tokens" in pick.line() and "better than the incumbent" in pick.line() and pick.warnings == ()


def test_outside_the_measured_sizes_the_baseline_with_one_warning() -> None:
    """It was made for every load; a table's default is the built-in one, which was measured to be 11 % slower at one token."""
    pick = lookup(QUERY, 1025, library(table()))
    assert (pick.choice, pick.source) == (BIG, "baseline"), "SMALL is the table's default"
    (warning,) = pick.warnings
    assert "1025 tokens" in warning and "outside what was measured" in warning and warning.endswith("is used")
    assert [line for line in pick.considered if "outside what was measured" in line]


def test_outside_the_measured_sizes_without_a_baseline_the_default_with_one_warning() -> None:
    other = replace(QUERY, ranks=2)
    for tables in ([table()], [table(), measured([(100.5, MIDDLE)], {64: {MIDDLE: 0.9}}, query=other)]):
        pick = lookup(QUERY, 1025, Library([(t, []) for t in tables]))
        assert (pick.choice, pick.source) == (SMALL, "measured")
        assert len(pick.warnings) == 1 and pick.warnings[0].endswith("outside what was measured; its default is used")
        assert len(pick.considered) == len(tables) - 1


def test_a_named_table_answers_outside_its_sizes_too() -> None:
    pick = lookup(QUERY, 1025, Library([(table(), [])]), named=True)
    assert (pick.choice, pick.source) == (SMALL, "measured") and "its default is used" in pick.warnings[0]


@pytest.mark.parametrize("tokens, choice", [(1, SMALL), (119, SMALL), (120, MIDDLE), (479, MIDDLE), (480, BIG), (10**9, BIG)])
def test_a_baseline_keeps_its_thresholds(tokens, choice) -> None:
    """In tokens, whatever the geometry: the axis of a baseline is not the load of an expert."""
    for topk in (1, 3, 6, 8, 32):
        pick = lookup(Query(Shape(4096, 2048, 256, topk), 8, H200), tokens, library())
        assert (pick.source, pick.choice) == ("baseline", choice), topk


@pytest.mark.parametrize("other", [
    replace(QUERY, shape=replace(SHAPE, hidden=7168)), replace(QUERY, shape=replace(SHAPE, intermediate=3072)),
    replace(QUERY, shape=replace(SHAPE, experts=64)), replace(QUERY, shape=replace(SHAPE, topk=8)), replace(QUERY, ranks=2),
    replace(QUERY, machine=replace(H200, sms=78)),
], ids=["hidden", "intermediate", "experts", "topk", "ranks", "sms"])
def test_another_geometry_or_gpu_is_not_answered(other) -> None:
    pick = lookup(other, 64, library(table()))
    assert pick.source == "baseline" and any("table" in line for line in pick.considered)


def test_virtual_ranks_never_answer_for_real_gpus() -> None:
    virtual = Query(parse_shape("flash"), 8, H200)
    made = measured([(1024.5, MIDDLE)], {64: {MIDDLE: 0.9}}, query=virtual)
    assert lookup(virtual, 64, library(made)).source == "measured"
    for backend in ("nvlink", "processes"):
        pick = lookup(Query(parse_shape("flash"), 8, replace(H200, backend=backend)), 64, library(made))
        assert pick.source == "baseline" and f"backend is {backend}, the table's is virtual" in pick.considered[0]


def test_one_rank_is_one_rank_however_it_was_started() -> None:
    assert lookup(replace(QUERY, machine=replace(H200, backend="nvlink")), 64, library(table())).source == "measured"


def test_a_static_table_answers_only_when_it_is_named() -> None:
    static = replace(table(), provenance={"source": "static"})
    assert lookup(QUERY, 64, library(static)).source == "baseline"
    assert lookup(QUERY, 64, library(static, table())).source == "measured"
    assert lookup(QUERY, 64, Library([(static, [])]), named=True).choice == MIDDLE


def test_a_pick_that_is_illegal_here_is_a_miss_with_a_warning(monkeypatch) -> None:
    from megamoe_cli import config

    monkeypatch.setattr(config, "NOT_IMPLEMENTED", config.NOT_IMPLEMENTED | {("block_m", 64)})
    pick = lookup(QUERY, 64, library(table()))
    assert pick.source == "baseline" and "illegal here (not-implemented" in pick.warnings[0]
    with pytest.raises(UsageError, match="illegal here"):
        lookup(QUERY, 64, Library([(table(), [])]), named=True)


def test_without_a_table_the_built_in_default() -> None:
    pick = lookup(QUERY, 64, Library())
    assert pick.source == "default" and pick.choice.config.block_m == 128 and "tables are off" in pick.line()


@pytest.mark.parametrize("content", ["schema: megamoe.table/9\n", "not: [yaml", "", "schema: megamoe.table/1\nkernel: null\n"])
def test_a_broken_file_is_one_warning_and_a_miss(tmp_path, content) -> None:
    (tmp_path / "broken.yaml").write_text(content)
    saved(table(), tmp_path / "good.yaml")
    found = Library.load([tmp_path])
    assert len(found.problems) == 1 and "broken.yaml is not used" in found.problems[0]
    pick = lookup(QUERY, 64, found)
    assert pick.source == "measured" and len(pick.warnings) == 1
    with pytest.raises(UsageError):
        Library.of(str(tmp_path / "broken.yaml"))


def test_the_users_tables_come_before_the_shipped_ones(tmp_path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    saved(measured([(1024.5, SMALL)], {64: {SMALL: 0.9}}), mine / "z.yaml")
    saved(table(), theirs / "a.yaml")
    assert lookup(QUERY, 64, Library.load([mine, theirs])).choice == SMALL


def test_a_stale_table_says_so_in_every_lookup(tmp_path) -> None:
    path = tmp_path / "old.yaml"
    saved(replace(table(), digest="sha256:0123"), path)
    pick = lookup(QUERY, 64, Library.load([tmp_path]))
    assert pick.source == "measured" and "stale" in pick.line() and "made with kernel sources sha256:0123" in pick.warnings[0]


@given(tokens=st.integers(0, 10**7), cuts=st.lists(st.integers(1, 10**6), min_size=1, max_size=6, unique=True))
def test_every_load_has_exactly_one_range(tokens, cuts) -> None:
    """No token count falls on a boundary or between two ranges."""
    choices = [SMALL, MIDDLE, BIG]
    made = measured([(cut + 0.5, choices[n % 3]) for n, cut in enumerate(sorted(cuts))], {})
    value = made.axis_value(tokens, 1, SHAPE.topk, SHAPE.experts)
    hits = [r for r in made.ranges if r.start <= value < r.end]
    expected = next((n for n, cut in enumerate(sorted(cuts)) if tokens <= cut), len(cuts))
    assert hits == [made.ranges[expected]] and made.range_at(value) == hits[0]


# -- the running GPU -------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    def here(sms: int = 132, count: int = 1) -> None:
        gpus = [Gpu(n, "NVIDIA H200", (9, 0), sms, 232448) for n in range(count)]
        monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: gpus)

    return here


def test_the_picker_picks_for_the_running_gpu_and_says_it_once(gpu) -> None:
    gpu()
    said: list[str] = []
    picker = Picker("auto", "auto", said.append)
    picks = [picker.pick(parse_shape("flash"), 8, tokens) for tokens in (8, 8, 1000)]
    assert [p.choice for p in picks] == [SMALL, SMALL, BIG] and len(said) == 2
    assert all(line.startswith("config: m") and OWN_NAME in line for line in said)


def test_without_a_gpu_or_on_the_emulator_nothing_is_picked(gpu, monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    assert Picker("auto", "auto").pick(SHAPE, 1, 8) is None
    gpu()
    assert Picker("auto", "emulator").pick(SHAPE, 1, 8) is None
    assert Picker("none", "auto").pick(SHAPE, 1, 8) is None
    assert Picker("auto", "auto").choices(SHAPE, 1) and Picker("auto", "emulator").choices(SHAPE, 1) == []


def test_real_gpus_are_asked_for_as_what_they_are(gpu) -> None:
    gpu(count=8)
    machine = lookup_module.running_machine("auto", 8)
    assert machine == Machine(132, "nvlink", "NVIDIA H200") and machine.sms_per_rank(8) == 132
    assert lookup_module.running_machine("virtual", 8).sms_per_rank(8) == 16


def test_every_choice_a_load_may_get_is_known_before(gpu, tmp_path) -> None:
    gpu()
    path = tmp_path / "t.yaml"
    saved(table(), path)
    assert set(Picker("auto", "auto").choices(SHAPE, 1)) == {SMALL, MIDDLE, BIG}, "of its own baseline"
    picker = Picker(str(path), "auto")
    assert picker.choices(SHAPE, 1) == [MIDDLE, BIG, SMALL]
    assert {picker.pick(SHAPE, 1, tokens).choice for tokens in range(0, 2000, 7)} <= set(picker.choices(SHAPE, 1))


def test_a_named_table_that_is_for_something_else_is_refused(gpu, tmp_path) -> None:
    gpu(sms=78)
    saved(table(), tmp_path / "t.yaml")
    with pytest.raises(UsageError, match="sms is 78, the table's is 132"):
        Picker(str(tmp_path / "t.yaml"), "auto").pick(SHAPE, 1, 8)


# -- the command -----------------------------------------------------------------------------------


def test_lookup_explains_why(megamoe, tmp_path) -> None:
    saved(table(), tmp_path / "t.yaml")
    answer = megamoe("table", "lookup", "--tokens", "64,5000", "--rank-of", 8, "--sms", 132, "--table", tmp_path / "t.yaml")
    assert answer.code == 0 and "m64n256" in answer.out and "0.9x its time" in answer.out
    assert "outside what was measured" in answer.err
    (pick, _) = megamoe("table", "lookup", "--tokens", "64,5000", "--rank-of", 8, "--sms", 132, "--table", tmp_path / "t.yaml", "--json").json["picks"]
    assert pick["source"] == "measured" and pick["config"]["block_m"] == 64 and pick["table"].endswith("t.yaml")


@pytest.mark.parametrize(("args", "words"), [
    (("--tokens", "x"), "--tokens"), (("--tokens", "-1"), "below 0"), (("--tokens", "1", "--shape", "flsh"), "flash"),
    (("--tokens", "1", "--table", "no.yaml"), "no.yaml"), (("--tokens", "1", "--ranks", "3"), "experts=256"),
    (("--tokens", "1", "--backend", "gpu"), "unknown backend"),
])
def test_bad_lookups_are_one_line_and_exit_2(megamoe, args, words) -> None:
    answer = megamoe("table", "lookup", "--sms", 132, *args)
    assert answer.code == 2 and words in answer.err.splitlines()[0] and answer.out == ""


def test_lookup_without_a_gpu_asks_for_one(megamoe, monkeypatch) -> None:
    monkeypatch.setattr("megamoe_cli.backends.driver.visible_gpus", lambda: [])
    answer = megamoe("table", "lookup", "--tokens", 8)
    assert answer.code == 2 and "--sms" in answer.err
