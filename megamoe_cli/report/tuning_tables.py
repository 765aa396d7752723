"""How a heuristic table looks on a terminal. Rich is imported here only, when something is printed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.tuning.schema import Evidence, Table


def print_table(app: App, table: Table) -> None:
    """Match, then one row for each range: load, pick, evidence; then validation and provenance."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    console = app.console()
    values = ", ".join(f"{key} {value}" for key, value in table.match.values.items() if value != "*")
    state = f"{table.source}{', partial' if table.partial else ''}"
    console.print(Text(f"{table.path} ({state}) for {values}", style="bold"))
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in ((table.axis, "left"), ("configuration", "left"), ("sizes", "left"), ("time us", "right"),
                            ("vs incumbent", "right"), ("verdicts", "left")):
        grid.add_column(column, justify=justify)  # type: ignore[arg-type]
    rows = {row.id: row for row in table.evidence}
    for entry in table.ranges:
        found = sorted((rows[name] for name in entry.evidence), key=lambda row: row.tokens)
        name = table.configs[entry.use].name() + (" (default)" if entry.use == table.default and not found else "")
        grid.add_row(f"[{entry.start:g}, {'inf' if math.isinf(entry.end) else f'{entry.end:g}'})", name, *(Text(t) for t in _cells(found, entry.note)))
    console.print(grid)
    if table.validation and table.validation.get("holdout"):
        v = table.validation
        console.print(f"held out: {v['holdout']} sizes, worst slowdown {v['worst_slowdown']:.3f}, geomean vs incumbent {v['geomean']:.3f}", markup=False)
    for note in table.notes:
        console.print(f"note: {note}", markup=False)
    for machine in table.provenance.get("machines", []):
        console.print("machine " + ", ".join(f"{key} {value}" for key, value in machine.items() if value not in (None, [])), markup=False)


def _cells(rows: list[Evidence], note: str) -> tuple[str, str, str, str]:
    """(sizes, times, ratios, verdicts) of a range."""
    if not rows:
        return note or "not measured", "", "", ""
    sizes = f"{rows[0].tokens}" if len(rows) == 1 else f"{rows[0].tokens}..{rows[-1].tokens} ({len(rows)})"
    times = [row.median_us if row.median_us is not None else row.model_us for row in rows]
    mark = "" if rows[0].median_us is not None else "model "
    spread = mark + _spread([t for t in times if t is not None], "{:.4g}")
    ratios = _spread([row.vs_incumbent for row in rows if row.vs_incumbent is not None], "{:.3f}")
    counts: dict[str, int] = {}
    for row in rows:
        if row.verdict:
            counts[row.verdict] = counts.get(row.verdict, 0) + 1
    return sizes, spread, ratios, ", ".join(f"{count} {verdict}" for verdict, count in counts.items())


def _spread(values: list[Any], form: str) -> str:
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}..{high}"
