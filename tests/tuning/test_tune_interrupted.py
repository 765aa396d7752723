"""Whenever a run ends, however it ends: no finished trial is lost, no process is left, resuming ends with the same table.
The rig's fixture checks the processes."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import pytest

from tests.tuning.rig import Rig, interrupt


def file_of(rig: Rig) -> str:
    """The table, byte for byte but for the moment, the run's name, the space's path and what the checkout is at, which somebody
    may be working on."""
    text = re.sub(r"^  (created|run|space|commit|dirty): .*\n", "", rig.table.read_text(), flags=re.MULTILINE)
    assert "evidence:" in text and "provenance:" in text
    return text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    rig = Rig(tmp_path_factory.mktemp("undisturbed") / "rig")
    assert rig.run(rig.fresh()).code == 0
    assert len(rig.lines()) > 50, "what the moments of the tests below are drawn from"
    return file_of(rig)


def continued(rig: Rig, undisturbed: str, before: int) -> None:
    """Resumes; nothing that was finished is measured again, and the table is the undisturbed one."""
    kept = rig.lines()[:before]
    answer = rig.run(rig.again())
    assert answer.code == 0, answer.err
    assert rig.lines()[:before] == kept
    keys = [t["key"] for t in rig.trials()]
    assert len(keys) == len(set(keys)), "a finished trial was measured again"
    assert file_of(rig) == undisturbed


@pytest.mark.parametrize("seed", range(3))
def test_kill_the_tuner_at_any_moment(rig, undisturbed, seed) -> None:
    rig.script["sleep_s"] = 0.005
    process = rig.start(rig.fresh())
    rig.wait_for_trials(random.Random(seed).randrange(1, 45))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert rig.alive() == [], "the measuring processes die with the tuner"
    before = len(rig.lines())
    rig.script["sleep_s"] = 0
    rig.write()
    continued(rig, undisturbed, before)


@pytest.mark.parametrize("seed", range(2))
def test_kill_a_measuring_process_at_any_moment(rig, undisturbed, seed) -> None:
    """The group comes back and the task is tried again: the run ends as if nothing had happened, and the crash is a row."""
    rig.script["sleep_s"] = 0.01
    process = rig.start(rig.fresh())
    rig.wait_for_trials(random.Random(seed).randrange(1, 45))
    for pid in rig.workers():
        os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    crashed = [t for t in rig.trials() if t["status"] == "crash"]
    assert len(crashed) <= 1 and all("SIGKILL" in t["message"] and t["key"].endswith("#1") for t in crashed)
    assert file_of(rig) == undisturbed


def test_ctrl_c_once_finishes_the_trial_and_saves(rig, undisturbed) -> None:
    rig.script["sleep_s"] = 0.05
    process = rig.start(rig.fresh())
    rig.wait_for_trials(10)
    interrupt(process)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "finishing the current trial" in err and "--resume" in err
    before = len(rig.lines())
    assert before >= 10 and rig.alive() == []
    rig.script["sleep_s"] = 0
    rig.write()
    continued(rig, undisturbed, before)


def test_ctrl_c_twice_kills(rig) -> None:
    rig.sizes = "16"
    rig.script |= {"sleep_s": 50, "running": str(rig.folder / "running")}
    rig.extra = ("--candidate-timeout", "60")
    process = rig.start(rig.fresh())
    rig.wait_for(Path(rig.script["running"]))
    interrupt(process)
    while "finishing the current trial" not in (line := process.stderr.readline()):  # type: ignore[union-attr]
        assert line, "it ended without a word"
    assert process.poll() is None, "one Ctrl-C waits for the trial"
    interrupt(process)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 130 and "killed" in err and rig.alive() == []


def test_sigterm_kills_at_once(rig) -> None:
    rig.sizes = "16"
    rig.script |= {"sleep_s": 50, "running": str(rig.folder / "running")}
    rig.extra = ("--candidate-timeout", "60")
    process = rig.start(rig.fresh())
    rig.wait_for(Path(rig.script["running"]))
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=40)
    assert process.returncode == 143 and rig.alive() == []


def test_a_full_disk_keeps_what_was_finished(rig, undisturbed) -> None:
    """Files may grow to 40 KB only: writing fails in the middle of a run as on a full disk."""
    limited = ["/bin/sh", "-c", 'ulimit -f 80; exec "$@"', "sh"]
    answer = rig.run(rig.fresh(), prefix=limited)
    assert answer.code == 3 and "cannot be saved" in answer.err and "make room" in answer.err, answer.err
    raw = next(rig.results.glob("*-tune-*/trials.jsonl")).read_bytes()
    assert raw.endswith(b"\n") and len(rig.lines()) > 5 and rig.alive() == []
    continued(rig, undisturbed, len(rig.lines()))


def test_a_line_that_power_loss_cut_is_repaired(rig, undisturbed) -> None:
    rig.run(rig.fresh())
    path = rig.run_folder / "trials.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3] + b"\0" * 7)
    before = len(rig.lines())
    answer = rig.run(rig.again())
    assert answer.code == 0 and "repaired" in answer.err and len(rig.lines()) > before
    assert file_of(rig) == undisturbed


def test_one_tuner_in_a_folder_at_a_time(rig) -> None:
    rig.script["sleep_s"] = 0.05
    process = rig.start(rig.fresh())
    rig.wait_for_trials(1)
    answer = rig.run(rig.again())
    assert answer.code == 2 and "another process is tuning" in answer.err
    interrupt(process)
    process.communicate(timeout=60)
