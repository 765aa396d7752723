"""What every command shares: output conventions (data on stdout, messages on stderr), ``--json``, settings.

A command gets it with ``@click.pass_obj`` (``app: App``). Nothing here imports rich before something is printed with it.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from megamoe_cli.settings import Settings, Value

if TYPE_CHECKING:
    from megamoe_cli.devlog.journal import Run


@dataclass
class App:
    """Global options after parsing. ``verbosity``: -1 quiet, 0 normal, 1+ verbose."""

    settings: Settings = field(default_factory=Settings)
    json: bool = False
    verbosity: int = 0
    color: str = "auto"
    run: Run | None = None  # set by a command that really runs something: then the journal gets a line

    def started(self, kind: str, results_dir: str | Path | None = None) -> None:
        """From here on the command runs something: when it ends, the journal beside the run records gets a line."""
        from megamoe_cli import paths
        from megamoe_cli.devlog.journal import Run

        self.run = Run(kind, Path(results_dir or self.settings.get("results_dir") or paths.results_dir()))

    def evidence(self, **facts: Any) -> None:
        """Facts for that line. ``record``: path of a run record; there may be several."""
        if self.run is not None:
            if "record" in facts:
                self.run.facts.setdefault("records", []).append(facts.pop("record"))
            self.run.facts.update(facts)

    def wants_color(self, stream: TextIO) -> bool:
        """--color wins; then NO_COLOR (any value but empty); then whether the stream is a terminal."""
        if self.color != "auto":
            return self.color == "always"
        if os.environ.get("NO_COLOR"):
            return False
        return bool(getattr(stream, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"

    def console(self, stderr: bool = False) -> Any:
        """A rich Console for stdout or stderr that follows --color, NO_COLOR and non-terminals."""
        from rich.console import Console

        class PlainPipes(Console):
            def on_broken_pipe(self) -> None:
                # rich itself would exit with 1 here, which says "wrong result"; main knows the code for this.
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        stream = sys.stderr if stderr else sys.stdout
        color = self.wants_color(stream)
        tty = bool(getattr(stream, "isatty", lambda: False)())
        # Off a terminal rich would fold tables at 80 columns; a log or a pipe has no width.
        width = None if tty else int(os.environ.get("COLUMNS") or 160)
        return PlainPipes(file=stream, force_terminal=color or None, no_color=not color, width=width,
                          highlight=False, soft_wrap=not tty, legacy_windows=False)

    def is_tty(self) -> bool:
        """Live progress is drawn on stderr, so that is the stream that counts."""
        return bool(getattr(sys.stderr, "isatty", lambda: False)()) and os.environ.get("TERM") != "dumb"

    def say(self, message: str) -> None:
        """A progress or status message (stderr); not with -q."""
        if self.verbosity >= 0:
            click.echo(message, err=True)

    def detail(self, message: str) -> None:
        """A message for -v only."""
        if self.verbosity > 0:
            click.echo(message, err=True)

    def warn(self, message: str) -> None:
        """A warning is shown even with -q."""
        click.echo(f"warning: {message}", err=True)

    def emit(self, document: Any) -> None:
        """The --json answer: one document on stdout."""
        click.echo(json.dumps(document, indent=2, sort_keys=False, default=str))

    def origins(self, ctx: click.Context) -> dict[str, Value]:
        """Value and origin of every parameter of the running command."""
        from click.core import ParameterSource

        out: dict[str, Value] = {}
        for name, value in ctx.params.items():
            source = ctx.get_parameter_source(name)
            if source == ParameterSource.COMMANDLINE:
                origin = "flag"
            elif source == ParameterSource.DEFAULT_MAP:
                origin = self.settings.origin(name)
            else:
                origin = "default"
            out[name] = Value(value, origin)
        return out


def verbosity_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``-q`` and ``-v`` to a command, with the meaning they have before it. Sets ``app.verbosity``."""

    def quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(App).verbosity = -1

    def verbose(ctx: click.Context, param: click.Parameter, value: int) -> None:
        if value:
            ctx.ensure_object(App).verbosity = value

    function = click.option("-v", "--verbose", count=True, expose_value=False, callback=verbose,
                            help="More messages; tracebacks.")(function)
    return click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=quiet,
                        help="Only results, warnings and errors.")(function)


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--json`` to a command: ``megamoe test --json`` means the same as ``megamoe --json test``.

    Sets ``app.json``; the command function gets no extra argument.
    """

    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(App).json = True

    return click.option("--json", "json_", is_flag=True, expose_value=False, callback=callback,
                        help="Print one JSON document on stdout.")(function)


def reserve_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--reserve-sms``. The command gets it as ``reserve_sms``."""
    return click.option("--reserve-sms", type=click.IntRange(0), default=0, show_default=True, metavar="N",
                        help="SMs of each GPU that the grid leaves free, so that a kernel beside it cannot hang it.")(function)


def table_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``--table``: where a configuration comes from when none is given. The command gets it as ``table``."""
    return click.option("--table", default="auto", show_default=True, metavar="auto|none|FILE",
                        help="Heuristic table that picks the configuration for the running GPU when none is given.")(function)
