"""One tuning run from request to table: plan, compile, measure, fit, write. ``megamoe tune`` is a thin command on this.

A run is a folder: ``plan.json`` (what), ``machine.json`` (where), ``trials.jsonl`` (all that was measured), ``table.yaml``
and ``summary.json`` (what came of it). Everything but the last two is written before it is needed.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megamoe_cli import paths
from megamoe_cli.backends.sm_share import usable_sms
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.report.record import make_run_dir, new_run_id, source_state
from megamoe_cli.shapes import Shape, check_problem, check_shape
from megamoe_cli.tuning.compiling import Built, compile_all, kernel_key
from megamoe_cli.tuning.group import RankGroup
from megamoe_cli.tuning.journal import Journal, Trial
from megamoe_cli.tuning.lookup import Library, Machine, Query, running_machine
from megamoe_cli.tuning.measurer import Clock, Measurer
from megamoe_cli.tuning.plan import Plan, Settings, default_sizes, fitted, incumbents
from megamoe_cli.tuning.schema import Choice, Table
from megamoe_cli.tuning.space import Expansion, expand, load_space, resolved
from megamoe_cli.tuning.summary import summarize
from megamoe_cli.tuning.table_check import check_table, errors_of, kernel_digest
from megamoe_cli.tuning.table_writer import write, write_text
from megamoe_cli.tuning.tune_table import file_name, measured_table
from megamoe_cli.tuning.tuner import Outcome, Tuner

STATIC_MACHINE = Machine(132, "virtual", "")  # what is assumed without a GPU: the SMs of an H200


@dataclass
class Request:
    """What the user asked for. ``scripted``: a fake device's script instead of the GPU."""

    shape: Shape
    ranks: int = 1
    sizes: Sequence[int] = ()
    holdout: Sequence[int] = ()
    routing: str = "uniform"
    backend: str = "auto"
    space: str = "default"
    extra: Sequence[Choice] = ()
    strategy: str = "halving"
    incumbent: str = "auto"
    seed: int | None = None
    sms: int | None = None  # of the assumed GPU, without one
    static: bool = False
    scripted: str = ""
    settings: Settings = field(default_factory=Settings)
    reserve_sms: int = 0


def machine_of(request: Request) -> Machine | None:
    """Where the run measures; None: nowhere, so that only compilation and a model are left."""
    if request.scripted:
        from megamoe_cli.tuning.fake_device import read_script

        script = read_script(request.scripted)
        return Machine(int(script.get("sms", 132)), "fake", str(script.get("name", "fake")))
    if request.static:
        return None
    found = running_machine(request.backend, request.ranks)
    if found is None and request.backend not in ("auto", "emulator"):
        from megamoe_cli.backends.picking import pick

        pick(request.backend, request.ranks)  # says why
    return found


def make_plan(request: Request, library: Library | None = None) -> tuple[Plan, Expansion]:
    """Everything settled and checked; starts nothing. UsageError for what is illegal."""
    check_shape(request.shape, request.ranks)
    machine = machine_of(request) or replace(STATIC_MACHINE, sms=request.sms or STATIC_MACHINE.sms)
    usable = usable_sms(machine.sms, request.reserve_sms)
    sizes = sorted(set(request.sizes or default_sizes(request.ranks)))
    outside = [tokens for tokens in request.holdout if not sizes[0] < tokens < sizes[-1] or tokens in sizes]
    if outside:
        raise UsageError(f"--holdout {outside[0]} is not between the tuned sizes {sizes[0]}..{sizes[-1]}, or is one of them", rule="holdout")
    query = Query(request.shape, request.ranks, machine)
    default = resolved(Choice(KernelConfig()), request.shape, request.ranks)
    most = max([*sizes, *request.holdout])
    steps, source = incumbents(query, most, library or Library.of("auto"), default, request.incumbent)
    shared = None if query.shared_sms() is None else usable
    if request.reserve_sms:
        steps = [(start, fitted(choice, request.ranks, shared)) for start, choice in steps]
    expansion = expand(load_space(request.space), request.shape, request.ranks, shared,
                       [default, *(choice for _, choice in steps), *request.extra])
    capacity = -(-most // 128) * 128
    plan = Plan(new_run_id("tune"), request.shape, request.ranks, machine, sizes, capacity, request.routing, request.strategy, request.space,
                expansion.candidates, steps, source, default, secrets.randbits(31) if request.seed is None else request.seed,
                request.settings, kernel_digest(), expansion.accounts() | {"why": expansion.example}, list(request.holdout), request.scripted,
                [resolved(choice, request.shape, request.ranks) for choice in request.extra], request.reserve_sms)
    for tokens in sizes:
        check_problem(plan.problem(tokens))
    if request.strategy == "tpe":
        from megamoe_cli.tuning.search import optuna_module

        optuna_module()
    return plan, expansion


# -- folders ---------------------------------------------------------------------------------------


def new_folder(results: Path, plan: Plan) -> Path:
    folder = make_run_dir(results, plan.run)
    plan.write(folder)
    return folder


def find_run(text: str, results: Path) -> Path:
    """A run by folder, by id, or ``last``. UsageError with what there is."""
    if text != "last":
        for folder in (Path(text), results / text):
            if (folder / "plan.json").is_file():
                return folder
        raise UsageError(f"there is no tuning run {text!r} (looked for {text} and {results / text})", rule="resume")
    found = sorted((p for p in results.glob("*-tune-*") if (p / "plan.json").is_file()), key=lambda p: p.name)
    if not found:
        raise UsageError(f"there is no tuning run in {results} to resume", rule="resume")
    return found[-1]


def resume_plan(folder: Path, extra: Sequence[Choice] = ()) -> Plan:
    """The plan of an earlier run, with ``extra`` candidates added. UsageError when it cannot be continued here."""
    plan = Plan.read(folder)
    if plan.digest != kernel_digest():
        raise UsageError(f"the kernel sources changed since {folder.name} ({plan.digest} then, {kernel_digest()} now): its times are of "
                         f"another kernel", hint="start a new run", rule="resume")
    if not plan.scripted:
        if not plan.machine.name:  # no GPU
            raise UsageError(f"{folder.name} ranked by a model: nothing was measured, so there is nothing to resume", rule="resume",
                             hint="start it again; kernels that are built come from the cache")  # fmt: skip
        here = running_machine(plan.machine.backend, plan.ranks)
        if here != plan.machine:
            there = f"{plan.machine.backend} on {plan.machine.name} ({plan.machine.sms} SMs)"
            raise UsageError(f"{folder.name} was measured as {there}, and this machine is {here.name if here else 'without an SM90 GPU'}: "
                             f"times of two kinds of machine do not go into one table", rule="resume")
    if extra:
        more = expand(load_space(plan.space), plan.shape, plan.ranks, plan.shared_sms(), [*plan.candidates, *extra])
        named = dict.fromkeys([*plan.named, *(resolved(choice, plan.shape, plan.ranks) for choice in extra)])
        plan = replace(plan, candidates=more.candidates, named=list(named), accounts=more.accounts() | {"why": more.example})
        plan.write(folder)
    return plan


@contextmanager
def locked(folder: Path) -> Any:
    """One tuner in a folder at a time; the lock ends with its process, however that ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(str(folder / ".lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"another process is tuning in {folder}", rule="locked") from None
    try:
        yield
    finally:
        lock.release()


# -- measuring -------------------------------------------------------------------------------------


class Interrupts:
    """Ctrl-C once: no further trial. Twice, or a hang-up: the running one is killed. Restores what was there."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.count, self._say, self._old = 0, say, {}

    def interrupted(self) -> bool:
        return self.count >= 1

    def killed(self) -> bool:
        return self.count >= 2

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.count = 2 if number != signal.SIGINT else self.count + 1
        if self.count == 1:
            self._say("finishing the current trial and saving; Ctrl-C again kills it")

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._old = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGHUP)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)


def worker_command(plan: Plan) -> list[str]:
    command = [sys.executable, "-m", "megamoe_cli.tuning.tune_worker"]
    backend = plan.machine.backend
    if plan.scripted:
        from megamoe_cli.tuning.fake_device import read_script

        command += ["--fake", plan.scripted]
        backend = "processes" if read_script(plan.scripted).get("processes") else "virtual"
    command += ["--reserve-sms", str(plan.reserve_sms)] if plan.reserve_sms else []
    return [*command, "--backend", backend, "--ranks", str(plan.ranks)]


@dataclass
class Run:
    """A run in progress. ``view`` hears stages and trials; ``fit_only`` measures nothing new."""

    plan: Plan
    folder: Path
    view: Any
    budget_s: float | None = None
    candidate_timeout_s: float = 20.0
    retry_failed: bool = False
    fit_only: bool = False
    jobs: int | None = None
    built: Built = field(default_factory=Built)
    measurer: Measurer | None = None
    machines: list[dict[str, Any]] = field(default_factory=list)
    journal: Journal | None = None

    def execute(self) -> tuple[Outcome, Table]:
        """Measures, fits, writes ``table.yaml`` and ``summary.json``. The journal is right whatever ends this."""
        began = time.monotonic()
        deadline = None if self.budget_s is None else began + self.budget_s
        with locked(self.folder):
            self.journal = Journal(self.folder / "trials.jsonl").open()
            try:
                if self.journal.repaired:
                    self.view.note(f"the last {self.journal.repaired} bytes of trials.jsonl were cut short by whatever ended the run; repaired")
                if self.journal.skipped:
                    self.view.note(f"{self.journal.skipped} lines of trials.jsonl are no trials and are not used")
                if not self.plan.scripted and not self.fit_only:
                    self.built = compile_all(self.plan, self.jobs, self.view.built, self.journal)
                    self.view.note(f"{len(self.built.resources)} kernels ready after {self.built.seconds:.1f} s, {self.built.sent} of them brought "
                                   f"along, {len(self.built.refused)} refused")
                return self._measure(began, deadline)
            finally:
                self.journal.close()

    def _measure(self, began: float, deadline: float | None) -> tuple[Outcome, Table]:
        assert self.journal is not None
        with Interrupts(self.view.note) as interrupts, RankGroup(worker_command(self.plan), log_dir=self.folder / "logs",
                                                                 killed=interrupts.killed) as group:
            machine = self._describe(group)
            clock = Clock(None if self.fit_only else deadline, interrupts.interrupted, closed=self.fit_only)
            self.measurer = Measurer(self.plan, self.journal, group, clock, self.view, self.candidate_timeout_s, self.retry_failed, machine)
            for choice in self.plan.candidates:
                why = self.built.refused.get(kernel_key(choice.config))
                if why:
                    values = choice.to_dict()
                    self.measurer.failed[choice] = Trial("", "build", 0, "", 0, values, values, "build-failed", message=why)
            outcome = Tuner(self.plan, self.measurer, self.built.registers, self.view.stage).run()
        table = measured_table(self.plan, outcome, self._machine_facts(outcome), self.built.source or source_state())
        bad = errors_of([p for p in check_table(table) if p.rule != "validation"])
        assert not bad, f"the tuner made a table that does not check: {bad[0].rule}: {bad[0].message}"
        write(self.folder / "table.yaml", table)
        summary = summarize(self.plan, outcome, self.measurer, table, time.monotonic() - began)
        write_text(self.folder / "summary.json", json.dumps(summary, indent=1) + "\n")
        return outcome, table

    def _describe(self, group: RankGroup) -> str:
        """Facts of the GPU that measures now, kept with the run; a run that goes on elsewhere has several."""
        path = self.folder / "machine.json"
        self.machines = json.loads(path.read_text()) if path.is_file() else []
        if self.fit_only:
            return str(self.machines[-1]["id"]) if self.machines else "m1"
        result = group.ask({"id": "describe", "task": {"describe": True}}, 120.0)
        if not result.passed:
            raise EnvironmentUnfit(f"the measuring process cannot use the device: {result.message}", hint=f"its stderr is in {group.log}")
        facts = {key: value for key, value in result.metrics.items() if key != "sms"}
        known = next((m for m in self.machines if {k: v for k, v in m.items() if k != "id"} == facts), None)
        if known is None:
            known = {"id": f"m{len(self.machines) + 1}"} | facts
            self.machines.append(known)
            write_text(path, json.dumps(self.machines, indent=1) + "\n")
        return str(known["id"])

    def _machine_facts(self, outcome: Outcome) -> list[dict[str, Any]]:
        """With what the samples saw: clocks, throttling, other processes, noise."""
        assert self.journal is not None
        facts = []
        for machine in self.machines or [{"id": "m1"}]:
            seen = [t.conditions for t in self.journal.trials.values() if t.machine == machine["id"]]
            clocks = [mhz for c in seen for mhz in c.get("sm_mhz", [])]
            entry = dict(machine) | ({"compiler": self.built.compiler} if self.built.compiler else {})
            if clocks:
                entry["sm_mhz"] = [min(clocks), max(clocks)]
            if any("throttle" in c for c in seen):
                entry["throttle"] = sorted({name for c in seen for name in c.get("throttle", [])})
            if any("others" in c for c in seen):
                entry["shared"] = any(c.get("others") for c in seen)
            entry["aa_noise"] = float(f"{outcome.noise_level:.3g}")
            facts.append(entry)
        return facts


def install(folder: Path, table: Table, plan: Plan, output: Path | None) -> tuple[Path | None, str]:
    """Puts the table where it is looked up (or at ``output``); (path, why not). A fake device's table is only written
    where it is asked for, and a partial one does not replace a complete one."""
    from megamoe_cli.tuning.table_check import load_usable

    if not table.evidence:
        return None, "nothing was measured"
    if output is None and plan.reserve_sms:
        return None, f"{plan.reserve_sms} SMs were reserved, and tables that are looked up are of the whole GPU: name a file with --output"
    if output is None and plan.scripted:
        return None, "a fake device's table answers for no GPU"
    target = output or paths.new_tables_dir() / file_name(plan.query)
    limit = table.validation and table.validation["worst_slowdown"] > table.validation["max_slowdown"]
    if limit and output is None:
        return None, "a held-out size was slower than the limit"
    if output is None and table.partial and target.is_file():
        try:
            old, _ = load_usable(target)
            if not old.partial:
                return None, f"{target} is complete, and this table is partial"
        except UsageError:
            pass  # a broken table may be replaced
    write(target, table)
    return target, ""
