"""What a far side has and has not: emulator kernels that must be compiled first, GPUs that were asked for, and a list of jobs
that got long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megamoe_cli.compile.driver import BuildRequest, build_runtime, prepare, run_request
from megamoe_cli.remote.far_build import pack, unpack
from megamoe_cli.remote.far_jobs import Job
from megamoe_cli.remote.passthrough import emulator_flavour
from megamoe_cli.testplan import Request, expand
from tests.remote.conftest import STUB, Far, error_of, make_box, runs_in

TWO = ("test", "--ranks", "1", "--phase", "stub,dispatch", "--tokens", "8")


def requests() -> list[BuildRequest]:
    cases = expand(Request(ranks="1", phase="stub,dispatch", tokens="8", backend="emulator"))
    return [BuildRequest(c.phase, c.config, "emulator", c.problem.shape, c.ranks) for c in cases]


@pytest.fixture
def cold(far: Far) -> Path:
    """A far side that has compiled nothing. Its compiler takes kernels out of our cache: the first one at once, the second
    never, until the file that is returned is there."""
    go, known = far.home / "go", []
    for n, request in enumerate(requests()):
        (far.home / f"text{n}").write_text(prepare(request).text)
        known.append(f'cmp -s mega_moe.cpp "{far.home}/text{n}" && exec cp "{run_request(request).result().path}" "$out"')
    lines = "\n".join(known)
    script = far.home / "cxx"
    script.write_text(f"""#!/bin/bash
[ "$1" = --version ] && {{ echo "of the tests {far.nap}"; exit; }}
for word; do [ "$last" = -o ] && out=$word; last=$word; done
case "$*" in *" -c "*) touch "$out"; exit;; *-soname*) exec cp "{build_runtime()}" "$out";; esac
[ -e "{go}" ] || mkdir "{far.home}/first" 2>/dev/null || sleep {far.nap}
{lines}
echo "error: not known" >&2
exit 1
""")
    script.chmod(0o755)
    far.settings |= {"env": {"CXX": str(script)}, "timeout": 150}
    return go


def test_a_cold_far_side_gets_there(far: Far, cold: Path) -> None:
    """Compiling has a limit of its own. What was finished is kept; the user learns what to do; the next run goes on."""
    far.settings["build_timeout"] = 12
    answer = far.run(*TWO)
    assert answer.code == 124, answer.err
    assert error_of(answer.err) == ("error: far: the emulator's kernels were not compiled within 12 s (build_timeout); the command was not "
                                    "started")
    assert "run it again to go on with the rest" in answer.err and "--detach" in answer.err
    assert "emulator kernel 1 of 2: " in answer.err
    assert not any((folder / "results.json").exists() for folder in runs_in(far)), "no case was tried"
    kept = {p.name for p in (far.state / "cache" / "builds").glob("*.so")}
    assert len(kept) == 2, "the runtime and one kernel"
    far.assert_nothing_left()
    cold.touch()
    far.settings["build_timeout"] = 100
    again = far.run(*TWO)
    assert again.code == 0, again.err
    assert again.out.splitlines()[-1].startswith("2 passed, 0 failed"), again.out
    assert "1 emulator kernels compiled there" in again.err
    assert {p.name for p in (far.state / "cache" / "builds").glob("*.so")} > kept
    steps = json.loads((runs_in(far)[-1] / "remote.json").read_text())["steps"]
    assert [step["exit_code"] for step in steps if step["what"] == "build there"] == [0]


def test_the_kernels_of_a_plan_travel_unchanged() -> None:
    assert unpack(json.loads(json.dumps(pack(requests())))) == requests()


@pytest.mark.parametrize("options", [{}, {"races": True}, {"preempt": True, "schedule": "random"}, {"checked": True}, {"races": True, "checked": False},
                                     {"uninit": True}])  # fmt: skip
def test_the_flavour_that_the_emulator_will_load(options: dict) -> None:
    from megamoe_cli.backends.emulator import EmulatorBackend

    assert emulator_flavour(options) == EmulatorBackend(1, **options).flavour


# ---- GPUs ----


@pytest.mark.parametrize("there, words", [(0, "GPU 99 was asked for, and box has no GPU"), (8, "GPU 99 was asked for, and box has GPUs 0 to 7")])
def test_gpus_that_are_not_there(tmp_path: Path, there: int, words: str) -> None:
    """Not a pass on the emulator: exit 3 before anything runs, also of a command of one's own."""
    box = make_box(tmp_path / "box", gpus=there)
    far = Far(box, tmp_path, tmp_path / "far")
    up = far.fake_python('touch "$UP"')
    try:
        for args in (STUB, ("shell", "touch", str(up))):
            answer = far.run("--gpus", "0,99", *args)
            assert answer.code == 3 and error_of(answer.err) == f"error: far: {words}", answer.err
        assert not up.exists() and not list((far.state / "jobs").iterdir())
        assert far.run("--gpus", "0" if there else "none", *STUB).code == 0 and up.exists()
    finally:
        box.stop()


# ---- status ----


def test_status_begins_with_what_matters(far: Far) -> None:
    """Who holds the box, then jobs: those that ended long ago only when asked for."""
    import os
    import time

    from megamoe_cli.remote import hold

    assert far.run("shell", "true").code == 0
    for n in range(9):
        job = Job(str(far.state), f"20260102-03040{n}-test-aaaa")
        os.makedirs(job.folder)
        job.write("job.json", {"agent": 1, "birth": "never", "started": float(n), "command": ["x"]})
        job.end(0, "exit", 1.0, 0, [])
    held = hold.acquire(str(far.home / "locks"), "2", {"who": "eve@desk", "what": "x", "since": time.time()})
    try:
        lines = far.run("status").out.splitlines()
        assert lines[0] == "taken: gpu2 by eve@desk: x" and len(lines) == 7
        assert lines[-1] == "5 older jobs that ended: megamoe remote status --all"
        assert "-shell-" in lines[-2], "the latest one stands last"
        assert len(far.run("status", "--all").out.splitlines()) == 11
        assert len(far.run("status", "--json").json["jobs"]) == 10
    finally:
        for fd in held:
            os.close(fd)
