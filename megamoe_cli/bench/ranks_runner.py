"""The measuring side of ``megamoe bench --ranks``: one row at a time, in the process (or the processes) that hold the ranks.

It stands on the tuner's measuring process: weights once, inputs of a size on every rank, outputs judged against the FP32
reference before and after timing. What is timed is ``timing.measure``'s kernel, in_a_row and graph, on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..errors import EnvironmentUnfit, MegamoeError
from ..layout import INPUT_VIEWS
from ..oracle.compare import bits
from ..shapes import Problem, Shape
from ..tuning.conditions import between
from ..tuning.measuring import Arena, TuneRunner
from ..tuning.schema import Choice
from .contender import Contender, ContenderFailed, blame
from .judge import check_rival
from .link import facts
from .rank_contenders import OurRanks, RankPeer
from .rank_devices import ProgramDevice, RankDevice, RankWatch, StreamDevice
from .rivals import OWN, variant
from .timing import Plan, Timed, measure, overhead_us

T = TypeVar("T")
MODES = ("kernel", "in_a_row", "graph")  # cold has no launch ahead of the timed one, which the ranks would leave together
FIRST_S = 90.0  # on the device, of a contender's very first launch (the public package gives up waiting for a rank after 60)


class RanksRunner(TuneRunner):
    """Answers rows: ``{"shape", "tokens", "capacity", "routing", "seed", "weights_seed", "choice", "against", "samples", "modes",
    "in_a_row", "runs", "run_s"}``; with ``compile_peer`` it only has the public package compile. ``make_device(backend, control)`` and ``open_peer(rank, ranks)`` replace the real ones."""

    def __init__(self, backend: str, ranks: int, *, make_device: Callable[[Any, Any], RankDevice] | None = None,
                 open_peer: Callable[[int, int], Any] | None = None, **rest: Any) -> None:  # fmt: skip
        super().__init__(backend, ranks, **rest)
        self._make_device = make_device or (lambda backend, control: StreamDevice(backend, control) if control else ProgramDevice(backend))
        self._open_peer = open_peer or RankPeer
        self._machine: RankDevice | None = None
        self._peer: Any = None
        self._own_layer: tuple[Any, Any] = (None, None)
        self._failed: dict[str, str] = {}  # rivals of the row whose output was wrong

    def _answer(self, task: Mapping[str, Any]) -> dict[str, Any]:
        self.on_stage(self._key, "setup")
        self._machine = self._machine or self._together("look at the device", lambda: self._make_device(self.backend, self.control))
        if task.get("compile_peer"):
            return self._compile_peer(task)
        arena = self._arena(task)
        modes = [mode for mode in task.get("modes", MODES) if mode != "graph" or not self._machine.graphs]
        plan = Plan(samples=int(task["samples"]), in_a_row=int(task.get("in_a_row", 10)), runs=int(task.get("runs", 5)), modes=tuple(modes),
                    first_s=FIRST_S, wait_s=float(task.get("run_s", 30.0)))  # fmt: skip
        return self._row(task, arena, self._machine, plan)

    def _row(self, task: Mapping[str, Any], arena: Arena, device: RankDevice, plan: Plan) -> dict[str, Any]:
        self._reference(arena, 0), self._reference(arena, (plan.inputs - 1) % len(arena.cases))
        self._failed = {}
        ours, rivals = self._contenders(task, arena)
        for contender in (ours, *rivals):
            self._first_launch(contender, arena, plan)
        rivals = [rival for rival in rivals if rival.name not in self._failed]
        self.on_stage(self._key, "run")
        before = self._watch().sample()
        inputs = [arena.inputs[n % len(arena.inputs)] for n in range(plan.inputs)]
        every = {contender.name: contender for contender in (ours, *rivals)}
        watch = RankWatch(device, plan.wait_s, every, lambda stage: self.on_stage(self._key, stage))
        found = self._told("measure", lambda: measure(device, list(every.values()), inputs, plan, watch=watch))
        conditions = between(before, self._watch().sample())
        self._settle()
        self.on_stage(self._key, "reference")
        last = (plan.inputs - 1) % len(arena.cases)
        worst = self._judge_ours(found[ours.name], arena, last)
        different = {rival.name: self._judge_rival(rival, found[rival.name].outputs, arena, last) for rival in rivals}
        timed = [[data.topk_idx for data in arena.cases[n % len(arena.cases)].inputs] for n in range(plan.warmup, plan.inputs)]
        graphs = "" if "graph" in plan.modes else self._graphs_why(task, device)
        return facts(arena.problem, timed, self.backend.name) | {
            "config": ours.version, "worst_relative": worst, "graphs": graphs, "failed": self._failed, "conditions": conditions, "retaken": watch.retaken,
            "overhead_us": overhead_us(device) if isinstance(device, StreamDevice) else None,
            "contenders": {name: {"version": contender.version, "times": self._times(name, watch, plan),
                                  "difference": list(different.get(name, (0.0, worst)))}
                           for name, contender in every.items() if name not in self._failed}}  # fmt: skip

    @staticmethod
    def _graphs_why(task: Mapping[str, Any], device: RankDevice) -> str:
        return device.graphs if "graph" in task.get("modes", MODES) else "not asked for"

    @staticmethod
    def _times(name: str, watch: RankWatch, plan: Plan) -> dict[str, list[list[float]]]:
        """Mode -> microseconds of a launch on each rank, of each time taken."""
        per = {mode: 1 if mode == "kernel" else plan.in_a_row for mode in plan.modes}
        return {mode: [[us / per[mode] for us in ranks] for ranks in watch.by_rank[name, mode]] for mode in plan.modes}

    # -- contenders ----------------------------------------------------------------------------

    def _contenders(self, task: Mapping[str, Any], arena: Arena) -> tuple[OurRanks, list[Contender]]:
        ours = self._own("ours", Choice.from_dict(task["choice"]), arena, arena.outputs[0])
        rivals: list[Contender] = []
        for name in task.get("against", ()):
            if name.startswith(OWN):
                outputs = {rank: self._output(rank, arena.problem) for rank in self.backend.local_ranks}
                rivals.append(self._rivals_step(name, "preparation", lambda: self._own(name, Choice(variant(name)), arena, outputs)))
            else:
                rivals.append(self._prepared_peer(arena))
        return ours, rivals

    def _own(self, name: str, choice: Choice, arena: Arena, outputs: Any) -> OurRanks:
        assert self._machine is not None
        kernel = self._kernel(choice, arena.problem.shape)
        made = OurRanks(name, self.backend, self._machine, kernel, choice.ctas or None, self._buffer(arena.problem), self._weights, outputs)
        made.prepare(arena.problem)
        return made

    def _prepared_peer(self, arena: Arena) -> Any:
        self.on_stage(self._key, "compile peer")
        (rank,) = self.backend.local_ranks

        def load() -> None:
            self._peer = self._peer or self._open_peer(rank, self.ranks)
            assert self._natural is not None
            self._peer.load_layers(self._own_weights(rank))

        self._rivals_step("peer", "loading", load)
        self._rivals_step("peer", "preparation", lambda: self._peer.prepare(arena.problem, self._own_weights(rank)))
        return self._peer

    def _compile_peer(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """One launch of the public package on weights and tokens whose values do not matter: its kernel is in its cache then."""
        from .peer_build import blank_inputs, blank_layers

        self.on_stage(self._key, "compile peer")
        problem = Problem.make(Shape(*task["shape"]), self.ranks, task["tokens"], task["capacity"])
        (rank,), device = self.backend.local_ranks, self._machine

        def load() -> None:
            self._peer = self._open_peer(rank, self.ranks)
            self._peer.use_layers(*blank_layers(problem.shape, problem.experts_per_rank, self.device))

        def launch() -> None:
            data = blank_inputs(problem.shape, task["tokens"], self.device)
            self._settle()
            assert device is not None
            device.agree("first launch of the peer", None)
            with device.using():
                self._peer.load({rank: {name: getattr(data, name) for name in INPUT_VIEWS}})
                self._peer.enqueue()
                device.wait(FIRST_S)

        for doing, work in (("loading", load), ("preparation", lambda: self._peer.meet(problem, self.device)), ("first launch", launch)):
            self._rivals_step("peer", doing, work)
        return {"compiled": True}

    def _own_weights(self, rank: int) -> Any:
        """One object as long as the layer stays: a contender transforms it once."""
        if self._own_layer[0] != self._layers:
            assert self._natural is not None
            self._own_layer = (self._layers, self._natural[rank])
        return self._own_layer[1]

    def _first_launch(self, contender: Contender, arena: Arena, plan: Plan) -> None:
        """It may compile; its output is judged before anything is timed."""
        self.on_stage(self._key, "run" if contender.ours else f"compile {contender.name}")
        device: Any = self._machine

        def launch() -> torch.Tensor:
            self._settle()
            device.agree(f"first launch of {contender.name}", None)  # who is late by more than a kernel waits would be its fault
            with device.using():
                contender.load(arena.inputs[0])
                contender.poison()
                contender.launch()
                device.wait(plan.first_s)
                contender.check()
                y = contender.output().clone()
            self._settle()
            return y

        if contender.ours:
            self._compare({"ours": self._by_rank(self._told("first launch", launch), arena)}, arena, 0, "before timing")
            return
        y = self._rivals_step(contender.name, "first launch", launch)
        self._judge_rival(contender, {"first launch": y}, arena, 0)

    def _settle(self) -> None:
        """Inputs, references and judging are on torch's default stream, launches on another: neither may overtake the other.
        Only called where no launch can be left that does not end."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)

    # -- failures ------------------------------------------------------------------------------

    def _told(self, name: str, work: Callable[[], T]) -> T:
        """``work``, in which ranks meet. A rank that fails in it tells the others, who wait for it somewhere inside."""
        if self.control is None:
            return work()
        try:
            done = work()
        except Exception as error:
            # At once: the others may be late, and with a failure of their own that this one is the reason of.
            print(f"megamoe: rank {self.control.rank} failed ({name}): {error}", file=sys.stderr, flush=True)
            if not self.control.broken:
                self.control.step(name, lambda: _again(error))  # raises it on all ranks
            raise
        self.control.step(name, lambda: None)
        return done

    def _rivals_step(self, name: str, doing: str, work: Callable[[], T]) -> T:
        """Whatever goes wrong in it is the rival's failure, on all ranks."""

        def blamed() -> T:
            try:
                with blame(_Named(name), doing):
                    return work()
            except EnvironmentUnfit as error:
                raise ContenderFailed(name, f"{doing}: {error}" + (f" ({error.hint})" if error.hint else "")) from error

        return self._told(f"{name}: {doing}", blamed)

    # -- judging -------------------------------------------------------------------------------

    def _by_rank(self, y: torch.Tensor, arena: Arena) -> dict[int, torch.Tensor]:
        """[T,H] of the local ranks, one after the other, as rows of each."""
        ranks = self.backend.local_ranks
        return dict(zip(ranks, y.split([arena.problem.tokens[rank] for rank in ranks])))

    def _judge_ours(self, timed: Timed, arena: Arena, case: int) -> float:
        """The worst relative L2 error of a row; all modes have the same bits, so one is compared."""
        first, plain = next(iter(timed.outputs.items()))
        worst = self._compare({"ours": self._by_rank(plain, arena)}, arena, case, f"after timing ({first})")["ours"]

        def same() -> None:
            for mode, y in timed.outputs.items():
                if not torch.equal(bits(y), bits(plain)):
                    raise ContenderFailed("ours", f"launches on the same inputs differ in some bits ({mode} against {first})")

        self._told("compare the launches", same)
        return worst

    def _judge_rival(self, rival: Contender, outputs: Mapping[str, torch.Tensor], arena: Arena, case: int) -> tuple[float, float]:
        want = self._reference(arena, case)

        def judge() -> tuple[float, float]:
            return check_rival(rival, torch.cat([want[rank] for rank in self.backend.local_ranks]), outputs)

        try:
            own = self._rivals_step(rival.name, "output", judge)
        except MegamoeError as error:
            if self.control is not None and self.control.broken:
                raise
            self._failed[rival.name] = str(error)  # it costs its own column, and nothing of ours
            return (0.0, 0.0)
        every = [own] if self.control is None else self.control.gather(own)
        return max(one[0] for one in every), max(one[1] for one in every)


class _Named:
    """What ``blame`` needs of a contender that may not exist yet."""

    ours = False

    def __init__(self, name: str) -> None:
        self.name = name


def _again(error: Exception) -> None:
    raise error

