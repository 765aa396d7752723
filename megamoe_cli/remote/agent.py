#!/usr/bin/env python3
"""The far side of ``megamoe remote``: starts one command and makes sure that nothing of it stays.

Runs as a script, by path, maybe inside a container, with the standard library only: it must work where nothing is
installed yet. What it knows lies below STATE/jobs/JOB: ``job.json`` (what was started, by whom, where),
``end.json`` (how it ended), ``results/`` and, for a detached job, ``stdout`` and ``stderr``.

Every process of a job carries a token in its environment. A job ends in one of these ways, and each ends with a search
for that token: the command ended; its time is up; the client closed our stdin or fell silent (a dropped connection, a
sleeping laptop); we were told to stop; one of our two processes was killed, and the other one noticed. These are the
guard, which was started, and the agent, its child. Both adopt orphans, so what hides from the token is found as a child.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

if __name__ == "__main__":  # the tree it came with, not the folder it lies in
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from megamoe_cli.processes import TOKEN, token_pids  # noqa: E402
from megamoe_cli.remote.far_input import ENDED, WANTED, Client  # noqa: E402
from megamoe_cli.remote.far_jobs import (  # noqa: E402
    NOT_STARTED, Job, all_jobs, host_facts, private_variables, prune, say, stamps,
)
from megamoe_cli.remote.far_processes import birth, children, descendants, kill_all, send, token_of, tokens_below  # noqa: E402

_SUBREAPER, _PARENT_DEATH_SIGNAL = 36, 1  # prctl: adopt orphans below us; a signal when our parent dies
_SETTLE_S = 10.0  # how long an agent may take to end its job
_TICK_S = 0.05
_TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)  # a shell's own business


# ---- run ----


class Stop:
    """Why a job must end before its command does."""

    reason = ""
    interrupts = 0

    def on_signal(self, number, frame):
        self.reason = self.reason or f"signal {signal.Signals(number).name}"


def watch_client(stop, child, silence_s, client):
    """Does what the client wants, and notices when it is gone or silent."""
    wishes = client.listen(_TICK_S)
    if wishes is None:
        stop.reason = stop.reason or "the client is gone"
        return
    if silence_s and time.monotonic() - client.heard > silence_s:
        stop.reason = stop.reason or f"no sign of life from the client for {silence_s:g} s"
    for _ in range(wishes.count(b"i")):
        for pid in children(child.pid):  # not to timeout(1): a signal starts its clock for SIGKILL
            send(pid, signal.SIGINT)
    if b"t" in wishes:
        stop.reason = stop.reason or "stopped by the client"


def run(args):
    """The guard: starts the agent and outlives it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    guard, start = os.getpid(), time.monotonic()
    agent = os.fork()
    if agent == 0:
        prctl(_SUBREAPER, 1, 0, 0, 0)
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        code = 70
        try:
            code = supervise(args, guard)
        finally:
            sys.stderr.flush()
            os._exit(code)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, lambda number, frame: send(agent, number))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the client's words are the agent's
    _, ended = os.waitpid(agent, 0)
    if os.WIFEXITED(ended):
        return os.WEXITSTATUS(ended)
    job = Job(args.state, args.job)
    killed, left = kill_all(lambda: list({*descendants(guard), *token_pids(job.token)}), args.grace)
    job.end(137, "the agent was killed", time.monotonic() - start, killed, left)
    say("the agent was killed; its job has been ended")
    return 137


def supervise(args, guard):
    """The agent: one command from start to end."""
    job, stop = Job(args.state, args.job), Stop()
    try:
        private = private_variables(job) if args.private else {}
    except (OSError, ValueError) as error:
        say(f"the values of {args.private} cannot be read: {getattr(error, 'strerror', None) or error}")
        return NOT_STARTED
    env = {**os.environ, **own_environment(job, args.results), **dict(item.split("=", 1) for item in args.env), **private, TOKEN: job.token}
    sys.path[1:1] = env["PYTHONPATH"].split(os.pathsep)  # where the command will look
    if lacking := [name for name in args.need if importlib.util.find_spec(name) is None]:
        say(f"{sys.executable} lacks {' '.join(lacking)}")
        return NOT_STARTED
    results = env["MEGAMOE_RESULTS_DIR"]
    try:
        os.makedirs(os.path.join(job.folder, "results"))
        os.makedirs(results, exist_ok=True)
        about = {"agent": os.getpid(), "birth": birth(os.getpid()), "token": job.token, "client": args.client, "command": args.command,
                 "detached": args.detached, "interactive": args.interactive, "limit_s": args.limit, "started": time.time(),
                 "facts": host_facts(), "results": results, "before": stamps(results)}  # fmt: skip
        job.write("job.json", about)
        streams = {name: open(os.path.join(job.folder, name), "wb") for name in ("stdout", "stderr")} if args.detached else {}
    except OSError as error:
        say(f"cannot write to {args.state}: {error.strerror}")
        return NOT_STARTED
    for sig in (signal.SIGTERM, signal.SIGHUP, *(() if args.interactive else (signal.SIGINT,))):
        signal.signal(sig, stop.on_signal)
    if os.getppid() != guard:
        return 143
    start, code, child = time.monotonic(), None, None
    try:
        child = start_command(args, env, streams)
    except OSError as error:
        say(f"cannot start {args.command[0]!r} in {args.cwd!r}: {error.strerror}")
        code, stop.reason = NOT_STARTED, "not started"
    else:
        job.note(about, group=child.pid)
        code = wait_for(child, args, stop, start)
    killed, left = kill_all(lambda: list({*descendants(os.getpid()), *token_pids(job.token)}), args.grace if stop.reason else 0.0,
                            child.pid if child else None)
    if code is None:
        code = 137 if child.pid in left else exit_code(child.wait())
        code = 124 if stop.reason == "time limit" else 143 if stop.reason.startswith(("signal", "stopped")) else code
    elif code in (124, 137) and args.limit and time.monotonic() - start >= args.limit:  # 124 may be the command's own
        stop.reason, code = "time limit", 124
    job.end(code, stop.reason or "exit", time.monotonic() - start, killed, left)
    if stop.reason and stop.reason != "not started":
        say(ENDED.removeprefix("far side: ") + stop.reason)
    if killed and not stop.reason and not args.interactive:
        say(f"{killed} processes outlived the command and were killed")
    if left:
        say(f"{len(left)} processes cannot be killed (stuck in a driver call): {left}")
    return code


def start_command(args, env, streams):
    """The command, in a session of its own; a shell in a terminal stays in the terminal's."""
    prctl = ctypes.CDLL(None).prctl  # looked up here: little may happen between fork and exec

    def in_child():
        prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)  # guard and agent may be killed in one blow
        for sig in _TERMINAL_SIGNALS if args.interactive else ():
            signal.signal(sig, signal.SIG_DFL)

    for sig in _TERMINAL_SIGNALS if args.interactive else ():
        signal.signal(sig, signal.SIG_IGN)
    command = args.command or [os.environ.get("SHELL") or shutil.which("bash") or "/bin/sh", "-i"]
    stdin = None if args.interactive else subprocess.PIPE if args.reads else subprocess.DEVNULL
    return subprocess.Popen(command, env=env, cwd=args.cwd, stdin=stdin, bufsize=0,
                            start_new_session=not args.interactive, preexec_fn=in_child, **streams)


def own_environment(job, results):
    """Where things lie on this side. LC_ALL: messages and file names are read by a program, whatever the box speaks."""
    place = lambda name: os.path.join(job.state, name)  # noqa: E731
    return {"PYTHONPATH": place("tree"), "PYTHONUNBUFFERED": "1", "PYTHONPYCACHEPREFIX": place("cache/pyc"), "LC_ALL": "C.UTF-8",
            "MEGAMOE_CACHE_DIR": place("cache"), "MEGAMOE_PREBUILT": place("prebuilt"),
            "MEGAMOE_RESULTS_DIR": place(results) if results else os.path.join(job.folder, "results")}


def wait_for(child, args, stop, start):
    """The exit code of the command; None when it has to be ended first (``stop.reason`` says why)."""
    client = Client(os.dup(child.stdin.fileno()) if child.stdin else None, lambda: say(WANTED.removeprefix("far side: ")))
    if child.stdin:
        child.stdin.close()
    while True:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return exit_code(child.wait())
        if args.detached or args.interactive:
            time.sleep(_TICK_S)
        else:
            watch_client(stop, child, args.silence, client)
        # timeout(1) inside the command has the first word; this is for a command that it cannot end
        if args.limit and time.monotonic() - start > args.limit + args.grace + 2:
            stop.reason = stop.reason or "time limit"
        if stop.reason:
            return None


def exit_code(code):
    return 128 - code if code < 0 else code


# ---- the other commands ----


def reap(args):
    """Ends what is left of jobs whose client is gone; those in the background and shells in a terminal live on unless they
    are meant. Prints JSON."""
    spared, ended = [], []
    if not args.jobs:
        prune(args.state)
    known = all_jobs(args.state)
    # a job that could not write its folder has a token all the same
    for job in known + [Job(args.state, name) for name in args.jobs if name not in {job.name for job in known}]:
        if args.jobs and job.name not in args.jobs:
            continue
        about = job.read("job.json") or {}
        live = job.alive() and job.read("end.json") is None
        if live and (about.get("detached") or about.get("interactive")) and not args.all and job.name not in args.jobs:
            spared.append(job)
            continue
        processes = len(token_pids(job.token))
        if live:
            send(job.read("job.json")["agent"], signal.SIGTERM)
            until = time.monotonic() + args.grace + _SETTLE_S
            while job.alive() and time.monotonic() < until:
                time.sleep(0.05)
        killed, left = kill_all(lambda job=job: token_pids(job.token), args.grace)
        if live or killed:
            ended.append({"job": job.name, "killed": max(killed, processes), "left": left,
                          "command": (job.read("job.json") or {}).get("command")})
            if os.path.isdir(job.folder):
                job.end(143, "reaped", 0.0, killed, left)
    if not args.jobs:  # what no job folder knows any more
        spare = tuple(job.token for job in spared)

        def strangers():
            return [pid for pid, token in tokens_below(token_of(args.state)).items() if not token.startswith(spare)]

        killed, left = kill_all(strangers, args.grace)
        if killed:
            ended.append({"job": "", "killed": killed, "left": left, "command": None})
    print(json.dumps({"ended": ended, "running": [job.describe() for job in spared],
                      "ends": {name: Job(args.state, name).read("end.json") for name in args.jobs}}))
    return 0 if not any(entry["left"] for entry in ended) else 1


def status(args):
    print(json.dumps({"jobs": [job.describe() for job in all_jobs(args.state)], "facts": host_facts(),
                      "free_bytes": shutil.disk_usage(args.state if os.path.isdir(args.state) else "/").free}))
    return 0


def follow(args):
    """Copies the output of a detached job to ours until it ends; leaves with its exit code. Reads only."""
    job = Job(args.state, args.job)
    if job.read("job.json") is None:
        say(f"there is no job {args.job}")
        return 5
    files = [(open(os.path.join(job.folder, name), "rb"), target) for name, target in
             (("stdout", sys.stdout.buffer), ("stderr", sys.stderr.buffer)) if os.path.exists(os.path.join(job.folder, name))]
    while True:
        over = job.read("end.json") is not None or not job.alive()  # before the last look, so that nothing is missed
        for source, target in files:
            data = source.read()
            if data:
                target.write(data)
                target.flush()
        if over:
            end = job.read("end.json")
            return end["exit"] if end else 137
        if select.select([0], [], [], 0.2)[0] and os.read(0, 4096) == b"":
            return 0


def main(words):
    parser = argparse.ArgumentParser(prog="agent.py")
    commands = parser.add_subparsers(dest="what", required=True)
    one = commands.add_parser("run")
    one.add_argument("--job", required=True)
    one.add_argument("--limit", type=float, default=0)
    one.add_argument("--silence", type=float, default=0)
    one.add_argument("--cwd", default=".")
    one.add_argument("--env", action="append", default=[])
    one.add_argument("--private", default="", help="names of variables whose values lie in private/JOB.json of the state")
    one.add_argument("--reads", action="store_true", help="the command's standard input comes from the client")
    one.add_argument("--client", default="")
    one.add_argument("--results", default="", help="folder of the state for records, in place of the job's own")
    one.add_argument("--need", action="append", default=[], help="a module the command imports")
    one.add_argument("--detached", action="store_true")
    one.add_argument("--interactive", action="store_true", help="the command has the terminal; without one: a shell")
    one.add_argument("command", nargs=argparse.REMAINDER)
    two = commands.add_parser("reap")
    two.add_argument("jobs", nargs="*")
    two.add_argument("--all", action="store_true")
    commands.add_parser("status")
    commands.add_parser("follow").add_argument("job")
    for command in commands.choices.values():
        command.add_argument("--state", required=True)
        command.add_argument("--grace", type=float, default=2.0)
    args = parser.parse_args(words)
    args.state = os.path.abspath(args.state)
    if args.what == "run":
        args.command = args.command[args.command[:1] == ["--"]:]
        args.cwd = os.path.abspath(args.cwd)
    return {"run": run, "reap": reap, "status": status, "follow": follow}[args.what](args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
