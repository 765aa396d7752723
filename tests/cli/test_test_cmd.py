"""``megamoe test`` against a fake supervisor: what it asks for, shows, writes and returns."""

from __future__ import annotations

import json
import re
import signal
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megamoe_cli import supervisor
from megamoe_cli.backends import driver
from megamoe_cli.cli import test_cmd
from megamoe_cli.errors import EnvironmentUnfit, UsageError

PHASES = ("stub", "dispatch", "l1", "l2", "combine")
EMULATED = ("test", "--backend", "emulator", "--tokens", "0,8,48", "--results-dir", "out")
NAMED = ("test", "--backend", "emulator", "--results-dir", "out")


def failing(*statuses: str, **more):
    """A verdict: the cases of phase l1 get these statuses in turn, everything else passes."""
    left = list(statuses)
    return lambda case: {"status": left.pop(0), **more} if case["phase"] == "l1" and left else {}


def record() -> dict:
    (folder,) = [path for path in Path("out").iterdir() if path.is_dir()]
    assert sorted(p.name for p in folder.iterdir()) == ["junit.xml", "results.json"]
    return json.loads((folder / "results.json").read_text())


def test_all_pass(megamoe, fake) -> None:
    answer = megamoe(*EMULATED)
    assert answer.code == 0
    assert [case["phase"] for case in fake.cases] == [phase for phase in PHASES for _ in range(3)]
    assert answer.out.splitlines()[-1].startswith("15 passed, 0 failed in ")
    assert answer.out.rstrip().endswith("on emulator")
    assert answer.out.count(" pass ") == 15
    assert [line for line in answer.err.splitlines() if line.startswith("[")][-1].startswith("[15/15] pass ")
    assert "backend: emulator" in answer.err
    kept = record()
    assert kept["summary"] == {"cases": 15, "passed": 15, "failed": 0, "not_run": 0} and kept["exit_code"] == 0
    assert kept["where"] == ["emulator"] and kept["settings"]["backend"] == {"value": "emulator", "from": "flag"}
    assert kept["settings"]["ranks"] == {"value": "8", "from": "default"}
    assert re.fullmatch("[0-9a-f]{12}", kept["source"]["kernel_sources"])


def test_the_supervisor_gets_backend_ranks_and_timeout(megamoe, fake) -> None:
    megamoe(*EMULATED, "--ranks", "2,1", "--phase", "l1", "--tokens", "4", "--timeout", "7", "-j", "3")
    assert [(call["ranks"], call["backend"], call["timeout_s"], call["jobs"]) for call in fake.calls] == [
        (2, "emulator", 7.0, 3), (1, "emulator", 7.0, 3)]
    assert [case["ranks"] for case in fake.cases] == [2, 1]


def test_a_failure_is_shown_with_its_place_and_its_command(megamoe, fake) -> None:
    finding = {"rank": 3, "token": 5, "slot": 1, "column": 77, "got": 0.5, "expected": 0.25, "metric": "l1_raw",
               "message": "relative L2"}
    fake.verdict = failing("fail", message="1 row differs", findings=[finding], findings_total=1,
                           metrics={"l1_raw": 0.7})
    answer = megamoe(*EMULATED)
    assert answer.code == 1
    assert "rank 3, token 5, slot 1, column 77: got 0.5, expected 0.25" in answer.out
    command = re.search(r"reproduce: (.*)", answer.out).group(1)
    assert "14 passed, 1 failed" in answer.out.splitlines()[-1]
    assert "rank 3, token 5" in answer.err, "at once, not only at the end"
    fake.cases.clear()
    words = command[command.index(" test ") + 1:].split()
    assert megamoe(*words, "--results-dir", "out2").code == 0
    assert [case["id"] for case in fake.cases] == ["l1-r8-tiny-t0-m128-uniform-s0"]


@pytest.mark.parametrize("statuses, codes, expected", [
    (["hang"], [124], 124), (["hang", "fail"], [124, 1], 1), (["error"], [4], 4), (["crash"], [1], 1), (["error"], [0], 1),
])
def test_exit_codes_of_failures(megamoe, fake, statuses, codes, expected) -> None:
    pairs = list(zip(statuses, codes))
    fake.verdict = lambda case: (dict(zip(("status", "exit_code"), pairs.pop(0)))
                                 if pairs and case["phase"] == "l1" else {})
    assert megamoe(*EMULATED).code == expected


def test_json_is_the_record(megamoe, fake) -> None:
    fake.verdict = failing("fail", metrics={"l1_raw": float("nan")})
    answer = megamoe(*EMULATED, "--json")
    assert answer.code == 1 and answer.json == record() and answer.json["schema"] == "megamoe.run/1"
    failed = [entry for entry in answer.json["results"] if entry["status"] == "fail"]
    assert [entry["metrics"] for entry in failed] == [{"l1_raw": "nan"}]
    assert failed[0]["case"]["tokens"] == [0] * 8 and failed[0]["repro"].endswith("--backend emulator")
    assert megamoe("--json", *EMULATED).json["exit_code"] == 0


def test_junit(megamoe, fake) -> None:
    fake.verdict = failing("pass", "crash")
    assert megamoe(*EMULATED, "--junit", "deep/report.xml").code == 1
    root = ET.parse("deep/report.xml").getroot()
    assert (root.get("tests"), root.get("errors"), root.get("failures")) == ("15", "1", "0")
    (folder,) = [path for path in Path("out").iterdir() if path.is_dir()]
    assert (folder / "junit.xml").read_text() == Path("deep/report.xml").read_text()


def test_nothing_selected(megamoe, fake) -> None:
    answer = megamoe(*EMULATED, "-k", "no-such-case")
    assert answer.code == 5 and answer.err == "warning: no case selected\n" and not Path("out").exists()
    assert megamoe(*EMULATED, "-k", "no-such-case", "--json").json["exit_code"] == 5
    assert megamoe("test", "-n", "-k", "no-such-case").code == 5
    assert fake.cases == []


def test_filter(megamoe, fake) -> None:
    assert megamoe(*EMULATED, "-k", "combine", "-k", "!t0").code == 0
    assert [case["id"] for case in fake.cases] == [f"combine-r8-tiny-t{n}-m128-uniform-s0" for n in (8, 48)]


def test_dry_run_lists_and_starts_nothing(megamoe, fake) -> None:
    answer = megamoe("test", "-n", "--phase", "l1", "--tokens", "0,8,48")
    assert answer.code == 0 and answer.out.splitlines() == [f"l1-r8-tiny-t{n}-m128-uniform-s0" for n in (0, 8, 48)]
    plan = megamoe("test", "-n", "--phase", "l1", "--tokens", "0,8,48", "--json").json
    assert [case["id"] for case in plan["cases"]] == answer.out.splitlines()
    assert fake.calls == [] and not Path("results").exists()


def test_exitfirst(megamoe, fake) -> None:
    fake.verdict = failing("pass", "fail")
    answer = megamoe(*EMULATED, "-x")
    assert answer.code == 1 and len(fake.cases) == 8
    assert "7 passed, 1 failed, 7 not run" in answer.out and record()["summary"]["not_run"] == 7


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interrupted_run_keeps_what_it_has(megamoe, fake, number, code) -> None:
    fake.interrupted, fake.stop_after = number, 4
    answer = megamoe(*EMULATED, "--ranks", "8,2")
    assert answer.code == code and len(fake.calls) == 1, "no further rank count is started"
    kept = record()
    assert kept["summary"] == {"cases": 30, "passed": 4, "failed": 0, "not_run": 26}
    assert (kept["interrupted"], kept["exit_code"]) == (number, code)


def test_an_error_in_between_keeps_what_it_has(megamoe, fake, monkeypatch) -> None:
    run = fake.run_cases

    def second_fails(cases, *, ranks, **rest):
        if ranks == 2:
            raise EnvironmentUnfit("no such machine", hint="take another")
        return run(cases, ranks=ranks, **rest)

    monkeypatch.setattr(supervisor, "run_cases", second_fails)
    answer = megamoe(*EMULATED, "--ranks", "8,2", "--phase", "l1")
    assert answer.code == 3 and answer.err.splitlines()[-2:] == ["error: no such machine", "hint: take another"]
    assert "3 passed, 0 failed, 3 not run" in answer.out and record()["summary"]["not_run"] == 3
    assert json.loads(megamoe(*EMULATED[:-1], "out2", "--ranks", "8,2", "--phase", "l1", "--json").out)["exit_code"] == 3


def test_nothing_is_left_when_nothing_could_run(megamoe, fake, monkeypatch) -> None:
    def refuses(cases, **rest):
        raise UsageError("too many ranks for this GPU")

    monkeypatch.setattr(supervisor, "run_cases", refuses)
    assert megamoe(*EMULATED).code == 2
    assert list(Path("out").iterdir()) == []


@pytest.mark.parametrize("args, words", [
    (("--phase", "l3"), ["'l3'", "l2"]),
    (("--shape", "200x256x16x2"), ["hidden=200"]),
    (("--tokens", "300", "--capacity", "128"), ["300", "128"]),
    (("--tokens", "8", "--tokens-per-rank", "1,2,3,4,5,6,7,8"), ["--tokens-per-rank"]),
    (("--case", "S01", "--ranks", "2"), ["--ranks"]),
    (("--case", "S99"), ["S99"]),
    (("--routing", "fixed:0,99"), ["rank 0", "token 0", "slot 1", "99"]),
    (("--jobs", "0"), ["jobs"]),
    (("--option", "races"), ["races"]),
    (("--policy", ""), ["--policy"]),
])
def test_bad_input_starts_nothing(megamoe, fake, args, words) -> None:
    answer = megamoe(*(NAMED if "--case" in args else EMULATED), *args)
    assert answer.code == 2 and answer.out == ""
    line, *hints = answer.err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    assert all(hint.startswith("hint: ") for hint in hints)
    assert fake.calls == [] and not Path("out").exists()


def test_results_that_cannot_be_written_are_said_first(megamoe, fake) -> None:
    Path("file").write_text("")
    answer = megamoe("test", "--backend", "emulator", "--results-dir", "file/below")
    assert answer.code == 2 and "--results-dir" in answer.err and fake.calls == []


def gpu(index: int, sms: int = 132, cc: tuple[int, int] = (9, 0)) -> driver.Gpu:
    return driver.Gpu(index, "H200" if cc == (9, 0) else "Other", cc, sms, 232448)


def test_no_gpu_is_exit_3_and_says_what_to_do(megamoe, fake, monkeypatch) -> None:
    monkeypatch.setattr(driver, "visible_gpus", lambda: [])
    for backend in ("virtual", "nvlink", "processes"):
        answer = megamoe("test", "--backend", backend, "--ranks", "2")
        assert answer.code == 3 and "emulator" in answer.err.splitlines()[1]
    assert fake.calls == []


def test_auto_says_what_it_picked(megamoe, fake, monkeypatch) -> None:
    monkeypatch.setattr(driver, "visible_gpus", lambda: [])
    assert "backend: emulator" in megamoe("test", "--results-dir", "a").err
    monkeypatch.setattr(driver, "visible_gpus", lambda: [gpu(0)])
    assert "backend: virtual" in megamoe("test", "--results-dir", "b").err
    assert [(call["backend"], call["jobs"] == 1) for call in fake.calls] == [
        ("emulator", test_cmd.default_jobs("emulator") == 1), ("virtual", True)]


def test_workers_share_the_cores(megamoe, fake, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert test_cmd.default_jobs("emulator") == 4 and test_cmd.default_jobs("nvlink") == 1
    megamoe(*EMULATED, "--phase", "l1")
    megamoe(*EMULATED[:-1], "out2", "--phase", "l1", "-j", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    megamoe(*EMULATED[:-1], "out3", "--phase", "l1")
    assert [call["env"] for call in fake.calls] == [{"OMP_NUM_THREADS": "4"}, {}, {}]


def test_more_virtual_ranks_than_the_gpu_holds(megamoe, fake, monkeypatch) -> None:
    monkeypatch.setattr(driver, "visible_gpus", lambda: [gpu(0, sms=4)])
    answer = megamoe("test", "--backend", "virtual", "--ranks", "1,8")
    assert answer.code == 2 and "8 ranks" in answer.err and "4 SMs" in answer.err and fake.calls == []


def test_named_cases(megamoe, fake) -> None:
    listed = megamoe("test", "--case", "list")
    ids = [line.split()[0] for line in listed.out.splitlines()]
    assert listed.code == 0 and "S01" in ids and "S22" not in ids
    assert [entry["id"] for entry in megamoe("test", "--case", "list", "--json").json["cases"]] == ids
    assert megamoe(*NAMED, "--case", "S01", "--case", "S03", "--phase", "combine").code == 0
    assert [(case["case"], case["phase"], case["ranks"]) for case in fake.cases] == [("S01", "combine", 1), ("S03", "combine", 8)]


def test_settings_reach_the_plan(megamoe, fake, monkeypatch) -> None:
    Path("pyproject.toml").write_text("[tool.megamoe]\nranks = [2]\nphase = 'l1'\ntokens = [4]\nconfig = {lag = 4}\n"
                                      "results_dir = 'out'\nbackend = 'emulator'\n")
    assert megamoe("test").code == 0
    (case,) = fake.cases
    assert (case["ranks"], case["phase"], case["tokens"], case["config"]["lag"]) == (2, "l1", [4, 4], 4)
    assert record()["settings"]["ranks"]["from"].endswith("pyproject.toml")


def test_quiet_and_verbose(megamoe, fake) -> None:
    quiet = megamoe(*EMULATED, "-q")
    assert quiet.err == "" and "15 passed" in quiet.out
    assert "compile" in megamoe(*EMULATED[:-1], "out2", "-v").err


def test_many_cases_are_shown_by_phase(megamoe, fake) -> None:
    fake.verdict = failing("pass", "fail")
    answer = megamoe(*EMULATED, "--seeds", "20", "--tokens", "8")
    assert answer.out.count(" of 20 passed") == 5 and "19 of 20 passed" in answer.out
    assert answer.out.count("reproduce:") == 1 and "99 passed, 1 failed" in answer.out


def test_color_only_when_asked_for_off_a_terminal(megamoe, fake) -> None:
    assert "\x1b[" not in megamoe(*EMULATED).out
    assert "\x1b[" in megamoe("--color", "always", *EMULATED[:-1], "out2").out


def test_live_progress_on_a_terminal(fake, tmp_path) -> None:
    """Through a pseudo-terminal: the moving line is drawn, results scroll above it."""
    import os
    import pty
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    script = ("import sys, time; from megamoe_cli import supervisor\nfrom megamoe_cli.protocol import CaseResult\n"
              "def run_cases(cases, *, on_result, on_stage, **rest):\n"
              "    out = []\n    for c in cases:\n        on_stage(c.id, 'compile'); time.sleep(0.3)\n"
              "        out.append(CaseResult(c.id, 'pass', where='emulator', seconds=0.3)); on_result(out[-1])\n"
              "    return supervisor.CaseResults(out)\n"
              "supervisor.run_cases = run_cases\nfrom megamoe_cli.cli.main import main\n"
              "sys.exit(main(['--no-config', 'test', '--backend', 'emulator', '--phase', 'l1', '--tokens', '0,8,48', '--results-dir', 'out']))")
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=slave, cwd=tmp_path,
                               env={**os.environ, "PYTHONPATH": str(root), "TERM": "xterm"})
    os.close(slave)
    screen = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        screen += part
    out, _ = process.communicate(timeout=30)
    os.close(master)
    assert process.returncode == 0 and b"3 passed" in out and b"\x1b[" not in out
    assert b"0/3 done" in screen and b"(compile " in screen and b"[3/3] pass" in screen
