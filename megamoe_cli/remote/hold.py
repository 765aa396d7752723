#!/usr/bin/env python3
"""Holds GPUs of a shared box for one command: ``hold.py --gpus=0,1 --who=NAME -- COMMAND...`` runs the command and ends
as it does.

Runs on the host itself (a container's /tmp is not the box's), with the standard library of any Python from 3.6 on. The
locks are open file descriptions, held here and inherited by the command: they go when the last of both goes, however
that happens, and a command that closes them (sudo does) cannot drop them. Specific GPUs share ``box`` and own ``gpuN``;
``all`` owns ``box``. Exit 75: taken; stderr says by whom and since when.
"""

import argparse
import errno
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

TAKEN = 75
_POLL_S = 0.2


class Taken(Exception):
    """``holders``: what the lock files say about those who hold them."""

    def __init__(self, holders):
        super().__init__("taken")
        self.holders = holders


def open_lock(folder, name):
    """A lock file anybody may open. Never follows a link: the folder is everybody's."""
    path = os.path.join(folder, name)
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        os.fchmod(fd, 0o666)
        return fd
    except FileExistsError:  # made by another in this moment
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)


def holder(fd):
    try:
        return json.loads(os.pread(fd, 4096, 0).decode() or "null")
    except ValueError:
        return None


def try_lock(fd, shared, tries=3):
    """Several tries: somebody who only looks (``holders_of``) holds a lock for microseconds."""
    for left in reversed(range(tries)):
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if left:
            time.sleep(0.02)
    return False


def holders_of(folder):
    """Every lock that somebody holds now: {name: what its holder wrote}."""
    found = {}
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    for name in names:
        fd = open_lock(folder, name)
        if not try_lock(fd, shared=False, tries=1):
            info = holder(fd)
            if name != "box" or info:  # a shared box has no text: its holders stand under their GPUs
                found[name] = info
        os.close(fd)
    return found


def acquire(folder, gpus, info):
    """All locks or none: descriptors that stay open. Raises Taken."""
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o1777)
    held = []
    try:
        for name in ["box"] + ([] if gpus == "all" else [f"gpu{g}" for g in gpus.split(",")]):
            fd = open_lock(folder, name)
            held.append(fd)
            shared = name == "box" and gpus != "all"
            if not try_lock(fd, shared):
                found = holder(fd)
                raise Taken({name: found} if found else holders_of(folder) or {name: None})
            os.ftruncate(fd, 0)  # what stands there is about somebody who is gone
            if not shared:
                os.pwrite(fd, json.dumps({**info, "all": gpus == "all"}).encode(), 0)
    except BaseException:
        for fd in held:
            os.close(fd)
        raise
    return held


def describe(name, info):
    if not info:
        return f"{name} by somebody"
    since = time.strftime("%H:%M:%S", time.localtime(info["since"]))
    return f"{'all GPUs' if info.get('all') else name} by {info['who']} since {since} ({time.time() - info['since']:.0f} s): {info['what']}"


class Client:
    """Who waits for us at the other end of the connection, and sends signs of life (see agent.py)."""

    def __init__(self, silence):
        self.silence, self.heard = silence, time.monotonic()
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.poll.register(2, 0)  # whoever reads our messages is gone: reported unasked

    def pause(self, seconds):
        """Waits; exit code of a reason to give up, or None."""
        for fd, _ in self.poll.poll(1000 * seconds):
            if fd == 2:
                return 128 + signal.SIGHUP
            data = os.read(0, 4096)
            self.heard = time.monotonic()
            if not data:
                return 128 + signal.SIGHUP
            if b"t" in data or b"i" in data:
                return 128 + signal.SIGINT
            time.sleep(seconds)
        if self.silence and time.monotonic() - self.heard > self.silence:
            return 128 + signal.SIGHUP
        return None


def take(args, client):
    """Exit code, or None when the locks are held. Waits as long as ``--wait`` says and the client is there."""
    until, told = time.monotonic() + args.wait, False
    while True:
        try:
            for fd in acquire(args.dir, args.gpus, {"who": args.who, "what": args.what, "since": time.time()}):
                os.set_inheritable(fd, True)
            return None
        except Taken as taken:
            over = time.monotonic() >= until
            if over or not told:
                for name, info in taken.holders.items():
                    print("taken: " + describe(name, info), file=sys.stderr, flush=True)
            if over:
                return TAKEN
            told = True
        except OSError as error:
            print("far side: the locks in {} cannot be used: {}".format(args.dir, error.strerror), file=sys.stderr)
            return 126
        code = client.pause(_POLL_S)
        if code is not None:
            return code


def serve(command):
    """Runs it with our streams; signals are passed on. Its exit code."""
    try:
        child = subprocess.Popen(command, close_fds=False)
    except OSError as error:
        print("far side: cannot start {!r}: {}".format(command[0], error.strerror), file=sys.stderr)
        return 126
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, lambda number, frame: child.send_signal(number))
    for fd in (0, 1):  # the command's alone: its end must be heard at the other end
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    code = child.wait()
    return 128 - code if code < 0 else code


def leave(command):
    """Into the background, locks and all."""
    if not shutil.which(command[0]):
        print("far side: cannot start {!r}: not found".format(command[0]), file=sys.stderr)
        return 126
    if os.fork():
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os._exit(serve(command))


def main(words):
    parser = argparse.ArgumentParser(prog="hold.py")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--gpus", required=True, help="all, none, or 0,1,...")
    parser.add_argument("--who", default="")
    parser.add_argument("--what", default="")
    parser.add_argument("--wait", type=float, default=0)
    parser.add_argument("--silence", type=float, default=0)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    if args.list:
        print(json.dumps(holders_of(args.dir)))
        return 0
    command = args.command[args.command[:1] == ["--"]:]
    if args.gpus != "none":
        code = take(args, Client(args.silence))
        if code is not None:
            return code
    return leave(command) if args.detach else serve(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
