"""``megamoe bench``: kernel times on one GPU beside the floors; and whether they have become worse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli.cli.app import App, json_option, table_option
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import ExitCode, UsageError
from megamoe_cli.shapes import Shape, parse_shape

if TYPE_CHECKING:
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
    from megamoe_cli.compile.driver import BuildRequest

    config = KernelConfig.parse(values["config_text"])
    return [BuildRequest("combine", config, "sm_90a", shape, 1) for shape in slices(values).values()]


@click.command("bench")
@click.option("--shape", "shapes", default="flash,pro,v3", show_default=True, help="Shapes, comma-separated.")
@click.option("--rank-of", default=8, show_default=True, help="One rank holding 1/N of the shape's experts, as a rank of EP N would.")
@click.option("--tokens", default="1,8,128,1024,8192", show_default=True, help="Tokens of the rank, comma-separated.")
@click.option("--config", "config_text", default="", help="KEY=VAL,... of the kernel configuration.")
@table_option
@click.option("--samples", default=12, show_default=True, type=click.IntRange(3), help="Timed launches, each with routing of its own.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of that many samples [default: 1; 3 with a baseline].")
@click.option("--seed", default=0, show_default=True)
@click.option("--save-baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH", help="Keep the samples here.")
@click.option("--baseline", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
              help="Compare with these samples [default with --fail-on-regression: results/bench-baseline.json].")
@click.option("--fail-on-regression", "limit_text", metavar="SHARE", help="Exit 1 when a row is slower than the baseline by more: 3%.")
@json_option
@click.pass_obj
def bench_command(app: App, **values: Any) -> int:
    """Time the whole kernel on one GPU: median kernel time with its interval, back-to-back time, floors of the drawn
    routing. L2 is as the launch before left it. Outputs are checked after timing.

    With a baseline: exit 1 when something is surely slower, 6 when the noise allows no verdict, even after more rounds.
    """
    from megamoe_cli import bench_gate, paths

    sizes, shapes = parse_sizes(values["tokens"]), slices(values)
    config = KernelConfig.parse(values["config_text"]) if values["config_text"].strip() else None
    limit = bench_gate.parse_limit(values["limit_text"]) if values["limit_text"] else None
    path = values["baseline"] or (Path(app.settings.get("results_dir") or paths.results_dir()) / "bench-baseline.json" if limit else None)
    baseline = bench_gate.load_baseline(path) if path else None
    # What two measurements must share to be compared.
    same = {name: values[name] for name in ("rank_of", "seed", "samples")}
    if baseline:
        bench_gate.check_comparable(baseline, same, [])
        known = {(row["shape"], row["tokens"]) for row in baseline["rows"]}
        for name in shapes:
            for size in sizes:
                if (name, size) not in known:
                    raise UsageError(f"{path} has no row for {name} at {size} tokens", rule="baseline")
    gated = baseline is not None or values["save_baseline"] is not None
    rounds = values["rounds"] or (bench_gate.MIN_ROUNDS if gated else 1)
    if gated and rounds < bench_gate.MIN_ROUNDS:
        raise UsageError(f"--rounds {rounds}: a baseline needs at least {bench_gate.MIN_ROUNDS}, to see how far rounds differ", rule="rounds")
    app.started("bench")
    run = _Measured(app, config, values["samples"], values["seed"], rounds, baseline, limit if limit is not None else 0.03)
    run.table = values["table"]
    for name, shape in shapes.items():
        run.shape(name, shape, sizes)
    return _finish(app, run, same, values["save_baseline"], limit)


class _Measured:
    """Rows as they come. With a baseline every row is judged, and measured further while it is unclear."""

    table = "auto"  # who picks the configuration of each size when none was given

    def __init__(self, app: App, config: KernelConfig | None, samples: int, seed: int, rounds: int, baseline: Any, limit: float) -> None:
        self.app, self.config, self.samples, self.seed, self.rounds = app, config, samples, seed, rounds
        self.baseline, self.limit = baseline, limit
        self.rows: list[dict[str, Any]] = []
        self.judged: list[Judgement] = []
        self.where = ""
        self.picker: Any = None
        self.running: Any = None  # the shape that is being measured

    def shape(self, name: str, shape: Shape, sizes: list[int]) -> None:
        from megamoe_cli.bench import Bench

        bench, self.running = Bench(shape, self.seed), shape
        self.where = bench.backend.where
        try:
            # Rounds go over all sizes in turn, so that a slow minute of the machine does not hit one size alone.
            found: dict[int, dict[str, Any]] = {}
            for _ in range(self.rounds):
                for size in sizes:
                    self._add(found, bench, name, size)
            for size, row in found.items():
                if self.baseline is not None:
                    self._judge(found, bench, name, size)
                self.rows.append(found[size])
                if not self.app.json:
                    _print_row(row, first=len(self.rows) == 1)
                    if self.baseline is not None:
                        click.echo("        " + self.judged[-1].text(self.limit))
        finally:
            bench.close()

    def _add(self, found: dict[int, dict[str, Any]], bench: Any, name: str, size: int) -> None:
        from megamoe_cli.bench import median_interval
        from megamoe_cli.bench_gate import center

        config, grid = self._choice(size)
        row = bench.measure(size, config, samples=self.samples, say=self.app.detail, **grid).to_dict()
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
    from megamoe_cli.report.junit import write_text
    from megamoe_cli.report.record import host_state, make_run_dir, new_run_id, source_state

    assert app.run is not None
    code = exit_code_of(j.verdict for j in run.judged) if limit is not None else int(ExitCode.DONE)
    run_id = new_run_id("bench")
    document = {"schema": SCHEMA, "id": run_id, "where": run.where, "source": source_state(), "host": host_state(), "rows": run.rows,
                "gate": [j.to_dict() for j in run.judged], "limit": limit, "exit_code": code}  # fmt: skip
    folder = make_run_dir(app.run.results_dir, run_id)
    write_text(folder / "bench.json", json.dumps(document, indent=1) + "\n")
    app.evidence(record=folder / "bench.json")
    if save is not None:
        write_text(save, json.dumps(baseline_document(run.where, same, run.rows, document["source"])) + "\n")
        app.say(f"baseline: {save}")
    if app.json:
        app.emit(document)
    else:
        click.echo(f"{len(run.rows)} rows on {run.where}")
    if limit is not None:
        slower = sum(j.verdict == "slower" for j in run.judged)
        unclear = sum(j.verdict == "unclear" for j in run.judged)
        app.say(f"gate at {limit:.1%}: {slower} slower, {unclear} unclear, {len(run.judged) - slower - unclear} not slower")
    return code


def _print_row(row: dict, first: bool) -> None:
    if first:
        click.echo(f"{'shape':<8}{'tokens':>7}{'kernel us':>11}{'interval':>18}{'in a row':>10}{'floor':>9}{'% floor':>9}  config")
    interval = f"{row['low_us']:.1f}-{row['high_us']:.1f}"
    click.echo(f"{row['shape']:<8}{row['tokens']:>7}{row['kernel_us']:>11.1f}{interval:>18}{row['back_to_back_us']:>10.1f}"
               f"{row['floor_us']:>9.1f}{100 * row['of_floor']:>8.0f}%  {row['config']}")  # fmt: skip
