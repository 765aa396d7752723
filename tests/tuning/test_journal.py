"""The journal survives whatever ends its process, and never rewrites what is in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.tuning.journal import Journal, Trial


def trial(n: int, status: str = "ok") -> Trial:
    return Trial(f"key{n}", "final", 8, "uniform", n, {"lag": n}, {"lag": 0}, status, pairs=[[100.0 + n, 101.5]], message="né\n")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "trials.jsonl"


def filled(path, count: int = 3) -> bytes:
    journal = Journal(path).open()
    for n in range(count):
        journal.append(trial(n))
    journal.close()
    return path.read_bytes()


def test_what_was_appended_is_there(path) -> None:
    filled(path)
    again = Journal(path).open()
    assert list(again.trials) == ["key0", "key1", "key2"] and again.trials["key1"] == trial(1)
    assert (again.repaired, again.skipped) == (0, 0)


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(0, 2000), tail=st.binary(max_size=30))
def test_cut_anywhere_only_the_last_trial_is_lost(tmp_path_factory, cut, tail) -> None:
    """Power loss: a prefix of the file, and whatever blocks came after it."""
    path = tmp_path_factory.mktemp("j") / "trials.jsonl"
    whole = filled(path, 4)
    cut = min(cut, len(whole))
    path.write_bytes(whole[:cut] + tail.replace(b"{", b""))
    complete = whole[:cut].count(b"\n")
    again = Journal(path).open()
    assert list(again.trials) == [f"key{n}" for n in range(complete)]
    again.append(trial(9))
    again.close()
    last = Journal(path).open()
    assert list(last.trials) == [*(f"key{n}" for n in range(complete)), "key9"] and last.repaired == 0
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_line_of_zeros_in_front_of_good_ones_is_skipped_not_cut(path) -> None:
    whole = filled(path)
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0" * 40 + b"\n" + b"".join(lines[1:]))
    again = Journal(path).open()
    assert len(again.trials) == 3 and (again.skipped, again.repaired) == (1, 0) and path.read_bytes().count(b"\n") == 4


def test_later_lines_win(path) -> None:
    filled(path)
    journal = Journal(path).open()
    journal.append(trial(1, "crash"))
    assert Journal(path).open().trials["key1"].status == "crash"


def test_every_append_is_on_disk_when_it_returns(path, monkeypatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(fd))
    journal = Journal(path).open()
    before = len(synced)
    journal.append(trial(1))
    assert len(synced) == before + 1


def test_a_full_disk_is_said_and_nothing_half_stays(path, monkeypatch) -> None:
    import os

    filled(path)
    journal = Journal(path).open()
    real = os.write
    monkeypatch.setattr("os.write", lambda fd, data: real(fd, data[:20]) if len(data) > 200 else (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(EnvironmentUnfit, match="No space left on device") as caught:
        journal.append(Trial("big", "final", 8, "uniform", 0, {}, {}, "ok", pairs=[[1.0, 2.0]] * 10))
    # 20 bytes at a time until little is left, then the disk is full: none of it may stay.
    assert "--resume" in caught.value.hint and "big" not in journal.trials
    monkeypatch.undo()
    assert list(Journal(path).open().trials) == ["key0", "key1", "key2"] and path.read_bytes().endswith(b"\n")


def test_a_place_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        Journal(tmp_path / "file" / "trials.jsonl").open()


def test_no_nan_gets_into_the_file(path) -> None:
    journal = Journal(path).open()
    bad = trial(1, "invalid")
    bad.pairs = [[float("nan"), 1.0]]
    journal.append(bad)
    assert b"NaN" not in path.read_bytes() and Journal(path).open().trials["key1"].pairs == [["nan", 1.0]]
