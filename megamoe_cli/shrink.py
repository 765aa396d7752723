"""From a failing case to a small one that fails in the same way: fewer ranks, launches, tokens and CTAs, a smaller
layer, a simpler schedule. No torch.

    smallest = shrink(case, result, run, budget_s=60)

Every step tries a handful of candidates, each with a few seeds, since another size is another schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import UsageError
from .layout import SCALE_GROUP
from .protocol import CaseResult
from .shapes import Shape
from .testplan import Case, resized

SEEDS_TRIED = 4
# Results by position in the batch; what did not run is missing.
Run = Callable[[Sequence[Case]], Mapping[int, CaseResult]]


@dataclass(frozen=True)
class Shrunk:
    """``case`` fails with ``result``; ``tried`` cases were run to find it. ``done``: nothing smaller was left to try."""

    case: Case
    result: CaseResult
    tried: int
    done: bool
    interrupted: int | None = None  # the signal that ended it


class Interrupted(Exception):
    """A batch was cut short by signal ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


def signature(result: CaseResult) -> frozenset[str]:
    """What kind of failure this is: where each finding is and what it is about. Two results that share one part count as
    the same failure."""
    if result.passed:
        return frozenset()
    parts = {f"{f.get('metric', '')}@{f.get('place', '')}" for f in result.findings}
    for record in ((result.fault or {}).get("records") or {}).values():
        parts.add(f"{record.get('code')}:{record.get('wait')}")
    return frozenset(parts or {result.status})


def shrink(case: Case, result: CaseResult, run: Run, budget_s: float = 60.0,
           clock: Callable[[], float] = time.monotonic) -> Shrunk:  # fmt: skip
    """The smallest case found in ``budget_s`` seconds (a batch that has begun ends), or until a signal. ``run``: see ``batches``."""
    wanted, began, tried = signature(result), clock(), 0
    step = True
    while step:
        step = False
        for kind in KINDS:
            small = [resized(other, seed=case.seed + n) for other in candidates(case, kind) for n in range(SEEDS_TRIED)]
            if not small:
                continue
            if clock() - began > budget_s:
                return Shrunk(case, result, tried, False)
            tried += len(small)
            try:
                done = run(small)
            except Interrupted as stop:
                return Shrunk(case, result, tried, False, stop.number)
            first = next((n for n in range(len(small)) if n in done and signature(done[n]) & wanted), None)
            if first is not None:
                case, result, step = small[first], done[first], True
    return Shrunk(case, result, tried, True)


def batches(backend: str, timeout_s: float, jobs: int = 1, env: Mapping[str, str] | None = None) -> Run:
    """Runs cases through the supervisor, which may differ in their rank count. Raises Interrupted."""
    from .supervisor import run_cases

    def run(cases: Sequence[Case]) -> dict[int, CaseResult]:
        done: dict[int, CaseResult] = {}
        for ranks in dict.fromkeys(case.ranks for case in cases):
            # By position, not by id: cases that differ in an option only have the same id.
            chosen = [case.to_dict() | {"id": str(n)} for n, case in enumerate(cases) if case.ranks == ranks]
            results = run_cases(chosen, backend=backend, ranks=ranks, timeout_s=timeout_s, jobs=jobs, env=env)
            if results.interrupted is not None:
                raise Interrupted(results.interrupted)
            for result in results:
                done[int(result.id)] = replace(result, id=cases[int(result.id)].id)
        return done

    return run


KINDS = ("ranks", "launches", "options", "tokens", "shape", "schedule")


def candidates(case: Case, kind: str) -> Iterator[Case]:
    """Variants of ``case`` that are smaller in one respect, the biggest steps first; only legal ones."""
    for changes in _changes(case, kind):
        try:
            yield resized(case, **changes)
        except UsageError:
            continue


def _changes(case: Case, kind: str) -> Iterator[dict[str, Any]]:
    tokens, shape, options = case.problem.tokens, case.problem.shape, case.options
    if kind == "ranks":
        yield from ({"tokens": tokens[:ranks]} for ranks in range(1, case.ranks) if shape.experts % ranks == 0)
    elif kind == "launches":
        yield from ({"launches": launches} for launches in range(1, case.launches))
    elif kind == "options":
        for name in ("replay", "mix", "vary_tokens", "skew"):
            if name in options:
                yield {"options": {k: v for k, v in options.items() if k != name}}
        yield from ({"options": options | {"ctas": fewer}} for fewer in range(1, int(options.get("ctas", 2))))
    elif kind == "tokens":
        most = max(tokens)
        for limit in sorted({1, 2, most // 4, most // 2, most - 1}):
            if 0 < limit < most:
                yield {"tokens": tuple(min(count, limit) for count in tokens)}
        for rank, count in enumerate(tokens):
            if count and len(tokens) > 1:
                yield {"tokens": tokens[:rank] + (0,) + tokens[rank + 1 :]}
    elif kind == "shape":
        yield from ({"shape": smaller} for smaller in _shapes(shape, case.ranks))
    else:
        for name, simple in (("completion", "eager"), ("schedule", "fifo")):
            if options.get(name, simple) != simple:
                yield {"options": options | {name: simple}}


def _shapes(shape: Shape, ranks: int) -> Iterator[Shape]:
    for hidden in sorted({SCALE_GROUP, shape.hidden // 2 // SCALE_GROUP * SCALE_GROUP} - {0}):
        if hidden < shape.hidden:
            yield replace(shape, hidden=hidden)
    for intermediate in sorted({SCALE_GROUP, shape.intermediate // 2 // SCALE_GROUP * SCALE_GROUP} - {0}):
        if intermediate < shape.intermediate:
            yield replace(shape, intermediate=intermediate)
    if shape.experts > ranks:
        yield replace(shape, experts=ranks, topk=min(shape.topk, ranks))
    if shape.topk > 1:
        yield replace(shape, topk=1)
