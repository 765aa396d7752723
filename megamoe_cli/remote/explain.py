"""What went wrong on the far side, in words: before a job, and inside of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamoe_cli.errors import EnvironmentUnfit, MegamoeError, UsageError
from megamoe_cli.remote import commands
from megamoe_cli.remote.targets import Target
from megamoe_cli.remote.transport import DISK_FULL, SSH_FAILED, Step, explain_killed, explain_ssh, last_line, space_hint

_FAULT_CHARS = 300  # a fault of 8 ranks names them all


def explain_prepare(target: Target, step: Step) -> MegamoeError:
    """Why the folder there cannot be used, in one line and a hint."""
    if step.exit_code == commands.NOT_OURS:
        return UsageError(f"{target.label}: {target.path} has contents that megamoe did not put there",
                          hint="set path to a new folder: what lies in it is deleted when it is gone here", rule="remote-target")
    if step.exit_code == commands.NO_CONTAINER:
        return EnvironmentUnfit(f"{target.label}: container {target.container} does not answer: {last_line(step.stderr)}",
                                hint=f"start it on the host, with {target.path} mounted")
    if step.exit_code == commands.NOT_MOUNTED:
        return EnvironmentUnfit(f"{target.label}: container {target.container} does not see {target.inside}",
                                hint=f"mount {target.path} into it, or set container_path to where it is mounted")
    if step.exit_code == commands.NO_TIMEOUT:
        where = f"container {target.container}" if target.container else "the machine"
        return EnvironmentUnfit(f"{target.label}: {where} has no timeout that ends a command (timeout --foreground -k): "
                                f"{last_line(step.stderr) or 'it fails'}", hint="install GNU coreutils there")
    if killed := explain_killed(target, step):
        return killed
    if step.exit_code == SSH_FAILED:
        return explain_ssh(target, step.stderr)
    return EnvironmentUnfit(f"{target.label}: {target.path} cannot be prepared: {last_line(step.stderr) or step.exit_code}",
                            hint=space_hint(target) if any(words in step.stderr for words in DISK_FULL) else None)


def load(path: Path) -> Any:
    """A document, or None."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def innermost(folders: Sequence[Path]) -> str:
    """The fault nearest to the device that the records hold, or an empty string."""
    order = ("fault", "hang", "crash", "error", "fail")
    found: list[tuple[int, str]] = []
    for folder in folders:
        for result in (load(folder / "results.json") or {}).get("results", []):
            if result.get("status") in order:
                fault = " ".join(str((result.get("fault") or {}).get("text") or result.get("message") or result["status"]).split())
                more = fault[_FAULT_CHARS:] and "... (the rest is in the record)"
                found.append((order.index(result["status"]), f"{result['id']}: {result['status']}: {fault[:_FAULT_CHARS]}{more}"))
    return min(found)[1] if found else ""
