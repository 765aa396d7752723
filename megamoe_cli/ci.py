"""``megamoe ci``: build, test on several rank counts, maybe gate times; one summary, one JUnit file, one exit code.

Every step is a command of ours in a process of its own, with a time limit: a step that crashes or hangs costs that step.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli import paths
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.processes import Tree, describe_exit
from megamoe_cli.report.junit import clean

if TYPE_CHECKING:
    from megamoe_cli.compile.driver import BuildRequest

SCHEMA = "megamoe.ci/1"
DEFAULT_RANKS = "1,2,8"
# Several steps may fail in different ways; the first of these that occurred is the answer.
PRECEDENCE = (ExitCode.BUG, ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.BUILD_FAILED, ExitCode.TIMEOUT, ExitCode.NO,
              ExitCode.NOTHING_SELECTED, ExitCode.INCONCLUSIVE)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What to do. ``limit``: the gate, as bench takes it; empty: no bench. ``timeout_s``: one case; ``step_timeout_s``: one step."""

    ranks: tuple[int, ...] = (1, 2, 8)
    phase: str = "all"
    tokens: str = ""
    shape: str = ""
    backend: str = "auto"
    build: bool = True
    limit: str = ""
    baseline: Path | None = None
    bench_args: tuple[str, ...] = ()
    timeout_s: float = 120.0
    step_timeout_s: float = 900.0
    jobs: int | None = None
    exitfirst: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Plan:
        """From the options of the command (names of its parameters), checked."""
        from megamoe_cli.plan_values import integers

        ranks = tuple(integers(values["ranks"], "--ranks"))
        limit = values["limit_text"] or ""
        if values["baseline"] and not limit:
            raise UsageError("--baseline without --fail-on-regression gates nothing", rule="regression-limit")
        if limit:
            from megamoe_cli.bench_gate import parse_limit

            parse_limit(limit)
        plan = cls(ranks, values["phase"], values["tokens"] or "", values["shape"] or "", values["backend"], not values["no_build"], limit,
                   values["baseline"], tuple(shlex.split(values["bench_args"] or "")), values["timeout"], values["step_timeout"],
                   values["jobs"], values["exitfirst"])  # fmt: skip
        plan.cases()
        return plan

    def cases(self) -> list[Any]:
        """Every case the test steps will run; checks them."""
        from megamoe_cli import testplan

        given = {name: value for name, value in (("tokens", self.tokens), ("shape", self.shape)) if value}
        return testplan.expand(testplan.Request(ranks=",".join(map(str, self.ranks)), phase=self.phase, backend=self.backend,
                                                timeout_s=self.timeout_s, **given))

    def builds(self) -> list[BuildRequest]:
        """The sm_90a kernels that the steps will want."""
        from megamoe_cli.compile.driver import BuildRequest
        from megamoe_cli.config import KernelConfig
        from megamoe_cli.shapes import parse_shape

        found = []
        if self.build:
            found += [BuildRequest(phase, KernelConfig(), "sm_90a", parse_shape("flash"), 8) for phase in self._phases()]
        if self.backend != "emulator":
            found += [BuildRequest(c.phase, c.config, "sm_90a", c.problem.shape, c.ranks) for c in self.cases()]
        if self.limit:
            from megamoe_cli.cli.bench_cmd import bench_command, requests_of

            found += requests_of(bench_command.make_context("bench", list(self.bench_args)).params)
        return found

    def _phases(self) -> list[str]:
        from megamoe_cli import testplan
        from megamoe_cli.plan_values import names

        return list(names(self.phase, testplan.phase_names(), "phase"))

    def steps(self) -> list[Step]:
        jobs = ["-j", str(self.jobs)] if self.jobs else []
        steps = [Step("build", ["build", *self._phases(), *jobs])] if self.build else []
        for ranks in self.ranks:
            words = ["test", "--ranks", str(ranks), "--phase", self.phase, "--backend", self.backend, "--timeout", f"{self.timeout_s:g}", *jobs]
            words += ["--tokens", self.tokens] if self.tokens else []
            words += ["--shape", self.shape] if self.shape else []
            steps.append(Step(f"test on {ranks} rank{'s' * (ranks > 1)}", words))
        if self.limit:
            words = ["bench", "--fail-on-regression", self.limit, *self.bench_args]
            steps.append(Step("bench", [*words, *(["--baseline", str(self.baseline)] if self.baseline else [])]))
        return steps


@dataclass
class Step:
    """One command and what came of it. ``document``: its --json answer."""

    name: str
    words: list[str]
    exit_code: int | None = None
    seconds: float = 0.0
    document: dict[str, Any] = field(default_factory=dict)
    junit: str = ""
    tail: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.exit_code == 0

    def text(self) -> str:
        """What it did, in a few words; for a failure the first thing to know."""
        if self.exit_code is None:
            return "not run"
        if self.document.get("schema") == "megamoe.run/1" and self.document["summary"]["cases"]:
            summary, places = self.document["summary"], ", ".join(self.document.get("where", []))
            text = f"{summary['passed']} passed, {summary['failed']} failed" + (f", {summary['not_run']} not run" if summary["not_run"] else "")
            return f"{text} on {places}" if places else text
        if "kernels" in self.document:
            good = sum(kernel["ok"] for kernel in self.document["kernels"])
            return f"{good} of {len(self.document['kernels'])} kernels"
        if "rows" in self.document:
            slower = [j for j in self.document["gate"] if j["verdict"] == "slower"]
            return f"{len(self.document['rows'])} rows, {len(slower)} slower" + (f" on {self.document['where']}" if self.document["where"] else "")
        return self.document.get("error") or self.reason or ("done" if self.passed else self.tail[-1] if self.tail else describe_exit(self.exit_code))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "command": ["megamoe", *self.words], "exit_code": self.exit_code, "seconds": round(self.seconds, 3),
                "text": self.text(), "run": self.document.get("id")}


def run(plan: Plan, results_dir: Path, say: Callable[[str], None] = lambda text: None, echo: bool = True) -> list[Step]:
    """All steps in order; with ``exitfirst`` none after one that failed. Their own records go into ``results_dir``;
    with ``echo`` their messages are ours."""
    steps = plan.steps()
    for step in steps:
        say(f"ci: {step.name}")
        _run(step, plan, results_dir, echo)
        say(f"ci: {step.name}: {'pass' if step.passed else f'exit {step.exit_code}'}, {step.text()}, {step.seconds:.1f} s")
        if step.exit_code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) or plan.exitfirst and not step.passed:
            break
    return steps


def _run(step: Step, plan: Plan, results_dir: Path, echo: bool) -> None:
    """In a process tree of its own. Progress goes to our stderr as it comes; the document is read from a file."""
    root = paths.checkout_root()
    env = dict(os.environ, PYTHONUNBUFFERED="1", MEGAMOE_RESULTS_DIR=str(results_dir.absolute()))
    if root is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megamoe-ci-") as folder:
        junit = Path(folder) / "junit.xml"
        words = [*step.words, "--json", *(["--junit", str(junit)] if step.words[0] == "test" else [])]
        with open(Path(folder) / "out", "w+b") as out, open(Path(folder) / "err", "w+b") as err:
            tree = Tree([sys.executable, "-m", "megamoe_cli", *words], env=env, stdout=out, stderr=err)
            code: int | None = None
            try:
                shown = _wait(tree, plan.step_timeout_s, err.name, echo)
                if not shown:
                    step.reason = f"not done after {plan.step_timeout_s:g} s"
            finally:
                code = tree.kill(grace_s=5.0)
            step.seconds = time.monotonic() - start
            step.exit_code = ExitCode.TIMEOUT if step.reason or code is None else 128 - code if code < 0 else code
            step.tail = Path(err.name).read_text(errors="replace").splitlines()[-20:]
            try:
                step.document = json.loads(Path(out.name).read_text())
            except ValueError:
                step.document = {}
        if junit.is_file():
            step.junit = junit.read_text(encoding="utf-8")


def _wait(tree: Tree, seconds: float, stderr: str, echo: bool) -> bool:
    """Copies the step's messages to ours until it ends (True) or its time is up."""
    deadline, ended = time.monotonic() + seconds, False
    with open(stderr, encoding="utf-8", errors="replace") as messages:
        while not ended and time.monotonic() < deadline:
            ended = tree.wait(0.2)
            if echo and (text := messages.read()):
                sys.stderr.write(text)
                sys.stderr.flush()
    return ended


def exit_code_of(steps: Sequence[Step]) -> int:
    """0 when all passed; else the first of PRECEDENCE; a signal's code before all of them."""
    codes = {int(step.exit_code) for step in steps if step.exit_code not in (0, None)}
    for code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED, *PRECEDENCE):
        if int(code) in codes:
            return int(code)
    return int(ExitCode.NO) if codes else int(ExitCode.DONE)


def document(run_id: str, steps: Sequence[Step], seconds: float) -> dict[str, Any]:
    from megamoe_cli.report.record import host_state, source_state

    places = [place for step in steps for place in (step.document.get("where") or []) if isinstance(step.document.get("where"), list)]
    return {"schema": SCHEMA, "id": run_id, "command": ["megamoe", *sys.argv[1:]], "exit_code": exit_code_of(steps),
            "seconds": round(seconds, 3), "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "source": source_state(),
            "host": host_state(), "where": list(dict.fromkeys(places)), "steps": [step.to_dict() for step in steps]}


def junit(steps: Sequence[Step]) -> str:
    """One document: the steps as a suite, then the suites of every test step, named after it."""
    root = ET.Element("testsuites", name="megamoe ci")
    suite = ET.SubElement(root, "testsuite", name="megamoe.ci")
    counts = {"tests": len(steps), "failures": 0, "errors": 0, "skipped": 0}
    for step in steps:
        case = ET.SubElement(suite, "testcase", classname="megamoe.ci", name=step.name, time=f"{step.seconds:.3f}")
        if step.exit_code is None:
            counts["skipped"] += 1
            ET.SubElement(case, "skipped", message="not run")
        elif not step.passed:
            kind = "failure" if step.exit_code == ExitCode.NO else "error"
            counts["failures" if kind == "failure" else "errors"] += 1
            ET.SubElement(case, kind, message=clean(f"exit {step.exit_code}: {step.text()}")).text = clean("\n".join(step.tail))
    for key, value in counts.items():
        suite.set(key, str(value))
    suite.set("time", f"{sum(step.seconds for step in steps):.3f}")
    for step in steps:
        for inner in ET.fromstring(step.junit).iter("testsuite") if step.junit else ():
            inner.set("name", f"{inner.get('name')} {step.name}")
            root.append(inner)
    for key in counts:
        root.set(key, str(sum(int(inner.get(key, 0)) for inner in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
