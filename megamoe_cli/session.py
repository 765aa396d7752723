"""Launch sequences on one buffer set-up: what the test harness drives.

    session = Session(backend, problem, config, "combine")
    for rank in backend.local_ranks: session.set_weights(rank, weights[rank])
    for n in range(3):
        for rank in backend.local_ranks: session.stage(n, rank, inputs[n][rank])
        session.launch(n)
    result = session.run(timeout_s=60)
    result.outputs(-1)[rank]["y"]

Any number of launches is in flight: each has inputs, ``y`` and snapshots of its own, copied in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .abi import FaultRecord, KernelParams
from .backends.base import Backend, Kernel, Program, RunResult
from .buffers import DeviceWeights, LaunchOptions, RankBuffer, last_bank, make_params, typed
from .config import KernelConfig
from .errors import UsageError
from .layout import CONTROL_WORDS, INPUT_VIEWS, NUM_REGIONS, VIEWS, Layout, ViewSpec
from .shapes import Problem, check_clamp, check_problem, check_tensor
from .weights import LayerWeights, check_weights, transform_weights_for_mega_moe_sm90

POISON = 0xFF  # NaN in e4m3, bf16 and f32; -1 in the integer views
STUB_WORDS = NUM_REGIONS + 8
# Regions a launch writes before it reads them. Counters and flags are not among them: those carry protocol state.
_POISONED = ("recv_count_sum", "metadata", "l1_acts", "l1_acts_sf", "l1_topk_weights", "l2_acts", "l2_acts_sf", "combine")
# What a snapshot holds beside the public views: combine slots, and the workspace for checking that it is left clean.
SNAPSHOT_VIEWS = VIEWS + ("combine",)
WORKSPACE = ("control", "count_flag", "done_flag", "recv_count", "recv_list", "send_count", "l1_arrival", "l2_arrival")

# What peers write as soon as their own next launch begins, while this rank may still be busy with what follows the
# last: it can be looked at after the last launch only.
WRITTEN_AHEAD = ("count_flag", "recv_count", "recv_list")


class NaturalWeights(Protocol):
    """A rank's experts in natural layout (see DESIGN of the numerics): w13, w13_sf, w2, w2_sf."""

    w13: torch.Tensor
    w13_sf: torch.Tensor
    w2: torch.Tensor
    w2_sf: torch.Tensor


class TokenInputs(Protocol):
    """A rank's tokens, T <= capacity rows: x [T,H] e4m3, x_sf [T,H/128] f32, topk_idx [T,K] i64, topk_weights [T,K] f32."""

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass
class _Staged:
    """One rank's share of one launch: staged inputs, and where its results go."""

    tokens: int
    inputs: dict[str, torch.Tensor]
    y: torch.Tensor
    stats: torch.Tensor | None = None
    l1_raw: torch.Tensor | None = None
    stub_report: torch.Tensor | None = None
    snapshot: dict[str, torch.Tensor] = field(default_factory=dict)  # region -> bytes


@dataclass
class SessionResult:
    """Results per launch and rank, as CPU tensors (unless the run was told to leave them on the device).

    ``launches[n][rank]`` maps names to tensors: always ``y`` [C,H] bf16, ``stub_report``, ``l1_raw``, ``stats`` (None
    where the run has none), ``tokens`` (int) and ``fault`` (FaultRecord or None; of the whole run); with a snapshot also
    every view, ``combine`` [K,C,H] and ``workspace`` (raw counters and flags by region, both banks; those of
    WRITTEN_AHEAD after the last launch only). Ranks driven by
    other processes are None.
    """

    run: RunResult
    launches: list[list[dict[str, Any] | None]]
    topk: int

    @property
    def faults(self) -> dict[int, FaultRecord]:
        return self.run.faults

    def outputs(self, launch: int = -1) -> list[dict[str, Any] | None]:
        return self.launches[launch]

    def raise_for_faults(self) -> None:
        self.run.raise_for_faults(self.topk)


class Session:
    """Symmetric buffers, weights and a built kernel for the local ranks of a backend; runs sequences of launches.

    ``raw``: collect raw L1 accumulators (default: in phase l1). ``stats``: pass accumulating receive counts. ``poison``:
    fill every output with 0xFF bytes before each launch. ``options`` are the defaults of each launch.
    """

    def __init__(
        self, backend: Backend, problem: Problem, config: KernelConfig, phase: str, *, options: LaunchOptions | None = None,
        raw: bool | None = None, stats: bool = False, poison: bool = True, kernel: Kernel | None = None, ring: int = 0,
    ) -> None:  # fmt: skip
        check_problem(problem)
        if problem.ranks != backend.ranks:
            raise UsageError(f"the problem has {problem.ranks} ranks, the backend {backend.ranks}", rule="ranks-limit")
        self.backend, self.problem, self.phase = backend, problem, phase
        self.options = options or LaunchOptions()
        check_clamp(self.options.clamp)
        self.kernel = kernel or backend.load(config, phase, problem.shape)
        self.config = self.kernel.config
        self.grid = backend.grid(self.config, self.options.ctas)
        self.layout = Layout(problem.shape, problem.ranks, problem.capacity, ring)
        self.raw = phase == "l1" if raw is None else raw
        self.poison = poison
        name = backend.fresh_name("symm")
        self.buffers = {rank: RankBuffer(backend, self.layout, rank, name) for rank in backend.local_ranks}
        self._stats = stats
        self._weights: dict[int, DeviceWeights] = {}
        self._staged: dict[int, dict[int, _Staged]] = {}
        self._launched: list[tuple[int, LaunchOptions, Kernel]] = []

    def set_weights(self, rank: int, weights: NaturalWeights) -> None:
        """Interleaves and uploads a rank's experts. UsageError for a wrong dtype, shape or stride."""
        self._local(rank)
        s = self.problem.shape
        l1, l2 = LayerWeights(weights.w13, weights.w13_sf), LayerWeights(weights.w2, weights.w2_sf)
        check_weights(l1, l2, self.layout.local_experts, s.hidden, s.intermediate)
        self._weights[rank] = DeviceWeights.adopt(self.backend, rank, *transform_weights_for_mega_moe_sm90(l1, l2))

    def stage(self, launch: int, rank: int, inputs: TokenInputs) -> None:
        """Uploads what ``rank`` has to say in launch ``launch`` (0-based within the next run). T may be 0."""
        self._local(rank)
        s, c = self.problem.shape, self.layout.capacity
        tokens = inputs.x.shape[0]
        if tokens > c:
            raise UsageError(f"rank {rank} has {tokens} tokens but the capacity is {c}", rule="tokens-capacity")
        wide = {"x": s.hidden, "x_sf": s.hidden // 128, "topk_idx": s.topk, "topk_weights": s.topk}
        tensors = {}
        for name in INPUT_VIEWS:
            tensor = getattr(inputs, name)
            check_tensor(name, tensor.dtype, tensor.shape, (tokens, wide[name]), tensor.stride())
            tensors[name] = self._upload(rank, tensor, f"{name}[{launch}]")
        staged = _Staged(tokens, tensors, self._output(rank, "y", torch.bfloat16, (c, s.hidden)))
        if self.raw:
            staged.l1_raw = self._output(rank, "l1_raw", torch.float32, (self.layout.pool_rows, 2 * s.intermediate))
        if self.phase == "stub":
            staged.stub_report = self._output(rank, "stub_report", torch.int64, (STUB_WORDS,))
        if self._stats:
            staged.stats = self._output(rank, "stats", torch.int32, (self.layout.local_experts,))
        self._staged.setdefault(launch, {})[rank] = staged

    def launch(self, launch: int, options: LaunchOptions | None = None, kernel: Kernel | None = None) -> None:
        """Appends launch ``launch``, which must be staged on every local rank. A staged launch can run more than once
        (it then writes the same ``y``). ``kernel``: another variant of the same phase and shape than the session's own;
        launches of several variants share the buffers."""
        missing = [rank for rank in self.backend.local_ranks if rank not in self._staged.get(launch, {})]
        if missing:
            raise UsageError(f"launch {launch} is not staged on rank {missing[0]}", rule="collective")
        unset = [rank for rank in self.backend.local_ranks if rank not in self._weights]
        if unset:
            raise UsageError(f"rank {unset[0]} has no weights", rule="collective")
        options = options or self.options
        check_clamp(options.clamp)
        self._launched.append((launch, options, kernel or self.kernel))

    def params(self, launch: int, rank: int, options: LaunchOptions | None = None, kernel: Kernel | None = None) -> KernelParams:
        """What the kernel would be told; for tests that alter it."""
        staged, options, kernel = self._staged[launch][rank], options or self.options, kernel or self.kernel
        return make_params(
            self.buffers[rank], kernel, self._weights[rank], tokens=staged.tokens, y=staged.y,
            grid=self.backend.grid(kernel.config, options.ctas), options=options, stats=staged.stats, l1_raw=staged.l1_raw,
            stub_report=staged.stub_report,
        )  # fmt: skip

    def run(self, timeout_s: float = 60.0, *, snapshot: str | Collection[int] = "last", to_cpu: bool = True,
            edit: Mapping[tuple[int, int], Mapping[str, Any]] | None = None,
            before: Callable[[Program, int, int], None] | None = None) -> SessionResult:  # fmt: skip
        """Runs all launches appended since the last run, and reads the results.

        ``snapshot``: "last", "all", "none" or launch positions whose views are kept. ``edit[(position, rank)]`` sets
        parameter fields by name (for tests of the kernel's own checks). ``before(program, position, rank)`` may add
        operations to a rank's list ahead of a launch, such as fills that delay it. TimedOut when the backend does not finish.
        """
        launched, self._launched = self._launched, []
        if not launched:
            raise UsageError("nothing to run: no launch was appended", rule="collective")
        last = len(launched) - 1
        wanted = _positions(snapshot, last)
        kept: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
        program = Program(self.backend.ranks)
        for position, (launch, options, kernel) in enumerate(launched):
            for rank in self.backend.local_ranks:
                if before is not None:
                    before(program, position, rank)
                self._enqueue(program, launch, rank, options, kernel, (edit or {}).get((position, rank), {}))
                if position in wanted:
                    kept.setdefault(position, {})[rank] = self._keep(program, rank, live=position == last)
        run = self.backend.run(program, timeout_s)
        results: list[list[dict[str, Any] | None]] = []
        for position, (launch, _, _) in enumerate(launched):
            ranks: list[dict[str, Any] | None] = [None] * self.backend.ranks
            for rank in self.backend.local_ranks:
                got = self._read(self._staged[launch][rank], kept.get(position, {}).get(rank), to_cpu)
                ranks[rank] = got | {"fault": run.faults.get(rank)}
            results.append(ranks)
        return SessionResult(run, results, self.problem.shape.topk)

    def reset(self) -> None:
        """Zeroes the local ranks' buffers: needed after a fault. All ranks must do it before any launches again."""
        for buffer in self.buffers.values():
            buffer.memory.zero_()

    def forget(self) -> None:
        """Drops staged inputs and outputs (their memory goes back once the last result is gone)."""
        self._staged.clear()
        self._launched.clear()

    # ---- internals ----

    def _local(self, rank: int) -> None:
        if rank not in self.backend.local_ranks:
            raise UsageError(f"rank {rank} is not driven by this process (ranks {self.backend.local_ranks})", rule="ranks-limit")

    def _upload(self, rank: int, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """A private copy on the rank's device: later changes of ``tensor`` do not reach it."""
        memory = self.backend.alloc(rank, max(tensor.numel() * tensor.element_size(), 1), symmetric=False, name=name)
        out = memory[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        if tensor.numel():
            out.copy_(tensor)
        return out

    def _output(self, rank: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = 1
        for extent in shape:
            count *= extent
        size = count * torch.empty(0, dtype=dtype).element_size()
        return self.backend.alloc(rank, size, symmetric=False, name=name).view(dtype).view(shape)

    def _enqueue(self, program: Program, launch: int, rank: int, options: LaunchOptions, kernel: Kernel, edit: Mapping[str, Any]) -> None:
        staged, buffer = self._staged[launch][rank], self.buffers[rank]
        if self.poison:
            # Peers touch these only after this rank's next count flag, so filling them here races with nobody.
            for region in (*INPUT_VIEWS, *_POISONED):
                program.fill(rank, buffer.region(region), POISON, undefined=True)
            for tensor in (staged.y, staged.l1_raw, staged.stub_report):
                if tensor is not None:
                    program.fill(rank, tensor, POISON, undefined=True)
        for name, tensor in staged.inputs.items():
            program.copy(rank, buffer.view(name)[: staged.tokens], tensor)
        params = self.params(launch, rank, options, kernel)
        for name, value in edit.items():
            if not hasattr(params, name):
                raise UsageError(f"KernelParams has no field {name!r}", rule="params")
            setattr(params, name, value)
        program.launch(rank, kernel, params, self.backend.grid(kernel.config, options.ctas))

    def _keep(self, program: Program, rank: int, live: bool) -> dict[str, torch.Tensor]:
        """Bytes of every region of interest: the buffer itself after the last launch, else stream-ordered copies."""
        buffer = self.buffers[rank]
        regions = dict.fromkeys([*WORKSPACE, *INPUT_VIEWS, *_POISONED])
        if live:
            return {name: buffer.region(name) for name in regions}
        kept = {}
        for name in [name for name in regions if name not in WRITTEN_AHEAD]:
            source = buffer.region(name)
            kept[name] = self.backend.alloc(rank, source.numel(), symmetric=False, name=f"snapshot:{name}")
            program.copy(rank, kept[name], source)
        return kept

    def _read(self, staged: _Staged, kept: Mapping[str, torch.Tensor] | None, to_cpu: bool) -> dict[str, Any]:
        def fetch(tensor: torch.Tensor | None) -> torch.Tensor | None:
            # Cloned even on the CPU: a view of the live buffer would change with the next launch.
            return tensor if tensor is None or not to_cpu else tensor.detach().to("cpu", copy=True)

        out: dict[str, Any] = {"tokens": staged.tokens, "y": fetch(staged.y), "l1_raw": fetch(staged.l1_raw),
                               "stub_report": fetch(staged.stub_report), "stats": fetch(staged.stats)}  # fmt: skip
        if kept is None:
            return out
        raw = {name: fetch(tensor) for name, tensor in kept.items()}
        epoch = int(raw["control"].view(torch.int32)[CONTROL_WORDS["epoch"]])
        for name in SNAPSHOT_VIEWS:
            spec = self.layout.view(name)
            out[name] = typed(raw[self.layout.region_of(name)], _rebased(spec), last_bank(epoch))
        out["workspace"] = {name: raw[name].view(torch.int32) for name in WORKSPACE if name in raw}
        out["epoch"] = epoch
        return out


def _rebased(spec: ViewSpec) -> ViewSpec:
    """The same window into a tensor that holds its region alone."""
    return ViewSpec(spec.name, spec.dtype, spec.shape, spec.strides, 0, spec.bank_bytes)


def _positions(snapshot: str | Collection[int], last: int) -> set[int]:
    if isinstance(snapshot, str):
        known = {"last": {last}, "all": set(range(last + 1)), "none": set()}
        if snapshot not in known:
            raise UsageError(f"snapshot is {', '.join(known)} or launch positions, not {snapshot!r}", rule="snapshot")
        return known[snapshot]
    return {position % (last + 1) for position in snapshot}
