"""``megamoe report`` on records as the commands leave them, and on one that ``megamoe test`` really left."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from megamoe_cli import paths
from megamoe_cli.devlog import journal

CACHE = paths.cache_dir()  # the real one, before a fixture moves it: these tests are not about compiling
HOST = {"system": "Linux", "machine": "x86_64", "cpus": 2, "python": "3.12"}
SOURCE = {"version": "0.1.0", "kernel_sources": "abc123", "commit": "c0ffee" + "0" * 34, "dirty": False}
REPORT = ("report", "--results-dir", "out")


def result(phase: str, ranks: int, tokens: list[int], status: str = "pass", block_m: int = 64, **more: Any) -> dict:
    return {"phase": phase, "id": f"{phase}-r{ranks}-t{tokens[0]}-m{block_m}", "status": status, "where": f"emulator({ranks} ranks x 2 CTAs)",
            "case": {"ranks": ranks, "tokens": tokens, "config": {"block_m": block_m}}, "repro": f"megamoe test --phase {phase}", **more}


def left(identity: str, name: str, document: dict, code: int = 0, minute: int = 0) -> Path:
    """A record and its line in the journal. Returns the record's path."""
    path = Path("out") / identity / name
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"id": identity, "source": SOURCE, "host": HOST, "command": ["megamoe", identity.split("-")[2], "--x", "a b"], "exit_code": code,
                "finished": f"2026-01-02T03:{minute:02d}:00+0000", "seconds": 1.5, **document}
    path.write_text(json.dumps(document))
    run = journal.Run(identity.split("-")[2], Path("out"))
    run.facts["records"] = [path]
    journal.finish(run, code)
    return path


def ran(identity: str, *results: dict, **more: Any) -> Path:
    where = list(dict.fromkeys(r["where"] for r in results))
    return left(identity, "results.json", {"schema": "megamoe.run/1", "results": list(results), "where": where}, **more)


def bench_row(tokens: int, kernel: float, weight: float, tensor: float, **more: Any) -> dict:
    return {"shape": "flash", "tokens": tokens, "config": "m128-n256", "kernel_us": kernel, "low_us": kernel - 1, "high_us": kernel + 1,
            "back_to_back_us": kernel - 2, "weight_floor_us": weight, "tensor_floor_us": tensor, "floor_us": max(weight, tensor), **more}


def line_with(text: str, *words: str) -> str:
    return next(line for line in text.splitlines() if all(word in line for word in words))


def test_what_passed_where(megamoe) -> None:
    """Phase x ranks x tokens x BLOCK_M, and a case that did not run is not one that passed."""
    ran("20260102-030405-test-0001", result("l1", 8, [48] * 8), result("l1", 8, [48] * 8), result("l1", 8, [3, 40] * 4),
           result("l1", 8, [48] * 8, block_m=128), result("l2", 2, [48] * 2, "not run"), result("l2", 2, [7] * 2, "fail", message="1 row\ndiffers"),
           code=1)  # fmt: skip
    answer = megamoe(*REPORT)
    assert answer.code == 0, answer.err
    head = line_with(answer.out, "phase", "BLOCK_M")
    assert head.split() == ["phase", "ranks", "BLOCK_M", "where", "7", "48", "uneven", "3..40"]
    assert line_with(answer.out, "l1", " 64 ").split()[-3:] == ["pass", "2", "pass"]
    assert line_with(answer.out, "l1", " 128 ").split()[-1] == "pass" and "uneven" not in line_with(answer.out, "l1", " 128 ")
    assert line_with(answer.out, "l2", "CTAs)", " 64 ").split()[-3:] == ["fail", "not", "run"]
    assert "Result: failed: 4 of 6 cases passed, 1 not run" in answer.out
    assert "fail l2-r2-t7-m64 on emulator(2 ranks x 2 CTAs): 1 row differs" in answer.out and "  megamoe test --phase l2" in answer.out
    assert "Ran on emulator(8 ranks x 2 CTAs), emulator(2 ranks x 2 CTAs); Linux x86_64, 2 CPUs." in answer.out
    assert "Commit c0ffee0000, kernel sources abc123" in answer.out and "--x 'a b'" in answer.out


def test_many_token_counts_take_several_tables(megamoe) -> None:
    ran("20260102-030405-test-0001", *(result("l1", 2, [n, n]) for n in range(20)))
    out = megamoe(*REPORT).out
    assert out.count("BLOCK_M") == 3 and out.count("pass ") + out.count("pass\n") >= 20


def test_times_beside_their_floors(megamoe) -> None:
    gate = [{"shape": "flash", "tokens": 8, "verdict": "slower", "ratio": 1.08, "low": 1.05, "high": 1.1}]
    rival = {"name": "peer", "version": "0.2.5", "times": {}, "ratios": {"kernel": {"median": 0.925, "low": 0.9, "high": 0.95}}, "to_reach": 0.9,
             "verdict": "ahead"}
    left("20260102-030405-bench-0001", "bench.json", {"schema": "megamoe.bench/1", "where": "virtual(1 on 1xH200)", "gate": gate, "limit": 0.03,
         "rows": [bench_row(8, 150.0, 100.0, 2.0), bench_row(8192, 2000.0, 160.0, 1250.0, rivals=[rival])]}, code=1)  # fmt: skip
    out = megamoe(*REPORT).out
    assert "Times on virtual(1 on 1xH200)" in out and "failed: 2 rows, 1 slower" in out
    assert line_with(out, "flash", " 8 ").split()[2:] == ["150.0", "149.0", "to", "151.0", "148.0", "100.0", "1.50", "weights", "-", "slower", "+8.0%",
                                                         "(+5.0%", "to", "+10.0%)", "m128-n256"]
    assert "1.60" in line_with(out, "8192") and "tensor cores" in line_with(out, "8192") and "0.925 (ahead, to reach 0.90)" in line_with(out, "8192")
    row = megamoe(*REPORT, "--json").json["runs"][0]["bench"][0]
    assert row["times_floor"] == 1.5 and row["floor"] == "weight" and row["gate"]["verdict"] == "slower"


def test_what_a_search_found(megamoe) -> None:
    folder = Path("out/20260102-030405-tune-0001")
    summary = {"schema": "megamoe.tune-summary/1", "where": ["virtual(1 on 1xH200)"], "stopped": "budget", "partial": True, "noise": {"8": 0.004},
               "picks": [{"tokens": 8, "config": "m64", "vs_incumbent": 0.91}, {"tokens": 16, "config": "m128", "vs_incumbent": None}],
               "validation": {"holdout": 3, "worst_slowdown": 1.012, "max_slowdown": 1.05, "geomean": 0.95},
               "accounts": {"generated": 10, "measured": 6, "not_reached": 1, "failed": {"hang": 1}, "same": 2, "refused": {}},
               "trials": {}, "notes": ["slow clocks"]}  # fmt: skip
    left(folder.name, "summary.json", summary, code=6)
    (folder / "plan.json").write_text(json.dumps({"shape": [4096, 2048, 256, 6], "ranks": 8}))
    out = megamoe(*REPORT).out
    assert "Search for 8 ranks of 4096x2048x256x6: partial, stopped: budget." in out and "Note: slow clocks" in out
    assert line_with(out, "m64").split() == ["8", "m64", "0.910", "0.40%"]
    assert "worst slowdown 1.012 (limit 1.05)" in out and "6 measured" in out and "10 " in out, "whatever accounts the version that wrote it had"
    unfinished = Path("out/20260102-040405-tune-0002")
    unfinished.mkdir()
    (unfinished / "plan.json").write_text("{}")
    (unfinished / "trials.jsonl").write_text("1\n2\n")
    out = megamoe(*REPORT, unfinished.name).out
    assert "not finished" in out and "2 trials measured" in out and "megamoe tune --resume 20260102-040405-tune-0002" in out


def test_a_ci_run_has_its_steps_and_their_cases(megamoe) -> None:
    ran("20260102-030405-test-0001", result("l1", 1, [8]), minute=1)
    ran("20260102-030406-test-0002", result("l1", 2, [8, 8], "hang", fault={"text": "rank 1 waited 5 s"}), code=124, minute=2)
    steps = [{"name": "test on 1 rank", "exit_code": 0, "seconds": 1, "text": "1 passed", "run": "20260102-030405-test-0001"},
             {"name": "test on 2 ranks", "exit_code": 124, "seconds": 1, "text": "0 passed", "run": "20260102-030406-test-0002"},
             {"name": "bench", "exit_code": None, "seconds": 0, "text": "not run", "run": None}]
    left("20260102-030404-ci-0003", "ci.json", {"schema": "megamoe.ci/1", "where": ["emulator(1 rank x 2 CTAs)"], "steps": steps}, code=124, minute=0)
    out = megamoe(*REPORT).out
    assert out.startswith("megamoe: 20260102-030404-ci-0003"), "its steps are newer, and still steps"
    assert line_with(out, "test on 2 ranks").split()[4:6] == ["exit", "124"] and line_with(out, "bench").split()[1:3] == ["not", "run"]
    assert "timeout: 1 of 2 cases passed" in out and "rank 1 waited 5 s" in out
    assert len(megamoe(*REPORT, "--all", "--list").out.splitlines()) == 3


def test_a_run_on_another_machine_says_so(megamoe) -> None:
    path = ran("20260102-030405-test-0001", result("l1", 8, [8] * 8))
    far = {"target": "box", "host": "gpu-box", "container": "dev", "job": "j", "machine": {"host": "n1", "gpus": [["0", "NVIDIA H200", "u", "1"]]}}
    (path.parent / "remote.json").write_text(json.dumps(far))
    assert "through ssh on box (container dev; NVIDIA H200)" in megamoe(*REPORT).out
    assert megamoe(*REPORT, "--json").json["runs"][0]["remote"]["host"] == "gpu-box"


# ---- choosing ----


@pytest.fixture
def three(megamoe) -> None:
    for n, kind in enumerate(("test", "test", "bench"), 1):
        document = {"where": "virtual(1 on 1xH200)", "rows": [], "gate": []} if kind == "bench" else {}
        if kind == "test":
            ran(f"20260102-03040{n}-test-000{n}", result("l1", 2, [n, n]), minute=n)
        else:
            left(f"20260102-03040{n}-bench-000{n}", "bench.json", document, minute=n)


@pytest.mark.parametrize("args, ids", [
    ((), ["3"]), (("--last", "2"), ["2", "3"]), (("--kind", "test"), ["2"]), (("--kind", "test", "--last", "9"), ["1", "2"]),
    (("--all",), ["1", "2", "3"]),
    (("20260102-030402",), ["2"]), (("20260102-030403-bench-0003", "out/20260102-030401-test-0001"), ["1", "3"]),
    (("--since", "2026-01-02T03:02:00+00:00"), ["2", "3"]),
    (("--list",), ["1", "2", "3"]), (("--list", "--kind", "test"), ["1", "2"]),
])  # fmt: skip
def test_which_runs(megamoe, three, args, ids) -> None:
    answer = megamoe(*REPORT, *args, "--json")
    assert answer.code == 0, answer.err
    assert [run["id"][-1] for run in answer.json["runs"]] == ids


@pytest.mark.parametrize("args, code, words", [
    (("--kind", "tune"), 5, "no run is selected"), (("--since", "1h"), 5, "no run is selected"), (("2027",), 2, "there is no run '2027'"),
    (("20260102",), 2, "means 3 runs"), (("--last", "2", "--all"), 2, "exclude"), (("20260102-030402", "--all"), 2, "exclude"),
    (("--since", "soon"), 2, "--since takes"), (("-o", "page.pdf"), 2, "names no format"), (("--last", "0"), 2, "--last"),
    (("20260102-030402-test-0003",), 2, "did you mean"),
])  # fmt: skip
def test_what_is_refused(megamoe, three, args, code, words) -> None:
    answer = megamoe(*REPORT, *args)
    assert answer.code == code and words in answer.err and answer.out == ""


def test_without_any_run(megamoe) -> None:
    answer = megamoe(*REPORT)
    assert answer.code == 5 and "there are no runs yet" in answer.err and "megamoe test" in answer.err
    assert megamoe(*REPORT, "--json").json["exit_code"] == 5
    assert not Path("out").exists(), "looking makes nothing"


def test_a_build_left_only_a_line(megamoe, three) -> None:
    run = journal.Run("build", Path("out"))
    journal.finish(run, 4)
    assert megamoe(*REPORT).out.startswith("megamoe: 20260102-030403-bench"), "the last run that left a record"
    out = megamoe(*REPORT, "--kind", "build").out
    assert "Result: build failed" in out and "compiled only" in out


# ---- records that are not what they were ----


def test_a_record_that_was_changed_says_so(megamoe) -> None:
    path = ran("20260102-030405-test-0001", result("l1", 2, [8, 8], "fail"), code=1)
    path.write_text(path.read_text().replace('"fail"', '"pass"'))
    assert "results.json was changed after the run" in megamoe(*REPORT).out


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_record_that_cannot_be_read_is_a_run_with_a_problem(megamoe, three, text) -> None:
    broken = Path("out/20260102-050405-test-0009")
    broken.mkdir()
    (broken / "results.json").write_text(text)
    answer = megamoe(*REPORT, "--all")
    assert answer.code == 0 and "20260102-050405-test-0009" in answer.out and "unreadable" in answer.out, answer.err
    assert "20260102-030401-test-0001" in answer.out


def test_a_broken_journal_is_said_and_the_records_are_shown(megamoe, three) -> None:
    with open("out/journal.jsonl", "a") as stream:
        stream.write("{}\n")
    answer = megamoe(*REPORT, "--last", "3")
    assert answer.code == 0 and "journal.jsonl: line 4 is torn" in answer.err and "20260102-030401-test-0001" in answer.out


# ---- pages ----


class Outline(HTMLParser):
    """Checks that tags close in order; collects the text of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        if tag != "meta":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        assert not any(name in ("src", "href") for name, _ in attrs), "the page needs nothing else"

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and any(tag in self.open for tag in ("td", "th")):
            self.cells[-1] += data


def test_one_page_with_everything(megamoe) -> None:
    ran("20260102-030405-test-0001", result("l1", 2, [8, 8], "fail", message="<script>alert(1)</script> a|b *c*"), code=1)
    answer = megamoe(*REPORT, "-o", "pages/report.html")
    assert (answer.code, answer.out) == (0, "") and "report: pages/report.html" in answer.err
    text = Path("pages/report.html").read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(text)
    assert outline.open == [] and "BLOCK_M" in outline.cells and "fail" in outline.cells
    assert "<script" not in text and "&lt;script&gt;" in text and text.startswith("<!doctype html>")
    assert re.search(r'<span class="bad">fail</span>', text)


def test_markdown(megamoe) -> None:
    ran("20260102-030405-test-0001", result("l1", 2, [8, 8]), result("l2", 2, [8, 8], "fail", message="<b> a|b *c*"), code=1)
    text = megamoe(*REPORT, "--format", "md").out
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[0] == "| phase | ranks | BLOCK\\_M | where | 8 |" and table[1] == "| --- | ---: | ---: | --- | --- |"
    assert table[2:] == ["| l1 | 2 | 64 | emulator(2 ranks x 2 CTAs) | pass |", "| l2 | 2 | 64 | emulator(2 ranks x 2 CTAs) | **fail** |"]
    assert "&lt;b> a\\|b \\*c\\*" in text
    megamoe(*REPORT, "-o", "r.md")
    assert Path("r.md").read_text() == text


def test_where_nothing_can_be_written(megamoe, three) -> None:
    Path("file").write_text("")
    answer = megamoe(*REPORT, "-o", "file/report.html")
    assert answer.code == 2 and "-o: file/report.html cannot be written" in answer.err


def test_no_colour_in_a_pipe(megamoe, three) -> None:
    assert "\x1b" not in megamoe(*REPORT, "--all").out and "\x1b" in megamoe("--color", "always", *REPORT, "--all").out


# ---- the real thing ----


def test_after_a_real_test(megamoe, monkeypatch) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(CACHE))
    done = megamoe("test", "--ranks", "1", "--phase", "stub", "--tokens", "8", "--backend", "emulator", "--results-dir", "out")
    assert done.code == 0, done.err
    answer = megamoe(*REPORT, "--last", "1")
    assert line_with(answer.out, "stub").split()[-1] == "pass" and "emulator(1 rank x 2 CTAs)" in answer.out
    assert "passed: 1 of 1 cases passed" in answer.out
    assert len(journal.read(Path("out"))) == 1, "showing is no run"


HANG = "emulator(8 ranks x 2 CTAs): not done within 20 s\nstopped: still running\n" + "".join(
    [f"rank {rank}: launch 1 (l1), 2 CTAs live\n" for rank in range(8)]
    + [f"rank {rank} CTA {cta} warp {warp}: polling counts+{8 * warp} = {rank} at kernels/roles/a.cuh:{warp} x32 lanes\n"
       for rank in range(8) for cta in range(2) for warp in range(12)])  # fmt: skip


def test_a_hang_on_a_screen(megamoe, monkeypatch) -> None:
    """Every warp of every rank waits: the screen groups them by place, the record has them all."""
    from dataclasses import replace

    from megamoe_cli import testplan
    from megamoe_cli.protocol import CaseResult
    from megamoe_cli.report.tables import describe_failure

    found = testplan.expand(testplan.Request(ranks="8", phase="l1", tokens="8", backend="emulator"))[0]
    lines = "\n".join(describe_failure(found, replace(CaseResult(found.id, "hang"), message=HANG))).splitlines()
    assert len(lines) < 20, lines
    assert "not done within 20 s" in lines[0] and any("(and 15 more like it, 8 ranks)" in line for line in lines)
    assert any("96 more waits at 6 more places" in line for line in lines)
    path = ran("20260102-030405-test-0001", result("l1", 8, [48] * 8, "hang", message=HANG), code=124)
    answer = megamoe(*REPORT)
    assert answer.code == 0 and len(answer.out.splitlines()) < 60 and "not done within 20 s" in answer.out
    assert json.loads(path.read_text())["results"][0]["message"] == HANG


def test_hangs_as_the_test_command_shows_them(megamoe, fake) -> None:
    """Two cases that hang on 8 ranks: a screenful, and every waiter in the record."""
    fake.verdict = lambda case: {"status": "hang", "message": HANG, "exit_code": 124}
    answer = megamoe("test", "--ranks", "8", "--phase", "l1,l2", "--tokens", "8", "--backend", "emulator", "--results-dir", "out")
    assert answer.code == 124, answer.err
    assert len(answer.out.splitlines()) < 40 > len(answer.err.splitlines()) and answer.out.count("not done within 20 s") == 2
    (record,) = Path("out").glob("*/results.json")
    assert [entry["message"] for entry in json.loads(record.read_text())["results"]] == [HANG, HANG]


@pytest.mark.parametrize("content", [b"gr\xfc\xdfe", b"[1]", b'{"results": [{"x": 1}]}', b'{"results": "many", "steps": 3}', b'{"finished": 7, "steps": [1]}'])
@pytest.mark.parametrize("name", ["results.json", "ci.json", "bench.json", "summary.json"])
def test_a_record_that_somebody_edited(megamoe, content: bytes, name: str) -> None:
    """It is a run that cannot be read; the others are shown."""
    ran("20260102-030405-test-0001", result("l1", 8, [48] * 8))
    path = ran("20260102-030406-test-0002", result("l2", 8, [48] * 8)).parent
    (path / "results.json").unlink()
    (path / name).write_bytes(content)
    answer = megamoe(*REPORT, "--all")
    assert answer.code == 0 and "internal" not in answer.err, answer.err
    assert "l1" in answer.out
    assert megamoe(*REPORT, "--list").code == 0 and megamoe(*REPORT, "--json", "--all").code == 0


NOT_TEXT = "größe = 1\n".encode("latin-1")


@pytest.mark.parametrize("args", [
    ("--config-file", "file", "test", "--dry-run"), ("table", "check", "file"),
    ("bench", "--baseline", "file", "--fail-on-regression", "3%"), ("tune", "--space", "file", "--plan", "--shape", "tiny"),
    ("fuzz", "--corpus", "file"), ("tune", "--resume", "folder"),
])  # fmt: skip
def test_files_that_are_not_utf_8(megamoe, args: tuple[str, ...]) -> None:
    """Every text file that a user may have edited: exit 2, and the file is named."""
    Path("file").write_bytes(NOT_TEXT)
    Path("folder").mkdir()
    (Path("folder") / "plan.json").write_bytes(NOT_TEXT)
    answer = megamoe(*args)
    assert answer.code == 2 and ("file" in answer.err or "plan.json" in answer.err), answer.err


@pytest.mark.parametrize("name", ["config/megamoe/config.toml", "pyproject.toml"])
def test_settings_that_are_not_utf_8(megamoe, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(b"[tool.megamoe]\n# " + NOT_TEXT)
    answer = megamoe("test", "-n")
    assert answer.code == 2 and f"{name} is not UTF-8 text" in answer.err, answer.err
