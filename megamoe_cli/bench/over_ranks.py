"""The parent of ``megamoe bench --ranks``: asks the measuring group for one row at a time and makes a row's record of it.

The group is held from outside: a rank that dies, hangs or is late ends it, and the next row meets a fresh one. Where another
contender may be the reason, the row is asked again without it, so that it costs its own column and not ours. Imports
neither torch nor cupy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import EnvironmentUnfit
from ..protocol import CaseResult
from ..shapes import Shape, default_capacity
from ..tuning.group import RankGroup
from ..tuning.schema import Choice
from .intervals import Estimate
from .measured import ratios
from .ranks_worker import NO_MULTICAST, PROGRAM

SETUP_S = 300.0  # weights, inputs, references, and what compiles at a first launch
ROW_S = 150.0  # a row's launches
PIECE_S = 30.0  # of one timed piece on the device
LOST = ("hang", "crash")
GIVE_UP = 2  # rows in a row that no group survives, with nobody else to blame


@dataclass(frozen=True)
class RowRequest:
    """One row: ``shape`` with all its experts over ``ranks``, ``tokens`` on each."""

    name: str
    shape: Shape
    ranks: int
    tokens: int
    choice: Choice
    samples: int
    seed: int
    times: tuple[str, ...] = ("kernel", "in_a_row", "graph")

    def task(self, against: Sequence[str]) -> dict[str, Any]:
        return {"shape": self.shape.as_list(), "tokens": self.tokens, "capacity": default_capacity([self.tokens]), "routing": "uniform",
                "seed": self.seed, "weights_seed": self.seed, "choice": self.choice.to_dict(), "against": list(against),
                "samples": self.samples, "modes": list(self.times), "run_s": PIECE_S}  # fmt: skip


def worker_command(backend: str, ranks: int, reserve: int = 0) -> list[str]:
    more = ["--reserve-sms", str(reserve)] if reserve else []
    return [*PROGRAM, "--backend", backend, "--ranks", str(ranks), *more]


@dataclass
class OverRanks:
    """Rows of one shape. ``against``: contenders that are still in; ``failed``: (tokens, contender, reason, status) of what was
    lost. ``say`` hears stages. Use as a context manager."""

    command: Sequence[str]
    against: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: None
    log_dir: Path | None = None
    setup_s: float = SETUP_S
    row_s: float = ROW_S
    failed: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0  # rows in a row that ended their group, with no other contender in them

    def __post_init__(self) -> None:
        self._stage = ""
        self.group = RankGroup(self.command, env=NO_MULTICAST, log_dir=self.log_dir, setup_timeout_s=self.setup_s, on_stage=self._hear)

    def __enter__(self) -> OverRanks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.group.end()
        self.group.close()

    def _hear(self, stage: str) -> None:
        if stage != self._stage and not stage.startswith("run "):  # turns change with every piece
            self.say(stage)
        self._stage = stage

    def row(self, request: RowRequest) -> dict[str, Any] | None:
        """The row, or None when our own part of it failed. EnvironmentUnfit when no group can be started, or none survives."""
        first = result = self._ask(request, self.against)
        while not result.passed and (blamed := self._blamed(result)):
            for name in blamed:
                self._lose(request, name, result)
            self.group.restart()  # whatever it left on the device is gone with its processes
            first = result = self._ask(request, self.against)
        if not result.passed and self.against and not result.message.startswith("ours "):
            self.group.restart()
            result = self._ask(request, ())  # whoever it was: with ours alone it shows
            if result.passed:
                for name in list(self.against):
                    self._lose(request, name, first)
        if not result.passed:
            self._note(request, "ours", result.message, result.status)
            self._count_lost(result)
            return None
        self.lost = 0
        for name, reason in result.metrics.get("failed", {}).items():
            self._note(request, name, shortened(name, reason), "output wrong")
        return record(request, result)

    def _ask(self, request: RowRequest, against: Sequence[str]) -> CaseResult:
        self._stage = ""
        began = time.monotonic()
        result = self.group.ask({"id": f"{request.name}-{request.tokens}", "task": request.task(against)}, self.row_s)
        if result.status == "crash":  # the group's parent has said which rank it was
            result.message += "".join(f": {line.removeprefix('megamoe: ')}" for line in result.stderr if line.startswith("megamoe: rank "))
        self.say(f"{request.name} at {request.tokens} tokens: {result.status} after {time.monotonic() - began:.0f} s")
        return result

    def _blamed(self, result: CaseResult) -> list[str]:
        """Other contenders that the failure surely comes from: by name, or because it was their turn."""
        named = [name for name in self.against if f"{name} failed: " in result.message]
        turn = self._stage.partition(" ")[2]
        return named or ([turn] if turn in self.against else [])

    def _lose(self, request: RowRequest, name: str, result: CaseResult) -> None:
        """What took a group down, or cannot be set up, would do so again."""
        self._note(request, name, shortened(name, result.message), result.status)
        self.against.remove(name)

    def _count_lost(self, result: CaseResult) -> None:
        self.lost = self.lost + 1 if result.status in LOST else 0
        if self.lost >= GIVE_UP:
            raise EnvironmentUnfit(f"{self.lost} rows in a row ended their processes; the last one: {result.message}",
                                   hint=f"the last words of the processes are in {self.group.log}")  # fmt: skip

    def _note(self, request: RowRequest, contender: str, reason: str, status: str) -> None:
        self.failed.append({"shape": request.name, "tokens": request.tokens, "contender": contender, "reason": reason, "status": status})


def shortened(name: str, message: str) -> str:
    """The reason alone, where ranks passed each other's words on; the first line of it."""
    said = message.rpartition(f"{name} failed: ")[2].strip()
    return said.splitlines()[0] if said else message


# -- a row's record --------------------------------------------------------------------------------


def estimates(times: dict[str, list[list[float]]]) -> dict[str, Estimate]:
    """Mode -> of the slowest rank in each time taken."""
    return {mode: Estimate.of([max(ranks) for ranks in taken]) for mode, taken in times.items() if taken}


def per_rank(times: dict[str, list[list[float]]], mode: str = "kernel") -> list[float]:
    """Each rank's median."""
    return [statistics.median(ranks) for ranks in zip(*times[mode])]


def record(request: RowRequest, result: CaseResult) -> dict[str, Any]:
    """A row as the document has it. Microseconds; bytes and GB/s are of the busiest rank and one launch."""
    said = result.metrics
    found = {name: entry["times"] for name, entry in said["contenders"].items()}
    own = estimates(found["ours"])
    kernel, ranks = own["kernel"], per_rank(found["ours"])
    link = dict(said["link"])
    for way in ("in", "out"):
        link[f"{way}_gb_s"] = link[f"{way}_bytes"] / kernel.us / 1e3 if link["is_link"] else None
    floors = {name: said[f"{name}_floor_us"] for name in ("weight", "tensor")} | {"link": link["floor_us"]}
    floor = max(value for value in floors.values() if value is not None)
    rivals = []
    for name, entry in said["contenders"].items():
        if name != "ours":
            times = estimates(entry["times"])
            rivals.append({"name": name, "version": entry["version"], "times": {mode: asdict(each) for mode, each in times.items()},
                           "ratios": ratios(own, times), "difference": entry["difference"], "per_rank_us": per_rank(entry["times"]), "to_reach": None})  # fmt: skip
    return {"shape": request.name, "tokens": request.tokens, "ranks": request.ranks, "where": result.where, "kernel_us": kernel.us,
            "low_us": kernel.low_us, "high_us": kernel.high_us, "samples": len(kernel.times_us), "per_rank_us": ranks,
            "slowest_rank": ranks.index(max(ranks)), "back_to_back_us": own["in_a_row"].us if "in_a_row" in own else None,
            "graph_us": own["graph"].us if "graph" in own else None, "no_graph": said["graphs"],
            "times": {mode: asdict(each) | {"per_rank_us": per_rank(found["ours"], mode)} for mode, each in own.items()},
            **{f"{name}_floor_us": value for name, value in floors.items()}, "floor_us": floor, "of_floor": floor / kernel.us,
            "floors_us": said["floors_us"], "link": link, "rivals": rivals, "config": said["config"], "worst_relative": said["worst_relative"],
            "conditions": said["conditions"], "retaken": said["retaken"], "overhead_us": said["overhead_us"]}  # fmt: skip
