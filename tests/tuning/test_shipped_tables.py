"""The tables that ship, through every door that finds them: each answers what its file says. What that is follows the
latest measurement (docs/tuning.md), so it is read from the files here, and no other test knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from megamoe_cli import config as kernel_config
from megamoe_cli import paths
from megamoe_cli.backends.driver import Gpu
from megamoe_cli.shapes import NAMED_SHAPES, Shape, legal_rank_counts
from megamoe_cli.table_picks import TablePicks
from megamoe_cli.tuning.lookup import Library, Machine, Picker, Query, edge_counts, lookup
from megamoe_cli.tuning.run import Request, make_plan
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import kernels_of, resolved
from tests.tuning.tables_at_hand import H200

pytestmark = pytest.mark.usefixtures("as_shipped")

FEW, MANY = "baseline-topk1-2.yaml", "baseline-topk3plus.yaml"
FLASH = NAMED_SHAPES["flash"]
OTHER = Machine(100, "virtual", "a GPU of which nothing is measured")


def ranges(name: str) -> list[tuple[float, float, Choice]]:
    """(from, to, choice) in tokens per rank, as the file has them, read without the program's reader."""
    document = yaml.safe_load((paths.tuning_dir() / "tables" / name).read_text())
    assert document["axis"] == "tokens"
    found = []
    for entry in document["ranges"]:
        names = [entry["use"], *([entry["otherwise"]] if "otherwise" in entry else [])]
        choices = [Choice.from_dict(document["configs"][n]) for n in names]
        there = [c for c in choices if not any(getattr(c.config, key) == value for key, value in kernel_config.NOT_IMPLEMENTED)]
        found.append((entry["from"], entry["to"], there[0]))
    return found


def counts(name: str) -> list[int]:
    """Around every edge, and far above the last."""
    edges = [int(start) for start, _, _ in ranges(name)]
    return sorted({0, 1, 8, 10**9, *edges, *(edge - 1 for edge in edges if edge)})


def says(name: str, tokens: int) -> Choice:
    (choice,) = [c for start, end, c in ranges(name) if start <= tokens < end]
    return choice


@pytest.fixture
def gpu(monkeypatch) -> None:
    """One is there on which nothing was measured, so that baselines answer."""
    gpus = [Gpu(0, OTHER.name, (9, 0), OTHER.sms, 232448)]
    for place in ("megamoe_cli.backends.driver.visible_gpus", "megamoe_cli.backends.picking.visible_gpus"):
        monkeypatch.setattr(place, lambda: gpus)
    monkeypatch.delenv("MEGAMOE_TABLE", raising=False)


@pytest.mark.parametrize("topk, name", [(1, FEW), (2, FEW), (3, MANY), (6, MANY), (8, MANY), (32, MANY)])
def test_a_lookup_answers_what_the_file_says(topk, name) -> None:
    for tokens in counts(name):
        pick = lookup(Query(Shape(4096, 2048, 256, topk), 8, OTHER), tokens, Library.of("auto"))
        assert (pick.source, pick.table.name, pick.choice) == ("baseline", name, says(name, tokens)), tokens


def test_the_thresholds_in_public_use_are_kept() -> None:
    """docs/tuning.md: 129 and 577 tokens a rank are edges; and more tokens never mean smaller tiles."""
    found = ranges(MANY)
    assert {129, 577} <= {start for start, _, _ in found}
    rows = [choice.config.block_m for _, _, choice in found]
    assert rows == sorted(rows) and len(set(rows)) > 1


@pytest.mark.parametrize("preset", sorted(NAMED_SHAPES))
@pytest.mark.parametrize("machine", [H200, Machine(132, "nvlink", "NVIDIA H200"), Machine(78, "virtual", "NVIDIA H20")], ids=["virtual", "nvlink", "h20"])
def test_every_pick_is_legal_for_every_known_shape(preset, machine) -> None:
    shape = NAMED_SHAPES[preset]
    baselines = Library([(t, p) for t, p in Library.of("auto").tables if t.source == "baseline"])
    for ranks in (n for n in legal_rank_counts(shape.experts) if n in (1, 2, 8)):
        for tokens in counts(MANY if shape.topk > 2 else FEW):
            pick = lookup(Query(shape, ranks, machine), tokens, baselines)
            assert pick.source == "baseline" and pick.warnings == (), pick.warnings


def test_a_measured_table_answers_for_what_it_was_measured_on() -> None:
    """At every edge and between, and with what is legal there; that it may be stale is said, and does not change the pick."""
    every = Library.of("auto")
    assert every.problems == []
    for table, _ in every.tables:
        if table.source != "measured":
            continue
        has = table.match.values
        query = Query(Shape(has["hidden"], has["intermediate"], has["experts"], has["topk"]), has["ranks"], Machine(has["sms"], has["backend"]))
        for tokens in edge_counts(Library([(table, [])]), query):
            pick = lookup(query, tokens, every)
            entry = table.range_at(table.axis_value(tokens, query.ranks, query.shape.topk, query.shape.experts))
            assert pick.source == ("measured" if entry.evidence else "baseline"), (table.path, tokens, pick)
            assert not any("illegal" in line for line in pick.warnings), (table.path, tokens, pick)
            if pick.table == table.path:
                assert pick.choice == table.configs[entry.use]


def test_the_commands_and_the_api_find_them(megamoe, gpu) -> None:
    some = [8, 100, 300, 600]
    answer = megamoe("test", "-n", "--shape", "flash", "--phase", "l1", "--tokens", ",".join(map(str, some)), "--json")
    assert [c["config"] | {"trace": 0} for c in answer.json["cases"]] == [says(MANY, n).config.to_dict() for n in some]
    every = list(dict.fromkeys(choice for _, _, choice in ranges(MANY)))
    assert Picker("auto", "auto").choices(FLASH, 1) == every
    built = megamoe("build", "-n", "combine", "--shape", "flash", "--json").json["kernels"]
    assert len(built) == len(kernels_of(every)), "launch parameters make no kernel"
    picks = TablePicks.of(SimpleNamespace(gpu=SimpleNamespace(sms=OTHER.sms, name=OTHER.name), name="virtual"), FLASH, 8, 1024)
    assert [picks.choice(n) for n in some] == [says(MANY, n) for n in some] and all(MANY in line for line in picks.lines)


@pytest.mark.parametrize("shape, ranks, name", [(FLASH, 8, MANY), (NAMED_SHAPES["pro"], 8, MANY), (Shape(256, 256, 16, 2), 1, FEW)], ids=["flash", "pro", "few"])
def test_a_tuning_run_can_have_them_as_what_is_to_be_beaten(shape, ranks, name) -> None:
    plan, _ = make_plan(Request(shape, ranks, static=True, sms=OTHER.sms, space="quick", seed=1))
    assert plan.incumbent_from == name
    for tokens in plan.sizes:
        assert plan.incumbent(tokens) == resolved(says(name, tokens), shape, ranks) and plan.incumbent(tokens) in plan.candidates
