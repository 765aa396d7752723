"""``megamoe bench``: kernel times on one GPU beside the floors; and whether they have become worse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.app import App, json_option, reserve_option, table_option
from megamoe_cli.config import KernelConfig, require
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import Shape, parse_shape

if TYPE_CHECKING:
    from megamoe_cli.bench.rows import RowSet
    from megamoe_cli.bench_gate import Judgement
    from megamoe_cli.compile.driver import BuildRequest

SCHEMA = "megamoe.bench/1"
EXTRA_ROUNDS = 5  # measured, one after the other, for rows that are too noisy to judge


def parse_sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--tokens takes positive counts like 1,8,128, not {text!r}", rule="tokens")
    return sizes


def slices(values: Mapping[str, Any]) -> dict[str, Shape]:
    """Name -> what one rank of it holds, of --shape and --rank-of."""
    from megamoe_cli.bench import slice_of

    return {name.strip(): slice_of(parse_shape(name.strip()), values["rank_of"]) for name in values["shapes"].split(",")}


def requests_of(values: Mapping[str, Any]) -> list[BuildRequest]:
    """The kernels that these options (names of this command's parameters) will run."""
    from megamoe_cli.bench.rivals import OWN, parse_names, variant
    from megamoe_cli.compile.driver import BuildRequest

    config = KernelConfig.parse(values["config_text"])
    if values.get("ranks_"):
        from megamoe_cli.cli.bench_ranks import Asked as Over

        return Over.of(values).builds()
    if values.get("cost_ranks"):
        full = [parse_shape(name.strip()) for name in values["shapes"].split(",")]
        return [BuildRequest("combine", config, "sm_90a", shape, n) for shape in full for n in (1, *parse_counts(values["cost_ranks"], "--protocol-cost"))]
    configs = [config, *(variant(name) for name in parse_names(values.get("against") or "") if name.startswith(OWN))] if values.get("against") else [config]
    return [BuildRequest("combine", each, "sm_90a", shape, 1) for shape in slices(values).values() for each in configs]


@click.command("bench")
@click.option("--shape", "shapes", default="flash,pro,v3", show_default=True, help="Shapes, comma-separated.")
@click.option("--ranks", "ranks_", type=click.IntRange(1), metavar="N",
              help="All experts over N real ranks, slowest rank reported, with the bytes on the link (docs/performance.md).")
@click.option("--backend", default="auto", show_default=True, help="Of --ranks: auto, nvlink, processes or virtual.")
@click.option("--budget", metavar="TIME", help="Of --ranks: begin no row after this long, such as 8m.")
@click.option("--rank-of", default=8, show_default=True, help="One rank holding 1/N of the shape's experts, as a rank of EP N would.")
@click.option("--tokens", default="1,8,128,1024,8192", show_default=True, help="Tokens of the rank, comma-separated.")
@click.option("--rows", "row_set", metavar="SET", help="Rows with a ratio to reach: peer (38 of flash, pro, v3; --shape and --tokens pick some).")
@click.option("--against", metavar="NAMES", help="Time others beside it, launch by launch: peer, unfused, unfused-peer, config:KEY=VAL+KEY=VAL.")
@click.option("--config", "config_text", default="", help="KEY=VAL,... of the kernel configuration.")
@table_option
@reserve_option
@click.option("--samples", default=12, show_default=True, type=click.IntRange(3), help="Timed launches, each with routing of its own.")
@click.option("--times", default="kernel,cold,in_a_row,graph", show_default=True, help="What to time; kernel must be among them.")
@click.option("--protocol-cost", "cost_ranks", metavar="RANKS",
              help="Instead: all experts on one rank against so many virtual ranks, 128 SMs in both: 2,8.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of that many samples [default: 1; 3 with a baseline].")
@click.option("--seed", default=0, show_default=True)
@click.option("--save-baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH", help="Keep the samples here.")
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
              help="Compare with these samples [default with --fail-on-regression: results/bench-baseline.json].")
@click.option("--fail-on-regression", "limit_text", metavar="SHARE", help="Exit 1 when a row is slower than the baseline by more: 3%.")
@json_option
@click.pass_obj
def bench_command(app: App, **values: Any) -> int:
    """Time the whole kernel on one GPU: device time of a launch with L2 as the launch before left it and with L2 emptied,
    launches in a row, launches in a CUDA graph; medians with intervals, and the floors of the drawn routing. Outputs are
    checked after timing. docs/performance.md says how.

    With --ranks, the same of all ranks of a shape; exit 1 when a row fails, 6 when --budget left some out.
    With --against, exit 1 when another contender fails or is wrong, 3 when it is not installed. With a baseline: exit 1
    when something is surely slower, 6 when the noise allows no verdict, even after more rounds.
    """
    from megamoe_cli import bench_gate, paths

    if values["ranks_"] is not None:
        from megamoe_cli.cli.bench_ranks import run_over_ranks

        return run_over_ranks(app, values)
    check_alone(values)
    if values["cost_ranks"]:
        from megamoe_cli.cli.bench_cost import run_protocol_cost

        return run_protocol_cost(app, values)
    asked = Asked.of(values)
    config = KernelConfig.parse(values["config_text"]) if values["config_text"].strip() else None
    if config is not None:
        for shape in asked.shapes.values():
            require(config, shape, 1)
    limit = bench_gate.parse_limit(values["limit_text"]) if values["limit_text"] else None
    path = values["baseline"] or (Path(app.settings.get("results_dir") or paths.results_dir()) / "bench-baseline.json" if limit else None)
    baseline = bench_gate.load_baseline(path) if path else None
    # What two measurements must share to be compared.
    same = {name: values[name] for name in ("rank_of", "seed", "samples")}
    if baseline:
        bench_gate.check_comparable(baseline, same, [])
        known = {(row["shape"], row["tokens"]) for row in baseline["rows"]}
        for name, sizes in asked.sizes.items():
            for size in sizes:
                if (name, size) not in known:
                    raise UsageError(f"{path} has no row for {name} at {size} tokens", rule="baseline")
    gated = baseline is not None or values["save_baseline"] is not None
    rounds = values["rounds"] or (bench_gate.MIN_ROUNDS if gated else 1)
    if gated and rounds < bench_gate.MIN_ROUNDS:
        raise UsageError(f"--rounds {rounds}: a baseline needs at least {bench_gate.MIN_ROUNDS}, to see how far rounds differ", rule="rounds")
    if asked.against and (gated or rounds > 1):
        raise UsageError("--against does not go with a baseline or several rounds: its samples are pairs already", rule="against")
    check_reserve(values["reserve_sms"], asked.against)
    asked.check_rivals(app)
    app.started("bench")
    run = _Measured(app, config, values["samples"], values["seed"], rounds, baseline, limit if limit is not None else 0.03)
    run.table, run.asked, run.reserve = values["table"], asked, values["reserve_sms"]
    for name in asked.sizes:
        run.shape(name, asked.shapes[name], asked.sizes[name])
        if run.lost:
            break
    return _finish(app, run, same, values["save_baseline"], limit)


@dataclass(frozen=True)
class Asked:
    """What to run: ``shapes`` (of one rank) and ``sizes`` by name; other contenders; the rows' ratios to reach."""

    shapes: dict[str, Shape]
    sizes: dict[str, list[int]]
    against: tuple[str, ...]
    times: tuple[str, ...] | None  # None: all
    rows: RowSet
    rank_of: int

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Asked:
        """UsageError for what cannot be run."""
        from megamoe_cli.bench.rivals import parse_names
        from megamoe_cli.bench.rows import load_rows

        rows, shapes, sizes = load_rows(values["row_set"] or "peer"), slices(values), parse_sizes(values["tokens"])
        if values["row_set"]:
            if values["rank_of"] != rows.rank_of:
                raise UsageError(f"--rows {values['row_set']} is of one rank of {rows.rank_of}, not of {values['rank_of']}", rule="rows")
            chosen = rows.sizes(list(shapes) if given("shapes") else None, sizes if given("tokens") else None)
            shapes = slices({**values, "shapes": ",".join(chosen)})
        else:
            chosen = {name: sizes for name in shapes}
        against = tuple(parse_names(values["against"])) if values["against"] is not None else ()
        return cls(shapes, chosen, against, parse_times(values["times"]), rows, values["rank_of"])

    def check_rivals(self, app: App) -> None:
        """What every row would trip over is said before the first: not installed (exit 3). Compiles the package's kernels."""
        if "peer" in self.against or "unfused-peer" in self.against:
            from megamoe_cli.bench import peer, peer_build

            peer.check_installed()
            on_a_gpu()
            peer.load_package()
            if "peer" in self.against and sum(map(len, self.sizes.values())) > 1:
                for line in peer_build.build({self.shapes[name]: sizes for name, sizes in self.sizes.items()}, app.say):
                    app.warn(line)

    def with_targets(self, name: str, row: dict[str, Any]) -> dict[str, Any]:
        """The row with a ratio to reach and a verdict for each rival."""
        from megamoe_cli.report.bench_table import verdict

        for rival in row.get("rivals", ()):
            reach = self.rows.ratio_to_reach(name, row["tokens"], self.rank_of, rival["version"]) if rival["name"] == "peer" else None
            own = rival["ratios"].get("kernel")
            rival |= {"to_reach": reach, "verdict": verdict(own["median"], reach) if own else ""}
        return row


def check_alone(values: Mapping[str, Any]) -> None:
    """UsageError for what means something with --ranks only. (A backend from the settings is about other commands too.)"""
    from click.core import ParameterSource

    typed = click.get_current_context().get_parameter_source("backend") == ParameterSource.COMMANDLINE
    option = "--backend" if typed else "--budget" if values["budget"] else ""
    if option:
        raise UsageError(f"{option} goes with --ranks: without it one rank is timed on one GPU", rule="ranks")


def given(parameter: str) -> bool:
    """The user set it (flag, environment or settings file); outside a command nothing was."""
    from click.core import ParameterSource

    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(parameter) not in (None, ParameterSource.DEFAULT)


def parse_times(text: str) -> tuple[str, ...] | None:
    from megamoe_cli.bench.timing import MODES

    names = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [name for name in names if name not in MODES]
    if unknown or "kernel" not in names:
        raise UsageError(f"--times takes {', '.join(MODES)}, kernel among them, not {text!r}", rule="times")
    return None if set(names) == set(MODES) else tuple(mode for mode in MODES if mode in names)


def parse_counts(text: str, option: str) -> list[int]:
    try:
        return parse_sizes(text)
    except UsageError:
        raise UsageError(f"{option} takes positive counts like 2,8, not {text!r}", rule="counts") from None


def check_reserve(reserve: int, against: tuple[str, ...]) -> None:
    """UsageError when the GPU has not so many SMs to spare, or beside a contender that spares none."""
    from megamoe_cli.backends import sm_share
    from megamoe_cli.backends.driver import visible_gpus
    from megamoe_cli.bench.rivals import OWN

    others = [name for name in against if not name.startswith(OWN)]
    if reserve and others:
        raise UsageError(f"{others[0]} uses every SM, so with --reserve-sms {reserve} its times do not compare with ours", rule="against")
    gpus = visible_gpus() if reserve else []
    sm_share.check_reserve(reserve, gpus[0].sms if gpus else None)


def on_a_gpu() -> None:
    """Without a GPU that is what the answer must name first."""
    from megamoe_cli.backends.driver import visible_gpus
    from megamoe_cli.errors import EnvironmentUnfit

    if not visible_gpus():
        raise EnvironmentUnfit("no GPU is visible to this process", hint="megamoe test --backend emulator runs the same kernel source on the CPU; it takes no times")


def record_run(app: App, document: dict[str, Any]) -> None:
    """Adds who, where and when, and writes the run's record."""
    from megamoe_cli.report.junit import write_text
    from megamoe_cli.report.record import host_state, make_run_dir, new_run_id, source_state

    assert app.run is not None
    document |= {"id": new_run_id("bench"), "source": source_state(), "host": host_state()}
    folder = make_run_dir(app.run.results_dir, document["id"])
    write_text(folder / "bench.json", json.dumps(document, indent=1) + "\n")
    app.evidence(record=folder / "bench.json")


class _Measured:
    """Rows as they come. With a baseline every row is judged, and measured further while it is unclear."""

    table = "auto"  # who picks the configuration of each size when none was given
    reserve = 0  # SMs left free
    asked: Asked
    lost = False  # a contender took the device down with it

    def __init__(self, app: App, config: KernelConfig | None, samples: int, seed: int, rounds: int, baseline: Any, limit: float) -> None:
        self.app, self.config, self.samples, self.seed, self.rounds = app, config, samples, seed, rounds
        self.baseline, self.limit = baseline, limit
        self.rows: list[dict[str, Any]] = []
        self.judged: list[Judgement] = []
        self.failed: list[dict[str, Any]] = []
        self.where = ""
        self.picker: Any = None
        self.running: Any = None  # the shape that is being measured

    def shape(self, name: str, shape: Shape, sizes: list[int]) -> None:
        from megamoe_cli.bench import Bench

        more: dict[str, Any] = {"against": self.asked.against} if self.asked.against else {}
        more |= {"reserve_sms": self.reserve} if self.reserve else {}
        bench, self.running = Bench(shape, self.seed, **more), shape
        self.where = bench.backend.where
        try:
            # Rounds go over all sizes in turn, so that a slow minute of the machine does not hit one size alone.
            found: dict[int, dict[str, Any]] = {}
            for turn in range(self.rounds):
                for size in sizes:
                    if not self.lost:
                        self._try(found, bench, name, size)
                    if turn == self.rounds - 1 and size in found:
                        self._report(found, bench, name, size)
        finally:
            bench.close()

    def _report(self, found: dict[int, dict[str, Any]], bench: Any, name: str, size: int) -> None:
        """The row is complete: judge it and say it."""
        from megamoe_cli.report import bench_table

        if self.baseline is not None:
            self._judge(found, bench, name, size)
        row = self.asked.with_targets(name, found[size])
        self.rows.append(row)
        if not self.app.json:
            lines = [bench_table.line(row), *map(bench_table.rival_line, row.get("rivals", ()))]
            lines = [bench_table.header(), *lines] if len(self.rows) == 1 else lines
            click.echo("\n".join(lines))
            if self.baseline is not None:
                click.echo("        " + self.judged[-1].text(self.limit))

    def _try(self, found: dict[int, dict[str, Any]], bench: Any, name: str, size: int) -> None:
        """Another contender's failure costs its row, and all later rows only when the device is gone."""
        from megamoe_cli.bench.contender import ContenderFailed

        try:
            self._add(found, bench, name, size)
        except ContenderFailed as failure:
            self.failed.append({"shape": name, "tokens": size, "contender": failure.contender, "reason": str(failure)})
            self.lost = failure.fatal
            self.app.warn(f"{name} at {size} tokens: {failure}" + ("; the device cannot be used any more" if failure.fatal else ""))

    def _add(self, found: dict[int, dict[str, Any]], bench: Any, name: str, size: int) -> None:
        from megamoe_cli.bench import median_interval
        from megamoe_cli.bench_gate import center

        config, more = self._choice(size)
        if self.asked.times is not None:
            more = {**more, "modes": self.asked.times}
        row = bench.measure(size, config, samples=self.samples, say=self.app.detail, **more).to_dict()
        times = list(row.pop("times_us"))
        if size not in found:
            found[size] = row | {"shape": name, "rounds_us": [times]}
            return
        kept = found[size]
        kept["rounds_us"].append(times)
        pooled = [value for samples in kept["rounds_us"] for value in samples]
        kept["kernel_us"], kept["samples"] = center(kept["rounds_us"]), len(pooled)
        kept["low_us"], kept["high_us"] = median_interval(pooled)
        kept["of_floor"] = kept["floor_us"] / kept["kernel_us"]

    def _choice(self, size: int) -> tuple[KernelConfig, dict[str, int]]:
        """The configuration that was given, else the table's pick for the running GPU (said once), else the default."""
        if self.config is not None:
            return self.config, {}
        from megamoe_cli.tuning.lookup import Picker

        self.picker = self.picker or Picker(self.table, "auto", self.app.say, self.app.warn)
        found = self.picker.pick(self.running, 1, size)
        choice = found.choice if found else None
        return (choice.config, {"ctas": choice.ctas} if choice.ctas else {}) if choice else (KernelConfig(), {})

    def _judge(self, found: dict[int, dict[str, Any]], bench: Any, name: str, size: int) -> None:
        from megamoe_cli.bench_gate import check_comparable, judge_rows, row_key

        check_comparable(self.baseline, {}, [row_key(found[size])], self.where)
        for extra in range(EXTRA_ROUNDS + 1):
            (judged,) = judge_rows(self.baseline, [found[size]], self.limit)
            if judged.verdict != "unclear" or extra == EXTRA_ROUNDS:
                break
            self.app.say(f"{name} at {size} tokens is too noisy to judge; one more round")
            self._add(found, bench, name, size)
        self.judged.append(judged)


def _finish(app: App, run: _Measured, same: dict[str, Any], save: Path | None, limit: float | None) -> int:
    """The record, the baseline, the answer."""
    from megamoe_cli.bench_gate import baseline_document, exit_code_of
    from megamoe_cli.report import bench_table
    from megamoe_cli.report.junit import write_text

    code = exit_code_of(j.verdict for j in run.judged) if limit is not None else int(ExitCode.DONE)
    code = int(ExitCode.NO) if run.failed else code
    sums = bench_table.summary(run.rows, run.asked.against)
    document = {"schema": SCHEMA, "where": run.where, "reserve_sms": run.reserve, "rows": run.rows, "failed": run.failed, "against": sums,
                "gate": [j.to_dict() for j in run.judged], "limit": limit, "exit_code": code}  # fmt: skip
    record_run(app, document)
    if save is not None:
        write_text(save, json.dumps(baseline_document(run.where, same, run.rows, document["source"])) + "\n")
        app.say(f"baseline: {save}")
    if app.json:
        app.emit(document)
    else:
        failed = f", {len(run.failed)} failed" if run.failed else ""
        click.echo(f"{len(run.rows)} rows on {run.where}{failed}")
        for name, found in sums.items():
            click.echo(bench_table.summary_line(name, found))
    if limit is not None:
        slower = sum(j.verdict == "slower" for j in run.judged)
        unclear = sum(j.verdict == "unclear" for j in run.judged)
        app.say(f"gate at {limit:.1%}: {slower} slower, {unclear} unclear, {len(run.judged) - slower - unclear} not slower")
    return code
