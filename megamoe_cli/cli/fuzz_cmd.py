"""``megamoe fuzz``: the corpus first, then random legal cases on the emulator until the time is up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from megamoe_cli import fuzz, sanitize
from megamoe_cli.cli.app import App, json_option, verbosity_options
from megamoe_cli.errors import ExitCode, UsageError, stopped_by
from megamoe_cli.report.tables import describe_failure
from megamoe_cli.testplan import Case

GROUP = 16  # cases between two looks at the clock; they share two builds
SHRINK_S = 90.0
LEAST_SHRINK_S = 10.0  # for the first failure, when the time is up


@click.command("fuzz", short_help="Random legal cases on the emulator against the oracle, for a while.")
@click.option("--minutes", type=click.FloatRange(min=0.0), default=2.0, show_default=True, help="Time for random cases, after the corpus.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Which sequence of random cases.")
@click.option("--corpus", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
              help="Cases to run first, and where failures are kept (default: tests/data/fuzz_corpus.jsonl of a checkout).")
@click.option("--no-corpus", is_flag=True, help="Neither run nor keep any.")
@click.option("--keep", type=click.IntRange(0), default=0, metavar="N", help="Also keep the first N random cases that pass.")
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first case that does not pass.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N", help="Cases side by side (default: up to 4).")
@click.option("--timeout", type=float, default=120.0, show_default=True, metavar="S", help="Seconds one case may take.")
@verbosity_options
@json_option
@click.pass_obj
def fuzz_command(app: App, **values: Any) -> int:
    """Random legal configuration x shape x tokens x routing x schedule x skew, on the emulator, against the oracle.

    A case that fails is made small, printed with the command that runs it, and kept in the corpus, which runs first the
    next time. Making cases small counts as time: once it is up, only the first failure is still made small, briefly. Exit
    codes: 0 all passed, 1 not, 2 usage, 5 nothing was run, 130 interrupted, 143 terminated.
    """
    if not values["timeout"] > 0:
        raise UsageError(f"--timeout={values['timeout']:g}; a case needs a positive number of seconds")
    return _Fuzz(app, values).execute()


class _Fuzz:
    def __init__(self, app: App, values: dict[str, Any]) -> None:
        self.app, self.values = app, values
        given = values["corpus"] or sanitize.corpus_path()
        self.corpus: Path | None = None if values["no_corpus"] else given
        if values["corpus"] and not values["corpus"].parent.is_dir():
            raise UsageError(f"--corpus {values['corpus']}: there is no such folder")
        self.jobs = values["jobs"] or sanitize.default_jobs()
        self.passed, self.failures, self.kept = 0, [], 0
        self.interrupted: int | None = None  # the signal
        self.until = 0.0

    def execute(self) -> int:
        began = time.monotonic()
        old = fuzz.read_corpus(self.corpus, self.values["timeout"]) if self.corpus and self.corpus.is_file() else []
        if old:
            self.app.say(f"corpus: {len(old)} cases of {self.corpus}")
            self._run(old, new=False)
        source, self.until = fuzz.Fuzzer(self.values["seed"], self.values["timeout"]), time.monotonic() + 60 * self.values["minutes"]
        while time.monotonic() < self.until and not self._over():
            self._run(source.group(GROUP), new=True)
        return self._finish(time.monotonic() - began)

    def _over(self) -> bool:
        return self.interrupted is not None or bool(self.failures and self.values["exitfirst"])

    def _run(self, cases: list[Case], new: bool) -> None:
        from megamoe_cli.supervisor import run_cases

        for ranks, some in fuzz.batches(cases):
            sent = {f"{n}:{case.id}": case for n, case in enumerate(some)}  # ids of cases that differ in options may be equal
            done = run_cases([case.to_dict() | {"id": key} for key, case in sent.items()], backend="emulator", ranks=ranks,
                             timeout_s=self.values["timeout"], jobs=self.jobs, env={"OMP_NUM_THREADS": "1"})  # fmt: skip
            self.interrupted = done.interrupted
            for result in done:
                self._take(sent[result.id], result, new)
                if self.failures and self.values["exitfirst"]:
                    break
            if self._over():
                return
        self.app.say(f"{self.passed} passed, {len(self.failures)} failed")

    def _take(self, case: Case, result: Any, new: bool) -> None:
        if result.passed:
            self.passed += 1
            if new and self.corpus and self.kept < self.values["keep"]:
                self.kept += fuzz.add_to_corpus(self.corpus, case, f"kept by fuzz --seed {self.values['seed']}")
            return
        if new and self.interrupted is None:
            case, result = self._shrunk(case, result)
        self.failures.append((case, result))
        for line in describe_failure(case, result):
            click.echo(line, err=self.app.json)
        if self.corpus and new:
            fuzz.add_to_corpus(self.corpus, case, f"{result.status}: {' '.join(result.message.split())[:160]}")

    def _shrunk(self, case: Case, result: Any) -> tuple[Case, Any]:
        from megamoe_cli.shrink import batches, shrink

        budget = min(SHRINK_S, max(self.until - time.monotonic(), 0.0 if self.failures else LEAST_SHRINK_S))
        if budget <= 0:
            return case, result
        self.app.say(f"shrinking {case.id} (up to {budget:.0f} s)")
        found = shrink(case, result, batches("emulator", self.values["timeout"], self.jobs, {"OMP_NUM_THREADS": "1"}), budget)
        self.interrupted = found.interrupted
        return found.case, found.result

    def _finish(self, seconds: float) -> int:
        failed = len(self.failures)
        code = stopped_by(self.interrupted) if self.interrupted is not None else ExitCode.NO if failed else ExitCode.DONE if self.passed else ExitCode.NOTHING_SELECTED
        if self.app.json:
            self.app.emit({"schema": "megamoe.fuzz/1", "passed": self.passed, "failed": failed, "seconds": round(seconds, 1),
                           "failures": [result.to_dict() | {"repro": case.repro()} for case, result in self.failures],
                           "exit_code": int(code)})  # fmt: skip
        else:
            click.echo(f"{self.passed} passed, {failed} failed in {seconds:.1f} s on the emulator (seed {self.values['seed']})")
        return int(code)
