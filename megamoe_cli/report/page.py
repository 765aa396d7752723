"""A report as headings, lines, lists and tables: what ``render.py`` turns into text, Markdown or HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megamoe_cli.report.overview import SHOWN_FAILURES, result_text

TOKEN_COLUMNS = 8  # of one table; more go into the next


@dataclass(frozen=True)
class Cell:
    """``mood``: good, bad, open or nothing. ``code``: to be copied as it is."""

    text: str
    mood: str = ""
    code: bool = False


@dataclass
class Block:
    """``kind``: title, heading, subheading, line, list, table or code."""

    kind: str
    text: str = ""
    items: list[Cell] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[Cell]] = field(default_factory=list)
    right: frozenset[int] = frozenset()  # columns of numbers


def page(views: Sequence[Mapping[str, Any]], complaints: Sequence[str] = ()) -> list[Block]:
    """The whole report, oldest run first; a table of the runs when there are several."""
    blocks = [Block("title", f"megamoe: {views[0]['id']}" if len(views) == 1 else f"megamoe: {len(views)} runs")]
    blocks += [Block("list", items=[Cell(text, "bad") for text in complaints])] if complaints else []
    if len(views) > 1:
        rows = [[Cell(v["id"]), Cell(v["kind"]), Cell(result_text(v), mood_of(v)), Cell(short_places(v["where"])), Cell(commit_of(v)),
                 Cell(_seconds(v["seconds"]))] for v in views]  # fmt: skip
        blocks.append(Block("table", columns=["run", "kind", "result", "where", "commit", "seconds"], rows=rows, right=frozenset({5})))
    for view in views:
        blocks += section(view)
    return blocks


def mood_of(view: Mapping[str, Any]) -> str:
    if view["problems"]:
        return "bad"
    return {0: "good", 5: "open", 6: "open", None: "open"}.get(view["exit_code"], "bad")


def short_places(places: Sequence[str]) -> str:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{places[0]}{more}" if places else "-"


def commit_of(view: Mapping[str, Any]) -> str:
    source = view["source"]
    commit = (source.get("commit") or "")[:10] or "no commit"
    return f"{commit}{' (dirty)' if source.get('dirty') else ''}"


def _seconds(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else ""


def section(view: Mapping[str, Any]) -> list[Block]:
    """One run."""
    blocks = [Block("heading", f"{view['id']} · {view['kind']}"),
              Block("line", items=[Cell("Result: "), Cell(result_text(view), mood_of(view))])]  # fmt: skip
    if view["command"]:
        blocks.append(Block("line", items=[Cell("Command: "), Cell(view["command"], code=True)]))
    blocks.append(Block("line", items=[Cell(text) for text in [f"Ran on {where_text(view)}."]]))
    source = view["source"]
    kernel = f", kernel sources {source['kernel_sources']}" if source.get("kernel_sources") else ""
    seconds = f", took {_seconds(view['seconds'])} s" if view["seconds"] is not None else ""
    blocks.append(Block("line", items=[Cell(f"Commit {commit_of(view)}{kernel}; {view['when']}{seconds}.")]))
    if view["problems"]:
        blocks.append(Block("list", items=[Cell(text, "bad") for text in view["problems"]]))
    if view["steps"]:
        rows = [[Cell(s["name"]), _code_cell(s["exit_code"]), Cell(_seconds(s["seconds"])), Cell(str(s["text"] or ""))] for s in view["steps"]]
        blocks += [Block("subheading", "Steps"), Block("table", columns=["step", "result", "seconds", "what"], rows=rows, right=frozenset({2}))]
    blocks += tested_blocks(view["tested"])
    blocks += failure_blocks(view["failures"])
    blocks += bench_blocks(view)
    if view["tune"]:
        blocks += tune_blocks(view["tune"])
    return blocks


def where_text(view: Mapping[str, Any]) -> str:
    """``emulator(8 ranks x 2 CTAs), on box (docker dev, H200)``; never nothing."""
    host = view["host"]
    machine = f"{host.get('system')} {host.get('machine')}, {host.get('cpus')} CPUs" if host.get("system") else ""
    text = ", ".join(view["where"]) or ("no GPU and no emulator (compiled only)" if view["kind"] == "build" else "a place that no record names")
    if view["remote"]:
        far = view["remote"]
        inside = [f"container {far['container']}" if far["container"] else "", ", ".join(dict.fromkeys(far["gpus"]))]
        extra = "; ".join(filter(None, inside))
        return f"{text}, through ssh on {far['target'] or far['host']}{f' ({extra})' if extra else ''}" + (f"; {machine}" if machine else "")
    return f"{text}; this is {machine}" if machine and not view["where"] else f"{text}; {machine}" if machine else text


def _code_cell(code: int | None) -> Cell:
    if code is None:
        return Cell("not run", "open")
    return Cell("pass", "good") if code == 0 else Cell(f"exit {code}", "open" if code in (5, 6) else "bad")


def tested_blocks(tested: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Phases, ranks and BLOCK_M down, tokens across: pass, or how many of how many."""
    if not tested:
        return []
    labels = list(dict.fromkeys(row["tokens"] for row in tested))
    labels.sort(key=lambda text: (not text.isdigit(), int(text) if text.isdigit() else 0))
    keys = list(dict.fromkeys((row["phase"], row["ranks"], row["block_m"], row["where"]) for row in tested))
    found = {(row["phase"], row["ranks"], row["block_m"], row["where"], row["tokens"]): row for row in tested}
    blocks = [Block("subheading", "Tested (tokens per rank across)")]
    for first in range(0, len(labels), TOKEN_COLUMNS):
        some = labels[first : first + TOKEN_COLUMNS]
        cells = {key: [_tested_cell(found.get((*key, label))) for label in some] for key in keys}
        rows = [[*(Cell(str(part)) for part in key), *cells[key]] for key in keys if any(cell.text for cell in cells[key])]
        blocks.append(Block("table", columns=["phase", "ranks", "BLOCK_M", "where", *some], rows=rows, right=frozenset({1, 2})))
    return blocks


def _tested_cell(row: Mapping[str, Any] | None) -> Cell:
    if row is None:
        return Cell("")
    if row["verdict"] == "pass":
        return Cell("pass" if row["cases"] == 1 else f"pass {row['cases']}", "good")
    count = "" if row["cases"] == 1 else f" {row['passed']}/{row['cases']}"
    return Cell(f"{row['verdict']}{count}", "open" if row["verdict"] == "not run" else "bad")


def failure_blocks(failures: Sequence[Mapping[str, str]]) -> list[Block]:
    if not failures:
        return []
    blocks = [Block("subheading", f"What did not pass ({len(failures)})")]
    for failure in failures[:SHOWN_FAILURES]:
        what = f"{failure['id']} on {failure['where'] or 'no place'}: {failure['text'][:400]}"
        blocks.append(Block("line", items=[Cell(f"{failure['status']} ", "bad"), Cell(what)]))
        if failure["repro"]:
            blocks.append(Block("code", failure["repro"]))
    if len(failures) > SHOWN_FAILURES:
        blocks.append(Block("line", items=[Cell(f"{len(failures) - SHOWN_FAILURES} more are in the record.")]))
    return blocks


def _us(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) and value == value else "-"


def bench_blocks(view: Mapping[str, Any]) -> list[Block]:
    """Times beside their floors, beside others, and beside the baseline."""
    blocks: list[Block] = []
    if view["bench"]:
        gated = any(row["gate"] for row in view["bench"])
        rivals = list(dict.fromkeys(rival["name"] for row in view["bench"] for rival in row["rivals"]))
        columns = ["shape", "tokens", "kernel us", "interval", "in a row", "floor us", "x floor", "bound by",
                   *(f"ours/{name}" for name in rivals), *(["against baseline"] if gated else []), "configuration"]
        rows = []
        for row in view["bench"]:
            ratio = f"{row['times_floor']:.2f}" if row["times_floor"] else "-"
            bound = {"weight": "weights", "tensor": "tensor cores"}.get(row["floor"], "-")
            cells = [Cell(text) for text in (row["shape"], str(row["tokens"]), _us(row["kernel_us"]), f"{_us(row['low_us'])} to {_us(row['high_us'])}",
                                             _us(row["in_a_row_us"]), _us(row["floor_us"]), ratio, bound)]
            cells += [_rival_cell(next((r for r in row["rivals"] if r["name"] == name), None)) for name in rivals]
            cells += [_gate_cell(row["gate"])] if gated else []
            rows.append([*cells, Cell(row["config"])])
        places = ", ".join(dict.fromkeys(row["where"] for row in view["bench"]))
        blocks += [Block("subheading", f"Times on {places or 'a place that no record names'}"),
                   Block("table", columns=columns, rows=rows, right=frozenset({1, 2, 4, 5, 6}))]  # fmt: skip
    if view["costs"]:
        rows = [[Cell(c["shape"]), Cell(str(c["tokens"])), Cell(str(c["ranks"])), Cell(_us(c["one"]["us"])), Cell(_us(c["many"]["us"])),
                 Cell(f"{c['ratio']['median']:.3f}", "good" if c["within"] else "bad"), Cell(f"{c['limit']:.2f}")] for c in view["costs"]]
        columns = ["shape", "tokens", "ranks", "1 rank us", "all us", "ratio", "limit"]
        blocks += [Block("subheading", "Cost of the protocol"), Block("table", columns=columns, rows=rows, right=frozenset(range(1, 7)))]
    if view["failed_contenders"]:
        blocks.append(Block("list", items=[Cell(f"{f['shape']} at {f['tokens']} tokens: {f['contender']}: {f['reason']}", "bad")
                                           for f in view["failed_contenders"]]))
    return blocks


def _rival_cell(rival: Mapping[str, Any] | None) -> Cell:
    if rival is None or rival["ratio"] is None:
        return Cell("-")
    reach = f", to reach {rival['to_reach']:.2f}" if rival["to_reach"] is not None else ""
    return Cell(f"{rival['ratio']:.3f} ({rival['verdict']}{reach})", {"met": "good", "behind": "bad"}.get(rival["verdict"] or "", ""))


def _gate_cell(gate: Mapping[str, Any] | None) -> Cell:
    if gate is None:
        return Cell("-")
    text = f"{gate['verdict']} {100 * (gate['ratio'] - 1):+.1f}% ({100 * (gate['low'] - 1):+.1f}% to {100 * (gate['high'] - 1):+.1f}%)"
    return Cell(text, {"slower": "bad", "unclear": "open"}.get(gate["verdict"], "good"))


def _accounts(accounts: Mapping[str, Any]) -> str:
    """As tune itself says it; a record of another version has other accounts, and these in its own words."""
    from megamoe_cli.report.tune_view import accounts_line

    try:
        return accounts_line(dict(accounts))
    except (KeyError, TypeError):
        return ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in accounts.items() if isinstance(value, int))


def tune_blocks(tune: Mapping[str, Any]) -> list[Block]:
    """The picks, what was held out, where every combination went."""
    stopped = f", stopped: {tune['stopped']}" if tune["stopped"] else ""
    sizes = f" for {tune['ranks']} ranks of {'x'.join(map(str, tune['shape']))}" if tune["shape"] else ""
    lines = [f"Search{sizes}: {tune['state']}{stopped}."]
    blocks = [Block("subheading", "Tuning")]
    if tune["picks"]:
        rows = [[Cell(str(p["tokens"])), Cell(p["config"]), Cell(f"{p['vs_incumbent']:.3f}" if p.get("vs_incumbent") else "-"),
                 Cell(f"{100 * p['noise']:.2f}%" if p.get("noise") is not None else "-")] for p in tune["picks"]]  # fmt: skip
        blocks.append(Block("table", columns=["tokens", "configuration", "x incumbent", "A/A noise"], rows=rows, right=frozenset({0, 2, 3})))
    if found := tune["validation"]:
        lines.append(f"Held out: {found['holdout']} sizes, worst slowdown {found['worst_slowdown']:.3f} (limit {found['max_slowdown']:.2f}), "
                     f"geomean {found['geomean']:.3f} of the incumbent's time.")
    if tune["accounts"]:
        lines.append(_accounts(tune["accounts"]))
    elif tune["trials"]:
        lines.append(f"{tune['trials'].get('measured', 0)} trials measured.")
    lines += [f"Note: {note}" for note in tune["notes"]] + ([f"Table: {tune['table']}"] if tune["table"] else [])
    return [*blocks, Block("list", items=[Cell(line) for line in lines])]
