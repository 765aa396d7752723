"""A job on the far side: the folder that holds what is known of it. Used by ``agent.py``; standard library only.

``job.json``: what was started, by whom, where; ``end.json``: how it ended, and which run folders it wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from megamoe_cli.processes import token_pids
from megamoe_cli.remote.far_processes import birth, token_of

KEEP_JOBS = 20  # ended jobs whose folders stay, and runs of tune
KEEP_FILES = 800  # cubins and their manifests
_PRIVATE_S = 600.0
NOT_STARTED = 126  # exit code of an agent that could not start the command; its last line says why


class Job:
    """The folder of one job."""

    def __init__(self, state: str, name: str) -> None:
        self.state, self.name = state, name
        self.folder = os.path.join(state, "jobs", name)
        self.token = token_of(state, name)

    def read(self, what: str) -> Any:
        try:
            with open(os.path.join(self.folder, what), encoding="utf-8") as stream:
                return json.load(stream)
        except (OSError, ValueError):
            return None

    def write(self, what: str, document: Any) -> None:
        path = os.path.join(self.folder, what)
        with open(path + ".part", "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
        os.replace(path + ".part", path)

    def note(self, about: dict[str, Any], **more: Any) -> None:
        """More about a job that began, for people; not worth ending it for."""
        try:
            self.write("job.json", {**about, **more})
        except OSError:
            pass

    def end(self, code: int, reason: str, seconds: float, killed: int, left: list[int]) -> None:
        """Written once; the disk may be full, and the exit code travels without it."""
        if self.read("end.json") is not None:
            return
        try:
            self.write("end.json", {"exit": code, "reason": reason, "seconds": round(seconds, 3), "killed": killed, "left": left,
                                    "ended": time.time(), "runs": self.runs()})
        except OSError as error:
            say(f"cannot write {self.folder}/end.json: {error.strerror}")

    def runs(self) -> list[str] | None:
        """Names of the run folders that were made or changed since the job began; None when that is not known."""
        job = self.read("job.json") or {}
        if "results" not in job:
            return None
        before = job["before"]
        return sorted(name for name, stamp in stamps(job["results"]).items() if before.get(name) != stamp)

    def alive(self) -> bool:
        """Is the agent that runs it still there?"""
        job = self.read("job.json")
        return bool(job) and birth(job["agent"]) == job["birth"]

    def describe(self) -> dict[str, Any]:
        job, end = self.read("job.json") or {}, self.read("end.json")
        state = "ended" if end else "running" if self.alive() else "lost"
        shown = {key: value for key, value in job.items() if key not in ("before", "results")}
        return {**shown, "job": self.name, "state": state, "end": end, "processes": len(token_pids(self.token))}


def private_variables(job: Job) -> dict[str, str]:
    """The values that came for a job, in a file that nobody else can read, and that is gone after this. OSError, ValueError."""
    path = os.path.join(job.state, "private", f"{job.name}.json")
    with open(path, encoding="utf-8") as stream:
        found = json.load(stream)
    os.unlink(path)
    return {str(name): str(value) for name, value in found.items()}


def stamps(folder: str) -> dict[str, int]:
    """Run folder -> a number that changes with it: times (nanoseconds) and sizes of its files. Clocks are not compared."""
    found = {}
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if entry.is_dir():
            files = [os.stat(os.path.join(where, name)) for where, _, names in os.walk(entry.path) for name in names]
            found[entry.name] = hash(tuple(sorted((s.st_ino, s.st_mtime_ns, s.st_size) for s in files)))
    return found


def all_jobs(state: str) -> list[Job]:
    """Oldest first, by the clock of this machine: names carry the client's, which may be wrong or be set."""
    folder = os.path.join(state, "jobs")
    jobs = [Job(state, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []
    return sorted(jobs, key=lambda job: (job.read("job.json") or {}).get("started", 0))


def prune(state: str) -> None:
    """What piles up: ended jobs, runs of tune and cubins beyond the newest go, and variables of jobs that never began."""
    private = os.path.join(state, "private")
    for entry in os.scandir(private) if os.path.isdir(private) else ():
        if time.time() - entry.stat().st_mtime > _PRIVATE_S:
            os.unlink(entry.path)
    for job in [j for j in all_jobs(state) if not j.alive()][:-KEEP_JOBS]:
        shutil.rmtree(job.folder, ignore_errors=True)
    for folder, keep in (("tune-results", KEEP_JOBS), ("prebuilt", KEEP_FILES)):
        path = os.path.join(state, folder)
        for entry in sorted(os.scandir(path), key=lambda e: e.stat().st_mtime)[:-keep] if os.path.isdir(path) else ():
            if entry.is_dir():
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def say(text: str) -> None:
    try:
        sys.stderr.write(f"far side: {text}\n")
        sys.stderr.flush()
    except OSError:
        pass  # nobody listens any more


def gpu_facts() -> dict[str, Any]:
    """What nvidia-smi knows: cards, and processes on them. Empty without it."""
    if not shutil.which("nvidia-smi"):
        return {}
    out: dict[str, Any] = {}
    for key, query in (("gpus", "--query-gpu=index,name,uuid,driver_version"),
                       ("compute_apps", "--query-compute-apps=pid,gpu_uuid,used_memory")):
        try:
            done = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5)
            out[key] = [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines() if line]
        except (OSError, subprocess.TimeoutExpired):
            out[key] = None
    return out


def host_facts() -> dict[str, Any]:
    name = os.uname()
    return {"host": name.nodename, "system": name.sysname, "release": name.release, "machine": name.machine,
            "python": sys.version.split()[0], "cpus": os.cpu_count(), **gpu_facts()}
