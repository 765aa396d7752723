"""``megamoe remote`` against a real sshd and rsync: what travels, what comes back, containers, locks, background jobs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megamoe_cli import paths
from megamoe_cli.devlog import journal
from megamoe_cli.remote import commands, hold
from megamoe_cli.remote.runs import Visit
from megamoe_cli.remote.targets import parse_target
from tests.remote.conftest import STUB, Far, error_of, runs_in, wait_for

# The far side has a cache of its own; these tests are not about compiling.
WARM = {"env": {"MEGAMOE_CACHE_DIR": str(paths.cache_dir())}}


def test_eight_ranks(far: Far) -> None:
    """The whole way: tests on 8 ranks there; table, exit code, record, JUnit and journal here."""
    far.settings |= {**WARM, "timeout": 150}
    answer = far.run("test", "--ranks", "8", "--tokens", "8", "--junit", "here/junit.xml")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1].startswith("5 passed, 0 failed in ")
    (folder,) = runs_in(far)
    kept = json.loads((folder / "results.json").read_text())
    assert kept["summary"]["passed"] == 5 and kept["where"] == ["emulator(8 ranks x 2 CTAs)"]
    assert {entry["case"]["timeout_s"] for entry in kept["results"]} == {56.0}, "a case ends before its command"
    assert kept["source"].get("commit") == journal_line(far)["source"].get("commit")
    assert ET.parse(far.home / "here" / "junit.xml").getroot().get("tests") == "5"
    origin = json.loads((folder / "remote.json").read_text())
    assert (origin["host"], origin["target"], origin["end"]["exit"]) == ("box", "far", 0)
    assert origin["machine"]["host"] == os.uname().nodename and origin["machine"]["cpus"] == os.cpu_count()
    assert [step["what"] for step in origin["steps"]] == [
        "prepare", "sync", "send kernel list", "send variables", "build there", "send variables", "run", "fetch"]
    assert all(step["exit_code"] == 0 for step in origin["steps"][:3])
    assert journal_line(far)["records"][0]["sha256"] == journal.file_digest(folder / "results.json")
    assert str(far.path) not in answer.err, "paths of the other machine help nobody"


def journal_line(far: Far) -> dict:
    return journal.read(far.home / "results")[-1]


def test_dry_run_prints_what_would_run_and_touches_nothing(far: Far) -> None:
    answer = far.run("-n", *STUB)
    again = far.run(*STUB, "-n")
    assert answer.code == again.code == 0 and not far.path.exists()
    lines = answer.out.splitlines()
    assert [shlex.split(line)[0] for line in lines] == ["ssh", "cd", "rsync", "rsync", "ssh", "ssh", "rsync"]
    assert "timeout --foreground -k 1 300" in lines[4] and "far_build.py" in lines[4], "kernels of the emulator have a limit of their own"
    assert "timeout --foreground -k 1 50" in lines[5] and "megamoe_cli test --ranks 1 --phase stub" in lines[5]
    assert len(again.out.splitlines()) == len(lines)


def test_json_comes_back_alone(far: Far) -> None:
    far.fake_python("echo progress >&2; echo '{\"args\": \"'\"$*\"'\"}'; echo more >&2")
    answer = far.run(*STUB, "--json")
    assert answer.code == 0 and answer.json["args"].endswith("--json --timeout 20") and "progress\nmore\n" in answer.err


@pytest.mark.parametrize("code", [0, 1, 4, 6, 70])
def test_exit_codes_come_back(far: Far, code: int) -> None:
    far.fake_python(f"echo data; echo message >&2; exit {code}")
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (code, "data\n") and "message" in answer.err
    assert journal_line(far)["exit_code"] == code


@pytest.mark.parametrize("args, words", [
    (("test", "--rnaks", "8"), "No such option"), (("test", "--ranks", "64"), "outside 1..32"), (("--on", "fra", *STUB), "did you mean 'far'"),
    (("--gpus", "0,0", *STUB), "different GPU indices"), (("--env", "A", *STUB), "NAME=VALUE"), (("tset",), "No such command"),
    (("--path", "/", *STUB), "a folder of its own"), (("cancel", "x"), "is no job"),
    (("--host=-oX", *STUB), "--host: '-oX' is no host name"), (("--timeout", "inf", *STUB), "--timeout: 'inf' is not a positive, finite number of seconds"),
    (("--timeout", "nan", *STUB), "--timeout: 'nan' is not a positive"), (("--timeout", "-1", *STUB), "--timeout: '-1' is not a positive"),
])  # fmt: skip
def test_bad_input_is_refused_here(far: Far, args: tuple[str, ...], words: str) -> None:
    answer = far.run(*args)
    assert answer.code == 2 and words in answer.err, answer.err
    assert not far.path.exists() and not (far.home / "results").exists()


def test_a_folder_that_is_not_ours(far: Far) -> None:
    far.path.mkdir()
    (far.path / "thesis.tex").write_text("years of work")
    answer = far.run(*STUB)
    assert answer.code == 2 and "has contents that megamoe did not put there" in answer.err
    assert sorted(p.name for p in far.path.iterdir()) == ["thesis.tex"]


def test_only_changed_files_travel(far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkout"
    for name in ("megamoe_cli/a.py", "megamoe_cli/b.py", "kernels/k.cuh", "kernels/__pycache__/x.pyc", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    monkeypatch.setattr(paths, "checkout_root", lambda: root)
    far.write()
    visit = Visit(parse_target("far", {"host": "box", "path": str(far.path), "ssh": far.box.ssh, "python": sys.executable}, "test"))
    visit.prepare()
    assert sorted(visit.sync()) == ["kernels/k.cuh", "megamoe_cli/a.py", "megamoe_cli/b.py", "pyproject.toml"]
    os.utime(root / "kernels/k.cuh", (1, 1))  # a fresh clone: other times, the same bytes
    assert visit.sync() == []
    (root / "megamoe_cli/a.py").write_text("other")
    (root / "megamoe_cli/b.py").unlink()
    assert sorted(visit.sync()) == ["megamoe_cli/a.py", "megamoe_cli/b.py"]
    tree = far.path / commands.client_name() / "tree"
    assert sorted(p.relative_to(tree).as_posix() for p in tree.rglob("*") if p.is_file()) == [
        "kernels/k.cuh", "megamoe_cli/a.py", "pyproject.toml"]


# ---- containers ----


@pytest.fixture
def engine(far: Far) -> Path:
    """A container runner without containers: ``exec`` runs the command, notes how it was asked."""
    script = far.home / "stub engine"
    script.write_text(f"""#!/bin/bash
printf '%s\\n' "$*" >> "{far.home}/engine.log"
[ "$1" = exec ] || exit 125
shift
while [ "${{1#-}}" != "$1" ]; do shift; done
[ "$1" = dev ] || {{ echo "Error response from daemon: No such container: $1" >&2; exit 1; }}
shift
exec env IN_CONTAINER=yes "$@"
""")
    script.chmod(0o755)
    far.settings |= {"container": "docker:dev", "engine": shlex.quote(str(script))}
    return far.home / "engine.log"


def test_in_a_container(far: Far, engine: Path) -> None:
    far.settings |= {"gpus": "0,3"}
    far.fake_python('echo "$IN_CONTAINER $CUDA_VISIBLE_DEVICES $MEGAMOE_PREBUILT"')
    answer = far.run(*STUB)
    assert answer.code == 0, answer.err
    assert answer.out == f"yes 0,3 {far.state}/prebuilt\n"
    run = next(line for line in engine.read_text().splitlines() if "--job" in line)
    assert run.startswith("exec -i dev ") and " timeout --foreground -k 1 50 " in run, "the limit is inside the container"


def test_a_container_that_is_not_there(far: Far, engine: Path) -> None:
    far.settings["container"] = "docker:gone"
    answer = far.run(*STUB)
    assert answer.code == 3 and "container gone does not answer: Error response from daemon: No such container: gone" in answer.err
    assert journal_line(far)["exit_code"] == 3


def test_a_folder_that_the_container_does_not_see(far: Far, engine: Path) -> None:
    far.settings["container_path"] = "/nowhere/megamoe"
    answer = far.run(*STUB)
    assert answer.code == 3 and "container dev does not see /nowhere/megamoe" in answer.err


# ---- the lock ----


def test_a_box_that_is_taken(far: Far) -> None:
    """Another user holds a GPU; asking for it, or for all, says by whom; another GPU is free."""
    far.settings["gpus"] = "all"
    far.fake_python("echo ran")
    locks = far.home / "locks"
    other = subprocess.Popen([sys.executable, hold.__file__, "--dir", str(locks), "--gpus", "2,5", "--who", "eve@desk", "--what",
                              "megamoe tune", "--", "sleep", far.nap])  # fmt: skip
    try:
        wait_for(lambda: (locks / "gpu5").exists() and (locks / "gpu5").read_text())
        answer = far.run(*STUB)
        assert answer.code == 3 and "far is taken: gpu2 by eve@desk since " in answer.err and "megamoe tune" in answer.err
        assert far.run("--gpus", "5", *STUB).code == 3
        assert far.run("--gpus", "0,1", *STUB).out == "ran\n"
        waiting = far.start("--wait", "30s", *STUB)
        assert waiting.stderr is not None
        while "taken: gpu2 by eve@desk" not in (line := waiting.stderr.readline()):
            assert line
    finally:
        other.terminate()  # passed on
        other.wait()
    out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (0, "ran\n"), err
    assert hold.holders_of(str(locks)) == {}, "it goes with whoever held it"


def test_all_and_some_exclude_each_other(tmp_path: Path) -> None:
    folder = str(tmp_path / "locks")
    whole = hold.acquire(folder, "all", {"who": "a", "what": "x", "since": time.time()})
    with pytest.raises(hold.Taken) as taken:
        hold.acquire(folder, "1", {"who": "b", "what": "y", "since": time.time()})
    assert hold.describe(*next(iter(taken.value.holders.items()))).startswith("all GPUs by a since ")
    for fd in whole:
        os.close(fd)
    some = hold.acquire(folder, "1,2", {"who": "b", "what": "y", "since": time.time()})
    more = hold.acquire(folder, "0", {"who": "c", "what": "z", "since": time.time()})
    assert {name: info["who"] for name, info in hold.holders_of(folder).items()} == {"gpu0": "c", "gpu1": "b", "gpu2": "b"}
    with pytest.raises(hold.Taken) as taken:
        hold.acquire(folder, "all", {"who": "a", "what": "x", "since": time.time()})
    assert set(taken.value.holders) == {"gpu0", "gpu1", "gpu2"}
    for fd in some + more:
        os.close(fd)


def test_a_word_of_the_users_own(far: Far) -> None:
    answer = far.run("shell", "sh", "-c", "echo $PWD; exit 9")
    assert (answer.code, answer.out) == (9, f"{far.state}/tree\n"), answer.err


# ---- files of this machine ----


def test_baselines_are_files_of_this_machine(far: Far) -> None:
    """The one to compare with is sent; the one to keep comes back; one that is not there is found out before anything is sent."""
    from megamoe_cli.bench_gate import baseline_document

    bench = ("bench", "--shape", "flash", "--tokens", "8", "--fail-on-regression", "3%")
    missing = far.run(*bench)
    assert missing.code == 2 and f"no baseline to compare with: {far.home}/results/bench-baseline.json" in missing.err
    assert not far.path.exists()
    rows = [{"shape": "flash", "tokens": 8, "config": "c", "rounds_us": [[1.0], [1.0], [1.0]]}]
    (far.home / "it's here.json").write_text(json.dumps(baseline_document("1xH200", {}, rows, {})))
    far.fake_python('while [ $# -gt 0 ]; do case "$1" in --baseline) cat "$2";; --save-baseline) echo new > "$2";; esac; shift; done')
    answer = far.run(*bench, "--baseline", "it's here.json", "--save-baseline", "kept/new.json")
    assert answer.code == 0, answer.err
    assert answer.out == (far.home / "it's here.json").read_text()
    assert (far.home / "kept/new.json").read_text() == "new\n"
    plan = far.run("-n", *bench, "--baseline", "it's here.json").out.splitlines()
    assert any("/inputs/" in line and line.startswith("rsync") for line in plan) and f"{far.state}/inputs/baseline.json" in plan[-2]


def test_a_table_of_this_machine(far: Far) -> None:
    (far.home / "mine.yaml").write_text("of this machine")
    far.fake_python('while [ $# -gt 0 ]; do [ "$1" = --table ] && cat "$2"; shift; done; echo " $MEGAMOE_TABLE"')
    far.environ["MEGAMOE_TABLE"] = "mine.yaml"
    assert far.run("shell", "true").code == 0
    answer = far.run(*STUB)
    assert (answer.code, answer.out) == (0, "of this machine \n"), answer.err


@pytest.mark.parametrize("option", ["--junit", "--results-dir"])
def test_where_nothing_can_be_written(far: Far, option: str) -> None:
    """Said before anything is sent, as without remote."""
    (far.home / "file").write_text("")
    answer = far.run(*STUB, option, "file/below")
    assert answer.code == 2 and f"{option}: " in error_of(answer.err) and not far.path.exists()


# ---- cubins ----


def test_cubins_built_here(far: Far) -> None:
    """The far compiler is not used unless asked: it has no NVRTC at all in this test."""
    pytest.importorskip("cupy")
    blocked = far.home / "blocked"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['cupy'] = None\nsys.modules['cupy.cuda'] = None\n")
    far.settings["env"] = {"PYTHONPATH": f"{blocked}:{far.state}/tree"}
    answer = far.run("build", "stub", "--json")
    assert answer.code == 0, answer.err
    (kernel,) = answer.json["kernels"]
    assert kernel["cache_hit"] and kernel["path"].startswith(f"{far.state}/prebuilt/")
    assert "1 cubins built here" in answer.err
    forced = far.run("shell", sys.executable, "-m", "megamoe_cli", "build", "stub", "--force")
    assert forced.code != 0, "there is really no compiler over there"


def test_what_was_not_sent_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe_cli.compile.driver import build
    from megamoe_cli.config import KernelConfig
    from megamoe_cli.errors import BuildFailed
    from megamoe_cli.shapes import parse_shape

    monkeypatch.setenv("MEGAMOE_PREBUILT", str(tmp_path))
    with pytest.raises(BuildFailed, match="not among the prebuilt cubins") as refused:
        build("stub", KernelConfig(), shape=parse_shape("tiny"), ranks=8)
    assert "--remote-compiler" in (refused.value.hint or "")
