"""``megamoe bench --ranks N``: the whole kernel over N real ranks, the slowest one reported, with what crosses the link."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.bench_cmd import check_reserve, given, on_a_gpu, parse_sizes
from megamoe_cli.config import KernelConfig, require
from megamoe_cli.errors import EnvironmentUnfit, ExitCode, MegamoeError, UsageError
from megamoe_cli.shapes import Problem, Shape, check_problem, parse_shape

if TYPE_CHECKING:
    from megamoe_cli.backends.picking import Choice as Backend
    from megamoe_cli.bench.over_ranks import OverRanks, RowRequest
    from megamoe_cli.cli.app import App
    from megamoe_cli.compile.driver import BuildRequest
    from megamoe_cli.tuning.schema import Choice

SCHEMA = "megamoe.bench-ranks/1"
BACKENDS = ("auto", "nvlink", "processes", "virtual")
MODES = ("kernel", "in_a_row", "graph")
# What is about one rank, or about a baseline of one rank: parameter -> option.
ALONE = {"rank_of": "--rank-of", "row_set": "--rows", "cost_ranks": "--protocol-cost", "rounds": "--rounds", "save_baseline": "--save-baseline",
         "baseline": "--baseline", "limit_text": "--fail-on-regression"}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What to run, checked as far as it can be without a machine. ``config`` None: the table's pick for each size."""

    shapes: dict[str, Shape]
    sizes: list[int]
    ranks: int
    backend: str
    against: tuple[str, ...]
    config: KernelConfig | None
    times: tuple[str, ...]
    budget_s: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Asked:
        """UsageError for what cannot be run."""
        from megamoe_cli.bench.rivals import OWN, parse_names, variant
        from megamoe_cli.cli.tune_cmd import parse_budget

        ranks = int(values["ranks_"])
        for parameter, option in ALONE.items():
            if given(parameter) if parameter == "rank_of" else values[parameter]:
                raise UsageError(f"--ranks times all ranks of a shape: no {option} with it", rule="ranks")
        if ranks == 1:
            raise UsageError("--ranks 1 is one rank with all experts: use --rank-of 1", rule="ranks")
        if values["backend"] not in BACKENDS:
            raise UsageError(f"--ranks takes --backend {', '.join(BACKENDS)}, not {values['backend']!r}", rule="backend-name")
        shapes = {name.strip(): parse_shape(name.strip()) for name in values["shapes"].split(",")}
        sizes = parse_sizes(values["tokens"])
        for shape in shapes.values():
            for tokens in sizes:
                check_problem(Problem.make(shape, ranks, tokens))
        against = tuple(parse_names(values["against"])) if values["against"] is not None else ()
        foreign = [name for name in against if name != "peer" and not name.startswith(OWN)]
        if foreign:
            raise UsageError(f"{foreign[0]} runs on one rank; --ranks takes --against peer and config:KEY=VAL+KEY=VAL", rule="against")
        if "peer" in against and values["backend"] == "virtual":
            raise _peer_needs_processes("--backend virtual")
        config = KernelConfig.parse(values["config_text"]) if values["config_text"].strip() else None
        for shape in shapes.values():
            for each in (config, *(variant(name) for name in against if name.startswith(OWN))):
                require(each or KernelConfig(), shape, ranks)
        budget = parse_budget(values["budget"]) if values["budget"] else None
        return cls(shapes, sizes, ranks, values["backend"], against, config, _times(values["times"]), budget)

    def builds(self) -> list[BuildRequest]:
        """The kernels that are known before a table is asked."""
        from megamoe_cli.bench.rivals import OWN, variant
        from megamoe_cli.compile.driver import BuildRequest

        configs = [self.config or KernelConfig(), *(variant(name) for name in self.against if name.startswith(OWN))]
        return [BuildRequest("combine", config, "sm_90a", shape, self.ranks) for shape in self.shapes.values() for config in configs]

    def place(self) -> Backend:
        """The backend. EnvironmentUnfit or UsageError when this machine has none that takes times."""
        from megamoe_cli.backends.picking import pick

        if "peer" in self.against:
            from megamoe_cli.bench import peer

            peer.check_installed()
        on_a_gpu()
        found = pick(self.backend, self.ranks)
        if found.name == "emulator":
            raise EnvironmentUnfit("times are taken on an SM90 GPU, and there is none here")
        if "peer" in self.against and found.name == "virtual":
            raise _peer_needs_processes(found.text)
        return found


def _peer_needs_processes(why: str) -> UsageError:
    return UsageError(f"the public package takes a process for each rank, and virtual ranks are one process ({why})",
                      hint="use --backend nvlink with a GPU for each rank", rule="against")  # fmt: skip


def _times(text: str) -> tuple[str, ...]:
    """The default of one rank stands for all that several ranks have."""
    from megamoe_cli.cli.bench_cmd import parse_times

    asked = parse_times(text)
    if asked is None and not given("times"):
        return MODES
    unknown = [name for name in asked or ("cold",) if name not in MODES]
    if unknown:
        raise UsageError(f"--times {unknown[0]}: over several ranks there are {', '.join(MODES)} (L2 cannot be emptied between two launches "
                         "that the ranks must leave and enter together)", rule="times")  # fmt: skip
    return asked or MODES


def run_over_ranks(app: App, values: Mapping[str, Any]) -> int:
    """The command. Rows are printed and recorded as they come, whatever ends the run."""
    from megamoe_cli.bench.over_ranks import OverRanks, worker_command
    from megamoe_cli.report.record import make_run_dir

    asked = Asked.of(values)
    check_reserve(values["reserve_sms"], asked.against)
    backend = asked.place()
    rows = plan_rows(app, asked, backend.name, values)
    build(app, asked, rows)
    app.started("bench")
    assert app.run is not None
    run = Run(app, asked, backend, values["reserve_sms"])
    run.folder = make_run_dir(app.run.results_dir, run.id)
    app.say(backend.text)
    against = list(asked.against)
    try:
        for name in asked.shapes:
            command, own = worker_command(backend.name, asked.ranks, values["reserve_sms"]), [row for row in rows if row.name == name]
            if "peer" in against and len(own) > 1 and run.time_left():
                run.compile_peer(command, own, against)
            with OverRanks(command, against, app.detail, run.folder / "logs") as group:
                run.shape(group, own)
    except MegamoeError as error:
        run.error, run.code = str(error), int(error.exit_code)
        app.warn(str(error) + (f" ({error.hint})" if error.hint else ""))
    except BaseException as stop:  # Ctrl-C, SIGTERM: what was measured is kept
        run.code = int(ExitCode.INTERRUPTED if isinstance(stop, KeyboardInterrupt) else ExitCode.TERMINATED)
        run.finish()
        raise
    return run.finish()


def plan_rows(app: App, asked: Asked, backend: str, values: Mapping[str, Any]) -> list[RowRequest]:
    from megamoe_cli.bench.over_ranks import RowRequest
    from megamoe_cli.tuning.lookup import Picker
    from megamoe_cli.tuning.schema import Choice

    picker = Picker(values["table"], backend, app.say, app.warn)

    def choice(shape: Shape, tokens: int) -> Choice:
        if asked.config is not None:
            return Choice(asked.config)
        found = picker.pick(shape, asked.ranks, tokens)
        return found.choice if found else Choice(KernelConfig())

    return [RowRequest(name, shape, asked.ranks, tokens, choice(shape, tokens), values["samples"], values["seed"], asked.times)
            for name, shape in asked.shapes.items() for tokens in asked.sizes]  # fmt: skip


def build(app: App, asked: Asked, rows: list[RowRequest]) -> None:
    """Every kernel once, ahead, so that ranks find it. The compiler's or the configuration's refusal of ours is raised; a
    rival's is said when its turn comes."""
    from megamoe_cli.compile.driver import BuildRequest, build_many

    own = dict.fromkeys(BuildRequest("combine", row.choice.config, "sm_90a", row.shape, asked.ranks) for row in rows)
    others = [request for request in asked.builds() if request not in own and asked.against]
    for outcome in build_many(list(own)):
        if outcome.error is not None:
            raise outcome.error
    build_many(others)
    app.detail(f"{len(own) + len(others)} kernels ready")


@dataclass
class Run:
    """Rows as they come, and the record of them."""

    app: App
    asked: Asked
    backend: Backend
    reserve: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    not_run: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    code: int = 0
    folder: Path = Path()

    def __post_init__(self) -> None:
        from megamoe_cli.report.record import host_state, new_run_id, source_state

        self.id, self.source, self.host = new_run_id("bench"), source_state(), host_state()
        self.deadline = None if self.asked.budget_s is None else time.monotonic() + self.asked.budget_s

    def time_left(self) -> bool:
        return self.deadline is None or time.monotonic() < self.deadline

    def compile_peer(self, command: list[str], requests: list[RowRequest], against: list[str]) -> None:
        """All sizes at once. A package that can launch at none of them is out."""
        from megamoe_cli.bench.peer_ranks import compile_peer

        failed = compile_peer(command, requests, self.app.say, log_dir=self.folder / "logs")
        for tokens, reason in sorted(failed.items()):
            self.app.warn(f"peer at {tokens} tokens: its first launch failed: {reason}")
        if len(failed) == len(requests):
            against.remove("peer")
            self.failed += [{"shape": requests[0].name, "tokens": tokens, "contender": "peer", "reason": reason, "status": "first launch"}
                            for tokens, reason in sorted(failed.items())]  # fmt: skip

    def shape(self, group: OverRanks, requests: list[RowRequest]) -> None:
        from megamoe_cli.report import bench_table, ranks_table

        for request in requests:
            if not self.time_left():
                self.not_run.append({"shape": request.name, "tokens": request.tokens, "reason": "no time was left"})
                continue
            known = len(group.failed)
            try:
                row = group.row(request)
            finally:
                self.failed += group.failed[known:]
            lines = [ranks_table.failure_line(failed) for failed in group.failed[known:]]
            if row is not None:
                for rival in row["rivals"]:
                    rival["verdict"] = bench_table.verdict(rival["ratios"]["kernel"]["median"], None)
                said = [] if self.rows else ranks_table.notes(row)  # once: they are the same for every row
                lines = [*([] if self.rows else [ranks_table.header()]), ranks_table.line(row), *map(bench_table.rival_line, row["rivals"]), *said, *lines]
                self.rows.append(row)
            if not self.app.json:
                click.echo("\n".join(lines))
            self.write()

    def document(self) -> dict[str, Any]:
        from megamoe_cli.report import bench_table

        where = self.rows[0]["where"] if self.rows else self.backend.name
        return {"schema": SCHEMA, "where": where, "ranks": self.asked.ranks, "backend": self.backend.name, "reserve_sms": self.reserve,
                "rows": self.rows, "failed": self.failed, "not_run": self.not_run, "error": self.error or None,
                "against": bench_table.summary(self.rows, self.asked.against), "gate": [], "exit_code": self.exit_code(), "id": self.id,
                "source": self.source, "host": self.host}  # fmt: skip

    def exit_code(self) -> int:
        if self.code:
            return self.code
        if self.failed:
            return int(ExitCode.NO)
        return int(ExitCode.INCONCLUSIVE if self.not_run else ExitCode.DONE)

    def write(self) -> None:
        from megamoe_cli.report.junit import write_text

        write_text(self.folder / "bench.json", json.dumps(self.document(), indent=1) + "\n")

    def finish(self) -> int:
        from megamoe_cli.report import bench_table

        self.write()
        self.app.evidence(record=self.folder / "bench.json")
        document = self.document()
        if self.failed:
            self.app.say(f"what the processes said: {self.folder / 'logs'}")
        if self.app.json:
            self.app.emit(document)
            return self.exit_code()
        lost = (f", {len(self.failed)} failed" if self.failed else "") + (f", {len(self.not_run)} not run" if self.not_run else "")
        click.echo(f"{len(self.rows)} rows on {document['where']}{lost}")
        for name, found in document["against"].items():
            click.echo(bench_table.summary_line(name, found))
        return self.exit_code()
