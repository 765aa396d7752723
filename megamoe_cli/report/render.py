"""Blocks of a report (``page.py``) as text for a terminal, as Markdown, or as one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from megamoe_cli.report.page import Block, Cell

FORMATS = ("text", "md", "html")
_RICH = {"good": "green", "bad": "bold red", "open": "yellow"}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c1c1e;background:#fff}
h2{margin-top:2.5rem;border-top:1px solid #d0d0d5;padding-top:1rem}p{margin:.3rem 0}.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}th,td{padding:.2rem .7rem;border-bottom:1px solid #e2e2e6;text-align:left}
th{font-weight:600}.right{text-align:right}code,pre{font:13px ui-monospace,monospace;background:#f3f3f5;border-radius:4px;padding:.1rem .3rem}
pre{overflow-x:auto;padding:.5rem}.good{color:#146c2e}.bad{color:#b3261e;font-weight:600}.open{color:#7a5900}
@media(prefers-color-scheme:dark){body{color:#e6e6ea;background:#17171a}th,td,h2{border-color:#3a3a40}code,pre{background:#26262b}
.good{color:#6dd58c}.bad{color:#ff8a80}.open{color:#e6c45c}}"""


# ---- terminal ----


def print_text(console: Any, blocks: Sequence[Block]) -> None:
    """On a rich console, which knows colours and width."""
    from rich.text import Text

    def styled(cell: Cell) -> Text:
        return Text(cell.text, style=_RICH.get(cell.mood, ""))

    for block in blocks:
        if block.kind == "table":
            from megamoe_cli.report.tables import print_fitting

            print_fitting(console, _rich_table(block, styled))
        elif block.kind == "list":
            for item in block.items:
                console.print(Text("  ") + styled(item))
        elif block.kind == "line":
            console.print(Text("").join(styled(cell) for cell in block.items))
        elif block.kind == "code":
            console.print(Text(f"  {block.text}"), soft_wrap=True)
        else:
            console.print(Text(("" if block.kind == "title" else "\n") + block.text, style="" if block.kind == "subheading" else "bold"))


def _rich_table(block: Block, styled: Any) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(block.columns):
        table.add_column(column, justify="right" if number in block.right else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*map(styled, row))
    return table


# ---- Markdown ----


def markdown(blocks: Sequence[Block]) -> str:
    """Verdicts are words, so nothing is lost without colour."""
    return "\n".join(line for block in blocks for line in _markdown(block)).rstrip() + "\n"


def _markdown(block: Block) -> list[str]:
    if block.kind in ("title", "heading", "subheading"):
        return [f"{'#' * (('title', 'heading', 'subheading').index(block.kind) + 1)} {_md(Cell(block.text))}", ""]
    if block.kind == "table":
        rules = ["---:" if number in block.right else "---" for number in range(len(block.columns))]
        rows = [[_md(cell) for cell in row] for row in block.rows]
        return ["| " + " | ".join(row) + " |" for row in [[_md(Cell(c)) for c in block.columns], rules, *rows]] + [""]
    if block.kind == "list":
        return [*(f"- {_md(item)}" for item in block.items), ""]
    if block.kind == "code":
        return [f"    {block.text}", ""]
    return ["".join(_md(cell) for cell in block.items), ""]


def _md(cell: Cell) -> str:
    if cell.code:
        fence = "``" if "`" in cell.text else "`"
        pad = " " if "`" in cell.text else ""
        return f"{fence}{pad}{cell.text}{pad}{fence}".replace("|", "\\|").replace("\n", " ")
    text = cell.text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
    for sign in "*_`[":
        text = text.replace(sign, f"\\{sign}")
    return f"**{text.strip()}**{' ' if text.endswith(' ') else ''}" if cell.mood == "bad" and text.strip() else text


# ---- HTML ----


def page_html(blocks: Sequence[Block]) -> str:
    title = next((block.text for block in blocks if block.kind == "title"), "megamoe")
    body = "\n".join(_html(block) for block in blocks)
    return (f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
            f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n")


def _html(block: Block) -> str:
    if block.kind in ("title", "heading", "subheading"):
        level = ("title", "heading", "subheading").index(block.kind) + 1
        return f"<h{level}>{html.escape(block.text)}</h{level}>"
    if block.kind == "table":
        def cell(tag: str, number: int, inner: str) -> str:
            return f"<{tag}{' class=right' if number in block.right else ''}>{inner}</{tag}>"

        head = "".join(cell("th", n, html.escape(column)) for n, column in enumerate(block.columns))
        rows = "\n".join("<tr>" + "".join(cell("td", n, _span(c)) for n, c in enumerate(row)) + "</tr>" for row in block.rows)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'
    if block.kind == "list":
        return "<ul>" + "".join(f"<li>{_span(item)}</li>" for item in block.items) + "</ul>"
    if block.kind == "code":
        return f"<pre>{html.escape(block.text)}</pre>"
    return "<p>" + "".join(_span(item) for item in block.items) + "</p>"


def _span(cell: Cell) -> str:
    text = html.escape(cell.text)
    if cell.code:
        text = f"<code>{text}</code>"
    return f'<span class="{cell.mood}">{text}</span>' if cell.mood else text
