"""What a tuning run shows while it runs: one moving block on a terminal, plain lines elsewhere, nothing with -q."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.tuning.journal import Trial
    from megamoe_cli.tuning.plan import Plan

HEARTBEAT_S = 30.0
SHOWN_SIZES = 16


class TuneView:
    """A context manager; hears ``stage``, ``trial``, ``built`` and ``note``. ``expected``: trials that the plan foresees."""

    def __init__(self, app: App, plan: Plan, expected: int, budget_s: float | None = None) -> None:
        self.app, self.plan, self.expected, self.budget_s = app, plan, expected, budget_s
        self.began = time.monotonic()
        self.done = self.replayed = 0
        self.spent = 0.0
        self.refused: dict[str, int] = {}
        self.best: dict[int, tuple[float, float, float, str, str]] = {}  # tokens -> ratio, low, high, name, stage
        self.stage_text = "starting"
        self.live: Any = None
        self._last_line = time.monotonic()

    def __enter__(self) -> TuneView:
        if self.app.verbosity >= 0 and self.app.is_tty():
            from rich.live import Live

            self.live = Live(get_renderable=self._draw, console=self.app.console(stderr=True), refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    # -- what the run tells ----------------------------------------------------------------------

    def stage(self, text: str) -> None:
        self.stage_text = text
        if self.live is None:
            self._line(f"{self._progress()}  {text}")

    def note(self, text: str) -> None:
        self._line(text)

    def built(self, outcome: Any, done: int, total: int) -> None:
        """A kernel was compiled (or was there)."""
        self.stage_text = f"compiled {done} of {total} kernels"
        if outcome.error is not None:
            self._line(f"not built: {outcome.request.config.name()}: {' '.join(str(outcome.error).split())}")
        elif self.live is None and not outcome.kernel.hit:
            self._line(f"[{done}/{total}] compiled {outcome.request.config.name()} in {outcome.kernel.seconds:.1f} s")

    def trial(self, trial: Trial, replayed: bool) -> None:
        from megamoe_cli.tuning.paired import ratio
        from megamoe_cli.tuning.schema import Choice

        self.done += 1
        self.replayed += replayed
        self.spent += 0.0 if replayed else trial.seconds
        name = Choice.from_dict(trial.a).name()
        if not trial.ok:
            self.refused[trial.status] = self.refused.get(trial.status, 0) + 1
            if not replayed:
                self._line(f"{trial.status}: {name} at {trial.tokens} tokens: {trial.message}")
        elif trial.a != trial.b and trial.stage in ("final", "final-more", "confirm", "confirm-more"):
            found = ratio(trial.pairs)
            if trial.tokens not in self.best or found.median < self.best[trial.tokens][0] or self.best[trial.tokens][3] == name:
                self.best[trial.tokens] = (found.median, found.low, found.high, name, trial.stage)
        if self.live is None and not replayed and time.monotonic() - self._last_line >= HEARTBEAT_S:
            self._line(f"{self._progress()}  {self.stage_text}")

    # -- drawing ---------------------------------------------------------------------------------

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        if self.live is not None:
            from rich.text import Text

            self.live.console.print(Text(text))
        else:
            self.app.say(text)

    def _progress(self) -> str:
        elapsed = time.monotonic() - self.began
        text = f"[{self.done}/~{max(self.expected, self.done)} trials, {_clock(elapsed)}"
        measured = self.done - self.replayed
        if measured and self.done < self.expected:
            eta = self.spent / measured * (self.expected - self.done)
            if self.budget_s is not None:
                eta = min(eta, max(0.0, self.budget_s - elapsed))
            text += f", {_clock(eta)} left"
        elif self.budget_s is not None:
            text += f" of {_clock(self.budget_s)}"
        return text + "]"

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        parts: list[Any] = [Text(f"{self._progress()}  {self.stage_text}", no_wrap=True, overflow="ellipsis")]
        if self.refused:
            parts.append(Text("refused: " + ", ".join(f"{count} {status}" for status, count in self.refused.items()), style="yellow"))
        if self.best:
            table = Table(box=None, pad_edge=False)
            for column, justify in (("tokens", "right"), ("best so far", "left"), ("x incumbent", "right"), ("interval", "left")):
                table.add_column(column, justify=justify)  # type: ignore[arg-type]
            for tokens in sorted(self.best)[:SHOWN_SIZES]:
                median, low, high, name, _ = self.best[tokens]
                table.add_row(str(tokens), name, f"{median:.3f}", f"{low:.3f}-{high:.3f}")
            parts.append(table)
        return Group(*parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0)), 60)
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def print_result(app: App, summary: dict[str, Any], plan: Plan) -> None:
    """The picks by size, what was validated, where every combination went."""
    import click
    from rich import box
    from rich.table import Table

    console = app.console()
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, justify in (("tokens", "right"), ("configuration", "left"), ("x incumbent", "right"), ("A/A noise", "right")):
        grid.add_column(column, justify=justify)  # type: ignore[arg-type]
    for pick in summary["picks"]:
        noise = summary["noise"].get(str(pick["tokens"]))
        ratio = "incumbent" if pick["config"] == plan.incumbent(pick["tokens"]).name() else f"{pick['vs_incumbent']:.3f}"
        grid.add_row(str(pick["tokens"]), pick["config"], ratio, f"{100 * noise:.2f}%" if noise is not None else "")
    console.print(grid)
    gain = summary["gain"]
    if gain:
        slower = f"slower beyond noise at {', '.join(map(str, gain['slower']))} tokens" if gain["slower"] else "nowhere slower beyond noise"
        click.echo(f"picks: {gain['geomean']:.3f} of the time of {gain['over']} (geomean of {gain['sizes']} sizes, best {gain['best']:.3f}, "
                   f"worst {gain['worst']:.3f}), {slower}")
    found = summary["validation"]
    if found:
        click.echo(f"held out: {found['holdout']} sizes, worst slowdown {found['worst_slowdown']:.3f} (limit {found['max_slowdown']:.2f}), "
                   f"geomean {found['geomean']:.3f} of the incumbent's time")
    click.echo(accounts_line(summary["accounts"]))


def accounts_line(accounts: dict[str, Any]) -> str:
    """Every generated combination in one line; the parts add up."""
    parts = [f"{accounts['measured']} measured"]
    if accounts["not_reached"]:
        parts.append(f"{accounts['not_reached']} not reached")
    if accounts["outranked"]:
        parts.append(f"{accounts['outranked']} launch variants of kernels that lost")
    if accounts["barred"]:
        parts.append(f"{accounts['barred']} barred")
    parts += [f"{count} {status}" for status, count in accounts["failed"].items()]
    if accounts["same"]:
        parts.append(f"{accounts['same']} the same as another")
    parts += [f"{count} refused ({rule})" for rule, count in accounts["refused"].items()]
    return f"{accounts['generated']} combinations: " + ", ".join(parts)
