"""``megamoe``: the command group, global options, and the one place where errors become exit codes.

Commands are loaded only when they are run, so that ``megamoe --help`` needs click and nothing else.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from megamoe_cli import __version__
from megamoe_cli.cli.app import App
from megamoe_cli.errors import CACHE_HINT, ExitCode, MegamoeError
from megamoe_cli.settings import COLORS, Settings, nearest

# name -> (module, attribute, one line of help). The line is here so that listing commands imports none of them.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "build": ("megamoe_cli.cli.build_cmd", "build_command", "Compile the kernel's phases; show registers and spills."),
    "test": ("megamoe_cli.cli.test_cmd", "test_command", "Prove the phases right on N ranks, on a GPU or the emulator."),
    "bench": ("megamoe_cli.cli.bench_cmd", "bench_command", "Time the kernel on one GPU beside its floors."),
    "trace": ("megamoe_cli.cli.trace_cmd", "trace_command", "Count where the kernel's cycles go, on one GPU."),
    "tune": ("megamoe_cli.cli.tune_cmd", "tune_command", "Find the fastest configuration for each load; write a table."),
    "table": ("megamoe_cli.cli.table_cmd", "table_command", "Look into heuristic tables: which configuration, and why."),
    "report": ("megamoe_cli.cli.report_cmd", "report_command", "Show run records: what ran where, what passed, how fast."),
    "remote": ("megamoe_cli.cli.remote_cmd", "remote_command", "Do it on another machine, through ssh; leave nothing there."),
    "ci": ("megamoe_cli.cli.ci_cmd", "ci_command", "Build, test on 1, 2 and 8 ranks, maybe gate times; one verdict."),
    "log": ("megamoe_cli.cli.log_cmd", "log_command", "Write, show and check entries of the development log."),
    "fuzz": ("megamoe_cli.cli.fuzz_cmd", "fuzz_command", "Random legal cases on the emulator, for a while."),
    "doctor": ("megamoe_cli.cli.doctor_cmd", "doctor_command", "Say what this machine can run, and what it lacks."),
}


# What a full or read-only disk, or a folder that is not ours, says: the machine's fault, not ours.
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class Terminated(BaseException):
    """SIGTERM as an exception, so that ``finally`` blocks end child processes."""


class ReaderGone(BaseException):
    """A broken pipe, in a form that click passes on: it answers BrokenPipeError with SystemExit(1), whatever it is told
    about exits, and 1 means a wrong result here."""


class LazyGroup(click.Group):
    """A group whose commands are imported on use. A command whose module is not there is not listed."""

    def make_context(self, *args: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*args, **more)
        except BrokenPipeError:
            raise ReaderGone from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise ReaderGone from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, (module, _, _) in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        module, attribute, _ = COMMANDS[name]
        return getattr(importlib.import_module(module), attribute)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, COMMANDS[name][2]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def version_text() -> str:
    """Version and digest of the kernel sources: the two things that say which kernel a result belongs to."""
    from megamoe_cli.paths import kernel_source_digest

    return f"megamoe {__version__} (kernel sources {kernel_source_digest()})"


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(version_text())
        ctx.exit()


@click.group(cls=LazyGroup, no_args_is_help=False, invoke_without_command=True,
             context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--config-file", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
              help="Read settings from this TOML file only.")
@click.option("--no-config", is_flag=True, help="Read no settings file.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON document on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="Only results, warnings and errors.")
@click.option("-v", "--verbose", count=True, help="More messages; tracebacks.")
@click.option("--color", type=click.Choice(COLORS), default=None, help="Colour output (default: on a terminal).")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Version and kernel source digest.")
@click.pass_context
def cli(ctx: click.Context, config_file: Path | None, no_config: bool, json_: bool, quiet: bool, verbose: int,
        color: str | None) -> None:
    """Build, test and tune the SM90 FP8 MoE mega kernel; on any machine, with a GPU or without."""
    if config_file is not None and no_config:
        raise click.UsageError("--config-file and --no-config exclude each other")
    app = ctx.ensure_object(App)
    app.json = app.json or json_
    app.verbosity = -1 if quiet else verbose
    app.color = color or app.color
    app.settings = Settings.load(config_file, use_files=not no_config)
    app.color = color or app.settings.get("color", "auto")
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(ExitCode.USAGE)
    command = cli.get_command(ctx, ctx.invoked_subcommand)
    if command is not None:
        # click resolves the command before this runs, and reads the map after it.
        given = app.settings.default_map(p.name for p in command.params)
        repeated = {p.name for p in command.params if getattr(p, "multiple", False)}
        ctx.default_map = {ctx.invoked_subcommand: {k: [v] if k in repeated else v for k, v in given.items()}}


def _raise_terminated(signum: int, frame: Any) -> NoReturn:
    raise Terminated


def _in_cache(error: OSError) -> bool:
    """Is it about a file in the user's cache?"""
    from megamoe_cli.paths import cache_dir

    name = error.filename
    return isinstance(name, (str, os.PathLike)) and Path(name).is_relative_to(cache_dir())


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _report(app: App, message: str, code: int, hint: str | None = None, rule: str | None = None) -> int:
    """One line on stderr, the hint on a second; with --json also a document on stdout."""
    message, hint = _one_line(message), _one_line(hint) if hint else None
    click.echo(f"error: {message}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    if app.json:
        app.emit({"schema": "megamoe.error/1", "error": message, "hint": hint, "rule": rule, "exit_code": int(code)})
    return int(code)


def _quiet_broken_streams() -> None:
    """A stream whose reader went away is pointed at /dev/null, or the interpreter would fail on it once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()


def _open_closed_streams() -> None:
    """Standard streams that the caller closed (``>&-``) become /dev/null. Otherwise the next file that is opened would
    get the number of the stream, and everything printed would land in it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code; every way out of the program passes here."""
    app = App()
    try:
        code = _main(list(sys.argv[1:] if args is None else args), app)
    except BrokenPipeError:  # while an error was being reported
        _quiet_broken_streams()
        code = 128 + signal.SIGPIPE
    if app.run is not None:
        from megamoe_cli.devlog import journal

        try:
            journal.finish(app.run, code)
        except OSError as error:
            app.warn(f"the journal in {app.run.results_dir} did not get its line: {error.strerror or error}")
    return code


def _main(arguments: list[str], app: App) -> int:
    # Errors of parsing come before the options are known; what was asked for is visible all the same.
    app.json = "--json" in arguments
    previous = None
    try:
        previous = signal.signal(signal.SIGTERM, _raise_terminated)
    except ValueError:
        pass  # not the main thread: signals stay as they are
    try:
        result = cli.main(args=arguments, prog_name="megamoe", standalone_mode=False, obj=app)
        return int(result) if isinstance(result, int) else ExitCode.DONE
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 and newer: a group without a command
            click.echo(error.format_message())  # the help, as for megamoe itself
            return ExitCode.USAGE
        command = error.ctx.command_path if error.ctx else "megamoe"
        return _report(app, error.format_message(), ExitCode.USAGE, hint=f"see '{command} --help'")
    except click.ClickException as error:
        return _report(app, error.format_message(), ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return ExitCode.INTERRUPTED
    except Terminated:
        click.echo("terminated", err=True)
        return ExitCode.TERMINATED
    except MegamoeError as error:
        if app.verbosity > 1:
            traceback.print_exc()
        log = getattr(error, "log", "")
        if log and app.verbosity > 0:
            click.echo(log, err=True)
        return _report(app, str(error), error.exit_code, error.hint, getattr(error, "rule", None))
    except (ReaderGone, BrokenPipeError):
        # The reader went away (such as `| head`): nothing more can be said there, and it is no fault of ours.
        _quiet_broken_streams()
        return 128 + signal.SIGPIPE
    except Exception as error:
        if isinstance(error, OSError) and (error.errno in _DISK or _in_cache(error)):
            return _report(app, f"{error.filename or 'a file'} cannot be written: {error.strerror}", ExitCode.ENVIRONMENT,
                           hint=CACHE_HINT if _in_cache(error) else None)
        if app.verbosity > 0:
            traceback.print_exc()
        return _report(app, f"internal: {type(error).__name__}: {error}", ExitCode.BUG,
                       hint=None if app.verbosity > 0 else "run again with -v for the traceback; this is our bug")
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def run() -> NoReturn:
    """Console-script entry point."""
    _open_closed_streams()
    code = main()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE
    except OSError:  # a full disk behind stdout; said already, or the answer is incomplete
        code = code or ExitCode.ENVIRONMENT
    _quiet_broken_streams()
    sys.exit(int(code))
