"""For end-to-end tests: cases through the supervisor, as ``megamoe test`` runs them, and a failure text that says what
was wrong and how to run that one case again."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megamoe_cli import testplan
from megamoe_cli.supervisor import CaseResults, run_cases


def plan(backend: str, named: Sequence[str] = (), **request: Any) -> list[testplan.Case]:
    """The cases of a request (fields of ``testplan.Request``), or the named small inputs ``named``."""
    asked = testplan.Request(backend=backend, **{k: str(v) if k in ("ranks", "tokens", "block_m") else v for k, v in request.items()})
    return testplan.named(asked, named) if named else testplan.expand(asked)


def run(cases: Sequence[testplan.Case], *, jobs: int = 1, timeout_s: float = 120.0, backend: str | None = None) -> list[Any]:
    """Runs them, grouped by rank count as workers are."""
    results: list[Any] = []
    with tempfile.TemporaryDirectory() as logs:
        for ranks in dict.fromkeys(case.ranks for case in cases):
            some: CaseResults = run_cases([c for c in cases if c.ranks == ranks], backend=backend or cases[0].backend, ranks=ranks,
                                          timeout_s=timeout_s, jobs=jobs, log_dir=Path(logs))  # fmt: skip
            results += some
    return results


def prove(backend: str, *, jobs: int = 1, timeout_s: float = 120.0, **request: Any) -> list[Any]:
    """Every case must pass; returns the results."""
    cases = plan(backend, **request)
    results = run(cases, jobs=jobs, timeout_s=timeout_s)
    assert [r.id for r in sorted(results, key=lambda r: r.id)] == sorted(c.id for c in cases), "not every case ran"
    bad = [r for r in results if not r.passed]
    assert not bad, "\n" + "\n".join(describe(r) for r in bad)
    assert all(r.where.startswith(backend) for r in results)
    return results


def describe(result: Any) -> str:
    lines = [f"{result.status}: {result.id} on {result.where}: {result.message}"]
    lines += [f"    {f.get('metric')}: rank {f.get('rank')} token {f.get('token')} slot {f.get('slot')} column {f.get('column')}: "
              f"got {f.get('got')}, expected {f.get('expected')}: {f.get('message')}" for f in result.findings]
    lines += [f"    | {line}" for line in result.stderr]
    return "\n".join([*lines, f"    {result.repro}"])
