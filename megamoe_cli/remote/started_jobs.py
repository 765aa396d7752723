"""What this machine knows of the background jobs it started: where their results go, and how they were sent. A later
``attach`` needs it; from another machine it works without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli import paths
from megamoe_cli.report.junit import write_text

if TYPE_CHECKING:
    from megamoe_cli.remote.passthrough import Inner
    from megamoe_cli.remote.runs import Visit

_KEPT = 50  # jobs that are remembered


def _path(job: str) -> Path:
    return paths.cache_dir() / "remote" / "jobs" / f"{job}.json"


def keep(job: str, visit: Visit, inner: Inner, results: Path) -> None:
    """Before the job is started."""
    write_text(_path(job), json.dumps({
        "junit": str(inner.junit.absolute()) if inner.junit else None, "kept": {k: str(v.absolute()) for k, v in inner.kept.items()},
        "name": inner.name, "args": inner.args, "results": str(results.absolute()), "cubins": visit.cubins,
        "steps": [step.to_dict() for step in visit.steps]}))  # fmt: skip
    for old in sorted(_path(job).parent.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-_KEPT]:
        old.unlink(missing_ok=True)


def recall(job: str, visit: Visit) -> tuple[Inner, Path] | None:
    """(the command, where its results go); gives ``visit`` the steps and cubins of the start. None when not known here."""
    from megamoe_cli.remote.passthrough import Inner
    from megamoe_cli.remote.transport import Step

    try:
        known: dict[str, Any] = json.loads(_path(job).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    visit.cubins = visit.cubins or known["cubins"]
    started = [Step(s["what"], s["command"], s["seconds"], s["exit_code"]) for s in known["steps"]]
    visit.steps[:0] = started
    inner = Inner(known["name"], known["args"], junit=Path(known["junit"]) if known["junit"] else None,
                  kept={k: Path(v) for k, v in known["kept"].items()})
    return inner, Path(known["results"])
