#!/usr/bin/env python3
"""Holds GPUs of a shared box for one command: ``hold.py --gpus 0,1 --who NAME -- COMMAND...`` becomes the command.

Runs on the host itself (a container's /tmp is not the box's), with the standard library only. The locks are open file
descriptions that the command inherits: they go when its last process goes, however that happens. Specific GPUs share
``box`` and own ``gpuN``; ``all`` owns ``box``. Exit 75: taken; stderr says by whom and since when.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import subprocess
import sys
import time

TAKEN = 75
_POLL_S = 0.5


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


def main(words):
    parser = argparse.ArgumentParser(prog="hold.py")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--gpus", required=True, help="all, none, or 0,1,...")
    parser.add_argument("--who", default="")
    parser.add_argument("--what", default="")
    parser.add_argument("--wait", type=float, default=0)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    if args.list:
        print(json.dumps(holders_of(args.dir)))
        return 0
    command = args.command[args.command[:1] == ["--"]:]
    until, told = time.monotonic() + args.wait, False
    while args.gpus != "none":
        try:
            for fd in acquire(args.dir, args.gpus, {"who": args.who, "what": args.what, "since": time.time()}):
                os.set_inheritable(fd, True)
            break
        except Taken as taken:
            if time.monotonic() >= until or not told:
                for name, info in taken.holders.items():
                    print(f"taken: {describe(name, info)}", file=sys.stderr, flush=True)
            if time.monotonic() >= until:
                return TAKEN
            told = True
            time.sleep(_POLL_S)
        except OSError as error:
            print(f"far side: the locks in {args.dir} cannot be used: {error.strerror}", file=sys.stderr)
            return 3
    try:
        if args.detach:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                             start_new_session=True, close_fds=False)
            return 0
        os.execvp(command[0], command)
    except OSError as error:
        print(f"far side: cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
