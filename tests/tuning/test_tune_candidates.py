"""Candidates that crash, hang, lie or do not repeat: each is a recorded row, none is ever chosen, the rest goes on."""

from __future__ import annotations

import json

import pytest

from megamoe_cli.config import KernelConfig
from megamoe_cli.tuning.table_check import check_file
from tests.tuning.rig import WIDE
from tests.tuning.tables_at_hand import SMALL

BAD = {"block_m": 64, "stages": 3}


@pytest.fixture(autouse=True)
def wide(rig) -> None:
    rig.space = WIDE


@pytest.mark.parametrize(("kind", "status"), [
    ("crash", "crash"), ("exit", "crash"), ("hang", "hang"), ("stubborn", "hang"), ("wrong", "wrong"), ("raise", "error"), ("fault", "fault"),
    ("too-fast", "too-fast"), ("nan", "invalid"), ("negative", "invalid"),
])
def test_a_bad_candidate_is_recorded_and_never_chosen(rig, kind, status) -> None:
    """It would be the fastest by far; it is a row, and the rest goes on."""
    rig.sizes = "16,64"
    rig.script["effects"].insert(0, {"match": BAD, "factor": 0.6})
    rig.script["faults"] = [{"match": BAD, "kind": kind}]
    rig.extra = ("--candidate-timeout", "1")
    answer = rig.run(rig.fresh())
    assert answer.code == 0, answer.err
    bad = [t for t in rig.trials() if t["status"] != "ok"]
    assert bad and {t["status"] for t in bad} == {status}
    assert all(BAD.items() <= t["a"].items() for t in bad)
    if status != "invalid":
        # A crash is tried once more, in case something else killed the process; then it is not asked again.
        assert len(bad) == (2 if status == "crash" else 1)
        assert json.loads((rig.run_folder / "summary.json").read_text())["accounts"]["failed"] == {status: 1}
    table, problems = check_file(rig.table)
    assert not any(BAD.items() <= c.to_dict().items() for c in table.configs.values())
    assert f"{status}: " in answer.err and [p for p in problems if p.severity == "error"] == []
    if kind == "exit":
        assert bad[0]["stderr"][-1] == "device lost"


def test_a_candidate_that_is_wrong_only_at_one_size_is_gone_everywhere(rig) -> None:
    rig.script["effects"].insert(0, {"match": BAD, "factor": 0.6})
    rig.script["faults"] = [{"match": BAD, "tokens": 64, "kind": "wrong"}]
    assert rig.run(rig.fresh()).code == 0
    assert not any("m64" in name and "s3" in name for _, name in rig.picks())


def test_a_winner_that_fails_only_when_it_is_confirmed(rig) -> None:
    rig.script["faults"] = [{"match": {"block_m": 32, "lag": 8}, "stage": "confirm", "kind": "crash"}]
    assert rig.run(rig.fresh()).code == 0
    assert not any("m32" in name and "lag8" in name for _, name in rig.picks())


def test_a_gain_that_does_not_repeat_is_not_published(rig) -> None:
    """Fast when searched, slow in a fresh process: only the latter counts."""
    rig.sizes = "16,64"
    rig.script["effects"] = [{"match": {"lag": 8, "block_m": 32}, "factor": 0.8, "stages": ["screen", "second", "launch", "final", "final-more"]},
                             {"match": {"lag": 8, "block_m": 32}, "factor": 1.1, "stages": ["confirm", "confirm-more", "validate"]}]
    answer = rig.run(rig.fresh())
    assert answer.code == 0, answer.err
    summary = json.loads((rig.run_folder / "summary.json").read_text())
    assert {e["tokens"] for e in summary["not_confirmed"]} == {16, 64}
    assert not any("m32" in name and "lag8" in name for _, name in rig.picks())


def test_the_built_in_defaults_own_failure_ends_the_run_and_says_so(rig) -> None:
    rig.script["faults"] = [{"match": {}, "stage": "noise", "kind": "wrong"}]
    answer = rig.run(rig.fresh())
    assert answer.code == 1 and "the incumbent" in answer.err and "itself fails" in answer.err
    assert [t["a"]["block_m"] for t in rig.trials()] == [SMALL.config.block_m, KernelConfig().block_m], "first the table's pick, then the default"


@pytest.mark.parametrize(("stage", "tokens"), [("noise", 4), ("noise", 64), ("second", 64), ("confirm", 16), ("screen", 256)])
def test_where_the_table_picks_what_is_no_valid_kernel_the_default_is_to_be_beaten(rig, stage, tokens) -> None:
    """The baseline's small tile gives wrong results: it is gone, the run goes on, and says so. ``b`` is the incumbent's side."""
    side = "match" if stage == "noise" else "match_b"
    rig.script["faults"] = [{side: {"block_m": 32, "lag": 32}, "stage": stage, "tokens": tokens, "kind": "wrong"}]
    if stage == "screen":  # as a candidate, where another is to be beaten
        rig.script["faults"] = [{"match": {"block_m": 32, "lag": 32}, "tokens": 256, "kind": "wrong"}]
    answer = rig.run(rig.fresh())
    assert answer.code == 0 and "built-in default takes its place" in answer.err, answer.err
    names = {name for _, name in rig.picks()}
    assert names and not any("m32" in name and "lag" not in name for name in names), "lag 32 is the one without a suffix"
    table, _ = check_file(rig.table)
    assert not any((c.config.block_m, c.config.lag) == (32, 32) for c in table.configs.values())
    assert {row.vs_incumbent for row in table.evidence if row.config == "default" and row.tokens <= 64} == {1.0}
    before = len(rig.lines())
    assert rig.run(rig.again()).code == 0 and len(rig.lines()) == before, "replayed, the same decisions"


def test_a_size_that_does_not_fit_is_left_out_and_said(rig) -> None:
    rig.script["faults"] = [{"match": {}, "tokens": 256, "kind": "unfit"}]
    answer = rig.run(rig.fresh())
    assert answer.code == 0 and "256 tokens: not measured: cannot allocate" in answer.err
    assert [t for t, _ in rig.picks() if t == 256] == []


def test_a_device_that_is_gone_ends_the_run(rig) -> None:
    rig.sizes = "16"
    rig.script["faults"] = [{"match": {}, "stage": stage, "kind": "exit"} for stage in ("second", "launch", "final", "probe")]
    answer = rig.run(rig.fresh())
    assert answer.code == 3 and " crash in a row, and then the incumbent too" in answer.err and "--resume" in answer.err
    statuses = [t["status"] for t in rig.trials()]
    assert statuses[0] == "ok" and 1 <= statuses.count("void") <= 3 and statuses.count("crash") == 2 * statuses.count("void"), "each was tried twice"
    rig.script["faults"] = []
    rig.write()
    assert rig.run(rig.again()).code == 0 and "m32" in dict(rig.picks())[16], "with the device back, nobody was blamed"


def test_what_has_a_broken_axis_in_common_is_not_tried_to_the_end(rig) -> None:
    """Everything with three stages faults: three of its kernels are seen to, the rest is left out, and the run says so."""
    rig.sizes = "16"
    rig.space = WIDE.replace("[32, 64, 128]", "[16, 32, 64, 128]")
    rig.script["faults"] = [{"match": {"stages": 3}, "kind": "fault"}]
    answer = rig.run(rig.fresh())
    assert answer.code == 0 and "stages=3: 3 kernels failed and none worked" in answer.err, answer.err
    bad = [t for t in rig.trials() if t["status"] == "fault"]
    assert len(bad) == 3 and all(t["a"]["stages"] == 3 for t in bad)
    accounts = json.loads((rig.run_folder / "summary.json").read_text())["accounts"]
    assert accounts["failed"] == {"fault": 3} and accounts["barred"] > 0


def test_failed_candidates_can_be_measured_again_on_request(rig) -> None:
    rig.sizes = "16"
    rig.script["faults"] = [{"match": BAD, "kind": "crash"}]
    rig.run(rig.fresh())
    rig.script["faults"] = []
    rig.write()
    before = len(rig.lines())
    assert rig.run(rig.again()).code == 0 and len(rig.lines()) == before
    assert rig.run(rig.again("--retry-failed")).code == 0 and len(rig.lines()) > before


# -- what cannot be continued ----------------------------------------------------------------------


def test_resume_refuses_what_would_mix_two_experiments(rig) -> None:
    rig.sizes = "16"
    rig.run(rig.fresh())
    answer = rig.run(rig.again("--tokens", "8"))
    assert answer.code == 2 and "leave out --tokens" in answer.err
    plan = rig.run_folder / "plan.json"
    data = json.loads(plan.read_text())
    plan.write_text(json.dumps(data | {"digest": "sha256:0000"}))
    answer = rig.run(rig.again())
    assert answer.code == 2 and "kernel sources changed" in answer.err
    plan.write_text("{")
    assert rig.run(rig.again()).code == 2


def test_resume_without_a_run(rig) -> None:
    rig.write()
    assert rig.run(rig.again()).code == 2
    answer = rig.run(["tune", "--resume", "nothing", *rig.common()])
    assert answer.code == 2 and "'nothing'" in answer.err
