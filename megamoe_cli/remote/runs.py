"""One visit to a remote target, step by step: prepare, sync, prebuilt cubins, run, fetch; and what to do when a step breaks.

Every step is a command line (``commands.py``) that ran and how it went; they go into the record of the visit.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli import paths
from megamoe_cli.errors import EnvironmentUnfit, MegamoeError, TimedOut
from megamoe_cli.remote import commands, transport
from megamoe_cli.remote.before_run import private_folder
from megamoe_cli.remote.explain import explain_prepare, load
from megamoe_cli.remote.far_jobs import NOT_STARTED
from megamoe_cli.remote.hold import TAKEN
from megamoe_cli.remote.passthrough import NO_GPU, Inner, kept_name, packages, sent_name
from megamoe_cli.remote.targets import Target
from megamoe_cli.remote.transport import (
    DISK_FULL, Attached, ConnectionLost, Step, call, explain_killed, explain_rsync, explain_ssh, last_line, space_hint,
)

if TYPE_CHECKING:
    from megamoe_cli.compile.driver import BuildRequest

SCHEMA = "megamoe.remote/1"
_SHORT_S = 30.0  # a step that only asks
_COPY_S = 120.0
_FULL_KIB = 256  # less than the largest file we send
_RECONNECT_S = (0.0, 1.0, 3.0)


@dataclass
class Visit:
    """``say``/``warn``: messages to the user. ``steps``: everything that ran."""

    target: Target
    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    remote_compiler: bool = False
    wait_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    gpus: int = 0  # that are there
    ended: str = ""  # why the far side ended the last job, or empty
    interrupts: int = 0  # by the user, during the last job
    cubins: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)  # how the job ended, as its agent wrote it
    jobs: list[str] = field(default_factory=list)  # those that ran in the foreground
    reached: bool = False  # after the connection broke, a new one answered

    @property
    def has_gpu(self) -> bool:
        """One that the command may use."""
        return self.gpus > 0 and self.target.gpus != "none"

    # ---- before ----

    @contextmanager
    def alone(self) -> Iterator[None]:
        """One visit at a time from this checkout to this target: a second one would change files under the first."""
        from filelock import FileLock, Timeout

        from megamoe_cli.compile.cache import key_of

        name = key_of(host=self.target.host, path=self.target.path, client=commands.client_name())[:16]
        folder = paths.cache_dir() / "remote"
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(str(folder / f"{name}.lock"))
        try:
            lock.acquire(timeout=max(self.wait_s, 0.2))
        except Timeout:
            raise EnvironmentUnfit(f"another megamoe remote of this checkout is using {self.target.label}",
                                   hint="wait for it (--wait 60), or use another checkout") from None
        try:
            yield
        finally:
            lock.release()

    def prepare(self) -> None:
        """The folder is ours, the container answers, nothing of an earlier run is left."""
        step = self._call("prepare", commands.prepare(self.target), _SHORT_S)
        if step.exit_code != 0:
            raise explain_prepare(self.target, step)
        lines = step.stdout.splitlines()
        self.gpus = next((int(line[5:]) for line in lines if re.fullmatch(r"gpus=\d+", line)), 0)
        left = next((json.loads(line) for line in lines if line.startswith("{")), {"ended": [], "running": []})
        self._report_reaped(left)
        for job in (job for job in left["running"] if not job.get("interactive")):
            raise EnvironmentUnfit(
                f"job {job['job']} of this checkout still runs on {self.target.label}: {' '.join(job.get('command') or [])[:120]}",
                hint=f"megamoe remote attach {job['job']}, or megamoe remote cancel {job['job']}")

    def require_gpus(self) -> None:
        """EnvironmentUnfit unless the GPUs asked for by number are there: the emulator would stand in for them."""
        if self.target.gpus in ("all", "none") or (last := int(self.target.gpus.split(",")[-1])) < self.gpus:
            return
        where = f"container {self.target.container}" if self.target.container else self.target.host
        there = "no GPU" if not self.gpus else "GPU 0 alone" if self.gpus == 1 else f"GPUs 0 to {self.gpus - 1}"
        raise EnvironmentUnfit(f"{self.target.label}: GPU {last} was asked for, and {where} has {there}",
                               hint="--gpus none runs on the emulator there" if not self.gpus else "see them with: megamoe remote shell nvidia-smi")

    def _report_reaped(self, answer: dict[str, Any]) -> None:
        for entry in answer["ended"]:
            if entry["killed"]:
                self.warn(f"{self.target.label}: {entry['killed']} processes of job {entry['job'] or '(unknown)'} were still there "
                          "and have been ended")
            if entry["left"]:
                raise EnvironmentUnfit(f"{self.target.label}: processes {entry['left']} of an earlier job cannot be killed",
                                       hint="they are stuck in a driver call; ask who runs the machine")

    def sync(self) -> list[str]:
        """Sends what changed; returns the names of the files that travelled."""
        command, folder = commands.sync(self.target)
        step = self._call("sync", command, _COPY_S, cwd=folder)
        if step.exit_code != 0:
            raise self._explain_copy(step)
        sent = [line.split(" ", 2)[2] for line in step.stdout.splitlines()
                if line.startswith(("send ", "del.")) and line.count(" ") >= 2 and not line.endswith("/")]
        self.say(f"{self.target.label}: {len(sent)} changed files sent" if sent else f"{self.target.label}: up to date")
        return sent

    def send_inputs(self, inner: Inner) -> None:
        """The files that the command reads."""
        for option, file in inner.sent.items():
            with tempfile.TemporaryDirectory(prefix="megamoe-inputs-") as folder:
                copy = Path(folder) / sent_name(option, file)
                copy.parent.mkdir()
                shutil.copyfile(file, copy)
                self.copy(f"send {file.name}", commands.send_folder(self.target, copy.parent, "inputs"))

    def send_private(self, job: str) -> None:
        """The values of the target's ``env``; the agent of the job removes them there when it has read them."""
        if self.target.env:
            with private_folder(self.target, job) as folder:
                self.copy("send variables", commands.send_private(self.target, folder))

    def copy(self, what: str, command: list[str]) -> None:
        step = self._call(what, command, _COPY_S)
        if step.exit_code != 0:
            raise self._explain_copy(step)

    def prebuild(self, requests: Sequence[BuildRequest], jobs: int | None = None, some_may_fail: bool = False) -> None:
        """Compiles here what the far side will ask for, and sends it. BuildFailed before anything runs there; of a
        search's candidates (``some_may_fail``) those that do not build are left out, and refused there too."""
        if not requests or self.remote_compiler:
            return
        from megamoe_cli.compile import prebuilt
        from megamoe_cli.compile.driver import build_many, prepare

        start = time.monotonic()
        outcomes = build_many(list(requests), jobs)
        if some_may_fail and any(outcome.error is None for outcome in outcomes):
            outcomes = [outcome for outcome in outcomes if outcome.error is None]
        kernels = [outcome.result() for outcome in outcomes]
        self.cubins = [prebuilt.describe(kernel.manifest) for kernel in kernels]
        with tempfile.TemporaryDirectory(prefix="megamoe-cubins-") as folder:
            prebuilt.export([(prepare(outcome.request), outcome.result()) for outcome in outcomes], Path(folder))
            self.copy("send cubins", commands.sync_prebuilt(self.target, Path(folder)))
        fresh = sum(not kernel.hit for kernel in kernels)
        self.say(f"{len(kernels)} cubins built here ({fresh} now, {time.monotonic() - start:.1f} s)")

    # ---- the job ----

    def job_command(self, job: str, inner: Inner, *, detach: bool = False) -> list[str]:
        more = {**inner.env, "MEGAMOE_SOURCE_STATE": json.dumps(_source_state())}
        env = commands.environment(self.target, remote_compiler=self.remote_compiler, more=more)
        words = inner.words(self.target, job, detached=detach)
        return commands.job(self.target, job, words, env, what=inner.what, wait_s=self.wait_s, detach=detach, need=inner.need,
                            lock=inner.name not in NO_GPU, results=commands.TUNE_RESULTS if inner.name == "tune" else "")

    def run(self, job: str, command: list[str], *, what: str = "run", limit_s: float = 0.0, source: int | None = None) -> int:
        """Runs it in the foreground; returns the exit code of the far command. ``limit_s``: its own limit, where that is not
        the target's; ``source``: a file descriptor whose contents are its input.

        EnvironmentUnfit: the box is taken, or has no such program. ConnectionLost, TimedOut: and what could be found out
        after; ``reached`` says whether the far side answered, so that results can be fetched.
        """
        self.send_private(job)
        step = Step(what, command)
        self.steps.append(step)
        self.jobs.append(job)
        limits = self.target.limits()
        remote = limits.remote - limits.command + (limit_s or limits.command)
        attached = Attached(step, remote + self.wait_s, source=source)
        try:
            code = attached.run()
        except TimedOut:
            raise TimedOut(f"{self.target.label}: no answer within {remote:g} s; {self.clean_up(job)}{_last_words(step)}") from None
        except BaseException:
            self.clean_up(job)
            raise
        self.ended, self.interrupts = attached.ended, attached.interrupts
        if killed := explain_killed(self.target, step):
            raise ConnectionLost(f"{killed} after {step.seconds:.0f} s; {self.clean_up(job)}", killed.hint)
        if code == transport.SSH_FAILED:
            error = explain_ssh(self.target, step.stderr)
            if isinstance(error, ConnectionLost):
                found = self.clean_up(job)
                if self.end.get("reason") == "exit" and self.end.get("exit") == code:
                    return code  # the command's own
                raise ConnectionLost(f"{error} after {step.seconds:.0f} s; {found}", error.hint)
            raise error
        return self._judge(code, step)

    def _judge(self, code: int, step: Step) -> int:
        """The same code, unless it says that the command was not started. Those of the command may be the same numbers."""
        label, said = self.target.label, last_line(step.stderr)
        holders = [line[7:] for line in step.stderr.splitlines() if line.startswith("taken: ")]
        if code == TAKEN and holders:
            raise EnvironmentUnfit(f"{label} is taken: {'; '.join(dict.fromkeys(holders))}", hint="wait for it with --wait 300")
        lacking = re.match(r"far side: (.+) lacks ([\w ]+)$", said)
        if code == NOT_STARTED and lacking:
            names = packages(lacking[2].split())
            raise EnvironmentUnfit(f"{label}: {lacking[1]} lacks {', '.join(names)}",
                                   hint=f"install there: {self.target.python} -m pip install {' '.join(names)}; or set python of the target")
        if code == NOT_STARTED and any(said.endswith(words) for words in DISK_FULL):
            raise EnvironmentUnfit(f"{label}: {said.removeprefix('far side: ')}", hint=space_hint(self.target))
        if code in (125, 126, 127) and (said.startswith("far side: ") or not self._began(step)):
            raise EnvironmentUnfit(f"{label}: {said.removeprefix('far side: ') or f'the command could not be started ({code})'}",
                                   hint="check python, container and path of the target")
        return code

    def _began(self, step: Step) -> bool:
        """Did the agent get as far as a job?"""
        name = next((word[6:] for word in shlex.split(step.command[-1]) if word.startswith("--job=")), "")
        return any(job["job"] == name for job in self.status()["jobs"])

    def start(self, job: str, command: list[str]) -> None:
        """Starts it detached: the lock, the agent and the command outlive this connection."""
        self.send_private(job)
        step = Step("start", command)
        self.steps.append(step)
        # attached until it runs: in the queue for the box it must know whether somebody still wants it
        code = Attached(step, _SHORT_S + self.wait_s).run()
        if killed := explain_killed(self.target, step):
            raise killed
        if code == transport.SSH_FAILED:
            raise explain_ssh(self.target, step.stderr)
        self._judge(code, step)
        if code != 0:
            raise EnvironmentUnfit(f"{self.target.label}: the job could not be started: {last_line(step.stderr) or step.exit_code}")
        for _ in range(50):  # the agent writes job.json first of all
            if any(entry["job"] == job for entry in self.status()["jobs"]):
                return
            time.sleep(0.2)
        raise EnvironmentUnfit(f"{self.target.label}: job {job} did not start",
                               hint="run it once in the foreground (without --detach) to see why")

    # ---- after ----

    def clean_up(self, job: str) -> str:
        """Over a new connection: ends what is left of ``job``. Returns what to tell the user."""
        for pause in _RECONNECT_S:
            time.sleep(pause)
            try:
                answer = self.reap([job])
            except MegamoeError:
                continue
            self.reached, self.end = True, answer.get("ends", {}).get(job) or {}
            killed = sum(entry["killed"] for entry in answer["ended"])
            return f"its {killed} processes there were ended" if killed else "nothing of it is left there"
        return (f"{self.target.label} does not answer now: the far side ends the job by itself within {self.target.silence:g} s; "
                "check with: megamoe remote reap")

    def reap(self, jobs: Sequence[str] = (), everything: bool = False) -> dict[str, Any]:
        """Ends leftovers; ``{"ended": [...], "running": [...]}``."""
        words = ["reap", *(["--all"] if everything else []), *jobs]
        command = commands.ssh(self.target, commands.agent(self.target, words))
        return self._ask("reap", command)[-1] or {"ended": [], "running": []}

    def status(self) -> dict[str, Any]:
        """Jobs of this checkout, the machine, and who holds its GPUs (``locks``)."""
        held, answer = self._ask("status", commands.status(self.target))
        return {**(answer or {"jobs": []}), "locks": held}

    def _ask(self, what: str, command: list[str]) -> list[Any]:
        """The last two lines of the answer, as JSON; None where nothing of this checkout has been there yet."""
        step = self._call(what, command, _SHORT_S)
        if killed := explain_killed(self.target, step):
            raise killed
        if step.exit_code == transport.SSH_FAILED:
            raise explain_ssh(self.target, step.stderr)
        if step.exit_code == 2 and "can't open file" in step.stderr:  # Python's words, in every language
            return [None, None]
        lines = ["", *step.stdout.splitlines()][-2:]  # before them a login shell may have said something
        answers = [json.loads(line) if line.startswith(("{", "null")) else None for line in lines]
        if answers[-1] is None:
            raise EnvironmentUnfit(f"{self.target.label}: {what}: {last_line(step.stderr) or 'no answer'}",
                                   hint="check python, container and path of the target")
        return answers

    def fetch(self, job: str, inner: Inner | None, results_dir: Path) -> list[Path]:
        """Brings the job's records here. Returns the run folders, each with ``remote.json`` (the host's provenance)."""
        with tempfile.TemporaryDirectory(prefix="megamoe-fetch-") as temporary:
            root = Path(temporary)
            self._bring(f"jobs/{job}", root)
            document = self.document(job, root)
            if "-tune-" in job:  # they stay there, so that the next job can continue them
                for name in self.touched():
                    self._bring(f"{commands.TUNE_RESULTS}/{name}", root / "results" / name)
            folders = [p for p in sorted((root / "results").glob("*")) if p.is_dir()]
            moved = []
            for folder in folders:
                results_dir.mkdir(parents=True, exist_ok=True)
                goal = results_dir / folder.name
                shutil.copytree(folder, goal, dirs_exist_ok=True)
                (goal / "remote.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
                moved.append(goal)
            if inner is not None:
                self._keep(inner, root, moved)
        return moved

    def touched(self) -> list[str]:
        """Run folders that the fetched job worked on; after several jobs in a row (slices), all of theirs."""
        ends = [self.end]
        if len(self.jobs) > 1:
            ends += [entry["end"] or {} for entry in self.status()["jobs"] if entry["job"] in self.jobs]
        return sorted({name for end in ends for name in end.get("runs") or ()})

    def _keep(self, inner: Inner, root: Path, moved: Sequence[Path]) -> None:
        """The files that the user named."""
        if inner.junit is not None:
            found = [folder / "junit.xml" for folder in moved if (folder / "junit.xml").is_file()]
            if found:
                inner.junit.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(found[-1], inner.junit)
            else:
                self.warn(f"no JUnit file came back for {inner.junit}")
        for option, goal in inner.kept.items():
            if (root / kept_name(option)).is_file():
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / kept_name(option), goal)
            else:
                self.warn(f"nothing came back for {option} {goal}")

    def _bring(self, what: str, folder: Path) -> None:
        step = self._call("fetch", commands.fetch(self.target, what, folder), _COPY_S)
        if step.exit_code != 0:
            raise self._explain_copy(step)

    def document(self, job: str, folder: Path) -> dict[str, Any]:
        """Where the results come from: target, machine, how the job ended, who built the cubins, every command line."""
        far = load(folder / "job.json") or {}
        self.end = load(folder / "end.json") or self.end
        target = self.target
        return {"schema": SCHEMA, "job": job, "target": target.name, "host": target.host, "container": target.container or None,
                "gpus": target.gpus, "limits": vars(target.limits()), "machine": far.get("facts"), "command": far.get("command"),
                "end": self.end, "cubins": self.cubins, "steps": [step.to_dict() for step in self.steps]}

    def _explain_copy(self, step: Step) -> MegamoeError:
        """A receiver that dies of a full disk often takes its last words with it: then the disk is asked."""
        full = False
        if step.exit_code in (11, 12) and step.what != "fetch":
            try:
                asked = self._call("free space", commands.free_space(self.target), _SHORT_S)
                found = re.search(r"(\d+)\s+\d+%", asked.stdout)  # available KiB, share in use
                full = found is not None and int(found[1]) < _FULL_KIB
            except MegamoeError:
                pass  # what is known is said all the same
        return explain_rsync(self.target, step, full)

    def _call(self, what: str, command: list[str], timeout_s: float, cwd: Path | None = None) -> Step:
        return call(what, command, timeout_s=timeout_s, cwd=cwd, on_start=self.steps.append)


def _source_state() -> dict[str, Any]:
    from megamoe_cli.report.record import source_state

    return source_state()


def _last_words(step: Step) -> str:
    said = last_line(step.stderr)
    return f"; its last words: {said}" if said else ""
