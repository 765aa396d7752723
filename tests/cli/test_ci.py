"""``megamoe ci``: its steps as processes, the summary, the JUnit file, the exit code."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from megamoe_cli import ci, paths
from megamoe_cli.ci import Plan, Step
from megamoe_cli.devlog import journal
from megamoe_cli.processes import token_pids

CACHE = paths.cache_dir()  # the real one, before a fixture moves it: these tests are not about compiling
SMALL = ("ci", "--phase", "stub", "--tokens", "8", "--backend", "emulator", "--no-build", "--results-dir", "out")


def test_the_steps(megamoe) -> None:
    lines = megamoe("ci", "-n").out.splitlines()
    assert [line.split()[1:4] for line in lines] == [["build", "stub", "dispatch"], *(["test", "--ranks", r] for r in ("1", "2", "8"))]
    assert all("--phase all --backend auto" in line for line in lines[1:])
    gated = megamoe("ci", "-n", "--fail-on-regression", "3%", "--baseline", "b.json", "--bench-args", "--shape flash").out.splitlines()
    assert gated[-1] == "megamoe bench --fail-on-regression 3% --shape flash --baseline b.json"


@pytest.mark.parametrize("args", [("--ranks", "0"), ("--ranks", "x"), ("--phase", "l9"), ("--fail-on-regression", "3"), ("--baseline", "b"),
                                  ("--backend", "gpu"), ("--tokens", "-1")])
def test_bad_options_are_refused_before_anything_runs(megamoe, args) -> None:
    assert megamoe("ci", *args, "--results-dir", "out").code == 2 and not Path("out").exists()


def test_a_real_one(megamoe, monkeypatch) -> None:
    monkeypatch.setenv("MEGAMOE_CACHE_DIR", str(CACHE))
    answer = megamoe(*SMALL, "--ranks", "1,2", "--junit", "j.xml")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines()[-1].startswith("ci: 2 of 2 steps passed in ")
    assert "1 passed, 0 failed on emulator(2 ranks x 2 CTAs)" in answer.out
    root = ET.parse("j.xml").getroot()
    assert [suite.get("name") for suite in root] == ["megamoe.ci", "megamoe.stub test on 1 rank", "megamoe.stub test on 2 ranks"]
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("4", "0", "0")
    (folder,) = Path("out").glob("*-ci-*")
    kept = json.loads((folder / "ci.json").read_text())
    assert [step["exit_code"] for step in kept["steps"]] == [0, 0] and kept["where"] == ["emulator(1 rank x 2 CTAs)", "emulator(2 ranks x 2 CTAs)"]
    assert [line["kind"] for line in journal.read(Path("out"))] == ["test", "test", "ci"]
    assert kept["steps"][0]["run"] == journal.read(Path("out"))[0]["id"]


@pytest.fixture
def steps(monkeypatch):
    """Replaces the steps of the plan."""
    def replace(*made: Step) -> None:
        monkeypatch.setattr(Plan, "steps", lambda plan: [Step(step.name, step.words) for step in made])
    return replace


def test_every_step_runs_and_the_gravest_one_answers(megamoe, steps) -> None:
    steps(Step("one", ["test", "--no-such-option"]), Step("two", ["test", "-n", "-k", "nothing"]), Step("three", ["test", "-n"]))
    answer = megamoe(*SMALL, "--junit", "j.xml")
    assert answer.code == 2
    assert [line.split()[1] for line in answer.out.splitlines()[:3]] == ["exit", "exit", "pass"]
    assert "No such option" in answer.out.splitlines()[0], "the summary says why"
    suite = ET.parse("j.xml").getroot()[0]
    assert [case.find("error") is not None for case in suite] == [True, True, False]
    first = megamoe(*SMALL, "-x")
    assert first.code == 2 and "three              not run" in first.out


def test_a_step_that_hangs_is_ended(megamoe, steps, tmp_path: Path, monkeypatch) -> None:
    """With everything it started."""
    seen: list[str] = []
    real = ci.Tree

    class Watched(real):
        def __init__(self, command, **options):
            super().__init__(["sh", "-c", "echo started >&2; setsid sleep 300 & exec sleep 301"], **options)
            seen.append(self.token)

    monkeypatch.setattr(ci, "Tree", Watched)
    steps(Step("slow", ["test"]))
    answer = megamoe(*SMALL, "--step-timeout", "1")
    assert answer.code == 124 and "not done after 1 s" in answer.out and "started" in answer.err
    assert token_pids(seen[0]) == []


@pytest.mark.parametrize("codes, answer", [
    ([0, 0], 0), ([0, None], 0), ([1, 0], 1), ([6, 1], 1), ([1, 124], 124), ([4, 3], 3), ([3, 70], 70), ([2, 3], 2), ([130, 70], 130),
    ([5], 5), ([139], 1),
])  # fmt: skip
def test_exit_code(codes, answer) -> None:
    assert ci.exit_code_of([Step("s", [], code) for code in codes]) == answer


def test_what_a_remote_ci_builds_here() -> None:
    plan = Plan(ranks=(1, 8), phase="stub,combine", tokens="8")
    wanted = {(r.phase, r.ranks, r.shape.name) for r in plan.builds()}
    assert wanted == {("stub", 8, "flash"), ("combine", 8, "flash"), *((p, r, "tiny") for p in ("stub", "combine") for r in (1, 8))}
    assert Plan(backend="emulator", build=False).builds() == []
