"""What meets somebody who tries things: pipes that close, folders that cannot be written, options with a typo."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megamoe_cli.report import junit

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "-m", "megamoe_cli"]
STUB = ("test", "--backend", "emulator", "--ranks", "1", "--phase", "stub", "--tokens", "8", "--results-dir", "out")
FAKE = """
import sys
from megamoe_cli import supervisor
from megamoe_cli.protocol import CaseResult
def run_cases(cases, *, on_result, on_stage, **rest):
    out = []
    for case in cases:
        out.append(CaseResult(case.id, STATUS, where="emulator", seconds=0.1, exit_code=int(STATUS != "pass")))
        on_result(out[-1])
    return supervisor.CaseResults(out)
supervisor.run_cases = run_cases
from megamoe_cli.cli.main import run
sys.argv = ["megamoe", *sys.argv[1:]]
run()
"""


def into_a_closed_pipe(*args: str, code: str | None = None) -> tuple[int, str]:
    """Exit code and stderr of a command line whose stdout nobody reads."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code, *args] if code else [*PROGRAM, *args]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(write)
    return done.returncode, done.stderr


@pytest.mark.parametrize("args", [("--help",), ("--version",), ("test", "--help"), ("test", "-n"), ("test", "--case", "list"), ("table",)])
def test_a_reader_that_left_is_no_wrong_result(args) -> None:
    assert into_a_closed_pipe(*args) == (141, "")


def test_a_build_nobody_reads(monkeypatch) -> None:
    code, err = into_a_closed_pipe("build", "stub", "-n", "--json")
    assert code == 141 and "Traceback" not in err


@pytest.mark.parametrize("status, expected, verdict", [("pass", 0, "3 passed, 0 failed"), ("fail", 1, "0 passed, 3 failed")])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_closed_pipe_keeps_the_verdict_and_the_record(status, expected, verdict, form) -> None:
    code, err = into_a_closed_pipe("test", "--backend", "emulator", "--phase", "l1", "--tokens", "0,8,48", "--results-dir", "out", *form,
                                   code=FAKE.replace("STATUS", repr(status)))
    assert code == expected and verdict in err and "Traceback" not in err
    record = Path(err.rpartition("record: ")[2].strip())
    assert json.loads(record.read_text())["exit_code"] == expected


@pytest.mark.parametrize("closing, code", [(">&-", 0), (">/dev/full", 3), ("2>&-", 0), (">&- 2>&- <&-", 0)])
def test_streams_that_are_closed_or_full(closing, code) -> None:
    command = f"{' '.join(PROGRAM)} test -n {closing}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_the_first_ctrl_c_is_answered_at_once() -> None:
    script = """
import sys
from megamoe_cli import supervisor
supervisor.default_command = lambda backend, ranks: [sys.executable, "-c", '''
import json, sys, time
print(json.dumps({"hello": {"where": "fake"}}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    print(json.dumps({"id": case["id"], "stage": "run"}), flush=True)
    time.sleep(4)
    print(json.dumps({"id": case["id"], "status": "pass"}), flush=True)
''']
from megamoe_cli.cli.main import run
sys.argv = ["megamoe", *sys.argv[1:]]
run()
"""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", script, "test", "-v", "--backend", "emulator", "--phase", "l1", "--tokens", "8,16", "-j", "1",
               "--results-dir", "out"]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}, preexec_fn=lambda: _own_terminal(slave))
    os.close(slave)
    screen = _read_until(master, b"(run ", 30)
    os.write(master, b"\x03")
    pressed = time.monotonic()
    screen = _read_until(master, b"Ctrl-C again to stop at once", 3)
    assert b"finishing running cases; Ctrl-C again to stop at once" in screen.replace(b"\r\n", b" "), screen
    assert time.monotonic() - pressed < 2.5
    screen = _read_until(master, b"no such text", 30)
    assert process.wait(timeout=20) == 130 and b"1 passed, 0 failed, 1 not run" in screen


def _own_terminal(slave: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def _read_until(master: int, text: bytes, seconds: float) -> bytes:
    got, end = b"", time.monotonic() + seconds
    while text not in got and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            try:
                part = os.read(master, 4096)
            except OSError:  # the program left
                break
            if not part:
                break
            got += part
    return got


def test_a_junit_path_that_cannot_be_written_starts_nothing(megamoe, fake) -> None:
    answer = megamoe(*STUB, "--junit", "/proc/j.xml")
    assert answer.code == 2 and answer.out == "" and answer.err.startswith("error: --junit: /proc/j.xml cannot be written: ")
    assert fake.calls == [] and not Path("out").exists()


def test_files_that_fail_at_the_end_do_not_hide_the_table(megamoe, fake, monkeypatch) -> None:
    def full(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(junit, "write_text", full)
    answer = megamoe(*STUB, "--junit", "j.xml")
    assert answer.code == 3 and "1 passed, 0 failed" in answer.out
    assert "error: j.xml cannot be written: No space left on device" in answer.err
    fake.verdict = lambda case: {"status": "fail"}
    assert megamoe(*STUB, "--junit", "j.xml").code == 1, "a wrong result outweighs a missing file"
    answer = megamoe(*STUB, "--junit", "j.xml", "--json")
    assert answer.code == 1 and answer.json["summary"]["failed"] == 1


@pytest.mark.parametrize("args, words", [
    (("--option", "rases=true"), ["emulator", "'rases'", "nearest name: races"]),
    (("--option", "races=maybe"), ["races='maybe'", "true or false"]),
    (("--option", "races=1"), ["races=1", "true or false"]),
    (("--option", "seed=-1"), ["seed=-1", "outside"]),
    (("--option", "max_findings=5000000000"), ["max_findings", "outside"]),
    (("--option", "ctas=0"), ["ctas=0", "outside 1.."]),
    (("--option", "schedule=fifi"), ["'fifi'", "nearest: fifo"]),
    (("--option", "slow=3"), ["slow=3", "each rank"]),
    (("--option", "wait_s=soon"), ["wait_s='soon'", "a number"]),
    (("--option", "wait_s=1e300"), ["wait_s"]),
    (("--option", "peer_memory=ipc"), ["emulator", "peer_memory"]),
    (("--mix", "bloc_m=64"), ["bloc_m", "block_m"]),
    (("--mix", "stages=99"), ["stages"]),
])
@pytest.mark.parametrize("dry", [(), ("-n",)])
def test_options_are_checked_before_anything_starts(megamoe, fake, args, words, dry) -> None:
    answer = megamoe(*STUB, *args, *dry)
    line = answer.err.splitlines()[0]
    assert answer.code == 2 and answer.out == "" and line.startswith("error: ") and all(word in line for word in words), line
    assert fake.calls == [] and not Path("out").exists()


def test_options_the_picked_backend_does_not_know(megamoe, fake) -> None:
    """Before a backend is picked every backend's options are legal, afterwards only its own."""
    assert megamoe("test", "-n", "--option", "peer_memory=ipc").code == 0
    answer = megamoe("test", "--option", "peer_memory=ipc", "--results-dir", "out", "--backend", "emulator")
    assert answer.code == 2 and "the emulator backend does not know" in answer.err and fake.calls == []
    assert megamoe("test", "-n", "--option", "rases=true").code == 2
    assert "not for virtual" in megamoe("test", "-n", "--backend", "virtual", "--option", "skew=late:0").err


@pytest.mark.parametrize("command", [STUB, ("build", "stub")])
def test_a_home_that_cannot_be_made(megamoe_process, command) -> None:
    answer = megamoe_process(*command, HOME="/proc/nowhere", MEGAMOE_CACHE_DIR="", XDG_CACHE_HOME="")
    assert answer.code == 3 and "MEGAMOE_CACHE_DIR" in answer.err.splitlines()[-1] and "internal" not in answer.err


def test_doctor_blames_the_cache_and_not_the_compiler(megamoe_process) -> None:
    answer = megamoe_process("doctor", HOME="/proc/nowhere", MEGAMOE_CACHE_DIR="", XDG_CACHE_HOME="", CUPY_CACHE_DIR="")
    assert answer.code == 3 and "MISSING  build cache" in answer.out
    assert "MISSING  nvrtc" not in answer.out and "MISSING  cupy" not in answer.out
    assert answer.out.splitlines()[-1].startswith("next: export MEGAMOE_CACHE_DIR=")


def test_cupy_needs_no_home(megamoe_process) -> None:
    answer = megamoe_process("build", "stub", HOME="/proc/nowhere", CUPY_CACHE_DIR="")
    assert answer.code == 0, answer.err


@pytest.mark.parametrize("group", ["table", "remote"])
def test_a_group_without_a_command_shows_its_help(megamoe, group) -> None:
    answer = megamoe(group)
    assert answer.code == 2 and answer.err == "" and len(answer.out.splitlines()) > 5
    assert answer.out.startswith(f"Usage: megamoe {group} ")


def test_every_command_is_in_the_readme(megamoe) -> None:
    from megamoe_cli.cli.main import COMMANDS

    readme = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"| `megamoe {name}" not in readme] == []


def test_80_columns(megamoe, fake, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = megamoe("test", "--backend", "emulator", "--phase", "combine", "--tokens", "8,uneven:40", "--results-dir", "out")
    assert answer.code == 0 and all(any(case["id"].removeprefix("combine-") in line for line in answer.out.splitlines()) for case in fake.cases)
    long = megamoe("test", "--backend", "emulator", "--ranks", "32", "--shape", "128x128x32x2", "--tokens", "uneven:4000", "--phase", "combine",
                   "--results-dir", "out")
    assert any(fake.cases[-1]["id"].removeprefix("combine-") in line for line in long.out.splitlines())


def test_build_in_80_columns(megamoe_process) -> None:
    answer = megamoe_process("build", "stub", "dispatch", COLUMNS="80")
    assert answer.code == 0 and "…" not in answer.out and "planned registers: dispatch " in answer.out
    assert all(len(line) <= 80 for line in answer.out.splitlines()) and "shared" in answer.out


def test_a_build_says_what_it_does_before_what_it_did(megamoe_process, tmp_path) -> None:
    lines = megamoe_process("build", "stub", MEGAMOE_CACHE_DIR=str(tmp_path / "fresh")).err.splitlines()
    assert lines[0].startswith("compiling ") and lines[1].startswith("[1/1] ")


@pytest.mark.parametrize("args, text", [
    (("--case", "s1"), "nearest id: S01"), (("--case", "S1"), "nearest id: S01"), (("--case", "S02"), "nearest id: S01"),
    (("--shape", "128x128x-8x1"), "experts=-8"),
])
def test_near_misses(megamoe, fake, args, text) -> None:
    answer = megamoe("test", "-n", *args)
    assert answer.code == 2 and text in answer.err


def test_help_says_what_block_m_is(megamoe) -> None:
    assert "(default: 128)" in " ".join(megamoe("test", "--help").out.partition("--block-m")[2].partition("--config")[0].split())
