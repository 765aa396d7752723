"""What a tuning run is going to do, settled and written down before anything runs: ``plan.json`` of its folder.

Resuming reads it back, so an interrupted run and its continuation are the same experiment. The keys of trials do not
depend on the set of candidates: adding one to a finished run measures that one.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megamoe_cli.backends.sm_share import usable_sms
from megamoe_cli.config import grid_ctas
from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.tuning.lookup import Library, Machine, Query, edge_counts, lookup
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import resolved
from megamoe_cli.tuning.table_writer import write_text

SCHEMA = "megamoe.tune-plan/1"
STRATEGIES = ("grid", "halving", "tpe")
INCUMBENTS = ("auto", "baseline", "default")


@dataclass(frozen=True)
class Settings:
    """Numbers that decide. Rounds are pairs; fractions are of time."""

    min_gain: float = 0.01  # the least gain that is worth another configuration
    tolerance: float = 0.02  # configurations this close to the best of a size are equally good there
    max_slowdown: float = 0.03  # on a held-out size, against the best that was measured there
    screen_rounds: int = 2
    second_rounds: int = 6
    final_rounds: int = 16
    noise_rounds: int = 24
    stop_ratio: float = 1.6  # a candidate this far behind after one round is not measured further in screening
    tpe_trials: int = 24  # asked for each size


@dataclass
class Plan:
    """See the module. ``incumbents``: (first token count, what the existing tables pick from there on), ascending from 0,
    resolved. ``digest``: of the kernel sources. ``scripted``: the fake device's script, or empty."""

    run: str
    shape: Shape
    ranks: int
    machine: Machine
    sizes: list[int]
    capacity: int
    routing: str
    strategy: str
    space: str
    candidates: list[Choice]
    incumbents: list[tuple[int, Choice]]
    incumbent_from: str
    default: Choice
    seed: int
    settings: Settings
    digest: str
    accounts: dict[str, Any] = field(default_factory=dict)
    holdout: list[int] = field(default_factory=list)  # sizes to hold out; empty: chosen from the result
    scripted: str = ""
    named: list[Choice] = field(default_factory=list)  # candidates named by hand: each has a final at every size
    reserve_sms: int = 0  # SMs that every launch leaves free
    disqualified: set[Choice] = field(default_factory=set, compare=False)  # incumbents that failed; found again on replay

    @property
    def query(self) -> Query:
        return Query(self.shape, self.ranks, self.machine)

    @property
    def sms(self) -> int:
        """SMs of the GPU that launches may use."""
        return usable_sms(self.machine.sms, self.reserve_sms)

    def shared_sms(self) -> int | None:
        """As ``Query.shared_sms``, less the reserve."""
        return None if self.query.shared_sms() is None else self.sms

    def problem(self, tokens: int) -> Problem:
        return Problem.make(self.shape, self.ranks, tokens, self.capacity)

    def incumbent(self, tokens: int) -> Choice:
        """What every candidate has to beat at ``tokens`` per rank; the default where that is no valid kernel."""
        own = self.incumbents[bisect.bisect_right([start for start, _ in self.incumbents], tokens) - 1][1]
        return self.default if own in self.disqualified else own

    def load(self, tokens: float) -> float:
        """Expected tokens per local expert."""
        return tokens * self.ranks * self.shape.topk / self.shape.experts

    def identity(self) -> list[Any]:
        """What a measurement belongs to beside its own options. The GPU's name is part of it: two chips with the same SM
        count are two machines."""
        m = self.machine
        reserve = [self.reserve_sms] if self.reserve_sms else []
        return [self.digest, m.name, m.sms, m.backend, self.shape.as_list(), self.ranks, self.capacity, *reserve]

    def stage_seed(self, stage: str, tokens: int, routing: str) -> int:
        """Of a stage's inputs: searching, finals, confirmation and validation each have their own at every size, so that
        nothing is confirmed by the inputs that chose it."""
        group = stage.removesuffix("-more")
        group = "search" if group in ("noise", "screen", "second", "launch", "tpe", "probe") else group
        return _number(f"{self.seed}/{group}/{tokens}/{routing}")

    def task(self, stage: str, tokens: int, routing: str, a: Choice, b: Choice, rounds: int, stop_ratio: float = 0.0) -> dict[str, Any]:
        """The measuring process's task, without its key."""
        return {"stage": stage, "shape": self.shape.as_list(), "tokens": tokens, "capacity": self.capacity, "routing": routing,
                "seed": self.stage_seed(stage, tokens, routing), "weights_seed": _number(f"{self.seed}/weights"), "rounds": rounds,
                "stop_ratio": stop_ratio, "a": a.to_dict(), "b": b.to_dict()}

    def key(self, task: Mapping[str, Any]) -> str:
        """Names a trial: everything that could change what it measures."""
        return hashlib.sha256(json.dumps([self.identity(), dict(task)], sort_keys=True).encode()).hexdigest()[:24]

    def fingerprint(self) -> str:
        """Equal for runs that may share trials."""
        return hashlib.sha256(json.dumps([self.identity(), self.sizes, self.routing, self.seed]).encode()).hexdigest()[:12]

    # -- on disk -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "run": self.run, "shape": self.shape.as_list(), "ranks": self.ranks, "machine": asdict(self.machine),
            "sizes": self.sizes, "capacity": self.capacity, "routing": self.routing, "strategy": self.strategy, "space": self.space,
            "candidates": [c.to_dict() for c in self.candidates], "incumbents": [[start, c.to_dict()] for start, c in self.incumbents],
            "incumbent_from": self.incumbent_from, "default": self.default.to_dict(), "seed": self.seed, "settings": asdict(self.settings),
            "digest": self.digest, "accounts": self.accounts, "holdout": self.holdout, "scripted": self.scripted,
            "named": [c.to_dict() for c in self.named], "reserve_sms": self.reserve_sms, "fingerprint": self.fingerprint(),
        }

    def write(self, folder: Path) -> None:
        write_text(folder / "plan.json", json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """UsageError when the folder holds no plan of a tuning run that this program can read."""
        path = folder / "plan.json"
        try:
            data = json.loads(path.read_text())
            if data.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {data.get('schema')!r}, not {SCHEMA!r}")
            known = {f.name for f in fields(Settings)}
            return cls(
                data["run"], Shape(*data["shape"]), data["ranks"], Machine(**data["machine"]), data["sizes"], data["capacity"],
                data["routing"], data["strategy"], data["space"], [Choice.from_dict(c) for c in data["candidates"]],
                [(start, Choice.from_dict(c)) for start, c in data["incumbents"]], data["incumbent_from"], Choice.from_dict(data["default"]),
                data["seed"], Settings(**{k: v for k, v in data["settings"].items() if k in known}), data["digest"], data["accounts"],
                data["holdout"], data["scripted"], [Choice.from_dict(c) for c in data["named"]], int(data.get("reserve_sms", 0)))
        except OSError as error:
            raise UsageError(f"{folder} is no tuning run: {path.name}: {error.strerror}", rule="resume") from None
        except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
            raise UsageError(f"{path} cannot be read: {error}", rule="resume") from None


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def incumbents(query: Query, most: int, library: Library, default: Choice, kind: str) -> tuple[list[tuple[int, Choice]], str]:
    """What is picked today for each count up to ``most``, as steps, resolved, and where from. ``kind``: auto (a measured
    table first), baseline, or default (the built-in configuration everywhere)."""
    if kind == "default":
        return [(0, default)], "the built-in default"
    if kind == "baseline":
        library = Library([(t, p) for t, p in library.tables if t.source == "baseline"], library.problems)
    steps: list[tuple[int, Choice]] = []
    sources: dict[str, None] = {}
    for tokens in (count for count in edge_counts(library, query) if count <= most):
        pick = lookup(query, tokens, library)
        sources[pick.table.name if pick.table else "the built-in default"] = None
        if not steps or steps[-1][1] != pick.choice:
            steps.append((tokens, pick.choice))
    return [(start, resolved(choice, query.shape, query.ranks)) for start, choice in steps], ", ".join(sources)


def fitted(choice: Choice, ranks: int, sms: int | None) -> Choice:
    """The choice with as many CTAs as fit, where it says more than that: what the backend launches then."""
    return replace(choice, ctas=0) if sms is not None and choice.ctas > grid_ctas(choice.config, ranks, sms) else choice


def default_sizes(ranks: int) -> list[int]:
    """Powers of two: to 8192 tokens on one rank, to 1024 where every rank has as many."""
    return [1 << n for n in range(14 if ranks == 1 else 11)]


def visiting_order(sizes: Sequence[int]) -> list[int]:
    """The ends, then always the middle of the widest stretch not visited: whenever time runs out, what was measured spans
    all sizes."""
    ordered, done = sorted(sizes), []
    if not ordered:
        return []
    done = [0, len(ordered) - 1] if len(ordered) > 1 else [0]
    while len(done) < len(ordered):
        marks = sorted(done)
        gap = max(zip(marks, marks[1:]), key=lambda pair: pair[1] - pair[0])
        done.append((gap[0] + gap[1]) // 2)
    return [ordered[i] for i in done]
