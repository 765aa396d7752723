"""``megamoe table check``: each rule on a table broken by hand, with its line; what ships; what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megamoe_cli import config as kernel_config
from megamoe_cli import paths
from megamoe_cli.tuning import table_check
from megamoe_cli.tuning.table_check import CHECK_RULES, check_file, kernel_digest

DATA = Path(__file__).resolve().parents[1] / "data" / "tables"
WISHES = """\
schema: megamoe.table/1
kernel: {name: sm90_fp8_mega_moe}
match: {arch: sm_90a, sms: "*", backend: "*", sms_per_rank: "*", ranks: "*", experts: "*", topk: {from: 3, to: .inf}, hidden: "*", intermediate: "*", dtype: e4m3, scale: block128}
axis: tokens
default: m128
ranges:
  - {from: 0, to: 129, use: n64, otherwise: m32, evidence: []}
  - {from: 129, to: .inf, use: m128, evidence: []}
configs:
  n64: {block_m: 64, block_n: 128, math_threads: 256, cluster: 2, policy: serial_n, promotion: classic, frontend: standard, regs_dispatch: 48, regs_tma: 40, regs_math: 208}
  m32: {block_m: 32, block_n: 256}
  m128: {block_m: 128, block_n: 256}
provenance: {source: baseline}
"""
GOOD = """\
schema: megamoe.table/1
kernel: {name: sm90_fp8_mega_moe, source_digest: "DIGEST"}
match: {arch: sm_90a, sms: 132, backend: virtual, sms_per_rank: 132, ranks: 1, experts: 32, topk: 6, hidden: 4096, intermediate: 2048, dtype: e4m3, scale: block128}
axis: expected_tokens_per_local_expert
default: big
ranges:
  - {from: 0, to: 16.5, use: small, evidence: [e1]}
  - {from: 16.5, to: 96, use: big, evidence: [e2]}
  - {from: 96, to: .inf, use: big, evidence: []}
configs:
  small: {block_m: 32}
  big: {block_m: 128, stages: 4}
policies:
  serial_n: {enabled: false, reason: "slower"}
evidence:
  - {id: e1, config: small, tokens: 8, routing: uniform, median_us: 160.0, ci_us: [158.0, 161.5], vs_incumbent: 0.95, verdict: better, rounds: 16}
  - {id: e2, config: big, tokens: 256, routing: uniform, median_us: 210.0, vs_incumbent: 1.0, verdict: same, rounds: 16}
validation: {holdout: 2, worst_slowdown: 1.01, geomean: 0.97, max_slowdown: 1.03, seed: 7}
provenance: {source: measured, run: r1, machines: [{id: m1, gpu: NVIDIA H200, aa_noise: 0.005}]}
"""


@pytest.fixture
def good() -> str:
    return GOOD.replace("DIGEST", kernel_digest())


@pytest.fixture
def table(tmp_path: Path, good: str):
    def write(old: str = "", new: str = "") -> Path:
        assert not old or good.count(old) >= 1, old
        path = tmp_path / "table.yaml"
        path.write_text(good.replace(old, new, 1) if old else good)
        return path

    return write


def test_a_good_table_is_good(megamoe, table) -> None:
    answer = megamoe("table", "check", table(), "--strict")
    assert (answer.code, answer.out) == (0, f"{table()}: ok\n")


# (text replaced, by what, line it must name, rule)
BROKEN = [
    ("to: 16.5, use: small", "to: 12, use: small", 8, "gap"),
    ("from: 0, to: 16.5", "from: 1, to: 16.5", 7, "gap"),
    ("from: 96, to: .inf", "from: 96, to: 4096", 9, "gap"),
    ("from: 16.5, to: 96, use", "from: 12, to: 96, use", 8, "overlap"),
    ("from: 16.5, to: 96, use", "from: 3, to: 16, use", 8, "unreachable"),
    ("from: 16.5, to: 96, use", "from: 16.5, to: 16.5, use", 8, "unreachable"),
    ("axis: expected", "colour: red\naxis: expected", 4, "unknown-key"),
    ("small: {block_m: 32}", "small: {blok_m: 32}", 11, "unknown-key"),
    ("use: small, evidence", "use: small, weight: 1, evidence", 7, "unknown-key"),
    ("verdict: better, rounds: 16", "verdict: better, round: 16", 16, "unknown-key"),
    ("small: {block_m: 32}", "small: {block_m: 48}", 11, "illegal-configuration"),
    ("stages: 4}", "stages: 8}", 12, "illegal-configuration"),
    ("stages: 4}", "regs_math: 256}", 12, "illegal-configuration"),
    ("stages: 4}", "cluster: two}", 12, "illegal-configuration"),
    ("  serial_n: {enabled", "  fused: {enabled", 7, "disabled-policy"),
    ("megamoe.table/1", "megamoe.table/2", 1, "schema-version"),
    ("schema: megamoe.table/1\n", "", 1, "schema-version"),
    ("axis: expected_tokens_per_local_expert", "axis: bytes", 4, "bad-value"),
    ("use: small", "use: tiny", 7, "unknown-configuration"),
    ("default: big", "default: huge", 5, "unknown-configuration"),
    ("evidence: [e1]", "evidence: [e9]", 7, "unknown-evidence"),
    ("evidence: [e1]", "evidence: [e2]", 7, "unknown-evidence"),
    ("evidence: [e1]", "evidence: []", 7, "missing-evidence"),
    ("id: e2", "id: e1", 17, "duplicate-key"),
    ("topk: 6", "topk: 6, topk: 8", 3, "duplicate-key"),
    ("sms: 132", 'sms: "*"', 3, "wildcard"),
    ("topk: 6", "topk: {from: 3, to: 9}", 3, "wildcard"),
    ("median_us: 210.0, vs", "model_us: 210.0, vs", 17, "model-marked"),
    ("median_us: 160.0", "median_us: .nan", 16, "wrong-type"),
    ("median_us: 160.0", "median_us: -3", 16, "wrong-type"),
    ("ranks: 1,", "ranks: one,", 3, "wrong-type"),
    ("default: big\n", "", 1, "missing-key"),
    ("median_us: 160.0", "median_us: 162.0", 16, "contradiction"),
    ("median_us: 210.0", "median_us: 210.0, floor_us: 300.0", 17, "contradiction"),
    ("vs_incumbent: 0.95", "vs_incumbent: 1.05", 16, "contradiction"),
    ("vs_incumbent: 1.0, verdict: same", "vs_incumbent: 0.97, verdict: worse", 17, "contradiction"),
    ("worst_slowdown: 1.01", "worst_slowdown: 1.2", 18, "validation"),
]


@pytest.mark.parametrize(("old", "new", "line", "rule"), BROKEN, ids=[f"{rule}-{n}" for n, (_, _, _, rule) in enumerate(BROKEN)])
def test_a_broken_table_names_line_and_rule(megamoe, table, old, new, line, rule) -> None:
    path = table(old, new)
    answer = megamoe("table", "check", path)
    assert answer.code == 1
    assert f"{path}:{line}: error: {rule}: " in answer.out, answer.out
    document = megamoe("table", "check", path, "--json").json
    assert document["ok"] is False and (line, rule) in {(p["line"], p["rule"]) for p in document["problems"]}


def test_every_error_rule_is_exercised() -> None:
    """A rule that no test can break is a rule that may not exist."""
    warnings = {"stale", "dirty", "partial", "unused-configuration", "awaited"}
    assert {rule for _, _, _, rule in BROKEN} | warnings == set(CHECK_RULES)


def test_several_faults_are_named_together_in_line_order(megamoe, table) -> None:
    path = table("to: 16.5, use: small", "to: 12, use: tiny, colour: red")
    lines = megamoe("table", "check", path).out.splitlines()
    found = [(int(line.split(":")[1]), line.split(": ")[2]) for line in lines]
    assert found == sorted(found) and {(7, "unknown-key"), (7, "unknown-configuration"), (8, "gap")} <= set(found)


@pytest.mark.parametrize(("old", "new", "rule"), [
    ("DIGEST", "sha256:0000000000000000", "stale"),
    ("run: r1", "run: r1, dirty: true", "dirty"),
    ("run: r1", "run: r1, partial: true", "partial"),
    ("  big: {", "  spare: {block_m: 64}\n  big: {", "unused-configuration"),
])
def test_warnings_fail_only_with_strict(megamoe, tmp_path, good, old, new, rule) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(GOOD.replace("DIGEST", new) if old == "DIGEST" else good.replace(old, new, 1))
    answer = megamoe("table", "check", path)
    assert answer.code == 0 and f"warning: {rule}: " in answer.out
    assert megamoe("table", "check", path, "--strict").code == 1


@pytest.mark.parametrize("content", [b"schema: [unclosed", b"\xff\xfe\x00", b"", b"a: &x [*x]\n", b"--- 1\n--- 2\n", b"a: b: c"])
def test_what_is_no_yaml_is_exit_2(megamoe, tmp_path, content) -> None:
    path = tmp_path / "table.yaml"
    path.write_bytes(content)
    answer = megamoe("table", "check", path)
    assert answer.code == 2 and answer.err.startswith(f"error: {path}") and len(answer.err.splitlines()) == 1


def test_a_missing_file_is_exit_2(megamoe, tmp_path) -> None:
    assert megamoe("table", "check", tmp_path / "none.yaml").code == 2


def test_a_tag_that_would_run_code_is_refused(megamoe, tmp_path, good) -> None:
    path = tmp_path / "table.yaml"
    path.write_text(good.replace("default: big", "default: !!python/name:os.getcwd x"))
    assert megamoe("table", "check", path).code == 2


def test_what_ships_is_good(megamoe) -> None:
    shipped = sorted((paths.tuning_dir() / "tables").glob("*.yaml"))
    assert len([p for p in shipped if p.name.startswith("baseline-")]) == 2
    answer = megamoe("table", "check", *shipped)
    assert answer.code == 0, answer.out
    for path in (p for p in shipped if p.name.startswith("baseline-")):
        table, problems = check_file(path)
        assert table is not None and table.source == "baseline" and {p.rule for p in problems} <= {"awaited"}


def test_a_baseline_takes_what_it_wants_as_soon_as_the_kernel_has_it(monkeypatch, tmp_path) -> None:
    """Whatever is not implemented today: with the predicate accepting all, the wishes are taken; with it accepting none of
    them, what stands in for them; both are legal, and the file is written back as it was."""
    from megamoe_cli.tuning.lookup import Library, Machine, Query, lookup
    from megamoe_cli.tuning.table_writer import to_dict
    from tests.tuning.tables_at_hand import SHAPE

    path = tmp_path / "baseline-wishes.yaml"
    path.write_text(WISHES)

    def now(missing: set) -> tuple:
        monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", frozenset(missing))
        table, problems = check_file(path)
        assert [p for p in problems if p.severity == "error"] == []
        pick = lookup(Query(SHAPE, 1, Machine(132, "virtual")), 64, Library([(table, problems)]))
        return table, {p.rule for p in problems}, pick.choice.config

    all_there, rules, config = now(set())
    assert rules == set() and (config.block_n, config.policy, config.register_plan()) == (128, "serial_n", (48, 40, 208))
    waiting, rules, config = now({("policy", "serial_n"), ("cluster", 2), ("block_n", 128)})
    assert rules == {"awaited"} and (config.block_m, config.block_n, config.policy) == (32, 256, "fused")
    assert to_dict(all_there) == to_dict(waiting)


def test_only_a_baseline_waits_for_something(megamoe, table) -> None:
    answer = megamoe("table", "check", table("use: small, evidence", "use: small, otherwise: big, evidence"))
    assert answer.code == 1 and ":7: error: bad-value: only a baseline has an otherwise" in answer.out


def test_the_public_review_fails_for_both_of_its_reasons(megamoe) -> None:
    answer = megamoe("table", "check", DATA / "public-review.yaml")
    assert answer.code == 1
    assert answer.out.count("disabled-policy: [") == 3, "every branch names the disabled policy"
    assert "illegal-configuration: configuration 'large': register-budget" in answer.out


def test_the_one_predicate_decides(megamoe, table, monkeypatch) -> None:
    """What the predicate refuses tomorrow, the check refuses."""
    assert megamoe("table", "check", table()).code == 0
    monkeypatch.setattr(kernel_config, "NOT_IMPLEMENTED", kernel_config.NOT_IMPLEMENTED | {("block_m", 32)})
    answer = megamoe("table", "check", table())
    assert answer.code == 1 and ":11: error: illegal-configuration: configuration 'small': not-implemented" in answer.out


def test_the_digest_is_of_what_the_gpu_kernel_reaches(tmp_path, monkeypatch) -> None:
    import shutil

    copy = tmp_path / "kernels"
    shutil.copytree(paths.kernels_dir(), copy)
    monkeypatch.setattr(paths, "kernels_dir", lambda: copy)
    fresh = lambda: (table_check.kernel_digest.cache_clear(), table_check.kernel_digest())[1]  # noqa: E731
    before = fresh()
    emulator = next((copy / "hw" / "emu").glob("*.cpp"))
    emulator.write_text(emulator.read_text() + "\n")
    assert fresh() == before, "the emulator is not what a table is about"
    role = copy / "roles" / "combine.cuh"
    role.write_text(role.read_text() + "\n")
    assert fresh() != before
    table_check.kernel_digest.cache_clear()
