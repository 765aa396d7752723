"""``megamoe tune`` without a GPU: facts of every compiled candidate, a model's time at every size, a static table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli.report.record import source_state
from megamoe_cli.tuning.compiling import Built, kernel_key
from megamoe_cli.tuning.fit import Fit, Point, fit
from megamoe_cli.tuning.paired import Ratio
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.static_model import Facts, facts
from megamoe_cli.tuning.table_check import check_table, errors_of
from megamoe_cli.tuning.table_writer import write, write_text
from megamoe_cli.tuning.tune_table import static_table

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App

SHOWN = 3  # candidates shown for each size


@dataclass
class Ranking:
    """``by_size``: facts of every candidate, fastest by the model first. ``refused``: kernels that do not build."""

    plan: Plan
    by_size: dict[int, list[tuple[Choice, Facts]]]
    fitted: Fit
    refused: dict[str, str] = field(default_factory=dict)
    compiler: str = ""
    source: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": "megamoe.tune-static/1", "source": "static", "compiler": self.compiler, "refused": self.refused,
                "sizes": {str(t): [{"config": c.to_dict(), **f.to_dict()} for c, f in rows] for t, rows in self.by_size.items()},
                "picks": [{"tokens": p.tokens, "config": s.choice.name()} for s in self.fitted.segments for p in s.points]}


def rank(plan: Plan, built: Built) -> Ranking:
    """The model's order at every size, and ranges by the same rules as measured ones."""
    alive = [c for c in plan.candidates if kernel_key(c.config) not in built.refused]
    by_size: dict[int, list[tuple[Choice, Facts]]] = {}
    points = []
    for tokens in plan.sizes:
        rows = [(c, facts(c, plan.shape, plan.ranks, plan.sms, tokens, resources=built.of(c))) for c in alive]
        rows.sort(key=lambda row: (row[1].model_us, built.registers(row[0]), row[0].name()))
        by_size[tokens] = rows
        own = plan.incumbent(tokens)
        base = next(f.model_us for c, f in rows if c == own)
        ratios = {c: Ratio(f.model_us / base, f.model_us / base, f.model_us / base, 0) for c, f in rows if c != own}
        gain = 1 / (1 + plan.settings.min_gain)
        points.append(Point(tokens, own, ratios, {c: "better" if r.median < gain else "same" if r.median <= 1 else "worse" for c, r in ratios.items()}))
    refused = {config.name(): why for config, why in built.refused.items()}
    return Ranking(plan, by_size, fit(points, plan.settings.tolerance, built.registers), refused, built.compiler, built.source)


def write_result(plan: Plan, ranking: Ranking, folder: Path, output: Path | None) -> Path:
    """``table.yaml`` and ``ranking.json`` in the run's folder, and the table at ``output``; never where tables are looked up."""
    model = {(t, c): f.model_us for t, rows in ranking.by_size.items() for c, f in rows}
    table = static_table(plan, ranking.fitted, model, ranking.source or source_state(), ranking.compiler)
    bad = errors_of(check_table(table))
    assert not bad, f"the model made a table that does not check: {bad[0].rule}: {bad[0].message}"
    comment = "A model's ranking: nothing was run. Every time in it is a model's."
    write_text(folder / "ranking.json", json.dumps(ranking.to_dict(), indent=1) + "\n")
    write(folder / "table.yaml", table, comment)
    if output is not None:
        write(output, table, comment)
    return output or folder / "table.yaml"


def print_ranking(app: App, plan: Plan, ranking: Ranking) -> None:
    from rich import box
    from rich.table import Table

    console = app.console()
    grid = Table(title="kernels (compiler facts)", title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("kernel", "registers", "spills B", "math registers", "shared B", "CTAs/SM")
    for column in columns:
        grid.add_column(column, justify="left" if column == "kernel" else "right")
    seen = set()
    for choice, found in next(iter(ranking.by_size.values())):
        key = kernel_key(choice.config)
        if key not in seen:
            seen.add(key)
            name = choice.config.name().partition("-lag")[0].partition("-unit")[0]
            grid.add_row(name, *(str(v) if v is not None else "-" for v in (found.registers, found.spill_bytes, found.math_registers,
                                                                            found.smem_bytes, found.ctas_per_sm)))
    console.print(grid)
    grid = Table(title="ranking (model)", title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("tokens", "configuration", "model us", "model floor us", "bound (model)", "tiles", "waves"):
        grid.add_column(column, justify="left" if column in ("configuration", "bound (model)") else "right")
    for tokens, rows in ranking.by_size.items():
        for n, (choice, found) in enumerate(rows[:SHOWN]):
            grid.add_row(str(tokens) if n == 0 else "", choice.name(), f"{found.model_us:.1f}", f"{found.floor_us:.1f}", found.bound,
                         str(found.tiles), f"{found.waves:.1f}")
        grid.add_section()
    console.print(grid)
    for name, why in ranking.refused.items():
        app.warn(f"not built: {name}: {' '.join(why.split())}")
