"""Tables of ``megamoe build``. Rich is imported here only, when something is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.compile.driver import Outcome
    from megamoe_cli.config import KernelConfig


def print_build(app: App, outcomes: list[Outcome], seconds: float) -> None:
    """One row per variant. Registers and spills are the compiler's, planned registers the configuration's."""
    from megamoe_cli.report.tables import print_fitting

    built = [o.kernel for o in outcomes if o.kernel]
    title = f"{built[0].config.name()} ({built[0].manifest['compiler']})" if built else None
    print_fitting(app.console(), _table(outcomes, title, narrow=False), _table(outcomes, title, narrow=True))
    for outcome in outcomes:
        if outcome.kernel:
            _print_notes(app, outcome)
    hits = sum(kernel.hit for kernel in built)
    app.say(f"{len(built)} of {len(outcomes)} built in {seconds:.2f} s ({hits} from the cache)")


_COLUMNS = (("target", "left"), ("phase", "left"), ("registers", "right"), ("spills B", "right"), ("planned registers", "left"),
            ("stack B", "right"), ("shared B", "right"), ("seconds", "right"), ("cache", "left"), ("state", "left"))  # fmt: skip
_SHORT = {"registers": "regs", "spills B": "spills", "stack B": "stack", "shared B": "shared"}  # bytes, as the wide table says


def _table(outcomes: list[Outcome], title: str | None, narrow: bool) -> Any:
    """``narrow``: fits 80 columns; the planned registers, which are the configuration's, go below it."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD if narrow else box.HEAVY_HEAD,
                  pad_edge=not narrow, caption_justify="left", caption_style="")  # fmt: skip
    shown = [(n, c) for n, c in enumerate(_COLUMNS) if not (narrow and c[0] == "planned registers")]
    for _, (name, justify) in shown:
        table.add_column(_SHORT.get(name, name) if narrow else name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    plans = []
    for outcome in outcomes:
        cells = _cells(outcome)
        plans.append(cells[4])
        table.add_row(*(cells[n] for n, _ in shown))
    if narrow:
        table.caption = "planned registers: " + "; ".join(dict.fromkeys(plan for plan in plans if plan != "-"))
    return table


def _cells(outcome: Outcome) -> list[str]:
    kernel, request = outcome.kernel, outcome.request
    target = f"{request.target} {request.flavour}" if request.flavour != "plain" else request.target
    if kernel is None:
        return [target, request.phase, *["-"] * 7, "[red]failed[/]"]
    found = kernel.resources
    spills = f"{found.spill_stores}+{found.spill_loads}" if found and found.spills else "0" if found else "-"
    plan = " ".join(f"{name} {registers}" for name, registers in zip(("dispatch", "tma", "math"), kernel.config.register_plan()))
    return [target, request.phase, str(found.registers) if found else "-", spills, plan, str(found.stack) if found else "-",
            str(kernel.smem_bytes) if kernel.smem_bytes is not None else "-", f"{kernel.seconds:.2f}",
            "hit" if kernel.hit else "miss", "[red]unfit[/]" if outcome.error else "[green]ok[/]"]


def _print_notes(app: App, outcome: Outcome) -> None:
    kernel = outcome.kernel
    assert kernel is not None
    app.detail(f"{kernel.phase}: {kernel.path}")
    if kernel.resources is None:
        return
    for kind in ("setmaxnreg", "serialized", "warning"):
        for text in dict.fromkeys(f"{note.code} {note.text}".strip() for note in kernel.resources.of_kind(kind)):
            app.warn(f"{kernel.phase}: {text}")
    for note in kernel.resources.of_kind("injected-wait"):
        app.detail(f"{kernel.phase}: {note.code} {note.text}")


def print_explain(app: App, config: KernelConfig, warps: list[dict[str, Any]], totals: dict[str, Any]) -> None:
    """Warp -> warpgroup -> role -> registers, with what the plan asks for and what the launch owns."""
    from rich.table import Table

    table = Table(title=config.name(), title_justify="left", title_style="")
    for name in ("warp", "warpgroup", "role", "registers/thread", "registers"):
        table.add_column(name, justify="left" if name == "role" else "right")
    group = None
    for row in warps:
        if group is not None and row["warpgroup"] != group:
            table.add_section()
        group = row["warpgroup"]
        table.add_row(str(row["warp"]), str(group), row["role"], str(row["registers"]), str(32 * row["registers"]))
    table.add_section()
    table.add_row("", "", "planned", "", str(totals["planned"]))
    table.add_row("", "", f"owned: {totals['threads']} threads", str(totals["launch_registers"]), str(totals["owned"]))
    table.add_row("", "", "left", "", str(totals["owned"] - totals["planned"]))
    console = app.console()
    console.print(table)
    console.print(f"tile {config.block_m}x{config.block_n}x{config.block_k}, {config.stages} stages, {totals['smem_bytes']} bytes of shared "
                  f"memory; {config.columns_per_warpgroup} columns per math warpgroup, {config.accumulators} accumulators per math thread")
