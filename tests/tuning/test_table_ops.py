"""Writing, merging, comparing and exporting tables."""

from __future__ import annotations

import json
import random
import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli.errors import UsageError
from megamoe_cli.tuning.schema import Evidence
from megamoe_cli.tuning.table_check import check_table, errors_of
from megamoe_cli.tuning.table_merge import diff, merge, model_error, slowdowns
from megamoe_cli.tuning.table_reader import decode
from megamoe_cli.tuning.table_writer import to_header, to_json, to_yaml, write
from tests.tuning.tables_at_hand import BIG, MIDDLE, QUERY, SHAPE, SMALL, measured, saved

SIZES = (4, 16, 64, 256, 1024)


def one(cut: int = 100, machine: str = "m1", **ratios: float):
    """MIDDLE up to ``cut`` tokens, SMALL above. Ratios of middle/small below and above: ml, sl, mh, sh."""
    r = {"ml": 0.9, "sl": 1.0, "mh": 1.0, "sh": 0.9} | ratios
    found = {t: {MIDDLE: r["ml"] if t <= 100 else r["mh"], SMALL: r["sl"] if t <= 100 else r["sh"]} for t in SIZES}
    return measured([(cut + 0.5, MIDDLE), (1024.5, SMALL)], found, machine=machine)


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(1, 1000), noise=st.floats(1e-4, 0.2), tokens=st.integers(1, 5000))
def test_what_is_written_is_read_back(cut, noise, tokens) -> None:
    made = replace(one(cut), provenance={**one(cut).provenance, "partial": True, "seed": tokens, "min_gain": noise},
                   validation={"holdout": 1, "seed": 3, "worst_slowdown": 1 + noise, "geomean": 1.0, "max_slowdown": 1.03,
                               "points": [{"tokens": tokens, "routing": "powerlaw", "use": "middle", "slowdown": 1 + noise, "vs_incumbent": 0.9}]},
                   notes=("it's: a note, with #marks",))
    problems: list = []
    again = decode(to_yaml(made), None, problems)
    assert problems == [] and again is not None
    for name in ("match", "axis", "default", "ranges", "configs", "evidence", "provenance", "validation", "digest", "notes"):
        assert getattr(again, name) == getattr(made, name), name


def test_rows_are_lines(tmp_path) -> None:
    """So that a diff of two tables reads."""
    text = to_yaml(one())
    assert sum(line.startswith("  - {id: ") for line in text.splitlines()) == 10
    assert sum(line.startswith("  - {from: ") for line in text.splitlines()) == 3


def test_writing_is_atomic(tmp_path, monkeypatch) -> None:
    path = tmp_path / "t.yaml"
    write(path, one())
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UsageError, match="No space left"):
        write(path, one(50))
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["t.yaml"]


# -- merge -----------------------------------------------------------------------------------------


def test_machines_that_agree_are_merged_with_both_ones_evidence() -> None:
    merged = merge([one(machine="a"), one(machine="b")])
    assert [(r.start, r.use) for r in merged.ranges] == [(r.start, merged.ranges[n].use) for n, r in enumerate(one().ranges)]
    assert len(merged.evidence) == 20 and len({row.id for row in merged.evidence}) == 20
    assert len(merged.provenance["machines"]) == 2 and len({row.machine for row in merged.evidence}) == 2
    assert merged.notes == () and errors_of(check_table(merged)) == []
    assert all(len({row.split("e")[0] for row in r.evidence}) == 2 for r in merged.ranges[:2]), "each range has rows of both machines"


def test_where_machines_disagree_what_is_good_on_all_of_them_wins() -> None:
    """Between 100 and 300 tokens one takes middle, one small; middle is within 1 % of the best on both."""
    merged = merge([one(100, "a", mh=0.905, sh=0.9), one(300, "b", mh=0.9, sh=0.95)])
    picked = {t: merged.configs[merged.range_at(merged.axis_value(t, 1, 6, 32)).use] for t in (64, 256, 1024)}
    assert picked == {64: MIDDLE, 256: MIDDLE, 1024: SMALL} and len(merged.notes) == 1 and "within" in merged.notes[0]
    assert errors_of(check_table(merged)) == []


def test_where_nothing_is_good_on_all_machines_the_default_is_and_is_listed() -> None:
    merged = merge([one(100, "a", mh=1.2, sh=0.9), one(300, "b", mh=0.8, sh=1.0)])
    entry = merged.range_at(merged.axis_value(256, 1, 6, 32))
    assert merged.configs[entry.use] == BIG and entry.evidence == () and "neither" in merged.notes[0]
    assert errors_of(check_table(merged)) == []


@pytest.mark.parametrize(("other", "words"), [
    (lambda t: replace(t, match=type(t.match)({**t.match.values, "sms": 78})), "sms (132 and 78)"),
    (lambda t: replace(t, axis="tokens"), "axis"), (lambda t: replace(t, digest="sha256:1"), "kernel sources"),
    (lambda t: replace(t, provenance={"source": "baseline"}), "only measured"),
])
def test_what_cannot_be_merged(other, words) -> None:
    with pytest.raises(UsageError) as caught:
        merge([one(), other(one())])
    assert words in str(caught.value)


def test_the_merge_command(megamoe, tmp_path) -> None:
    files = [saved(one(machine=name), tmp_path / f"{name}.yaml").path for name in "ab"]
    out = tmp_path / "m.yaml"
    assert megamoe("table", "merge", *files, "-o", out).code == 0
    assert megamoe("table", "check", out).code == 0
    assert megamoe("table", "merge", *files, "-o", out).code == 2, "an existing file is not replaced"
    assert megamoe("table", "merge", *files, "-o", out, "--force").code == 0
    assert megamoe("table", "merge", files[0], "-o", tmp_path / "n.yaml").code == 2


# -- diff ------------------------------------------------------------------------------------------


def test_diff_says_same_where_the_evidence_does() -> None:
    """Two runs that cut at different places: what lies between is the same on both by their own numbers, or it is not."""
    close = diff(one(100, ml=0.9, sl=0.905, mh=0.905, sh=0.9), one(300, mh=0.9, sh=0.905))
    assert [(d.verdict, d.first, d.second) for d in close] == [("same", SMALL, MIDDLE)] and close[0].cost < 0.01
    far = diff(one(100), one(300, mh=0.9, sh=1.0))
    assert [d.verdict for d in far] == ["differs"] and far[0].cost > 0.1
    assert diff(one(), one()) == []


def test_a_crossover_a_few_tokens_apart_is_the_same() -> None:
    """Each run may be off by what it lets pass, on its own side; a stretch that is wide must be proven equal."""
    near = {"mh": 0.93, "sh": 0.9}   # 3.3 % apart, more than the 2 % of two picks anywhere else
    assert [d.verdict for d in diff(one(254, **near), one(258, **near))] == ["same"]
    assert [d.verdict for d in diff(one(254, **near), one(300, **near))] == ["differs"]
    assert [d.verdict for d in diff(one(254), one(258))] == ["differs"], "11 % apart is no crossover"
    ratios = {t: {MIDDLE: 0.93, SMALL: 0.9} for t in SIZES}
    island, whole = (measured([*cuts, (1024.5, MIDDLE)], ratios) for cuts in ([(254.5, MIDDLE), (258.5, SMALL)], []))
    assert [d.verdict for d in diff(island, whole)] == ["differs"], "nor is an island"


def test_each_routing_of_a_size_counts() -> None:
    """Rows of one size with two routings: neither hides the other, whichever comes last."""
    def with_powerlaw(table, ratio: float):
        rows = [replace(row, id=f"{row.id}p", routing="powerlaw", vs_incumbent=ratio if row.config == "middle" else 0.9)
                for row in table.evidence if row.tokens == 256]
        return [replace(table, evidence=found) for found in ((*table.evidence, *rows), (*rows, *table.evidence))]

    for a in with_powerlaw(one(100, mh=0.9), 1.0):
        (found,) = diff(a, one(300, mh=0.9))
        assert found.verdict == "differs" and found.cost == pytest.approx(1.0 / 0.9 - 1)
        assert slowdowns(a, MIDDLE, 0, 1e9)[256] == pytest.approx(1.0 / 0.9 - 1)


def test_the_diff_command(megamoe, tmp_path) -> None:
    a, b = saved(one(100), tmp_path / "a.yaml").path, saved(one(300, mh=0.9, sh=1.0), tmp_path / "b.yaml").path
    assert (megamoe("table", "diff", a, a).code, megamoe("table", "diff", a, b).code) == (0, 1)
    (found,) = megamoe("table", "diff", a, b, "--json").json["differences"]
    assert found["verdict"] == "differs" and found["from"] == pytest.approx(18.84, abs=0.01)


def test_the_models_error_is_stated_against_measurements() -> None:
    static = replace(one(), evidence=tuple(Evidence(r.id, r.config, r.tokens, "uniform", model_us=r.median_us * 1.1) for r in one().evidence),
                     provenance={"source": "static"})
    found = model_error(static, one())
    assert found["points"] == 10 and found["median"] == pytest.approx(0.1) and found["worst"] == pytest.approx(0.1)
    assert model_error(one(), static) == found and model_error(one(), one()) is None


# -- export ----------------------------------------------------------------------------------------


def test_the_header_is_a_constexpr_function_that_picks_the_same(tmp_path) -> None:
    made = one(100)
    (tmp_path / "table.h").write_text(to_header(made, "t.yaml"))
    draw = random.Random(5)
    tokens = [0, 100, 101, 1024, 1025, *(draw.randrange(3000) for _ in range(40))]
    loads = [made.axis_value(t, 1, SHAPE.topk, SHAPE.experts) for t in tokens]
    (tmp_path / "main.cpp").write_text('#include <cstdio>\n#include "table.h"\n'
                                       "static_assert(megamoe_table::pick(megamoe_table::load(8, 1, 6, 32)).block_m == 64, \"\");\n"
                                       "int main() { const double loads[] = {" + ", ".join(map(repr, loads)) + "};\n"
                                       'for (double l : loads) std::printf("%u %s\\n", megamoe_table::pick(l).block_m, megamoe_table::pick(l).policy); }\n')
    subprocess.run(["g++", "-std=c++14", "-Wall", "-Werror", "-o", tmp_path / "main", tmp_path / "main.cpp"], check=True, timeout=60)
    got = subprocess.run([tmp_path / "main"], capture_output=True, text=True, timeout=10).stdout.splitlines()
    assert got == [f"{made.configs[made.range_at(load).use].config.block_m} fused" for load in loads]


def test_json_holds_everything_a_runtime_needs() -> None:
    document = json.loads(to_json(one()))
    assert document["ranges"][-1]["to"] is None and document["match"] == QUERY.values()
    assert document["configs"]["small"]["block_m"] == 32 and document["configs"]["small"]["ctas"] == 0


def test_the_export_command(megamoe, tmp_path) -> None:
    path = saved(one(), tmp_path / "t.yaml").path
    assert megamoe("table", "export", path).out.startswith("// Generated by `megamoe table export` from t.yaml (measured)")
    assert megamoe("table", "export", path, "--format", "json", "-o", tmp_path / "t.json").code == 0
    assert json.loads((tmp_path / "t.json").read_text())["source"] == "measured"


def test_show(megamoe, tmp_path) -> None:
    path = saved(one(), tmp_path / "t.yaml").path
    out = megamoe("table", "show", path).out
    assert "m64n256" in out and "0.900" in out and "3 better" in out and "not measured" in out
    assert megamoe("table", "show", path, "--json").json["tables"][0]["ranges"][-1]["to"] is None
