"""The measuring process on a GPU: weights once, inputs once for each size, then any number of (a, b) duels on them.

A duel interleaves launches of two configurations on one buffer, pair by pair on the same inputs (a b, b a, ...), so that
drift of clocks and neighbours cancels. Outputs are checked against an independent FP32 reference before anything is
timed and again after the last timed launch, from memory that was filled with 0xFF before each launch. A sample is a
launch's own device time on the slowest rank; L2 is as the launch before left it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from megamoe_cli.backends.base import Backend, Kernel, Program
from megamoe_cli.bench import E4M3_FLOPS, HBM_BYTES_PER_S
from megamoe_cli.buffers import DeviceWeights, LaunchOptions, RankBuffer, make_params
from megamoe_cli.errors import ExitCode
from megamoe_cli.inputs import LazyWeights, make_case
from megamoe_cli.layout import INPUT_VIEWS, layout_for
from megamoe_cli.oracle import gpu_reference
from megamoe_cli.oracle.casedata import CaseData
from megamoe_cli.oracle.compare import cosine, end_to_end_limits, relative_l2
from megamoe_cli.protocol import CaseResult
from megamoe_cli.runner import Opener, default_opener, explain
from megamoe_cli.session import POISON
from megamoe_cli.shapes import Problem, Shape
from megamoe_cli.tuning.conditions import Monitor, between
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.weights import LayerWeights, transform_weights_for_mega_moe_sm90

T = TypeVar("T")
INPUT_SETS = 6  # launches of a duel rotate through them: no launch sees what the one before it saw
KEPT_BYTES = 4e9  # of inputs that stay on the device for a size that comes again (screening, finals, cross)
L2_BYTES = 50e6  # weights that may survive in L2 from one launch to the next; no floor counts them


@dataclass
class Arena:
    """Inputs of one size, routing and seed, on every local rank, and where outputs go (one place for each side)."""

    problem: Problem
    cases: list[CaseData]
    inputs: list[dict[int, dict[str, torch.Tensor]]]
    outputs: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]
    floor_us: float
    references: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """On all ranks: the inputs twice (as made, and where launches take them from), outputs and references."""
        rows, hidden = sum(self.problem.tokens), self.problem.shape.hidden
        return rows * hidden * (2 * len(self.cases) + 2 * (2 + len(self.references)))


class TuneRunner:
    """Answers tuning tasks. ``control`` is given when this process is one rank of several. ``opener`` replaces the
    backend's; ``launch_ms`` reads a run's times (default: the device events). ``reserve_sms``: SMs left free."""

    def __init__(self, backend: str, ranks: int, *, control: Any = None, on_stage: Callable[[str, str], None] | None = None,
                 index: int = 0, opener: Opener | None = None, device: str | None = None,
                 launch_ms: Callable[[Any], dict[int, list[float]]] | None = None, reserve_sms: int = 0) -> None:
        self.name, self.ranks, self.control = backend, ranks, control
        self.device = device or f"cuda:{index}"
        self.on_stage = on_stage or (lambda *_: None)
        self._opener = opener or default_opener(backend, control)
        self._options = {"device": index} if backend == "virtual" and index and opener is None else {}
        self._options |= {"reserve_sms": reserve_sms} if reserve_sms else {}
        self._launch_ms = launch_ms or (lambda run: run.launch_ms)
        self._backend: Backend | None = None
        self._monitor: Monitor | None = None
        self._layers: tuple[Any, ...] = ()  # (shape, seed) of the weights that are loaded
        self._natural: LazyWeights | None = None
        self._weights: dict[int, DeviceWeights] = {}
        self._buffers: dict[int, dict[int, RankBuffer]] = {}
        self._arenas: OrderedDict[Any, Arena] = OrderedDict()
        self._kernels: dict[Any, Kernel] = {}
        self._key = ""

    @property
    def backend(self) -> Backend:
        if self._backend is None:
            self._backend = self._opener(self.ranks, **self._options)
        return self._backend

    def run(self, case: Mapping[str, Any]) -> CaseResult:
        """Never raises for what a candidate can do wrong; the result says it."""
        began, self._key = time.perf_counter(), str(case.get("id", ""))
        result = CaseResult(self._key, "error")
        try:
            task = case["task"]
            result.metrics = self._describe() if task.get("describe") else self._answer(task)
            result.status, result.exit_code = "pass", int(ExitCode.DONE)
        except _Wrong as wrong:
            result.status, result.message, result.exit_code = "fail", str(wrong), int(ExitCode.NO)
            result.metrics = {"check": {"wrong": wrong.who}}
        except Exception as error:  # noqa: BLE001
            explain(result, error, gpu=self.name != "emulator")
        if self.control is not None and self.control.broken:
            result.respawn = True
        result.where = self._backend.where if self._backend else self.name
        result.seconds = time.perf_counter() - began
        return result

    def _answer(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics of a task. ``megamoe bench --ranks`` measures something else on the same arena."""
        return self._duel(task)

    # -- set-up --------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        self.on_stage(self._key, "setup")
        gpu = getattr(self.backend, "gpu", None)
        out: dict[str, Any] = {"where": self.backend.where, "torch": torch.__version__, "cuda": str(torch.version.cuda or "none")}
        if gpu is not None:
            out |= {"gpu": gpu.name, "sms": gpu.sms}
        return out | self._watch().identity()

    def _watch(self) -> Monitor:
        if self._monitor is None:
            bus = ""
            if self.device.startswith("cuda"):
                import cupy

                bus = cupy.cuda.runtime.deviceGetPCIBusId(int(self.device.partition(":")[2] or 0))
            self._monitor = Monitor(bus, own=self.ranks if self.name == "processes" else 1)
        return self._monitor

    def _load_weights(self, shape: Shape, seed: int) -> None:
        """All local ranks' experts, transformed; natural ones stay for the reference."""
        if self._layers == (shape, seed):
            return
        self.on_stage(self._key, "setup")
        self._arenas.clear()
        self._weights.clear()
        keep = self.ranks if self.control is None else 1
        problem = Problem.make(shape, self.ranks, 1)
        self._natural = LazyWeights(problem, seed, self.device, keep=keep)
        for rank in self.backend.local_ranks:
            own = self._natural[rank]
            pair = transform_weights_for_mega_moe_sm90(LayerWeights(own.w13, own.w13_sf), LayerWeights(own.w2, own.w2_sf))
            self._weights[rank] = DeviceWeights.adopt(self.backend, rank, *pair)
        self._layers = (shape, seed)

    def _arena(self, task: Mapping[str, Any]) -> Arena:
        shape = Shape(*task["shape"])
        self._load_weights(shape, task["weights_seed"])
        key = (task["tokens"], task["routing"], task["seed"])
        if key in self._arenas:
            self._arenas.move_to_end(key)
            return self._arenas[key]
        self.on_stage(self._key, "inputs")
        problem = Problem.make(shape, self.ranks, task["tokens"], task["capacity"])
        weights = self._natural
        cases = self._together("inputs", lambda: [make_case(problem, task["routing"], task["seed"], launch=n, device=self.device, weights=weights)
                                                  for n in range(INPUT_SETS)])
        inputs = [{rank: {name: self._place(rank, getattr(case.inputs[rank], name), name) for name in INPUT_VIEWS}
                   for rank in self.backend.local_ranks} for case in cases]
        outputs = tuple({rank: self._output(rank, problem) for rank in self.backend.local_ranks} for _ in range(2))
        floor = floor_us(problem, cases, shared=self.name != "nvlink")
        self._arenas[key] = Arena(problem, cases, inputs, outputs, floor)  # type: ignore[arg-type]
        while len(self._arenas) > 1 and sum(arena.bytes for arena in self._arenas.values()) > KEPT_BYTES:
            self._arenas.popitem(last=False)
        return self._arenas[key]

    def _place(self, rank: int, tensor: torch.Tensor, name: str) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        memory = self.backend.alloc(rank, max(size, 1), symmetric=False, name=name)[:size]
        placed = memory.view(tensor.dtype).view(tensor.shape)
        if size:
            placed.copy_(tensor)
        return placed

    def _output(self, rank: int, problem: Problem) -> torch.Tensor:
        rows, hidden = max(problem.tokens[rank], 1), problem.shape.hidden
        return self.backend.alloc(rank, rows * hidden * 2, symmetric=False, name="y").view(torch.bfloat16).view(rows, hidden)

    def _buffer(self, problem: Problem) -> dict[int, RankBuffer]:
        """One buffer for all sizes of a run: symmetric memory is not given back while the backend lives."""
        if problem.capacity not in self._buffers:
            name, layout = self.backend.fresh_name("symm"), layout_for(problem.shape, problem.ranks, problem.capacity)
            self._buffers[problem.capacity] = {rank: RankBuffer(self.backend, layout, rank, name) for rank in self.backend.local_ranks}
        return self._buffers[problem.capacity]

    def _kernel(self, choice: Choice, shape: Shape) -> Kernel:
        if (choice.config, shape) not in self._kernels:
            self.on_stage(self._key, "compile")
            self._kernels[choice.config, shape] = self._together("load", lambda: self.backend.load(choice.config, "combine", shape))
        return self._kernels[choice.config, shape]

    # -- a duel --------------------------------------------------------------------------------

    def _duel(self, task: Mapping[str, Any]) -> dict[str, Any]:
        arena = self._arena(task)
        sides = [Choice.from_dict(task[name]) for name in ("a", "b")]
        kernels = [self._kernel(choice, arena.problem.shape) for choice in sides]
        self._reference(arena, 1), self._reference(arena, 0)
        self.on_stage(self._key, "run")
        wait_s, rounds = float(task.get("wait_s", 5.0)), int(task["rounds"])
        limit = float(task.get("run_s", 15.0))

        def launches(plan: list[tuple[int, int]]) -> list[float]:
            program = Program(self.ranks)
            for side, case in plan:
                self._add(program, arena, kernels[side], sides[side], side, case, wait_s)

            def work() -> dict[int, list[float]]:
                run = self.backend.run(program, limit)
                run.raise_for_faults(arena.problem.shape.topk)
                return self._launch_ms(run)

            return self._slowest(self._together("run", work))

        launches([(0, 0), (1, 0), (0, 1), (1, 1)])  # never timed: the outputs are judged, and caches and clocks settle
        self._judge(arena, 1, "before timing")
        before = self._watch().sample()
        pairs: list[list[float]] = []
        stopped = False
        while len(pairs) < rounds and not stopped:
            # The first round alone, so that a candidate that is far behind costs no more.
            first, last = len(pairs), rounds if pairs or not task.get("stop_ratio") else 1
            plan = [(side, (rounds - 1 - n) % len(arena.cases)) for n in range(first, last) for side in ((0, 1) if n % 2 == 0 else (1, 0))]
            found = launches(plan)
            for n, (one, two) in zip(range(first, last), zip(found[::2], found[1::2])):
                pairs.append([one, two] if n % 2 == 0 else [two, one])
            stopped = bool(task.get("stop_ratio")) and len(pairs) < rounds and pairs[0][0] > task["stop_ratio"] * pairs[0][1]
        conditions = between(before, self._watch().sample())
        last_case = (rounds - len(pairs)) % len(arena.cases)
        check = self._judge(arena, last_case, "after timing")
        return {"pairs": [[round(1e3 * t, 3) for t in pair] for pair in pairs], "floor_us": arena.floor_us, "check": check, "stopped": stopped,
                "conditions": conditions}

    def _add(self, program: Program, arena: Arena, kernel: Kernel, choice: Choice, side: int, case: int, wait_s: float) -> None:
        """One launch on every local rank: poison the output, bring the inputs, launch."""
        options = LaunchOptions(timeout_ns=round(wait_s * 1e9), ctas=choice.ctas or None)
        grid = self.backend.grid(kernel.config, options.ctas)
        for rank, buffer in self._buffer(arena.problem).items():
            tokens, y = arena.problem.tokens[rank], arena.outputs[side][rank]
            program.fill(rank, y, POISON)
            for name, tensor in arena.inputs[case][rank].items():
                program.copy(rank, buffer.view(name)[:tokens], tensor)
            params = make_params(buffer, kernel, self._weights[rank], tokens=tokens, y=y, grid=grid, options=options)
            program.launch(rank, kernel, params, grid)

    def _together(self, name: str, work: Callable[[], T]) -> T:
        """``work``; where there are more processes, one rank's failure is raised on all, so that none waits for it."""
        return work() if self.control is None else self.control.step(name, work)

    def _slowest(self, launch_ms: Mapping[int, list[float]]) -> list[float]:
        """Milliseconds of each launch on its slowest rank, over all processes."""
        own = [max(times) for times in zip(*launch_ms.values())]
        if self.control is None or self.control.ranks == 1:
            return own
        return [max(times) for times in zip(*self.control.gather(own))]

    # -- correctness ---------------------------------------------------------------------------

    def _reference(self, arena: Arena, case: int) -> list[torch.Tensor]:
        if case not in arena.references:
            self.on_stage(self._key, "reference")
            arena.references[case] = gpu_reference.layer(arena.cases[case])
        return arena.references[case]

    def _judge(self, arena: Arena, case: int, when: str) -> dict[str, float]:
        """The worst relative L2 error of a row, of each side. Raises _Wrong on every rank when any is beyond the limits."""
        return self._compare(dict(zip("ab", arena.outputs)), arena, case, when)

    def _compare(self, outputs: Mapping[str, Mapping[int, torch.Tensor]], arena: Arena, case: int, when: str) -> dict[str, float]:
        """The same for outputs by name and local rank ([>=T,H] bf16)."""
        want, limits = self._reference(arena, case), end_to_end_limits(arena.problem.shape.intermediate)
        worst, wrong = dict.fromkeys(outputs, 0.0), ("", "")
        for name, ranks in outputs.items():
            for rank, tensor in ranks.items():
                tokens = arena.problem.tokens[rank]
                got = tensor[:tokens].to(want[rank].device)
                if not tokens:
                    continue
                relative, near = relative_l2(got, want[rank]), cosine(got, want[rank])
                worst[name] = max(worst[name], float(relative.nan_to_num(nan=torch.inf).max()))
                bad = (~((relative <= limits.row) & (near >= limits.cosine))).nonzero().flatten()  # so that NaN fails
                if len(bad) and not wrong[0]:
                    token = int(bad[0])
                    wrong = (f"{name} is wrong {when}: rank {rank}, token {token}: relative L2 {float(relative[token]):.3g} "
                             f"(limit {limits.row:g}); {len(bad)} of {tokens} rows", name)
        if self.control is not None and self.control.ranks > 1:
            gathered = self.control.gather((worst, wrong))
            worst = {name: max(entry[0][name] for entry in gathered) for name in worst}
            wrong = next((entry[1] for entry in gathered if entry[1][0]), wrong)
        if wrong[0]:
            raise _Wrong(*wrong)
        return worst


class _Wrong(Exception):
    """An output is not the layer's; ``who``: whose."""

    def __init__(self, said: str, who: str) -> None:
        super().__init__(said)
        self.who = who


def floor_us(problem: Problem, cases: list[CaseData], shared: bool) -> float:
    """Microseconds that no launch on the drawn routings can beat: weight bytes of the experts hit beyond what L2 may hold,
    and FLOPs of the rows, at the measured ceilings. ``shared``: all ranks have one GPU between them; else the floor is the
    busiest rank's."""
    s = problem.shape
    best = float("inf")
    for case in cases:
        ids = torch.cat([data.topk_idx.flatten() for data in case.inputs])
        counts = torch.bincount(ids[ids >= 0], minlength=s.experts).cpu()
        owners = [counts] if shared else list(counts.split(problem.experts_per_rank))
        each = []
        for part in owners:
            weights = max(0.0, int((part > 0).sum()) * 3 * s.hidden * s.intermediate - L2_BYTES) / HBM_BYTES_PER_S
            each.append(max(weights, int(part.sum()) * 6 * s.hidden * s.intermediate / E4M3_FLOPS))
        best = min(best, max(each))
    return 1e6 * best
