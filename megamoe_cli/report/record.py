"""The run record: everything needed to know later what ran, where, on which sources, and what came out."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamoe_cli import __version__, paths
from megamoe_cli.errors import UsageError
from megamoe_cli.protocol import CaseResult, plain
from megamoe_cli.report.junit import junit_xml, write_text
from megamoe_cli.settings import Value
from megamoe_cli.testplan import Case

SCHEMA = "megamoe.run/1"


def new_run_id(command: str, now: float | None = None) -> str:
    """``20260102-030405-test-9f3a``: sorts by time, and two runs in one second differ."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{command}-{secrets.token_hex(2)}"


def source_state() -> dict[str, Any]:
    """Version, digest of the kernel sources, and in a git checkout the commit and whether files differ from it."""
    state: dict[str, Any] = {"version": __version__, "kernel_sources": paths.kernel_source_digest()}
    root = paths.checkout_root()
    if root is not None and (root / ".git").exists():
        commit = _git(root, "rev-parse", "HEAD")
        if commit is not None:
            state["commit"] = commit
            state["dirty"] = bool(_git(root, "status", "--porcelain"))
    elif sent := os.environ.get("MEGAMOE_SOURCE_STATE"):
        # A tree sent by megamoe remote has no repository; what its sender said holds while the sources are the same.
        try:
            said = json.loads(sent)
        except ValueError:
            said = {}
        if said.get("kernel_sources") == state["kernel_sources"]:
            state.update({key: said[key] for key in ("commit", "dirty") if key in said})
    return state


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def host_state() -> dict[str, Any]:
    """The machine, without its name: system, processor count, Python."""
    return {"system": platform.system(), "release": platform.release(), "machine": platform.machine(),
            "cpus": os.cpu_count(), "python": platform.python_version()}


def run_document(run_id: str, cases: Sequence[Case], results: Sequence[CaseResult], seconds: float, exit_code: int,
                 settings: Mapping[str, Value], interrupted: int | None = None) -> dict[str, Any]:
    """The record as plain data (JSON). ``results`` is in plan order, one entry per case, ``not run`` included."""
    by_id = {result.id: result for result in results}
    entries = []
    for case in cases:
        result = by_id.get(case.id)
        entry = {"phase": case.phase, **(result.to_dict() if result else {"id": case.id, "status": "not run"})}
        entry["repro"] = case.repro()
        entries.append({**entry, "case": case.to_dict()})
    passed = sum(result.passed for result in results)
    return plain({
        "schema": SCHEMA, "id": run_id, "command": ["megamoe", *sys.argv[1:]], "exit_code": int(exit_code),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "seconds": round(seconds, 3),
        "interrupted": interrupted, "source": source_state(), "host": host_state(),
        "settings": {name: {"value": value.value, "from": value.origin} for name, value in settings.items()},
        "where": list(dict.fromkeys(result.where for result in results if result.where)),
        "summary": {"cases": len(cases), "passed": passed, "failed": len(results) - passed,
                    "not_run": len(cases) - len(results)},
        "results": entries,
    })


def make_run_dir(results_dir: Path, run_id: str) -> Path:
    """Creates the folder of a run; UsageError when it cannot be written, before anything is started."""
    folder = results_dir / run_id
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except OSError as error:
        raise UsageError(f"cannot write run records to {results_dir}: {error.strerror}",
                         hint="pass --results-dir") from None
    return folder


def write_record(folder: Path, document: Mapping[str, Any], cases: Sequence[Case],
                 results: Sequence[CaseResult]) -> None:
    """``results.json`` and ``junit.xml`` in ``folder``."""
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "junit.xml", junit_xml(cases, results))
