"""``megamoe log`` on records made by hand and, in a repository of its own, by ``megamoe test`` itself."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from megamoe_cli import paths
from megamoe_cli.devlog import journal

COMMIT = "c0ffee" + "0" * 34
LOG = ("log", "--file", "log.md", "--results-dir", "out")
CHECK = ("log", "check", "--file", "log.md", "--results-dir", "out")


def case(phase: str, ranks: int, tokens: list[int], status: str = "pass", **more) -> dict:
    identity = f"{phase}-r{ranks}-t{tokens[0]}"
    return {"phase": phase, "id": identity, "status": status, "where": f"emulator({ranks} ranks x 2 CTAs)", "seconds": 1.0,
            "case": {"ranks": ranks, "tokens": tokens, "config": {"block_m": 64}}, **more}


def ran(*results: dict, commit: str = COMMIT, code: int = 0, **facts) -> str:
    """A run record and its line in the journal, as a test run leaves them. Returns the run's id."""
    number = len(journal.read(Path("out"))) + 1
    identity = f"20260102-03040{number}-test-000{number}"
    source = {"version": "0.1.0", "kernel_sources": paths.kernel_source_digest(), "commit": commit, "dirty": False}
    where = list(dict.fromkeys(r["where"] for r in results))
    document = {"schema": "megamoe.run/1", "id": identity, "source": source, "where": where, "results": results,
                "host": {"system": "Linux", "machine": "x86_64", "cpus": 2, "python": "3.12"}}
    path = Path("out") / identity / "results.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document))
    run = journal.Run("test", Path("out"))
    run.facts.update(records=[path], **facts)
    journal.finish(run, code)
    return identity


def test_an_entry_says_what_ran(megamoe) -> None:
    ran(case("l1", 8, [48] * 8), case("l1", 8, [3, 40] * 4), case("l1", 8, [7] * 8, "fail", message="1 row | differs"), code=1)
    ran(case("l2", 2, [0, 0]))
    answer = megamoe(*LOG, "--request", "make l1 <right>", "--issue", "slow at 7 tokens", "--next", "fix it")
    assert answer.code == 0, answer.err
    text = megamoe("log", "show", "--file", "log.md").out
    assert text.startswith("## 20") and "· phase l1, l2 · c0ffee0000" in text
    assert "**Request.** make l1 &lt;right>" in text
    assert "| l1 | 8 | 48, uneven 3..40, 7 | 64 | emulator(8 ranks x 2 CTAs) | 2 of 3 |" in text
    assert "| l2 | 2 | 0 | 64 | emulator(2 ranks x 2 CTAs) | 1 of 1 |" in text
    assert "failed (1)" in text and "- l1-r8-t7: fail: 1 row \\| differs" in text and "- slow at 7 tokens" in text and "- fix it" in text
    assert "emulator only: nothing here is about a GPU" in text
    checked = megamoe(*CHECK)
    assert checked.code == 0 and checked.out == "1 entries: 1 proven by records, 0 not proven (digest fits, record not here), 0 false\n"
    again = megamoe(*LOG)
    assert again.code == 5 and "no run in out since the last entry" in again.err


def test_the_commands_of_a_remote_run_are_all_there(megamoe) -> None:
    steps = [{"what": "sync", "command": ["rsync", "-c", "a b", "box:x"], "seconds": 0.51, "exit_code": 0},
             {"what": "run", "command": ["ssh", "box", "timeout -k 5 50 python"], "seconds": 12.3, "exit_code": 124}]
    ran(case("l1", 8, [8] * 8), code=124, remote={"target": "box", "job": "j", "steps": steps})
    megamoe(*LOG)
    text = Path("log.md").read_text()
    assert "| to box (sync) | `rsync -c 'a b' box:x` | passed (0) | 0.5 |" in text
    assert "| to box (run) | `ssh box 'timeout -k 5 50 python'` | timeout (124) | 12.3 |" in text


@pytest.mark.parametrize("args, words", [
    (("--phase", "combine"), "phase combine was not run"), (("--ranks", "1,8"), "1 ranks was not run"),
    (("--phase", "l1", "--ranks", "8", "--phase", "l2"), "phase l2 on 8 ranks was not run"), (("--run", "nothing"), "there was no run nothing"),
])  # fmt: skip
def test_what_was_not_run_is_refused(megamoe, args, words) -> None:
    ran(case("l1", 8, [8] * 8), case("l2", 8, [8] * 8, "not run"))
    answer = megamoe(*LOG, *args)
    assert answer.code == 1 and words in answer.err, answer.err
    assert not Path("log.md").exists()
    assert megamoe(*LOG, "--phase", "l1", "--ranks", "8").code == 0


def test_without_any_run_there_is_nothing_to_say(megamoe) -> None:
    answer = megamoe(*LOG)
    assert answer.code == 5 and "nothing to log" in answer.err and not Path("log.md").exists()


def test_records_that_were_changed_are_refused(megamoe) -> None:
    identity = ran(case("l1", 8, [8] * 8, "fail"))
    path = Path("out") / identity / "results.json"
    kept = path.read_text()
    path.write_text(kept.replace('"fail"', '"pass"'))
    assert "was changed after the run" in megamoe(*LOG).err
    path.unlink()
    assert "is gone" in megamoe(*LOG).err
    path.write_text(kept)
    lines = Path("out/journal.jsonl").read_text()
    Path("out/journal.jsonl").write_text(lines.replace('"exit_code": 0', '"exit_code": 1'))
    assert "line 1: changed after it was written" in megamoe(*LOG).err
    assert not Path("log.md").exists()


def test_a_line_taken_out_of_the_journal_shows(megamoe) -> None:
    for ranks in (1, 2, 8):
        ran(case("l1", ranks, [8] * ranks))
    path = Path("out/journal.jsonl")
    first, _, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{last}\n")
    answer = megamoe(*LOG)
    assert answer.code == 1 and "line 2: the line before it is not the one it followed" in answer.err


def test_runs_of_different_sources_do_not_make_one_entry(megamoe) -> None:
    old, new = ran(case("l1", 8, [8] * 8), commit="a" * 40), ran(case("l2", 8, [8] * 8))
    refused = megamoe(*LOG, "--run", old, "--run", new)
    assert refused.code == 1 and "different commits or sources" in refused.err
    assert megamoe(*LOG).code == 0 and "phase l2 ·" in Path("log.md").read_text(), "the newest sources, and only these"
    assert f"{old}  exit 0" in (listed := megamoe("log", "list", "--runs", "--file", "log.md", "--results-dir", "out").out)
    assert "not logged" in listed


# ---- lies ----


@pytest.fixture
def logged(megamoe) -> str:
    ran(case("l1", 8, [8] * 8), case("l1", 8, [9] * 8, "fail", message="wrong"), code=1)
    assert megamoe(*LOG, "--request", "honest work").code == 0
    return Path("log.md").read_text()


@pytest.mark.parametrize("old, new", [
    ("1 of 2", "2 of 2"), ("failed (1)", "passed (0)"), ("honest work", "great work"), ("| l1 | 8 |", "| combine | 8 |"),
    ("- l1-r8-t9: fail: wrong\n", ""), ("**Next steps**", "All 8 ranks passed on an H200.\n\n**Next steps**"), ("8, 9 | 64", "8, 9 | 128"),
])  # fmt: skip
def test_a_claim_changed_by_hand_is_caught(megamoe, logged, old, new) -> None:
    assert old in logged
    head, text = logged.split("-->\n", 1)
    Path("log.md").write_text(f"{head}-->\n{text.replace(old, new)}")
    answer = megamoe(*CHECK)
    assert answer.code == 1 and "FALSE: " in answer.out and "1 false" in answer.out


def forged(text: str, change) -> str:
    """The log with data changed, and text and digest made anew to fit."""
    from megamoe_cli.devlog import entry

    (parsed,), _ = entry.parse(text)
    change(parsed.entry)
    return entry.HEADING + "\n" + entry.block(parsed.entry)


def test_a_careful_forger_is_caught_by_the_records(megamoe, logged) -> None:
    def lie(entry) -> None:
        entry["evidence"]["tested"][0]["passed"] = 2
        entry["evidence"]["issues"] = []

    Path("log.md").write_text(forged(logged, lie))
    answer = megamoe(*CHECK)
    assert answer.code == 1 and "tested: the entry claims what the records of its runs do not say" in answer.out
    Path("log.md").write_text(forged(logged, lambda entry: entry["evidence"]["runs"][0].update(digest="sha256:0")))
    assert megamoe(*CHECK).code == 1


def test_where_the_records_are_not_it_says_so(megamoe, logged) -> None:
    shutil.rmtree("out")
    answer = megamoe(*CHECK)
    assert answer.code == 0 and "NOT PROVEN: digest fits, record not here: " in answer.out and "1 not proven" in answer.out
    assert "consistent" not in answer.out
    assert megamoe(*CHECK, "--strict").code == 6
    Path("log.md").write_text(logged.replace("1 of 2", "2 of 2"))
    assert megamoe(*CHECK).code == 1


def test_an_entry_from_nowhere(megamoe, logged) -> None:
    Path("log.md").write_text(logged + "\n## 2026-01-01 · phase combine · abc\n\nAll passed.\n")
    answer = megamoe(*CHECK)
    assert answer.code == 1 and "belongs to no entry that megamoe log wrote" in answer.out
    Path("log.md").write_text(re.sub("<!-- megamoe-log-end.*-->", "", logged))
    assert megamoe(*CHECK).code == 1


@pytest.mark.parametrize("change, line", [
    (lambda text: text + "\nCombine passed on 8 H200.\n", "'Combine passed on 8 H200.'"),
    (lambda text: text + "| combine | 8 | 8 | 64 | nvlink(8xH200) | 5 of 5 |\n", "nvlink(8xH200)"),
    (lambda text: text.rstrip("\n") + " All passed on an H200.\n", "megamoe-log"),
    (lambda text: text.replace("Written by `megamoe log` from run records", "All phases passed on 8 H200s"), "line 1: the log does not begin"),
    (lambda text: "All passed.\n" + text, "line 1: 'All passed.'"),
    (lambda text: text.replace("<!-- megamoe-log {", "Passed.\n<!-- megamoe-log {"), "'Passed.'"),
    (lambda text: text + "\n" + text[text.index("<!-- megamoe-log {"):], "stands here a second time"),
])  # fmt: skip
def test_a_claim_outside_of_the_entries(megamoe, logged, change, line) -> None:
    """Wherever it stands: nothing but the header and entries made from records may be in the file."""
    Path("log.md").write_text(change(logged))
    answer = megamoe(*CHECK)
    assert answer.code == 1 and line in answer.out, answer.out
    assert "0 false; 1 places" in answer.out or "belong to no entry" in answer.out
    if line.startswith("'"):
        number = 1 + next(n for n, text in enumerate(Path("log.md").read_text().splitlines()) if line.strip("'") in text)
        assert f"line {number}: {line}" in answer.out


def test_two_entries_and_a_broken_one_between(megamoe, logged) -> None:
    ran(case("l2", 8, [8] * 8))
    assert megamoe(*LOG).code == 0
    checked = megamoe(*CHECK)
    assert checked.code == 0 and "2 entries: 2 proven" in checked.out, checked.out
    Path("log.md").write_text(Path("log.md").read_text().replace("<!-- megamoe-log-end", "All good <!-- megamoe-log-end", 1))
    checked = megamoe(*CHECK)
    assert checked.code == 1 and "1 entries: 1 proven" in checked.out, "the second is still found"


# ---- a journal that was torn, files that are not text ----


@pytest.mark.parametrize("torn", ['{"schema": "megamoe.journal/1", "id": "2026', "\0" * 40, "gr\xfc\xdfe".encode("latin-1").decode("latin-1")])
def test_a_torn_line_costs_only_its_own_run(megamoe, torn) -> None:
    """A killed writer, a full disk, a power cut: the next record begins on a line of its own, and one warning is all."""
    first = ran(case("l1", 8, [8] * 8))
    with open("out/journal.jsonl", "ab") as stream:
        stream.write(torn.encode("latin-1"))
    second = ran(case("l2", 8, [8] * 8))
    third = ran(case("combine", 8, [8] * 8))
    answer = megamoe(*LOG)
    assert answer.code == 0 and answer.err.count("warning: ") == 1 and "line 2 is torn and left out" in answer.err, answer.err
    text = Path("log.md").read_text()
    assert all(name in text for name in (first, second, third))
    checked = megamoe(*CHECK)
    assert checked.code == 0 and "1 proven" in checked.out and checked.err.count("torn") == 1
    assert megamoe("log", "list", "--runs", "--file", "log.md", "--results-dir", "out").out.count("exit 0") == 3
    assert megamoe("report", "--list", "--results-dir", "out").code == 0


def test_a_run_made_unreadable_is_missed(megamoe) -> None:
    """Tearing a line by hand is no way to lose a failure."""
    for ranks in (1, 2, 8):
        ran(case("l1", ranks, [8] * ranks))
    path = Path("out/journal.jsonl")
    first, second, third = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:40]}\n{third}\n")
    answer = megamoe(*LOG)
    assert answer.code == 1 and "line 3: the line before it is not the one it followed" in answer.err


@pytest.mark.parametrize("args", [LOG, CHECK, ("log", "show", "--file", "log.md"), ("log", "list", "--file", "log.md")])
def test_a_log_that_is_not_utf_8(megamoe, args) -> None:
    ran(case("l1", 8, [8] * 8))
    Path("log.md").write_bytes("# Größe\n".encode("latin-1"))
    answer = megamoe(*args)
    assert answer.code == 2 and answer.err.startswith("error: log.md is not UTF-8 text"), answer.err


def test_values_of_variables_are_not_kept(megamoe, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["megamoe", "remote", "--env", "TOKEN=s3cret", "--env=OTHER=hush", "test"])
    ran(case("l1", 8, [8] * 8))
    megamoe(*LOG)
    text = Path("log.md").read_text() + Path("out/journal.jsonl").read_text()
    assert "s3cret" not in text and "hush" not in text and "remote --env 'TOKEN=***' '--env=OTHER=***' test" in text


def test_a_hang_is_one_line_of_an_entry(megamoe) -> None:
    ran(case("l1", 8, [8] * 8, "hang", message="not done within 20 s\n" + "rank 0 CTA 0 warp 1: barrier 3 x32 lanes\n" * 400), code=124)
    assert megamoe(*LOG).code == 0
    text = Path("log.md").read_text()
    assert "hang: not done within 20 s (more in the record)" in text and "warp 1" not in text
    assert megamoe(*CHECK).code == 0


def test_an_entry_in_a_file_that_is_no_log(megamoe) -> None:
    """It is written, since it is asked for; what stands beside it does not count, and that is said."""
    Path("log.md").write_text("# My notes\n\nAll passed.\n")
    ran(case("l1", 8, [8] * 8))
    answer = megamoe(*LOG)
    assert answer.code == 0 and "text that belongs to no entry" in answer.err
    assert megamoe(*CHECK).code == 1
