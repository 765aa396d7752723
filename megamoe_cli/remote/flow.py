"""What each ``megamoe remote`` command does, from options to exit code."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe_cli import paths
from megamoe_cli.errors import EnvironmentUnfit, ExitCode, MegamoeError, TimedOut, UsageError
from megamoe_cli.remote import commands, started_jobs
from megamoe_cli.remote.passthrough import NO_GPU, Inner, parse
from megamoe_cli.remote.before_run import build_command, build_there, too_slow_text, wanted_there, was_ended
from megamoe_cli.remote.explain import innermost
from megamoe_cli.remote.runs import Visit
from megamoe_cli.remote.targets import Target
from megamoe_cli.remote.transport import SSH_FAILED, Attached, ConnectionLost, Step, explain_killed, explain_ssh

if TYPE_CHECKING:
    from megamoe_cli.cli.app import App
    from megamoe_cli.cli.remote_cmd import Options

RECORDS = ("results.json", "ci.json", "bench.json", "summary.json", "ranking.json")  # what a run folder may hold
_ENDED_SHOWN = 5  # ended jobs that status lists
_JOB = re.compile(r"[0-9]{8}-[0-9]{6}-[a-z]+-[0-9a-f]{4}")


def new_job(name: str) -> str:
    """``20260102-030405-test-9f3a``: sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-{secrets.token_hex(2)}"


def check_job(text: str) -> str:
    if not _JOB.fullmatch(text):
        raise UsageError(f"{text!r} is no job; megamoe remote status lists them", rule="remote-job")
    return text


def visit_of(app: App, options: Options) -> Visit:
    return Visit(options.target(app), app.say, app.warn, options.remote_compiler, options.wait_s)


def run_command(app: App, options: Options, name: str, args: Sequence[str], *, background: bool, slices: bool = False) -> int:
    """One of our commands there. In the foreground its output and exit code are ours. ``slices``: a search, as many
    jobs in a row as it takes, each within the limit of one command; the box is free in between."""
    visit = visit_of(app, options)
    whole = list(args)
    if slices:
        args = sliced(args, visit.target)
    inner = parse(app, name, args, visit.target, detached=background)
    job = new_job(name)
    if options.dry_run:
        return print_plan(app, visit, inner, job, background)
    results = results_of(app, inner)
    check_destinations(results, inner)
    app.started(f"remote {name}", results)
    try:
        with visit.alone():
            visit.prepare()
            if name not in NO_GPU:
                visit.require_gpus()
            if visit.has_gpu or name == "build":
                visit.prebuild(inner.builds, inner.params.get("jobs"), some_may_fail=name == "tune")
            visit.sync()
            visit.send_inputs(inner)
            if wanted := wanted_there(visit, inner, background):
                code = build_there(visit, new_job("build"), inner, wanted)
                if was_ended(code):
                    click.echo(too_slow_text(visit), err=True) if visit.ended == "time limit" else None
                    return closed(app, visit, code, [], too_slow_text(visit))
            command = visit.job_command(job, inner, detach=background)
            if background:
                started_jobs.keep(job, visit, inner, results)
                visit.start(job, command)
            else:
                code = run_and_fetch(app, visit, job, command, inner, results)
                if slices:
                    code, job = more_slices(app, visit, code, job, whole, results)
                folders = fetched(app, visit, job, inner, results)
    finally:
        app.evidence(remote={"target": visit.target.label, "job": job, "steps": [step.to_dict() for step in visit.steps]})
    if background:
        app.say(f"job {job} runs on {visit.target.label}; follow it with: megamoe remote attach {job}")
        if app.json or options.detach:
            click.echo(json.dumps({"job": job}) if app.json else job)
            return ExitCode.DONE
        return attach(app, options, job)
    return closed(app, visit, code, folders)


def closed(app: App, visit: Visit, code: int, folders: Sequence[Path], too_slow: str = "") -> int:
    """The last line about a job that did not end by itself, and its exit code: 130 when it was the user who ended it.
    ``too_slow``: what to say when its time was up."""
    if visit.interrupts > 1 or visit.interrupts and code == ExitCode.INTERRUPTED:
        how = "was ended" if visit.interrupts > 1 else "ended"
        click.echo(f"interrupted: the job on {visit.target.label} {how}; nothing of it is left there", err=True)
        return ExitCode.INTERRUPTED
    if code == ExitCode.TIMEOUT:
        click.echo(too_slow or _timeout_text(visit, folders), err=True)
    elif visit.ended:
        click.echo(f"error: {visit.target.label}: the far side ended the job: {visit.ended}", err=True)
    return code


def results_of(app: App, inner: Inner | None) -> Path:
    return Path((inner.results_dir if inner else None) or app.settings.get("results_dir") or paths.results_dir())


def check_destinations(results: Path, inner: Inner) -> None:
    """Can what comes back be written? UsageError before anything is sent."""
    from megamoe_cli.report.junit import check_writable

    check_writable(results / "journal.jsonl", "--results-dir")
    for option, path in (("--junit", inner.junit), *inner.kept.items()):
        if path is not None:
            check_writable(path, option)


def run_and_fetch(app: App, visit: Visit, job: str, command: list[str], inner: Inner, results: Path) -> int:
    """The exit code. Where the connection broke and a new one could be made, what was recorded until then is fetched."""
    try:
        return visit.run(job, command)
    except (ConnectionLost, TimedOut):
        if visit.reached:
            fetched(app, visit, job, inner, results)
        raise


def sliced(args: Sequence[str], target: Target) -> list[str]:
    """The arguments of a slice: its budget leaves room for the last measurement and for writing down."""
    if any(word == "--budget" or word.startswith("--budget=") for word in args):
        raise UsageError("--slices gives every slice its own --budget; leave it out", rule="budget")
    return [*args, "--budget", f"{0.5 * target.limits().command:.0f}s"]


def more_slices(app: App, visit: Visit, code: int, job: str, args: Sequence[str], results: Path) -> tuple[int, str]:
    """Continues the run until it is complete, fails, or three slices in a row end in a timeout. (code, last job)"""
    kept = [word for word in args if word in ("-q", "-v", "--json")]
    late = 0
    while code == ExitCode.INCONCLUSIVE or code == ExitCode.TIMEOUT and (late := late + 1) < 3:
        late = 0 if code == ExitCode.INCONCLUSIVE else late
        app.say("next slice")
        job = new_job("tune")
        inner = parse(app, "tune", sliced([*kept, "--resume", "last"], visit.target), visit.target, detached=False)
        code = run_and_fetch(app, visit, job, visit.job_command(job, inner), inner, results)
    return code, job


def _timeout_text(visit: Visit, folders: Sequence[Path]) -> str:
    """Whose time was up: the command's, or that of something inside it; and the innermost fault of the records."""
    over = "time limit" in (visit.ended, visit.end.get("reason"))
    outer = f"the {visit.target.limits().command:g} s of the command are over" if over else "something inside the command timed out"
    fault = innermost(folders)
    return f"error: {visit.target.label}: {outer}" + (f"; innermost: {fault}" if fault else "")


def fetched(app: App, visit: Visit, job: str, inner: Inner | None, results: Path) -> list[Path]:
    """The records, here. A run whose results cannot be brought back still has its exit code."""
    try:
        folders = visit.fetch(job, inner, results)
    except (MegamoeError, OSError) as error:  # OSError: this machine's disk
        app.warn(f"results stay on {visit.target.label}: {error}; to try again: megamoe remote attach {job}")
        return []
    for folder in folders:
        app.say(f"record: {folder / 'results.json'}" if (folder / "results.json").is_file() else f"results: {folder}")
        for name in RECORDS:
            if (folder / name).is_file():
                app.evidence(record=folder / name)
    return folders


def print_plan(app: App, visit: Visit, inner: Inner, job: str, background: bool) -> int:
    """The exact command lines, in order."""
    target = visit.target
    sync, folder = commands.sync(target)
    lines = [commands.prepare(target)]
    visit.gpus = int(target.gpus not in ("all", "none"))  # asked for by number: without them nothing runs
    if inner.builds and not visit.remote_compiler:
        lines.append(commands.sync_prebuilt(target, Path("CUBINS")))
    lines += [["cd", str(folder)], sync]
    lines += [commands.send_folder(target, Path("INPUTS"), "inputs")] if inner.sent else []
    lines += [commands.send_private(target, Path("VARIABLES"))] if target.env else []
    if wanted_there(visit, inner, background):
        lines += [commands.send_folder(target, Path("KERNELS"), "inputs"), build_command(visit, new_job("build"), inner)]
    lines += [visit.job_command(job, inner, detach=background), commands.fetch(target, f"jobs/{job}", Path("RESULTS"))]
    if app.json:
        app.emit({"schema": "megamoe.remote-plan/1", "commands": lines})
    else:
        for line in lines:
            click.echo(shlex.join(line))
    return ExitCode.DONE


def run_shell(app: App, options: Options, words: Sequence[str]) -> int:
    """A job of the user's own words; without any, a login shell in a terminal."""
    visit = visit_of(app, options)
    target, job = visit.target, new_job("shell")
    env = commands.environment(target, remote_compiler=True, more={})
    reads = bool(words) and not options.detach and not sys.stdin.isatty()
    if words:
        command = commands.job(target, job, list(words), env, what=shlex.join(words), wait_s=visit.wait_s, detach=options.detach, reads=reads)
    else:
        command = commands.terminal(target, job, env)
    if options.dry_run:
        for line in [*([commands.send_private(target, Path("VARIABLES"))] if target.env else []), command]:
            click.echo(shlex.join(line))
        return ExitCode.DONE
    with visit.alone():
        visit.prepare()
        visit.require_gpus()
        visit.sync()
        if words and options.detach:
            visit.start(job, command)
            click.echo(job)
            return ExitCode.DONE
        if words:
            return closed(app, visit, visit.run(job, command, source=sys.stdin.fileno() if reads else None), [])
        visit.send_private(job)
    step = Step("shell", command)
    step.ended(subprocess.call(command))
    visit.reap([job])
    if killed := explain_killed(target, step):
        raise killed
    assert step.exit_code is not None
    return step.exit_code


def latest_job(visit: Visit) -> str:
    jobs = [entry for entry in visit.status()["jobs"] if entry.get("detached")]
    if not jobs:
        raise EnvironmentUnfit(f"{visit.target.label}: no background job of this checkout is there")
    return jobs[-1]["job"]


def attach(app: App, options: Options, job: str | None) -> int:
    """Output of a background job as it comes; its exit code; its results. Ctrl-C lets go."""
    visit = visit_of(app, options)
    job = check_job(job) if job else latest_job(visit)
    step = Step("attach", commands.ssh(visit.target, commands.agent(visit.target, ["follow", job])))
    if options.dry_run:
        click.echo(shlex.join(step.command))
        return ExitCode.DONE
    visit.steps.append(step)
    follower = Attached(step, None, lets_go=True)
    code = follower.run()
    if follower.interrupts:
        app.say(f"job {job} goes on; megamoe remote attach {job}, or megamoe remote cancel {job}")
        return ExitCode.INTERRUPTED
    if code == SSH_FAILED or step.killed_by:
        error = explain_killed(visit.target, step) or explain_ssh(visit.target, step.stderr)
        raise EnvironmentUnfit(f"{error}; job {job} goes on there", hint=f"megamoe remote attach {job}")
    if code == ExitCode.NOTHING_SELECTED and "there is no job" in step.stderr:
        raise UsageError(f"{visit.target.label} has no job {job}", hint="megamoe remote status", rule="remote-job")
    inner, results = started_jobs.recall(job, visit) or (None, results_of(app, None))
    app.started("remote attach", results)
    fetched(app, visit, job, inner, results)
    app.evidence(remote={"target": visit.target.label, "job": job, "steps": [s.to_dict() for s in visit.steps]})
    return code


def status(app: App, options: Options, everything: bool = False) -> int:
    """Who holds the box, what runs, and what ended lately (``everything``: all that is known)."""
    visit = visit_of(app, options)
    if options.dry_run:
        click.echo(shlex.join(commands.ssh(visit.target, commands.agent(visit.target, ["status"]))))
        return ExitCode.DONE
    answer = visit.status()
    if app.json:
        app.emit({"schema": "megamoe.remote-status/1", "target": visit.target.label, **answer})
        return ExitCode.DONE
    for name, holder in (answer["locks"] or {}).items():
        click.echo(f"taken: {name} by {holder['who']}: {holder['what']}" if holder else f"taken: {name}")
    ended = [entry for entry in answer["jobs"] if entry["end"]]
    hidden = {entry["job"] for entry in ended[:-_ENDED_SHOWN]} if app.verbosity < 1 and not everything else set()
    for entry in answer["jobs"]:
        if entry["job"] in hidden:
            continue
        end = entry["end"]
        how = f"exit {end['exit']}, {end['reason']}, {end['seconds']:.0f} s" if end else f"{entry['processes']} processes"
        click.echo(f"{entry['job']}  {entry['state']:<8} {how:<32} {' '.join(entry.get('command') or [])[:100]}")
    if not answer["jobs"]:
        click.echo("no jobs")
    if hidden:
        click.echo(f"{len(hidden)} older jobs that ended: megamoe remote status --all")
    return ExitCode.DONE


def cancel(app: App, options: Options, job: str) -> int:
    visit = visit_of(app, options)
    words = ["reap", check_job(job)]
    if options.dry_run:
        click.echo(shlex.join(commands.ssh(visit.target, commands.agent(visit.target, words))))
        return ExitCode.DONE
    answer = visit.reap([job])
    return _tell_reaped(app, visit, answer, f"job {job} was not running")


def reap(app: App, options: Options, everything: bool) -> int:
    visit = visit_of(app, options)
    if options.dry_run:
        words = ["reap", *(["--all"] if everything else [])]
        click.echo(shlex.join(commands.ssh(visit.target, commands.agent(visit.target, words))))
        return ExitCode.DONE
    with visit.alone():
        answer = visit.reap(everything=everything)
    return _tell_reaped(app, visit, answer, "nothing was left")


def _tell_reaped(app: App, visit: Visit, answer: dict[str, Any], nothing: str) -> int:
    """Exit 1 when something could not be ended."""
    if app.json:
        app.emit({"schema": "megamoe.remote-reap/1", "target": visit.target.label, **answer})
    else:
        for entry in answer["ended"]:
            click.echo(f"{visit.target.label}: job {entry['job'] or '(unknown)'}: {entry['killed']} processes ended"
                       + (f", {len(entry['left'])} cannot be killed: {entry['left']}" if entry["left"] else ""))
        if not answer["ended"]:
            click.echo(f"{visit.target.label}: {nothing}")
        for entry in answer["running"]:
            click.echo(f"{visit.target.label}: job {entry['job']} runs in the background: megamoe remote cancel {entry['job']}")
    return ExitCode.NO if any(entry["left"] for entry in answer["ended"]) else ExitCode.DONE
