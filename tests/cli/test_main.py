"""The command group: start-up cost, global options, and every way out of the program."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from megamoe_cli import __version__, paths
from megamoe_cli.cli import main as main_module
from megamoe_cli.cli.app import App
from megamoe_cli.errors import BuildFailed, EnvironmentUnfit, TimedOut, UsageError, WrongResult

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "cupy", "rich", "numpy", "yaml")


@pytest.fixture
def command(monkeypatch):
    """Registers a command ``probe`` whose body the test supplies; ``build`` is the name that is taken over."""

    def register(body, *decorators):
        function = click.pass_context(body)
        for decorator in decorators:
            function = decorator(function)
        probe = click.command("probe")(function)
        monkeypatch.setattr(main_module.LazyGroup, "list_commands", lambda self, ctx: ["probe"])
        monkeypatch.setattr(main_module.LazyGroup, "get_command", lambda self, ctx, name: probe if name == "probe" else None)
        monkeypatch.setitem(main_module.COMMANDS, "probe", ("", "", "A command for tests."))

    return register


def test_help_lists_only_commands_that_exist(megamoe) -> None:
    answer = megamoe("--help")
    assert answer.code == 0
    listed = set(re.findall(r"^  (\w+)  ", answer.out.partition("Commands:")[2], re.MULTILINE))
    cli_folder = ROOT / "megamoe_cli" / "cli"
    assert listed == {name for name in main_module.COMMANDS if (cli_folder / f"{name}_cmd.py").is_file()}
    assert "test" in listed


def test_help_imports_nothing_heavy_and_is_fast(megamoe_process) -> None:
    code = ("import sys; from megamoe_cli.cli.main import main; rc = main(['--help'])\n"
            f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules]); sys.exit(rc)")
    answer = megamoe_process(code=code)
    assert (answer.code, answer.out.rpartition("HEAVY ")[2].strip()) == (0, "[]")
    took = []
    for _ in range(3):  # processor time: on a busy machine the wall clock says more about the neighbours
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert megamoe_process("--help").code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3, took


def test_test_help_imports_no_torch(megamoe_process) -> None:
    code = ("import sys; from megamoe_cli.cli.main import main; rc = main(['test', '--help'])\n"
            "print('HEAVY', [m for m in ('torch', 'cupy') if m in sys.modules]); sys.exit(rc)")
    assert megamoe_process(code=code).out.rpartition("HEAVY ")[2].strip() == "[]"


def test_version_names_the_kernel_sources(megamoe, tmp_path, monkeypatch) -> None:
    answer = megamoe("--version")
    assert (answer.code, answer.out) == (0, f"megamoe {__version__} (kernel sources {paths.kernel_source_digest()})\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cuh").write_text("one")
    monkeypatch.setattr(paths, "kernels_dir", lambda: tmp_path / "kernels")
    first = megamoe("--version").out
    (tmp_path / "kernels" / "a.cuh").write_text("two")
    assert megamoe("--version").out != first != answer.out


def test_no_command_shows_help_and_is_a_usage_error(megamoe) -> None:
    answer = megamoe()
    assert answer.code == 2 and "Usage: megamoe" in answer.out + answer.err


@pytest.mark.parametrize("args, words", [
    (("tset",), ("'tset'", "'test'")),
    (("--bogus",), ("--bogus",)),
    (("test", "--bogus"), ("--bogus",)),
    (("test", "--seed", "x"), ("--seed", "x")),
    (("--color", "blue", "test"), ("blue", "always")),
    (("--config-file", "a", "--no-config", "test"), ("--no-config",)),
    (("--config-file", "missing.toml", "test"), ("missing.toml",)),
])
def test_usage_errors_are_one_line_and_exit_2(megamoe, args, words) -> None:
    answer = megamoe(*args)
    lines = answer.err.splitlines()
    assert answer.code == 2 and answer.out == ""
    assert lines[0].startswith("error: ") and all(word in lines[0] for word in words)
    assert [line for line in lines[1:] if not line.startswith("hint: ")] == []


@pytest.mark.parametrize("error, code", [
    (UsageError("u"), 2), (EnvironmentUnfit("e"), 3), (BuildFailed("b", log="the log"), 4), (WrongResult("w"), 1),
    (TimedOut("t"), 124),
])
def test_our_errors_carry_their_exit_code(megamoe, command, error, code) -> None:
    def body(ctx):
        raise error

    command(body)
    answer = megamoe("probe")
    assert (answer.code, answer.err, answer.out) == (code, f"error: {error}\n", "")


def test_error_with_hint_and_newlines(megamoe, command) -> None:
    def body(ctx):
        raise UsageError("first\nsecond", hint="do\nthis", rule="some-rule")

    command(body)
    assert megamoe("probe").err == "error: first second\nhint: do this\n"
    answer = megamoe("--json", "probe")
    assert answer.json == {"schema": "megamoe.error/1", "error": "first second", "hint": "do this", "rule": "some-rule",
                           "exit_code": 2}


def test_build_log_only_with_v(megamoe, command) -> None:
    def body(ctx):
        raise BuildFailed("no", log="line of the compiler")

    command(body)
    assert "line of the compiler" not in megamoe("probe").err
    assert "line of the compiler" in megamoe("-v", "probe").err


def test_anything_else_is_our_bug(megamoe, command) -> None:
    def body(ctx):
        raise ZeroDivisionError("oops")

    command(body)
    answer = megamoe("probe")
    assert answer.code == 70 and "Traceback" not in answer.err
    assert answer.err.splitlines()[0] == "error: internal: ZeroDivisionError: oops"
    assert "Traceback" in megamoe("-v", "probe").err


def test_interrupt_and_terminate(megamoe, command) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def interrupt(ctx):
        raise KeyboardInterrupt

    command(interrupt)
    assert megamoe("probe").code == 130

    def terminate(ctx):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    command(terminate)
    assert megamoe("probe").code == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_real_signals_end_a_real_process(number, code) -> None:
    script = ("import sys, time; from megamoe_cli.cli import main as m; import click\n"
              "probe = click.command('probe')(lambda: (print('up', flush=True), time.sleep(30)))\n"
              "m.LazyGroup.list_commands = lambda s, c: ['probe']; m.LazyGroup.get_command = lambda s, c, n: probe\n"
              "sys.argv[1:] = ['--no-config', 'probe']; m.run()")
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == code and "Traceback" not in err


def test_return_value_is_the_exit_code(megamoe, command) -> None:
    command(lambda ctx: 6)
    assert megamoe("probe").code == 6
    command(lambda ctx: None)
    assert megamoe("probe").code == 0
    command(lambda ctx: ctx.exit(5))
    assert megamoe("probe").code == 5


def test_a_closed_pipe_is_no_bug(megamoe_process) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(f"'{sys.executable}' -m megamoe_cli --help | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}",
                          shell=True, executable="/bin/bash", capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.strip() in ("0", "141") and "Traceback" not in done.stderr


def test_global_options_reach_the_command(megamoe, command) -> None:
    def body(ctx):
        app: App = ctx.obj
        click.echo(json.dumps([app.json, app.verbosity, app.color]))
        app.say("said")
        app.detail("detailed")
        app.warn("warned")

    command(body)
    answer = megamoe("probe")
    assert json.loads(answer.out) == [False, 0, "auto"] and answer.err == "said\nwarning: warned\n"
    assert json.loads(megamoe("--json", "-vv", "--color", "always", "probe").out) == [True, 2, "always"]
    quiet = megamoe("-q", "probe")
    assert json.loads(quiet.out)[1] == -1 and quiet.err == "warning: warned\n"


@pytest.mark.parametrize("color, environ, tty, expected", [
    ("auto", {}, True, True), ("auto", {}, False, False), ("auto", {"NO_COLOR": "1"}, True, False),
    ("auto", {"NO_COLOR": ""}, True, True), ("auto", {"TERM": "dumb"}, True, False),
    ("always", {"NO_COLOR": "1"}, False, True), ("never", {}, True, False),
])
def test_color(monkeypatch, color, environ, tty, expected) -> None:
    class Stream:
        def isatty(self):
            return tty

    monkeypatch.setenv("TERM", "xterm")
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    assert App(color=color).wants_color(Stream()) is expected


def test_settings_become_defaults_and_flags_win(megamoe, command, monkeypatch, tmp_path) -> None:
    def body(ctx, ranks, seed):
        origins = ctx.obj.origins(ctx)
        click.echo(json.dumps({"ranks": ranks, "seed": seed, "from": [origins["ranks"].origin, origins["seed"].origin]}))

    options = (click.option("--ranks", default="8"), click.option("--seed", type=int, default=0))
    command(body, *options)
    assert megamoe("probe").json == {"ranks": "8", "seed": 0, "from": ["default", "default"]}
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.megamoe]\nranks = [1, 2]\nseed = 5\n")
    assert megamoe("probe").json == {"ranks": "1,2", "seed": 5, "from": [str(project)] * 2}
    assert megamoe("--no-config", "probe").json["ranks"] == "8"
    monkeypatch.setenv("MEGAMOE_RANKS", "4")
    assert megamoe("probe").json == {"ranks": "4", "seed": 5, "from": ["env MEGAMOE_RANKS", str(project)]}
    assert megamoe("probe", "--ranks", "2").json["from"] == ["flag", str(project)]
    other = tmp_path / "other.toml"
    other.write_text("ranks = 3\n")
    monkeypatch.delenv("MEGAMOE_RANKS")
    assert megamoe("--config-file", str(other), "probe").json == {"ranks": "3", "seed": 0, "from": [str(other), "default"]}


def test_color_setting(megamoe, command, monkeypatch) -> None:
    command(lambda ctx: click.echo(ctx.obj.color))
    monkeypatch.setenv("MEGAMOE_COLOR", "never")
    assert megamoe("probe").out == "never\n"
    assert megamoe("--color", "always", "probe").out == "always\n"
