"""``megamoe test``: expands options into cases, runs them through the supervisor, shows what came out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from megamoe_cli import sanitize, testplan
from megamoe_cli.cli import generated_cases
from megamoe_cli.cli.app import App, json_option, reserve_option, table_option, verbosity_options
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import ExitCode, UsageError, stopped_by
from megamoe_cli.plan_values import parse_options
from megamoe_cli.testplan import Case, Request

_DEFAULT = Request()


@click.command("test", short_help="Prove the phases right on N ranks, on a GPU or the emulator.")
@click.option("--ranks", default=_DEFAULT.ranks, show_default=True, metavar="N[,N...]", help="Rank counts.")
@click.option("--phase", default=_DEFAULT.phase, show_default=True, metavar="NAME[,NAME...]",
              help="Phases: stub, dispatch, l1, l2, combine, or all.")
@click.option("--tokens", default=_DEFAULT.tokens, show_default=True, metavar="T[,T...]",
              help="Tokens on every rank, a case for each; uneven:N draws 0..N for each rank.")
@click.option("--tokens-per-rank", metavar="T,T,...", help="One case with these token counts, one for each rank.")
@click.option("--capacity", metavar="C", help="Rows of each rank's buffer (default: tokens rounded up to 128).")
@click.option("--shape", default=_DEFAULT.shape, show_default=True, metavar="NAME|HxIxExK",
              help="flash, pro, v3, tiny, or hidden x intermediate x experts x topk.")
@click.option("--block-m", metavar="M[,M...]", help=f"BLOCK_M values: 16, 32, 64, 128 (default: {KernelConfig().block_m}).")
@click.option("--config", "config", multiple=True, metavar="KEY=VAL", help="Kernel configuration; repeatable.")
@table_option
@click.option("--routing", default=_DEFAULT.routing, show_default=True, metavar="NAME[,NAME...]",
              help="uniform, powerlaw, one-hot-expert, local, remote, masked, balanced, fixed:IDS, or all.")
@click.option("--clamp", default=_DEFAULT.clamp, show_default=True, metavar="none|C[,...]", help="Activation clamp.")
@click.option("--seed", type=int, default=_DEFAULT.seed, show_default=True, help="First seed of inputs and schedules.")
@click.option("--seeds", type=int, default=_DEFAULT.seeds, show_default=True, help="Number of seeds.")
@click.option("--repeat", type=int, metavar="N",
              help="Launches in a row on one buffer, each with other data (default: 3; stub: 1).")
@click.option("--backend", default=_DEFAULT.backend, show_default=True, metavar="NAME",
              help="auto, emulator, virtual, nvlink, processes.")
@click.option("--case", "case_ids", multiple=True, metavar="ID", help="A named small input, or all of them; repeatable; 'list' lists them.")
@click.option("--option", "options", multiple=True, metavar="KEY=VAL", help="Backend option, such as races=true.")
@click.option("--sanitize", is_flag=True,
              help="On the emulator, look for races, uninitialised reads and schedules that break the kernel. Defaults "
                   "then: --ranks 2 --tokens uneven:72 --shape 256x256x4x2 --seeds 8. A failing seed is shrunk.")
@click.option("--schedule", type=click.Choice(sanitize.SCHEDULE_CHOICES), metavar="NAME",
              help="Emulator: order of warps: fifo, random, pct, or mixed (seeds take turns; with --sanitize the default).")
@click.option("--completion", type=click.Choice(sanitize.COMPLETION_CHOICES), metavar="NAME",
              help="Emulator: when copies and WGMMA complete: eager, random, lazy, or mixed.")
@click.option("--skew", multiple=True, metavar="KIND:RANK",
              help="Emulator: late:R, slow:R or stop:R (dies); R may be 'any', @N sets the amount; repeatable.")
@reserve_option
@click.option("--resident-ctas", type=click.IntRange(1), metavar="N",
              help="Emulator: CTAs of a rank that can be on the device at once, as if another kernel held the rest.")
@click.option("--vary-tokens", is_flag=True, help="Each launch in a row has other token counts, zero on some ranks.")
@click.option("--mix", multiple=True, metavar="KEY=VAL[,KEY=VAL]",
              help="Later launches in a row use this configuration, in turn with the case's own; repeatable.")
@click.option("--replay", type=click.IntRange(1), metavar="N", help="Run the whole sequence N times, as a captured graph would.")
@click.option("--campaign", type=click.IntRange(1), metavar="N",
              help="With --sanitize: N race-checked seeds spread over all phases, policies, tiles and skews, instead of the "
                   "sizes and configurations of this command line.")
@click.option("--policy", metavar="all|covering|NAME[,NAME]",
              help="Every legal combination of policy, promotion, tile, math threads, split, frontend and cluster (of all policies, or "
                   "of those named; covering: few that hold every pair of choices), at l1, l2 and combine on 1, 2 and 8 ranks, "
                   "instead of the sizes and configurations of this command line.")
@click.option("--no-shrink", is_flag=True, help="With --sanitize: leave failing cases as they are.")
@click.option("-k", "filters", multiple=True, metavar="TEXT", help="Only cases whose id has TEXT (* and ? too; !TEXT: not).")
@click.option("-n", "--dry-run", is_flag=True, help="List the cases; run nothing.")
@click.option("-x", "--exitfirst", is_flag=True, help="Stop at the first case that does not pass.")
@click.option("-j", "--jobs", type=click.IntRange(1), metavar="N",
              help="Cases side by side (default: up to 4 on the emulator, 1 on a GPU).")
@click.option("--timeout", type=float, default=_DEFAULT.timeout_s, show_default=True, metavar="S",
              help="Seconds one case may take; compiling, making inputs and checking outputs not counted.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH", help="Also write JUnit XML here.")
@click.option("--results-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Where the run record goes (default: results/).")
@verbosity_options
@json_option
@click.pass_context
def test_command(ctx: click.Context, **values: Any) -> int:
    """Prove the phases right on N ranks, on a GPU or the emulator.

    Every combination of the options is a case. All of them are checked before anything starts.
    Exit codes: 0 all passed, 1 not, 2 usage, 3 this machine cannot, 4 build failed, 5 nothing selected.
    """
    app: App = ctx.obj
    if "list" in values["case_ids"]:
        return _list_named(app)
    cases = selected_cases(ctx, values)
    if values["dry_run"]:
        return _list(app, cases)
    return _Run(ctx, app, cases, values).execute()


def selected_cases(ctx: click.Context, values: dict[str, Any]) -> list[Case]:
    """The cases that these options (of a context of this command) name, checked; starts nothing."""
    from click.core import ParameterSource

    flags = {name for name in values if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    if values["sanitize"]:
        given = {name for name in values if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
        if values["tokens_per_rank"]:
            given.add("tokens")
        values |= {name: value for name, value in sanitize.DEFAULTS.items() if name not in given and not values["case_ids"]}
    if values["tokens_per_rank"] and "tokens" in flags:
        raise UsageError("--tokens and --tokens-per-rank exclude each other")
    values["backend"] = sanitize.check_backend(values)
    if values["campaign"]:
        return testplan.select(generated_cases.reserving(values, generated_cases.campaign(values, flags)), values["filters"])
    if values["policy"] is not None:
        cases = generated_cases.policies(values, flags, ctx.find_object(App) or App(), check_case_options)
        return testplan.select(generated_cases.reserving(values, cases), values["filters"])
    request = Request(
        **{name: values[name] for name in ("ranks", "phase", "tokens", "tokens_per_rank", "capacity", "shape", "block_m",
                                           "config", "routing", "clamp", "seed", "seeds", "repeat", "backend")},
        timeout_s=values["timeout"], options=sanitize.options_from(values) | parse_options(values["options"]),
        pick=_table_picks(ctx, values),
    )  # fmt: skip
    if values["case_ids"]:
        extra = [name for name in generated_cases.SWEEP_OPTIONS if name in flags]
        if extra:
            raise UsageError(f"--case fixes the sizes and the inputs; leave out --{extra[0].replace('_', '-')}")
        cases = testplan.named(request, values["case_ids"])
    else:
        cases = testplan.expand(request)
    cases = generated_cases.reserving(values, cases)
    check_case_options(cases, dict.fromkeys((case.ranks for case in cases), values["backend"]))
    return testplan.select(cases, values["filters"])


def check_case_options(cases: Sequence[Case], backends: Mapping[int, str]) -> None:
    """Names, types and values of all options, for the backend of each rank count (``auto``: whichever it will be)."""
    from megamoe_cli import config as kernel_config
    from megamoe_cli.case_options import check_options, parse_mix

    for case in cases:
        if case.options:
            check_options(case.options, backends[case.ranks], case.config)
            for other in parse_mix(case.options.get("mix", ""), case.config):
                kernel_config.require(other, case.problem.shape, case.ranks)


def _table_picks(ctx: click.Context, values: dict[str, Any]) -> Any:
    """What the heuristic tables pick for the running GPU: a function of the problem. Each pick is said once."""
    from megamoe_cli.tuning.lookup import Picker

    app = ctx.find_object(App) or App()
    picker = Picker(values["table"], values["backend"], app.say, app.warn)

    def pick(problem: Any) -> Any:
        found = picker.pick(problem.shape, problem.ranks, max(problem.tokens))
        return found.choice if found else None

    return pick


def _list(app: App, cases: Sequence[Case]) -> int:
    if app.json:
        app.emit({"schema": "megamoe.plan/1", "cases": [case.to_dict() for case in cases]})
    else:
        for case in cases:
            click.echo(case.id)
        app.say(f"{len(cases)} cases, nothing run")
    return ExitCode.DONE if cases else ExitCode.NOTHING_SELECTED


def _list_named(app: App) -> int:
    from megamoe_cli.cases import load_cases

    entries = [entry for entry in load_cases() if entry.expect == "match"]
    if app.json:
        app.emit({"schema": "megamoe.named-cases/1", "cases": [{"id": e.id, "why": e.why, "ranks": e.data["ranks"],
                                                              "shape": e.data["shape"]} for e in entries]})
    else:
        for entry in entries:
            click.echo(f"{entry.id:<6} {entry.data['ranks']} ranks  {entry.why}")
    return ExitCode.DONE


def preflight(cases: Sequence[Case], backend: str) -> dict[int, Any]:
    """The backend of each rank count (``picking.Choice``), checked before anything starts: UsageError or
    EnvironmentUnfit when this machine cannot run them. ``virtual`` ranks must all fit on the GPU at once."""
    from megamoe_cli import config as kernel_config
    from megamoe_cli.backends.driver import visible_gpus
    from megamoe_cli.backends.picking import pick
    from megamoe_cli.backends.sm_share import check_case

    gpus = [] if backend == "emulator" else list(visible_gpus())
    hopper = [gpu for gpu in gpus if gpu.is_sm90]
    choices = {ranks: pick(backend, ranks, gpus) for ranks in dict.fromkeys(case.ranks for case in cases)}
    for case in cases:
        if choices[case.ranks].name == "virtual":
            kernel_config.require(case.config, case.problem.shape, case.ranks, sms=hopper[0].sms)
    check_case_options(cases, {ranks: choice.name for ranks, choice in choices.items()})
    for case in cases:
        check_case(choices[case.ranks].name, case.ranks, case.config, case.options, hopper)
    return choices


def default_jobs(backend: str) -> int:
    """Emulated cases are one thread each; on a GPU cases would fight for its SMs."""
    if backend == "emulator":
        return max(1, min(4, os.cpu_count() or 1))
    return 1


def worker_env(jobs: int) -> dict[str, str]:
    """The processor shared out between workers. torch gives each all cores by default, and threads that outnumber the
    cores spin at each other's barriers: the default 15 cases took 74 s that way, 5 s this way (2 busy cores)."""
    if jobs < 2 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}


def exit_code_of(results: Sequence[Any]) -> int:
    """0 when all passed; else the one code all failures agree on (4 build, 124 hang, ...); else 1."""
    codes = {int(result.exit_code) or int(ExitCode.NO) for result in results if not result.passed}
    return codes.pop() if len(codes) == 1 else int(ExitCode.NO) if codes else int(ExitCode.DONE)


SHRINK_S = 60.0  # seconds for making one failure small
SHRUNK = 3  # kinds of failure that are made small


class _StopAfterFailure(Exception):
    """Ends the supervisor's loop from its callback (-x); it kills its workers on the way out."""


class _Run:
    """One execution: rank counts one after the other, a record whatever happens."""

    def __init__(self, ctx: click.Context, app: App, cases: list[Case], values: dict[str, Any]) -> None:
        from megamoe_cli import paths
        from megamoe_cli.report.junit import check_writable
        from megamoe_cli.report.record import make_run_dir, new_run_id

        self.app, self.cases, self.values = app, cases, values
        self.origins = app.origins(ctx)
        self.results: list[Any] = []
        self.interrupted: int | None = None
        self.started = time.monotonic()
        if cases:
            self.choices = preflight(cases, values["backend"])
            if values["junit"]:
                check_writable(values["junit"], "--junit")
            self.run_id = new_run_id("test")
            self.folder = make_run_dir(values["results_dir"] or paths.results_dir(), self.run_id)
            app.started("test", self.folder.parent)

    def execute(self) -> int:
        from megamoe_cli.report.progress import Progress

        if not self.cases:
            if self.app.json:
                self.app.emit({"schema": "megamoe.run/1", "summary": {"cases": 0}, "results": [],
                               "exit_code": int(ExitCode.NOTHING_SELECTED)})
            self.app.warn("no case selected")
            return ExitCode.NOTHING_SELECTED
        try:
            with Progress(self.app, self.cases) as progress:
                for ranks in dict.fromkeys(case.ranks for case in self.cases):
                    self._run_ranks(ranks, progress)
                    if self.interrupted is not None:
                        break
        except _StopAfterFailure:
            pass
        except BaseException as error:
            if not self.results:
                self._discard()
            else:
                # The error itself is reported by main; with --json that is the one document.
                gone = isinstance(error, BrokenPipeError)  # nobody reads what we say
                self._finish(128 + signal.SIGPIPE if gone else int(ExitCode.NO), show=not self.app.json and not gone)
            raise
        if self.values.get("sanitize") and not self.values["no_shrink"] and self.interrupted is None:
            self._shrink()
        return self._finish(self._exit_code())

    def _shrink(self) -> None:
        """Makes the failures small: the first few that differ in kind."""
        from megamoe_cli.shrink import batches, shrink, signature

        by_id, seen, shrunk = {case.id: case for case in self.cases}, set(), 0
        jobs = self.values["jobs"] or default_jobs("emulator")
        run = batches("emulator", self.values["timeout"], jobs, worker_env(jobs))
        for result in self.results:
            kind = signature(result)
            if result.passed or kind & seen or by_id[result.id].named or result.exit_code == ExitCode.BUILD_FAILED or shrunk == SHRUNK:
                continue
            seen |= kind
            shrunk += 1
            self.app.say(f"shrinking {result.id} (up to {SHRINK_S:g} s; --no-shrink leaves it out)")
            found = shrink(by_id[result.id], result, run, SHRINK_S)
            result.smallest = found.case.repro()
            if found.interrupted is not None:
                self.interrupted = found.interrupted
                return

    def _run_ranks(self, ranks: int, progress: Any) -> None:
        from megamoe_cli.supervisor import run_cases

        choice = self.choices[ranks]
        self.app.say(choice.text)

        def on_result(result: Any) -> None:
            self.results.append(result)
            progress.result(result)
            if self.values["exitfirst"] and not result.passed:
                raise _StopAfterFailure

        cases = [case for case in self.cases if case.ranks == ranks]
        self.app.detail(f"{len(cases)} cases on {ranks} ranks, record in {self.folder}")
        jobs = self.values["jobs"] or default_jobs(choice.name)
        done = run_cases(cases, backend=choice.name, ranks=ranks, timeout_s=self.values["timeout"], on_result=on_result,
                         on_stage=progress.stage, on_interrupt=progress.note, jobs=jobs, env=worker_env(jobs))
        self.interrupted = getattr(done, "interrupted", None)
        if self.interrupted is not None:
            for case_id, (stage, since) in progress.running.items():
                self.app.warn(f"stopped during {case_id}{f' ({stage})' if stage else ''}, {time.monotonic() - since:.0f} s after "
                              "it began")

    def _exit_code(self) -> int:
        if self.interrupted is not None:
            return stopped_by(self.interrupted)
        return exit_code_of(self.results)

    def _finish(self, code: int, show: bool = True) -> int:
        from megamoe_cli.report import tables
        from megamoe_cli.report.record import run_document

        seconds = time.monotonic() - self.started
        document = run_document(self.run_id, self.cases, self.results, seconds, code, self.origins, self.interrupted)
        if self.values.get("combinations"):
            document["combinations"] = self.values["combinations"]
        recorded, unwritten = self._write(document)
        if unwritten:  # what came out is worth more than a file: it is shown all the same
            code = code or int(ExitCode.ENVIRONMENT)
            document["exit_code"] = code
        if show:
            try:
                if self.app.json:
                    self.app.emit(document)
                else:
                    self._show(tables, seconds)
            except BrokenPipeError:
                # The reader had enough (`| head`). That changes no verdict; who still listens to stderr gets it there.
                self.app.say(tables.summary(self.cases, self.results, seconds))
        for line in unwritten:
            click.echo(f"error: {line}", err=True)
        if show and recorded:
            self.app.say(f"record: {self.folder / 'results.json'}")
        return code

    def _write(self, document: Mapping[str, Any]) -> tuple[bool, list[str]]:
        """Is the run record written? And a line for every file that could not be."""
        from megamoe_cli.report.junit import junit_xml, write_text
        from megamoe_cli.report.record import write_record

        recorded, unwritten = True, []
        try:
            write_record(self.folder, document, self.cases, self.results)
            self.app.evidence(record=self.folder / "results.json")
        except OSError as error:
            recorded = False
            unwritten.append(f"the run record in {self.folder} cannot be written: {error.strerror or error}")
        if self.values["junit"]:
            try:
                write_text(self.values["junit"], junit_xml(self.cases, self.results))
            except OSError as error:
                unwritten.append(f"{self.values['junit']} cannot be written: {error.strerror or error}")
        return recorded, unwritten

    def _show(self, tables: Any, seconds: float) -> None:
        console = self.app.console()
        if len(self.cases) <= tables.FULL_TABLE_ROWS:
            rows = tables.table_rows(self.cases, self.results)
        else:
            rows = tables.phase_rows(self.cases, self.results)
        tables.print_rows(console, rows)
        by_id = {result.id: result for result in self.results}
        failed = [case for case in self.cases if case.id in by_id and not by_id[case.id].passed]
        for case in failed:
            for line in tables.describe_failure(case, by_id[case.id]):
                console.print(line, markup=False)
        console.print(tables.summary(self.cases, self.results, seconds), markup=False)

    def _discard(self) -> None:
        """Nothing ran: no record is better than an empty one, and the journal has nothing to tell."""
        self.app.run = None
        try:
            self.folder.rmdir()
        except OSError:
            pass
