"""The exact command lines of ``megamoe remote``: what ``-n`` prints is what runs. Nothing here starts anything.

Far side, below the target's ``path``: ``.megamoe-remote`` (this folder is ours) and one folder per client checkout with
``tree/`` (sources), ``prebuilt/`` (cubins built here), ``jobs/``, ``tune-results/`` and ``cache/``. Values of the target's
``env`` stand in no command line: they travel as a file (``private/``) that the agent reads and removes.
"""

from __future__ import annotations

import getpass
import hashlib
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megamoe_cli import paths
from megamoe_cli.remote.targets import Target

MARKER = ".megamoe-remote"
NOT_OURS = 73  # exit code of the preparing command: the folder has contents that are not ours
PRIVATE = "private"  # variables of a job, until its agent has read them
TUNE_RESULTS = "tune-results"  # runs of tune stay here, so that the next job can continue them
NO_CONTAINER = 72  # ... the container does not answer
NOT_MOUNTED = 74  # ... it does not see the folder
NO_TIMEOUT = 76  # ... it has no timeout(1) of GNU coreutils
# What makes two machines two, even with the same name (clones of one image, defaults of a cloud).
_MACHINE_ID = ("/etc/machine-id", "/var/lib/dbus/machine-id")
SYNCED = ("megamoe_cli", "kernels", "phases", "tuning", "pyproject.toml", "tests/data")
EXCLUDED = ("__pycache__", "*.pyc", ".*.swp", "*~")
# Ours go first: a value in the user's ssh configuration would lose to these, so only what a dead connection needs.
SSH_OPTIONS = ("-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


def client_name() -> str:
    """This checkout on this machine, for people: ``me@laptop-1a2b3c``. Trees of different clients never mix."""
    where = str(paths.checkout_root() or paths.PACKAGE)
    for name in _MACHINE_ID:
        try:
            where += "\n" + Path(name).read_text(encoding="utf-8").strip()
            break
        except (OSError, UnicodeDecodeError):
            continue
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "user"
    plain = re.sub(r"[^A-Za-z0-9@._-]+", "_", f"{user}@{platform.node().partition('.')[0] or 'host'}")
    return f"{plain}-{hashlib.sha256(where.encode()).hexdigest()[:6]}"


@dataclass(frozen=True)
class Place:
    """Folders of this client on the far side: ``host`` as ssh and rsync see them, ``inside`` as the command does."""

    host: str
    inside: str

    @classmethod
    def of(cls, target: Target) -> Place:
        client = client_name()
        return cls(f"{target.path}/{client}", f"{target.inside}/{client}")


def ssh(target: Target, command: Sequence[str], *, tty: bool = False) -> list[str]:
    """``command`` on the host. Its words are quoted for the login shell."""
    # Without a terminal nobody can answer a question; with one, ssh may ask.
    batch = [] if sys.stdin is not None and sys.stdin.isatty() else ["-o", "BatchMode=yes"]
    return [*target.ssh, *batch, *SSH_OPTIONS, "-t" if tty else "-T", target.host, shlex.join(command)]


def rsync_shell(target: Target) -> str:
    """The value of rsync's -e. rsync splits it itself: quotes group words, a doubled quote stands for one."""
    batch = [] if sys.stdin is not None and sys.stdin.isatty() else ["-o", "BatchMode=yes"]
    return " ".join(w if re.fullmatch(r"[\w@%+=:,./-]+", w) else "'" + w.replace("'", "''") + "'"
                    for w in [*target.ssh, *batch, *SSH_OPTIONS])


def rsync(target: Target, options: Sequence[str], sources: Sequence[str], destination: str) -> list[str]:
    """-c: a fresh clone has new times and the same bytes. -s: the far shell never sees a name."""
    return [*target.rsync, "-rlpc", "-z", "-s", "--timeout=30", *options, "-e", rsync_shell(target), "--", *sources, destination]


def engine(target: Target, command: Sequence[str], *flags: str) -> list[str]:
    """``command`` inside the container, or as it is."""
    return [*target.engine, "exec", *flags, target.container, *command] if target.container else list(command)


# $1: our folder, $2: the agent, $3: python. The reaping says 1 when something cannot be killed, and JSON which.
_LOOK = "; ".join([
    f'test -d "$1" || exit {NOT_MOUNTED}', f"timeout --foreground -k 1 5 true || exit {NO_TIMEOUT}",
    # MEGAMOE_DEVICES: another folder of devices, so that tests have a box with GPUs
    'gpus=0; for device in "${MEGAMOE_DEVICES:-/dev}"/nvidia[0-9]*; do if test -e "$device"; then gpus=$((gpus + 1)); fi; done; echo gpus=$gpus',
    'if test -e "$2"; then "$3" -B "$2" reap --state "$1" || test $? = 1; fi'])  # fmt: skip


def prepare(target: Target) -> list[str]:
    """Makes the folder, refuses one that is not ours, checks that the container sees it and can end a command, says how
    many GPUs are there (``gpus=2``), and reaps what an earlier run may have left (JSON, when an earlier run brought the agent)."""
    place = Place.of(target)
    path, folder = shlex.quote(target.path), shlex.quote(place.host)
    steps = [
        "LC_ALL=C; export LC_ALL", f"mkdir -p {path}", f"if ! test -e {path}/{MARKER} && test -n \"$(ls -A {path})\"; then exit {NOT_OURS}; fi",
        f": > {path}/{MARKER}", f"mkdir -p {folder}/tree {folder}/prebuilt {folder}/jobs"]  # fmt: skip
    if target.container:
        steps.append(f"if ! {shlex.join(engine(target, ['true']))}; then exit {NO_CONTAINER}; fi")
    steps.append(shlex.join(engine(target, ["sh", "-c", _LOOK, "sh", place.inside, agent_path(target), target.python])))
    return ssh(target, ["sh", "-ec", "; ".join(steps)])


def agent_path(target: Target) -> str:
    return f"{Place.of(target).inside}/tree/megamoe_cli/remote/agent.py"


def free_space(target: Target) -> list[str]:
    """``df -P``: one line, with the free KiB before the share in use."""
    return ssh(target, ["df", "-Pk", target.path])


def local_sources() -> tuple[Path, list[str]]:
    """(folder, what below it travels): the checkout's parts, or an installed package."""
    root = paths.checkout_root()
    if root is None:
        return paths.PACKAGE.parent, [paths.PACKAGE.name]
    return root, [name for name in SYNCED if (root / name).exists()]


def sync(target: Target, *, dry_run: bool = False) -> tuple[list[str], Path]:
    """(command, folder to start it in). What is gone here goes there, below the folders that travel."""
    root, names = local_sources()
    options = ["-R", "--delete", "--out-format=%o %l %n", *(f"--exclude={name}" for name in EXCLUDED)]
    if dry_run:
        options.append("-n")
    return rsync(target, options, [f"./{name}" for name in names], f"{target.host}:{Place.of(target).host}/tree/"), root


def sync_prebuilt(target: Target, folder: Path) -> list[str]:
    """Earlier ones stay (a search that is continued wants them); the far side forgets the oldest."""
    return send_folder(target, folder, "prebuilt")


def send_folder(target: Target, folder: Path, name: str) -> list[str]:
    """Files of the user's, as folder ``name`` of this client over there."""
    return rsync(target, ["--out-format=%o %l %n"], [f"{folder}/"], f"{target.host}:{Place.of(target).host}/{name}/")


def fetch(target: Target, what: str, folder: Path) -> list[str]:
    """``what``: a folder of this client over there, such as jobs/JOB."""
    return rsync(target, [], [f"{target.host}:{Place.of(target).host}/{what}/"], f"{folder}/")


def agent(target: Target, words: Sequence[str], *flags: str) -> list[str]:
    """The agent on the far side, inside the container; its standard input stays open. ``flags``: of the engine."""
    return engine(target, [target.python, "-B", agent_path(target), words[0], "--state", Place.of(target).inside, *words[1:]],
                  *(flags or ("-i",)))


def environment(target: Target, *, remote_compiler: bool, more: Mapping[str, str]) -> dict[str, str]:
    """Variables of the far command beyond those the agent sets (where its tree, cache, cubins and results lie), and beyond
    the target's own, which win and stand in no command line (``PRIVATE``)."""
    env = {"MEGAMOE_REMOTE_COMPILER": "1"} if remote_compiler else {}
    if target.gpus != "all":
        env["CUDA_VISIBLE_DEVICES"] = "" if target.gpus == "none" else target.gpus
    return {**env, **more}


def send_private(target: Target, folder: Path) -> list[str]:
    """``folder``, with modes 0700 and 0600, which -p keeps."""
    return rsync(target, [], [f"{folder}/"], f"{target.host}:{Place.of(target).host}/{PRIVATE}/")


def hold(target: Target, what: str, command: Sequence[str], *, wait_s: float = 0, detach: bool = False,
         gpus: str | None = None) -> list[str]:  # fmt: skip
    """``command`` under the box's lock: hold.py on the host. ``--name=value``: a value may begin with a dash."""
    words = [*_hold(target), f"--gpus={gpus or target.gpus}", f"--who={client_name()}", f"--what={' '.join(what.split())[:200]}"]
    words += [f"--wait={wait_s:g}", f"--silence={target.silence:g}"] if wait_s else []
    words += ["--detach"] if detach else []
    return [*words, "--", *command]


def _hold(target: Target) -> list[str]:
    return [target.host_python, "-B", f"{Place.of(target).host}/tree/megamoe_cli/remote/hold.py", f"--dir={target.lock_dir}"]


def job(target: Target, name: str, command: Sequence[str], env: Mapping[str, str], *, what: str, wait_s: float = 0,
        detach: bool = False, lock: bool = True, results: str = "", need: Sequence[str] = (), limit_s: float = 0.0,
        reads: bool = False) -> list[str]:  # fmt: skip
    """ssh command line that runs ``command`` as job ``name``: lock, container, agent, ``timeout -k``, command.
    ``limit_s``: in place of the target's; ``reads``: our standard input is the command's."""
    limits = target.limits()
    seconds = limit_s or (target.detach_timeout if detach else limits.command)
    words = ["run", *_job_options(target, name, env), f"--limit={seconds:g}",
             *(["--detached"] if detach else [f"--silence={target.silence:g}"]), *([f"--results={results}"] if results else []),
             *(["--reads"] if reads else []), *(f"--need={module}" for module in need)]
    # --foreground: it signals the command once and leaves the rest to the agent, which finds more than a process group
    inner = ["timeout", "--foreground", "-k", f"{limits.grace:g}", f"{seconds:g}", *command]
    return ssh(target, hold(target, what, agent(target, [*words, "--", *inner]), wait_s=wait_s, detach=detach,
                            gpus=None if lock else "none"))


def terminal(target: Target, name: str, env: Mapping[str, str]) -> list[str]:
    """ssh command line of a shell in a terminal, as job ``name``: no lock, no limit."""
    return ssh(target, agent(target, ["run", *_job_options(target, name, env), "--interactive"], "-it"), tty=True)


def _job_options(target: Target, name: str, env: Mapping[str, str]) -> list[str]:
    return [f"--job={name}", f"--cwd={Place.of(target).inside}/tree", f"--grace={target.limits().grace:g}", f"--client={client_name()}",
            *([f"--private={','.join(target.env)}"] if target.env else []), *(f"--env={key}={value}" for key, value in env.items())]


def status(target: Target) -> list[str]:
    """Two lines of JSON: who holds what (``null`` when that cannot be said), then the agent's answer."""
    locks, jobs = shlex.join([*_hold(target), "--gpus=none", "--list"]), shlex.join(agent(target, ["status"]))
    return ssh(target, ["sh", "-c", f"{locks} || echo null; {jobs}"])
