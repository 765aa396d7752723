"""What goes wrong with the other machine, against a real sshd: time, disk, keys, names, languages. The user is told in one line,
and nothing of ours stays there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe_cli import paths
from megamoe_cli.remote.commands import client_name
from tests.remote.conftest import STUB, Far, error_of, make_box, record_of_end, runs_in


def test_time_is_up(far: Far) -> None:
    """The command's own limit ends it, inside; the client's is later and never needed."""
    far.settings["timeout"] = 12
    far.fake_python(far.stubborn())
    answer = far.run(*STUB)
    assert answer.code == 124
    assert "the 4.8 s of the command are over" in answer.err and "at work" in answer.err
    assert record_of_end(far)["reason"] == "time limit"
    far.assert_nothing_left()


def test_the_innermost_fault_is_shown(far: Far) -> None:
    """A case that hangs is found by its own limit, inside the command's; the record and the screen name it."""
    far.settings |= {"timeout": 150, "env": {"MEGAMOE_CACHE_DIR": str(paths.cache_dir())}}
    answer = far.run("test", "--ranks", "1", "--phase", "stub", "--tokens", "8", "--backend", "emulator", "--timeout", "0.001")
    assert answer.code == 124, answer.err
    assert "no answer within 0.001 s" in answer.out
    assert "far: something inside the command timed out; innermost: stub-r1-tiny-t8-m128-uniform-s0: hang: no answer within 0.001 s" in answer.err
    (folder,) = runs_in(far)
    kept = json.loads((folder / "results.json").read_text())
    assert kept["results"][0]["status"] == "hang"
    far.assert_nothing_left()


def test_time_is_up_after_a_fault(far: Far) -> None:
    """Both: the command's time is over, and its record knows why it took so long."""
    far.settings["timeout"] = 12
    result = {"id": "l1-r8", "status": "fault", "message": "x", "fault": {"text": "rank 3 waited 5 s for rank 1's counts"}}
    far.fake_python(f"mkdir \"$MEGAMOE_RESULTS_DIR/r\"; cat > \"$MEGAMOE_RESULTS_DIR/r/results.json\" <<'END'\n"
                    f"{json.dumps({'id': 'r', 'results': [result]})}\nEND\nsleep {far.nap}1")
    answer = far.run(*STUB)
    assert answer.code == 124
    assert error_of(answer.err) == ("error: far: the 4.8 s of the command are over; innermost: l1-r8: fault: rank 3 waited 5 s for rank 1's "
                                    "counts")
    far.assert_nothing_left()


def test_the_record_of_a_device_fault_is_the_innermost(far: Far) -> None:
    """A real one: the kernel itself says who waited for what. (The command then ends as if its time were up.)"""
    far.settings |= {"timeout": 150, "env": {"MEGAMOE_CACHE_DIR": str(paths.cache_dir())}}
    far.fake_python(f'"{sys.executable}" "$@"; exit 124')
    answer = far.run("test", "--ranks", "2", "--phase", "dispatch", "--tokens", "8", "--backend", "emulator", "--resident-ctas", "1")
    assert answer.code == 124, answer.err
    assert re.search(r"innermost: dispatch-r2-tiny-t8-\S+: fault: rank \d, CTA 0, .*: waited [\d.]+ s for rank \d", error_of(answer.err))
    assert len(error_of(answer.err)) < 500, "one line"
    assert len(answer.out.splitlines()) < 40 and "more like it, 2 ranks)" in answer.out, "a screenful, and the record has every waiter"
    (folder,) = runs_in(far)
    assert (folder / "results.json").read_text().count(" warp ") > 20
    far.assert_nothing_left()


def test_a_case_may_not_outlive_its_command(far: Far) -> None:
    answer = far.run(*STUB, "--timeout", "55")
    assert answer.code == 2 and "has 50 s on far" in error_of(answer.err)
    assert not far.path.exists()


def test_a_changed_host_key(tmp_path: Path) -> None:
    box = make_box(tmp_path / "box")
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    box.stop()
    box.new_host_key()
    box.start()
    answer = far.run(*STUB)
    box.stop()
    assert answer.code == 3 and "host key of box is not the one ssh knows" in error_of(answer.err)
    assert "ssh-keygen -R" in answer.err
    assert not far.path.exists(), "nothing may be sent to a machine that is not the one"


def test_a_box_that_is_not_there(far: Far) -> None:
    answer = far.run("--host", "127.0.0.1.invalid", *STUB)
    assert answer.code == 3 and "there is no host 127.0.0.1.invalid" in error_of(answer.err)


def test_a_full_disk(far: Far, small_disk: Path) -> None:
    far.path = small_disk / "far"
    answer = far.run(*STUB)
    assert answer.code == 3 and error_of(answer.err) == "error: far: the disk is full; sync stopped"
    assert f"hint: free some space on box below {far.path}, or set path" in answer.err
    far.assert_nothing_left()


def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """The same without mounting: no file over there may be longer than 5 KiB."""
    box = make_box(tmp_path / "box", file_size_limit=5)
    far = Far(box, tmp_path, tmp_path / "far", {"gpus": "none"})
    answer = far.run(*STUB)
    box.stop()
    assert answer.code == 3, answer.err
    # rsync's last words are lost at times; its exit code is not
    assert re.fullmatch(r"error: far: (the disk is full|files cannot be written); sync stopped.*", error_of(answer.err))
    far.assert_nothing_left(within=10)


@pytest.mark.parametrize("name", ["with space", "it's \"quoted\" $HOME", "größe;ls", "-dash"])
def test_names_that_shells_stumble_over(far: Far, name: str) -> None:
    far.path = far.home / name / "far"
    far.fake_python('printf "%s|" "$@"; echo')
    answer = far.run(*STUB, "-k", "a 'b' \"c\" $(touch x) ü")
    assert answer.code == 0, answer.err
    assert answer.out == "-m|megamoe_cli|test|--ranks|1|--phase|stub|--tokens|8|--backend|emulator|-k|a 'b' \"c\" $(touch x) ü|--timeout|20|\n"
    assert (far.path / client_name() / "tree" / "kernels").is_dir()
    assert sorted(p.name for p in far.path.iterdir()) == [".megamoe-remote", client_name()]


def german(folder: Path) -> Path:
    """A German locale that really is one, made here: its charset is not UTF-8."""
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE.ISO-8859-1")], capture_output=True)
    if made.returncode != 0:
        pytest.skip("localedef has no sources for de_DE here")
    return folder


@pytest.mark.parametrize("name", ["de_DE.ISO-8859-1", "xx_YY.UTF-8", "POSIX"])
def test_another_language(tmp_path: Path, name: str) -> None:
    """Here and there: a German one, one that is not installed, and none."""
    places = {"LOCPATH": str(german(tmp_path))} if name.startswith("de") else {}
    environ = {"LC_ALL": name, "LANG": name, "LANGUAGE": "de", **places}
    box = make_box(tmp_path / "box", environment=environ)
    far = Far(box, tmp_path, tmp_path / "größe", {"gpus": "none"}, {**environ, "PYTHONUTF8": "1"})
    far.fake_python("python - <<'EOF'\nEOF\nprintf 'größe %s\\n' \"$LC_ALL\"; exit 1")
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (1, "größe C.UTF-8\n"), answer.err
    far.settings["python"] = "/no/such/python"
    again = far.run(*STUB)
    box.stop()
    assert again.code == 3 and "/no/such/python" in error_of(again.err)
    far.assert_nothing_left(within=10)
