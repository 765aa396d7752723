"""The whole pipeline on a scripted device: what it finds, what it refuses, what it writes."""

from __future__ import annotations

import json

import pytest
import yaml

from megamoe_cli.config import KernelConfig
from megamoe_cli.tuning.table_check import check_file, load_usable
from megamoe_cli.tuning.table_merge import diff
from tests.tuning.rig import WIDE, Rig
from tests.tuning.tables_at_hand import OWN_NAME


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One finished run for the tests that only look at it: (rig, what it said)."""
    made = Rig(tmp_path_factory.mktemp("done") / "rig")
    answer = made.run(made.fresh())
    yield made, answer
    assert made.alive() == [], "left behind"


def names(rig) -> dict[int, str]:
    return dict(rig.picks())


def test_it_finds_the_planted_winners_and_their_crossover(done) -> None:
    rig, answer = done
    assert answer.code == 0, answer.err
    assert f"incumbent from {OWN_NAME}, " in answer.err, "not from what ships"
    found = names(rig)
    assert all("m32" in found[t] and "lag8" in found[t] for t in (4, 16, 64)), found
    assert "m128" in found[256] and "lag16" in found[256]
    table, problems = load_usable(rig.table)
    assert {p.rule for p in problems} <= {"dirty"} and table.source == "measured"
    below, low, high, above = table.ranges
    # The step is at 100 tokens = 18.75 expected for each of 32 experts; validation splits until it is found.
    assert low.end == pytest.approx(18.75, abs=0.2) and (below.start, low.start, high.start) == (0.0, below.end, low.end)
    assert table.validation["worst_slowdown"] <= 1.03 and table.validation["geomean"] < 0.95
    assert {(r.use, r.evidence) for r in (below, above)} == {(table.default, ())}, "4 and 256 tokens bound what is known"
    assert {row.verdict for row in table.evidence if row.id in low.evidence} == {"better"}
    assert "held out" in answer.out and "incumbent" in answer.out and str(rig.table) in answer.out


def test_without_a_winner_the_incumbent_stays(rig) -> None:
    """1 % better, 3 % noise: nothing is claimed."""
    rig.script |= {"noise": 0.03, "effects": [{"match": {"block_m": 32, "lag": 8}, "factor": 0.99}]}
    assert rig.run(rig.fresh()).code == 0
    from megamoe_cli.tuning.plan import Plan

    # Incumbents are equal to each other here too, so one of them may do for all sizes; nothing else may.
    assert set(names(rig).values()) <= {choice.name() for _, choice in Plan.read(rig.run_folder).incumbents}
    assert "better" not in {row.verdict for row in check_file(rig.table)[0].evidence}


def test_every_number_has_its_evidence(done) -> None:
    rig, answer = done
    trials = rig.trials()
    summary = json.loads((rig.run_folder / "summary.json").read_text())
    accounts = summary["accounts"]
    assert accounts["generated"] == accounts["candidates"] + accounts["same"] + sum(accounts["refused"].values())
    assert accounts["candidates"] == accounts["measured"] + sum(accounts["failed"].values()) + sum(accounts[k] for k in ("barred", "outranked", "not_reached"))
    assert accounts["not_reached"] == 0, "a run to the end leaves only variants of what lost"
    gain = summary["gain"]
    assert 0.8 < gain["best"] <= gain["geomean"] <= gain["worst"] <= 1.0 and gain["slower"] == [] and gain["sizes"] >= 4
    assert f"picks: {gain['geomean']:.3f} of the time of {OWN_NAME} (" in answer.out
    assert summary["trials"]["measured"] == len(trials)
    noise = {t["tokens"] for t in trials if t["stage"] == "noise"}
    assert noise == {4, 16, 64, 256} and trials[0]["stage"] == "noise", "A/A comes first"
    assert all(t["conditions"] == {"sm_mhz": [1980, 1980], "throttle": [], "others": 0} for t in trials)
    assert all(t["check"] for t in trials)
    table, _ = load_usable(rig.table)
    (machine,) = table.provenance["machines"]
    assert machine["gpu"] == "Fake" and machine["sm_mhz"] == [1980, 1980] and machine["shared"] is False and machine["aa_noise"] > 0
    # Picks were confirmed by processes that ran nothing before, on inputs of their own.
    searched = {t["worker"] for t in trials if t["stage"] in ("final", "noise")}
    confirmed = {t["worker"] for t in trials if t["stage"] == "confirm"}
    assert confirmed and not searched & confirmed
    seeds = {stage: {t["seed"] for t in trials if t["stage"] == stage and t["tokens"] == 16} for stage in ("final", "confirm")}
    assert not seeds["final"] & seeds["confirm"]


def test_the_default_is_a_candidate_and_is_measured_at_every_size(rig) -> None:
    args = rig.fresh()
    (rig.folder / "space.yaml").write_text("schema: megamoe.space/1\nspaces:\n  default: {block_m: [32], lag: [8]}\n")
    rig.run(args)
    default = KernelConfig()
    finals = {t["tokens"] for t in rig.trials() if t["stage"].startswith("final") and t["a"]["block_m"] == default.block_m and t["a"]["lag"] == default.lag}
    assert finals == {4, 16, 64, 256}


def test_tuning_twice_gives_the_same_picks_or_says_same(done, tmp_path) -> None:
    rig, _ = done
    other = Rig(tmp_path / "other", script={**rig.script, "seed": 99})
    args = other.fresh()
    args[args.index("--seed") + 1] = "2"
    other.run(args)
    differences = diff(load_usable(rig.table)[0], load_usable(other.table)[0])
    # A crossover may be found a token or two apart; there, and only there, no evidence is needed to say so.
    assert all(d.verdict == "same" or d.high - d.low < 1.0 for d in differences), differences


def test_adding_a_configuration_to_a_finished_run_measures_that_one(rig) -> None:
    rig.extra = ("--strategy", "grid")
    rig.sizes = "16"
    assert rig.run(rig.fresh()).code == 0
    before = len(rig.lines())
    rig.extra = ()
    again = rig.run(rig.again())
    assert again.code == 0 and len(rig.lines()) == before, "a finished run has nothing left to measure"
    assert rig.run(rig.again("--config", "block_m=128,lag=77")).code == 0
    added = rig.trials()[before:]
    assert [(t["stage"].removesuffix("-more"), t["a"]["lag"]) for t in added[:1]] == [("final", 77)]
    assert all(t["a"]["lag"] == 77 for t in added) and len({t["stage"] for t in added}) <= 2


def test_grid_measures_all_and_halving_fewer(rig, tmp_path) -> None:
    rig.script["effects"] = [{"match": {"block_m": 32, "block_n": 256}, "to": 100, "factor": 0.9},
                             {"match": {"block_m": 32, "block_n": 256, "lag": 8}, "to": 100, "factor": 0.9}]
    grid = Rig(tmp_path / "grid", script=rig.script, extra=("--strategy", "grid"))
    big = "schema: megamoe.space/1\nspaces:\n  default: {block_m: [32, 64, 128], lag: [2, 4, 8, 16, 24, 48]}\n"

    def finals(r) -> int:
        args = r.fresh()
        (r.folder / "space.yaml").write_text(big)
        assert r.run(args).code in (0, 1)
        return sum(t["stage"] == "final" for t in r.trials())

    assert finals(grid) > 60 > finals(rig)
    assert names(grid)[16] == names(rig)[16]


def test_a_screening_loser_is_stopped_after_one_round(rig) -> None:
    rig.script["effects"].append({"match": {"block_m": 64}, "factor": 2.0})
    args = rig.fresh()
    (rig.folder / "space.yaml").write_text(WIDE.replace("[32, 64, 128]", "[16, 32, 64, 128]"))
    rig.run(args)
    slow = [t for t in rig.trials() if t["stage"] == "screen" and t["a"]["block_m"] == 64 and t["b"]["block_m"] != 64]
    assert slow and all(t["stopped"] and len(t["pairs"]) == 1 for t in slow)


def test_a_slow_held_out_size_is_not_hidden(rig) -> None:
    """Between two tuned sizes lies a hole for the winner: validation finds it and the range splits around it."""
    rig.sizes = "4,16,64,256,1024"
    rig.script["effects"] = [{"match": {"lag": 8, "block_m": 32}, "factor": 0.85},
                             {"match": {"lag": 8, "block_m": 32}, "from": 110, "to": 150, "factor": 1.6}]
    answer = rig.run(rig.fresh())
    table, _ = check_file(rig.table)
    picked = table.configs[table.range_at(128 * 6 / 32).use]
    assert (picked.config.block_m, picked.config.lag) != (32, 8), "128 tokens is in the hole"
    assert answer.code == 0 and table.validation["worst_slowdown"] <= 1.03
    assert any("became part of the fit" in note for note in table.notes)


def test_the_fake_devices_table_goes_only_where_it_is_asked_to(rig) -> None:
    args = rig.fresh()
    at, before = args.index("-o"), rig.looked_up()
    answer = rig.run(args[:at] + args[at + 2:])
    assert answer.code == 0 and "answers for no GPU" in answer.err
    assert rig.looked_up() == before and (rig.run_folder / "table.yaml").is_file()


def test_a_table_of_fewer_sms_says_so_and_goes_only_where_it_is_asked_to(rig) -> None:
    """Ranks in processes of their own hear of the reserve too: the place they name is in the table."""
    rig.script |= {"processes": True}
    args = rig.fresh()
    at, before = args.index("-o"), rig.looked_up()
    answer = rig.run([*args[:at], *args[at + 2:], "--reserve-sms", "4", "--tokens", "16", "--budget", "60s"])
    assert "not put where tables are looked up: 4 SMs were reserved" in answer.err, answer.err
    table = (rig.run_folder / "table.yaml").read_text()
    assert "fake(1 on 1xFake, 4 SMs reserved)" in table and rig.looked_up() == before


def test_budget_gives_the_best_so_far_and_says_partial(rig) -> None:
    rig.script["sleep_s"] = 0.1
    rig.extra = ("--budget", "3s")
    answer = rig.run(rig.fresh())
    # A fast machine comes as far as the held-out sizes, and so few trials may be too few for those.
    assert answer.code == (1 if "held-out size is" in answer.err else 6), answer.err
    assert "partial (budget)" in answer.err
    table, problems = check_file(rig.table)
    assert table.partial and "partial" in {p.rule for p in problems} and not [p for p in problems if p.severity == "error" and p.rule != "validation"]
    # The ends come first, so that even a short run spans all sizes.
    assert [t["tokens"] for t in rig.trials() if t["stage"] == "noise"][:2] == [4, 256]
    rig.extra = ()
    rig.script["sleep_s"] = 0
    rig.write()
    assert rig.run(rig.again()).code == 0 and not check_file(rig.table)[0].partial


def test_a_budget_that_is_over_at_once(rig) -> None:
    rig.extra = ("--budget", "0.01s")
    answer = rig.run(rig.fresh())
    assert answer.code == 6 and rig.trials() == [] and "nothing was measured" in answer.err
    assert not rig.table.exists() and json.loads((rig.run_folder / "summary.json").read_text())["accounts"]["measured"] == 0


def test_one_size_has_nothing_to_hold_out(rig) -> None:
    rig.sizes = "16"
    assert rig.run(rig.fresh()).code == 0
    table, problems = check_file(rig.table)
    assert table.validation is None and not table.partial and [p for p in problems if p.severity == "error"] == []


def test_fit_only_measures_nothing(done) -> None:
    rig, _ = done
    before, table = rig.lines(), yaml.safe_load(rig.table.read_text())
    rig.table.unlink()
    assert rig.run(rig.again("--fit-only")).code == 0
    again = yaml.safe_load(rig.table.read_text())
    assert rig.lines() == before and again["ranges"] == table["ranges"] and again["evidence"] == table["evidence"]


def test_json_is_one_document(done) -> None:
    rig, _ = done
    document = rig.run([*rig.again(), "--json"]).json
    assert document["schema"] == "megamoe.tune/1" and document["exit_code"] == 0 and document["summary"]["validation"]["holdout"] > 0


def test_off_a_terminal_there_are_plain_lines(done) -> None:
    rig, answer = done
    assert "noise of the incumbent" in answer.err and "confirmation in a fresh process" in answer.err and "\x1b" not in answer.err
    assert rig.run([*rig.again(), "-q"]).err.count("\n") <= 2


def test_tpe_proposes_and_the_journal_remembers(rig) -> None:
    pytest.importorskip("optuna")
    rig.extra = ("--strategy", "tpe")
    assert rig.run(rig.fresh()).code == 0
    assert any(t["stage"] == "tpe" for t in rig.trials()) and "m32" in names(rig)[16]
    before = len(rig.lines())
    rig.extra = ()
    assert rig.run(rig.again()).code == 0 and len(rig.lines()) == before


def test_tpe_asks_and_tells(rig, megamoe, monkeypatch) -> None:
    """Without optuna itself: what it proposes is measured once, failures are told as failures, the default comes first."""
    import sys

    from tests.tuning import stand_in_optuna

    monkeypatch.setitem(sys.modules, "optuna", stand_in_optuna)
    stand_in_optuna.STUDIES.clear()
    rig.sizes = "16"
    rig.script["faults"] = [{"match": {"block_m": 64, "lag": 16}, "stage": "tpe", "kind": "wrong"}]
    rig.extra = ("--strategy", "tpe")
    assert megamoe(*rig.fresh()).code == 0
    (study,) = stand_in_optuna.STUDIES
    asked = [t for t in rig.trials() if t["stage"] == "tpe"]
    assert len({t["key"] for t in asked}) == len(asked) and asked[0]["a"]["block_m"] == KernelConfig().block_m
    assert [value for params, value in study.told if (params["block_m"], params["lag"]) == (64, 16)][:1] in ([], [None])
    assert any(value is None for _, value in study.told) and any(value is not None for _, value in study.told)
    assert "m32" in names(rig)[16] and "lag8" in names(rig)[16]
    before = len(rig.lines())
    rig.extra = ()
    assert megamoe(*rig.again()).code == 0 and len(rig.lines()) == before, "asking again costs nothing"


def test_tpe_without_optuna_says_what_to_install(megamoe, monkeypatch, rig) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "optuna", None)
    rig.extra = ("--strategy", "tpe")
    answer = megamoe(*rig.fresh())
    assert answer.code == 3 and "optuna" in answer.err and "megamoe[tune]" in answer.err
