"""``megamoe remote``: the other commands, on another machine. The logic is in ``megamoe_cli/remote``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from megamoe_cli.cli.app import App, json_option
from megamoe_cli.errors import UsageError
from megamoe_cli.remote.targets import Target, check_env_name, pick

_KEY = "megamoe.remote"
_PASSED = {
    "build": "Send the sources and cubins built here; look at them there.",
    "test": "Prove the phases right there.",
    "tune": "Search there, in the background; results come back when it is attached to.",
    "bench": "Time the kernel there.",
    "ci": "Build, test and gate there.",
    "trace": "Count the kernel's cycles there.",
}


@dataclass
class Options:
    """What the group's options said; the same options after the command win."""

    on: str | None = None
    dry_run: bool = False
    detach: bool = False
    wait_s: float = 0.0
    remote_compiler: bool = False
    given: dict[str, Any] | None = None

    def target(self, app: App) -> Target:
        return pick(app.settings.remotes, self.on, app.settings.default_remote, **(self.given or {}))


def _seconds(ctx: click.Context, param: click.Parameter, value: str | None) -> float:
    """30, 30s, 5m, 2h."""
    if value is None:
        return 0.0
    units = {"s": 1, "m": 60, "h": 3600}
    number, factor = (value[:-1], units[value[-1]]) if value[-1:] in units else (value, 1)
    try:
        seconds = float(number) * factor
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise click.BadParameter(f"{value!r} is no duration such as 30s or 5m")
    return seconds


def common_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that may stand before or after the command."""
    for option in reversed([
        click.option("--on", metavar="NAME", help="Target from the settings (default: remote.default, or the only one)."),
        click.option("--host", metavar="HOST", help="The machine, as ssh knows it."),
        click.option("-n", "--dry-run", is_flag=True, help="Print the exact command lines; run nothing."),
        click.option("--detach", is_flag=True, help="Run in the background there; see attach, status, cancel."),
        click.option("--wait", "wait_s", metavar="TIME", callback=_seconds, help="Wait so long for a box that is taken: 30s, 5m."),
        click.option("--remote-compiler", is_flag=True, help="Compile there; send no cubins built here."),
    ]):  # fmt: skip
        function = option(function)
    return function


@click.group("remote", context_settings={"help_option_names": ["-h", "--help"]})
@common_options
@click.option("--container", metavar="KIND:NAME", help="docker:NAME, podman:NAME, or none.")
@click.option("--path", metavar="DIR", help="Folder of ours on the host.")
@click.option("--python", metavar="PROGRAM", help="Python there, in the container if there is one.")
@click.option("--gpus", metavar="LIST", help="all, none, or indices: 0,1.")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable of the command there; repeatable.")
@click.option("--timeout", "limit", metavar="S", help="Seconds of one remote command, start to end [default: 60].")
@click.pass_context
def remote_command(ctx: click.Context, on: str | None, host: str | None, dry_run: bool, detach: bool, wait_s: float,
                   remote_compiler: bool, container: str | None, path: str | None, python: str | None, gpus: str | None,
                   variables: tuple[str, ...], limit: str | None) -> None:  # fmt: skip
    """Run build, test, bench, tune on another machine, through ssh and rsync; leave nothing behind there.

    \b
    megamoe remote test --ranks 8
    megamoe remote --on box --gpus 0,1 bench --shape flash
    megamoe remote -n test --ranks 8        # the exact command lines
    """
    env = {}
    for item in variables:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--env takes NAME=VALUE, not {item!r}", rule="remote-target")
        env[check_env_name(name, "--env")] = value
    given = {"host": host, "container": container, "path": path, "python": python, "gpus": gpus, "env": env, "timeout": limit}
    _end_on_hangup(ctx)
    ctx.meta[_KEY] = Options(on, dry_run, detach, wait_s, remote_compiler, given)


def _end_on_hangup(ctx: click.Context) -> None:
    """SIGHUP (a closed terminal) ends us as SIGTERM does, so that ssh and rsync are ended too; nohup keeps its meaning."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:
        return
    signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    ctx.call_on_close(lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))


def options_of(ctx: click.Context, values: dict[str, Any]) -> Options:
    """The group's options with those after the command on top; takes its own out of ``values``."""
    options: Options = ctx.meta[_KEY]
    for name in ("on", "dry_run", "detach", "wait_s", "remote_compiler"):
        value = values.pop(name, None)
        if value:
            setattr(options, name, value)
    if host := values.pop("host", None):
        options.given = {**(options.given or {}), "host": host}
    return options


def _passed(name: str, text: str) -> None:
    @remote_command.command(name, help=f"{text}\n\nARGS are those of `megamoe {name}`.",
                            context_settings={"ignore_unknown_options": True})
    @common_options
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @click.pass_context
    def command(ctx: click.Context, args: tuple[str, ...], slices: bool = False, **values: Any) -> int:
        from megamoe_cli.remote.flow import run_command

        app, options = ctx.obj, options_of(ctx, values)
        if slices and options.detach:
            raise UsageError("--slices and --detach exclude each other", rule="remote-slices")
        # a search does not fit into the limit of one command: in the background, or in slices
        return run_command(app, options, name, args, background=options.detach or name == "tune" and not slices, slices=slices)

    if name == "tune":
        click.option("--slices", is_flag=True, help="In the foreground, in slices that each keep the limit of one command; "
                     "the box is free in between.")(command)


for _name, _text in _PASSED.items():
    _passed(_name, _text)


@remote_command.command("shell", context_settings={"ignore_unknown_options": True})
@common_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def shell_command(ctx: click.Context, words: tuple[str, ...], **values: Any) -> int:
    """A shell there, in the tree (takes no lock); or COMMAND as a job, with lock and limits."""
    from megamoe_cli.remote.flow import run_shell

    return run_shell(ctx.obj, options_of(ctx, values), words)


@remote_command.command("attach")
@common_options
@click.argument("job", required=False)
@click.pass_context
def attach_command(ctx: click.Context, job: str | None, **values: Any) -> int:
    """Follow a background job (default: the latest); when it has ended, fetch its results. Ctrl-C only lets go."""
    from megamoe_cli.remote.flow import attach

    return attach(ctx.obj, options_of(ctx, values), job)


@remote_command.command("status")
@common_options
@click.option("--all", "everything", is_flag=True, help="Every job that ended, not the latest alone.")
@json_option
@click.pass_context
def status_command(ctx: click.Context, everything: bool, **values: Any) -> int:
    """Who holds the box, and the jobs of this checkout there."""
    from megamoe_cli.remote.flow import status

    return status(ctx.obj, options_of(ctx, values), everything)


@remote_command.command("cancel")
@common_options
@click.argument("job")
@click.pass_context
def cancel_command(ctx: click.Context, job: str, **values: Any) -> int:
    """End a background job and everything it started."""
    from megamoe_cli.remote.flow import cancel

    return cancel(ctx.obj, options_of(ctx, values), job)


@remote_command.command("reap")
@common_options
@click.option("--all", "everything", is_flag=True, help="Background jobs too.")
@json_option
@click.pass_context
def reap_command(ctx: click.Context, everything: bool, **values: Any) -> int:
    """End whatever an earlier run of this checkout left there."""
    from megamoe_cli.remote.flow import reap

    return reap(ctx.obj, options_of(ctx, values), everything)
