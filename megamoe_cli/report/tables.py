"""What ``megamoe test`` shows: the phase x case table, the failures, the closing line. No torch; rich only to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megamoe_cli.protocol import CaseResult
from megamoe_cli.report.waiters import shortened
from megamoe_cli.testplan import Case

FULL_TABLE_ROWS = 60  # more cases than this: one line per phase, and the cases that did not pass
FINDINGS_SHOWN = 3
_STYLE = {"pass": "green", "fail": "bold red", "fault": "bold red", "error": "bold red", "hang": "bold red",
          "crash": "bold red", "not run": "yellow"}


def number(value: Any) -> str:
    """Short text of a metric: 3 significant digits for floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def worst_metric(*metrics: Mapping[str, Any]) -> str:
    """The error metric that matters most, of one case or several, as ``name value``: one that is not finite, else the one nearest
    to (or furthest above) its tolerance when tolerances are known (they hang on the case), else the largest. Empty without metrics."""
    best: tuple[float, str] | None = None
    for name, raw in (item for each in metrics for item in each.items()):
        value, limit = (raw.get("value"), raw.get("limit")) if isinstance(raw, Mapping) else (raw, None)
        if isinstance(value, bool):
            continue
        if isinstance(value, str):
            if value not in ("nan", "inf", "-inf"):
                continue
            value = float(value)
        if not isinstance(value, (int, float)):
            continue
        rank = math.inf if not math.isfinite(value) else value / limit if limit else value
        text = f"{name} {number(float(value) if not isinstance(value, int) else value)}"
        if limit is not None:
            text += f" (limit {number(limit)})"
        if best is None or rank > best[0]:
            best = (rank, text)
    return best[1] if best else ""


def registers(kernel: Mapping[str, Any]) -> str:
    """Registers and spills from the compiler's log; ``-`` where no ptxas ran (the emulator)."""
    regs = kernel.get("registers")
    if regs is None:
        return "-"
    spills = kernel.get("spill_bytes", kernel.get("spills"))
    return f"{regs}" + (f" ({spills} B spilled)" if spills else "")


def table_rows(cases: Sequence[Case], results: Sequence[CaseResult]) -> list[dict[str, str]]:
    """One row per case, in plan order: phase, case, result, where, registers, worst error, seconds."""
    by_id = {result.id: result for result in results}
    rows = []
    for case in cases:
        result = by_id.get(case.id)
        rows.append({
            "phase": case.phase, "case": case.sizes, "result": result.status if result else "not run",
            "where": result.where if result else "", "regs": registers(result.kernel) if result else "",
            "worst error": worst_metric(result.metrics) if result else "",
            "seconds": f"{result.seconds:.1f}" if result else "",
        })
    return rows


def phase_rows(cases: Sequence[Case], results: Sequence[CaseResult]) -> list[dict[str, str]]:
    """One row per phase and place: passed of run, seconds."""
    by_id = {result.id: result for result in results}
    groups: dict[tuple[str, str], list[CaseResult | None]] = {}
    for case in cases:
        result = by_id.get(case.id)
        groups.setdefault((case.phase, result.where if result else ""), []).append(result)
    rows = []
    for (phase, where), members in groups.items():
        ran = [r for r in members if r is not None]
        passed = sum(r.passed for r in ran)
        status = "not run" if not ran else "pass" if passed == len(members) else "fail" if passed < len(ran) else "not run"
        regs = sorted({registers(r.kernel) for r in ran})
        worst = worst_metric(*(r.metrics for r in ran))
        rows.append({"phase": phase, "case": f"{passed} of {len(members)} passed", "result": status, "where": where,
                     "regs": regs[0] if len(regs) == 1 else f"{regs[0]} to {regs[-1]}" if regs else "",
                     "worst error": worst, "seconds": f"{sum(r.seconds for r in ran):.1f}"})
    return rows


COLUMNS = ("phase", "case", "result", "where", "regs", "worst error", "seconds")
NARROW = ("phase", "case", "result", "seconds")  # the closing line says where; the rest is in the record


def print_fitting(console: Any, *tables: Any) -> None:
    """Prints the first table that fits the console, else the last one at its full width: the terminal then wraps its
    lines, and what stands in a cell can still be copied."""
    from rich.measure import Measurement

    for table in tables:
        width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if width <= console.width:
            break
    console.width = max(console.width, width)
    console.print(table)


def print_rows(console: Any, rows: Sequence[Mapping[str, str]]) -> None:
    print_fitting(console, render_table(rows), render_table(rows, NARROW))


def render_table(rows: Sequence[Mapping[str, str]], columns: Sequence[str] = COLUMNS) -> Any:
    """A rich table of ``table_rows`` or ``phase_rows``; a phase's name is printed once."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("regs", "seconds") else "left",
                         overflow="fold", no_wrap=column in ("phase", "result", "seconds"))
    previous = None
    for row in rows:
        if previous is not None and row["phase"] != previous:
            table.add_section()
        cells = [Text(row["phase"] if row["phase"] != previous else "", style="bold")]
        cells += [Text(row[column], style=_STYLE.get(row["result"], "") if column == "result" else "") for column in columns[1:]]
        table.add_row(*cells)
        previous = row["phase"]
    return table


def finding_line(finding: Mapping[str, Any]) -> str:
    """``rank 3, token 5, slot 1, column 77: got 0.5, expected 0.25 (message)``; parts that are absent are left out."""
    place = ", ".join(f"{key} {finding[key]}" for key in ("rank", "token", "slot", "column")
                      if finding.get(key) is not None and finding.get(key) != -1)
    parts = []
    for key in ("got", "expected"):
        if finding.get(key) is not None:
            parts.append(f"{key} {_exact(finding[key])}")
    text = f"{place or 'whole output'}: {', '.join(parts)}" if parts else place or "whole output"
    notes = [str(finding[key]) for key in ("metric", "message") if finding.get(key) not in (None, "")]
    return f"{text} ({'; '.join(notes)})" if notes else text


def _exact(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


_DUMP = "(most recent call first)"


def telling(stderr: Sequence[str], count: int = 6) -> list[str]:
    """The lines that say most: the last ones; where Python dumped its stacks, what was said before (why), the innermost frames of the
    thread it happened in, which come first, and what was said after."""
    dumps = [at for at, line in enumerate(stderr) if _DUMP in line]
    if not dumps:
        return list(stderr[-count:])
    at = next((at for at in dumps if stderr[at].startswith("Current thread")), dumps[-1])
    frames = [line for line in stderr[at : at + count] if line == stderr[at] or line.lstrip().startswith("File ")]
    after = [line for line in stderr[dumps[-1] + 1 :] if not line.lstrip().startswith(("File ", "..."))]
    return [*stderr[max(0, dumps[0] - 2) : dumps[0]], *frames, *after[-2:]]


def describe_failure(case: Case, result: CaseResult) -> list[str]:
    """Lines: what, where each finding is, the fault record, the last words on stderr, how to run it again."""
    head = f"{result.status.upper()} {case.id} on {result.where or case.backend}"
    lines = [f"{head}: {shortened(result.message)}" if result.message else head]
    for finding in result.findings[:FINDINGS_SHOWN]:
        lines.append(f"  {shortened(finding_line(finding))}")
    total = max(result.findings_total, len(result.findings))
    if total > FINDINGS_SHOWN:
        lines.append(f"  ... {total} findings in all, the first {len(result.findings)} in the run record")
    if result.fault:
        lines.append(f"  fault: {result.fault.get('text') or result.fault}")
    if result.status in ("error", "crash", "hang"):
        lines += [f"  | {line}" for line in telling(result.stderr)]
    lines.append(f"  reproduce: {case.repro()}")
    if result.smallest:
        lines.append(f"  smallest: {result.smallest}")
    return lines


def summary(cases: Sequence[Case], results: Sequence[CaseResult], seconds: float) -> str:
    """The closing line: ``15 passed, 0 failed in 42.0 s on emulator``."""
    passed = sum(result.passed for result in results)
    failed = len(results) - passed
    text = f"{passed} passed, {failed} failed"
    if len(results) < len(cases):
        text += f", {len(cases) - len(results)} not run"
    places = ", ".join(dict.fromkeys(result.where for result in results if result.where))
    return f"{text} in {seconds:.1f} s" + (f" on {places}" if places else "")
