"""Where the host API's calls go: recorded and run together (``LocalWorld``: all ranks in this process, on the emulator
or as virtual ranks on one GPU), or enqueued at once (``GroupWorld``: this process is one rank of a torch group).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from .backends.base import Backend, Kernel, Program, RunResult
from .backends.picking import pick
from .buffers import DeviceWeights, LaunchOptions, RankBuffer, make_params
from .config import KernelConfig
from .errors import LaunchFault, UsageError, WrongResult
from .layout import INPUT_VIEWS, layout_for
from .shapes import Shape, check_capacities
from .weights import LayerWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .backends.nvlink import NvlinkBackend

API_TIMEOUT_S = 300.0  # bound of every device-side wait: ranks may start minutes apart when one of them compiles first


@dataclass(frozen=True)
class BufferRequest:
    """What a rank asked for. All ranks of a world must ask for the same, in the same order."""

    shape: Shape
    requested: int  # tokens per rank as the caller said
    capacity: int  # the same, rounded up
    config: KernelConfig
    phase: str
    variants: tuple[KernelConfig, ...] = ()  # what a heuristic table may pick for other loads; loaded with the buffer
    reserve_sms: int = 0  # left free by all launches of the world from here on; ranks may differ in it


@dataclass(frozen=True)
class Call:
    """One checked ``fp8_mega_moe`` call: everything but where it runs."""

    y: torch.Tensor
    l1: LayerWeights
    l2: LayerWeights
    stats: torch.Tensor | None
    options: LaunchOptions


def check_same_requests(requests: Sequence[BufferRequest]) -> None:
    """UsageError naming the first difference between what ranks 0.. asked for."""
    check_capacities([request.requested for request in requests])
    for rank, request in enumerate(requests):
        for what in ("shape", "phase", "config", "variants"):
            mine, first = getattr(request, what), getattr(requests[0], what)
            if mine != first:
                raise UsageError(f"symmetric buffers differ between ranks: {what} {_say(first)} on rank 0, "
                                 f"{_say(mine)} on rank {rank}", rule="collective")  # fmt: skip


def _say(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_say(item) for item in value) or "none"
    return value.name() if isinstance(value, KernelConfig) else str(value)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Do two contiguous tensors share a byte?"""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    first, second = ((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b))
    return first[0] < second[1] and second[0] < first[1]


class NoSuchRank(UsageError, IndexError):
    """An IndexError too: that is what ends ``for rank in world``."""


class LocalRank:
    """One rank of a ``LocalWorld``; stands where a process group stands in the API."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self._rank = world, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.world.ranks

    def __repr__(self) -> str:
        return f"LocalRank({self._rank} of {self.world.ranks}, {self.world.backend.where})"


@dataclass
class _Recorded:
    """A call with its inputs copied aside: later writes to the buffer's views belong to later calls."""

    call: Call
    buffer: RankBuffer
    kernel: Kernel
    inputs: dict[str, torch.Tensor]
    y: torch.Tensor


@dataclass
class _Scratch:
    """Device memory by (rank, size), reused from one ``synchronize`` to the next."""

    backend: Backend
    free: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    used: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def take(self, rank: int, nbytes: int) -> torch.Tensor:
        waiting = self.free.get((rank, max(nbytes, 1)))
        memory = waiting.pop() if waiting else self.backend.alloc(rank, max(nbytes, 1), symmetric=False, name="staging")
        self.used.append((rank, memory))
        return memory[:nbytes]

    def give_back(self) -> None:
        for rank, memory in self.used:
            self.free.setdefault((rank, memory.numel()), []).append(memory)
        self.used.clear()


class LocalWorld:
    """``ranks`` ranks in this process. Calls on its ``LocalRank``s are recorded; ``synchronize`` runs them.

    ``backend``: a name for ``pick`` (auto, emulator, virtual) or an open Backend. ``timeout_s`` bounds device-side
    waits; ``ctas``: CTAs per rank (default: as many as fit). ``backend_options`` go to the backend. Use as a context
    manager or call ``close``. Indexing gives a rank: ``world[0]``.
    """

    def __init__(self, ranks: int, backend: str | Backend = "auto", *, timeout_s: float = API_TIMEOUT_S,
                 ctas: int | None = None, **backend_options: Any) -> None:  # fmt: skip
        if isinstance(backend, Backend):
            self.backend, self.picked = backend, f"backend: {backend.where}"
        else:
            choice = pick(backend, ranks)
            if choice.name in ("nvlink", "processes"):
                if backend != "auto":
                    raise UsageError(f"{choice.name} runs one process per rank: use a torch.distributed group, not a LocalWorld",
                                     rule="backend-name")  # fmt: skip
                choice = pick("virtual", ranks)  # one process, so one GPU: the only GPU choice there is
            self.backend, self.picked = choice.open(**backend_options), choice.text
        if self.backend.ranks != ranks or len(self.backend.local_ranks) != ranks:
            raise UsageError(f"this process drives ranks {self.backend.local_ranks} of {self.backend.ranks}, not {ranks}",
                             rule="ranks-limit")  # fmt: skip
        self.ranks, self.timeout_s, self.ctas = ranks, timeout_s, ctas
        self.members = [LocalRank(self, rank) for rank in range(ranks)]
        self._requests: list[list[BufferRequest]] = [[] for _ in range(ranks)]
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._recorded: list[list[_Recorded]] = [[] for _ in range(ranks)]
        self._scratch = _Scratch(self.backend)
        self._adopted: dict[Any, tuple[DeviceWeights, Call]] = {}
        self._faulted: dict[tuple[int, str], LaunchFault] = {}  # (rank, buffer) that a faulty run used, until its reset

    def __getitem__(self, rank: int) -> LocalRank:
        if not isinstance(rank, int) or isinstance(rank, bool) or not -self.ranks <= rank < self.ranks:
            raise NoSuchRank(f"there is no rank {rank!r}; this world has ranks 0..{self.ranks - 1}", rule="ranks-limit")
        return self.members[rank]

    def __len__(self) -> int:
        return self.ranks

    # ---- what the API calls ----

    def allocate(self, rank: int, request: BufferRequest) -> tuple[RankBuffer, Kernel]:
        """The rank's next symmetric buffer. Compared with what the ranks before it asked for."""
        turn = len(self._requests[rank])
        others = [asked[turn] for asked in self._requests if len(asked) > turn]
        check_same_requests([*others, request])
        self.backend.leave_sms(request.reserve_sms)
        kernel = self._load(request)
        buffer = RankBuffer(self.backend, layout_for(request.shape, self.ranks, request.capacity, request.phase), rank, f"buffer{turn}")
        self._requests[rank].append(request)
        return buffer, kernel

    def load_variants(self, request: BufferRequest) -> dict[KernelConfig, Kernel]:
        """The other kernels of a request, so that none is built in the middle of serving."""
        return {config: self._load(replace(request, config=config)) for config in request.variants}

    def submit(self, buffer: RankBuffer, kernel: Kernel, call: Call) -> None:
        """Records a call; its inputs are copied now."""
        rank, tokens = buffer.rank, call.y.shape[0]
        for (_, name), fault in self._faulted.items():
            if name == buffer.name:
                raise LaunchFault(f"{fault}; reset the buffer on every rank before the next launch", fault.records)
        self._check_apart(rank, call)
        inputs = {}
        for name in INPUT_VIEWS:
            source = buffer.view(name)[:tokens]
            staged = self._scratch.take(rank, source.numel() * source.element_size())
            if source.numel():
                staged.view(source.dtype).view(source.shape).copy_(source)
            inputs[name] = staged
        y = self._scratch.take(rank, call.y.numel() * call.y.element_size())
        self._recorded[rank].append(_Recorded(call, buffer, kernel, inputs, y))

    def reset(self, buffer: RankBuffer) -> None:
        """Zeroes one rank's buffer; UsageError while its recorded calls wait to be run."""
        if self._recorded[buffer.rank]:
            raise UsageError(f"rank {buffer.rank} has recorded calls; synchronize its world before the reset", rule="collective")
        buffer.memory.zero_()
        self.backend.clear_fault(buffer.rank)
        self._faulted.pop((buffer.rank, buffer.name), None)

    def pending(self, rank: int) -> int:
        """Calls recorded and not yet run."""
        return len(self._recorded[rank])

    # ---- what the user calls ----

    def synchronize(self, timeout_s: float | None = None) -> RunResult:
        """Runs what was recorded, in order, and brings ``y`` and receive counts back.

        UsageError when the ranks' calls do not match; LaunchFault when a device recorded a fault (the buffers must be
        reset); WrongResult when the emulator found a defect; TimedOut.
        """
        recorded, self._recorded = self._recorded, [[] for _ in range(self.ranks)]
        if not any(recorded):
            return RunResult()
        try:
            self._check_collective(recorded)
            program, stats = Program(self.ranks), {}
            before, self._adopted = self._adopted, {}
            for turn, rank in itertools.product(range(len(recorded[0])), range(self.ranks)):
                self._add(program, rank, recorded[rank][turn], stats, before)
            limit = self.timeout_s + 60 if timeout_s is None else timeout_s
            result = self.backend.run(program, limit)
            for item in itertools.chain.from_iterable(recorded):
                if item.y.numel():
                    item.call.y.copy_(item.y.view(item.call.y.dtype).view(item.call.y.shape))
            for user, device in stats.values():
                if user is not device:
                    user.copy_(device)
        finally:
            self._scratch.give_back()
        try:
            result.raise_for_faults(recorded[0][0].buffer.layout.shape.topk)
        except LaunchFault as fault:
            self._faulted |= {(item.buffer.rank, item.buffer.name): fault for item in itertools.chain.from_iterable(recorded)}
            raise
        if result.diagnostics:
            raise WrongResult(f"{result.report}")
        return result

    def close(self) -> None:
        self.backend.close()

    def __enter__(self) -> LocalWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- internals ----

    def _load(self, request: BufferRequest) -> Kernel:
        key = (request.config, request.phase, request.shape)
        if key not in self._kernels:
            self._kernels[key] = self.backend.load(request.config, request.phase, request.shape)
        return self._kernels[key]

    def _check_apart(self, rank: int, call: Call) -> None:
        """Ranks run side by side: what two of them write must not be the same memory."""
        for other, item in ((r, item) for r, calls in enumerate(self._recorded) if r != rank for item in calls):
            for name, mine, theirs in (("y", call.y, item.call.y), ("cumulative_local_expert_recv_stats", call.stats, item.call.stats)):
                if mine is not None and theirs is not None and overlap(mine, theirs):
                    raise UsageError(f"{name} of rank {rank} shares memory with that of rank {other}; each rank needs its own",
                                     rule="overlap")  # fmt: skip

    def _check_collective(self, recorded: list[list[_Recorded]]) -> None:
        counts = [len(calls) for calls in recorded]
        if len(set(counts)) > 1:
            said = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            raise UsageError(f"ranks were called unequally often ({said}); the kernel is collective", rule="collective")
        for turn in range(counts[0]):
            first = recorded[0][turn]
            for rank in range(1, self.ranks):
                item = recorded[rank][turn]
                for what, mine, theirs in (
                    ("buffer", item.buffer.name, first.buffer.name),
                    ("activation_clamp", item.call.options.clamp, first.call.options.clamp),
                    ("num_tokens_bound", item.call.options.num_tokens_bound, first.call.options.num_tokens_bound),
                    ("fast_math", item.call.options.fast_math, first.call.options.fast_math),
                ):
                    if mine != theirs:
                        raise UsageError(f"call {turn}: {what} differs between ranks: {theirs} on rank 0, {mine} on rank {rank}",
                                         rule="collective")  # fmt: skip

    def _add(self, program: Program, rank: int, item: _Recorded, stats: dict[Any, tuple[torch.Tensor, torch.Tensor]],
             before: dict[Any, tuple[DeviceWeights, Call]]) -> None:  # fmt: skip
        call, buffer = item.call, item.buffer
        tokens = call.y.shape[0]
        for name, staged in item.inputs.items():
            target = buffer.view(name)[:tokens]
            program.copy(rank, target, staged)
        device_stats = None
        if call.stats is not None:
            key = (rank, call.stats.data_ptr())
            if key not in stats:
                stats[key] = (call.stats, self._place_stats(rank, call.stats))
            device_stats = stats[key][1]
        weights = self._place_weights(rank, call, before)
        grid = self.backend.grid(item.kernel.config, call.options.ctas or self.ctas)
        params = make_params(buffer, item.kernel, weights, tokens=tokens, y=item.y, grid=grid, options=call.options, stats=device_stats)
        program.launch(rank, item.kernel, params, grid)

    def _place_weights(self, rank: int, call: Call, before: dict[Any, tuple[DeviceWeights, Call]]) -> DeviceWeights:
        """The weights where the rank reads them; placed again only when they are other tensors or were written to.
        What a ``synchronize`` does not use is dropped. The call is kept so that its addresses stay taken."""
        key = (rank, *((t.data_ptr(), object() if t.is_inference() else t._version) for t in (*call.l1, *call.l2)))
        placed = self._adopted.get(key) or before.get(key)
        if placed is None:
            placed = (DeviceWeights.adopt(self.backend, rank, call.l1, call.l2), call)
        self._adopted[key] = placed
        return placed[0]

    def _place_stats(self, rank: int, stats: torch.Tensor) -> torch.Tensor:
        device = self._scratch.take(rank, stats.numel() * 4).view(torch.int32)
        device.copy_(stats)
        return device


class GroupWorld:
    """This process as one rank of a torch.distributed group, with memory its peers can reach. Calls are enqueued on the
    current CUDA stream at once: no synchronisation, capturable in a CUDA graph."""

    def __init__(self, group: ProcessGroup, backend: NvlinkBackend | None = None) -> None:
        from .backends.nvlink import backend_for_group

        self.backend = backend_for_group(group) if backend is None else backend
        self.ranks, self.rank = self.backend.ranks, self.backend.local_ranks[0]
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def allocate(self, rank: int, request: BufferRequest) -> tuple[RankBuffer, Kernel]:
        """Collective. Every rank sees what all asked for, and one rank's failure is raised on all."""
        control = self.backend.control
        check_same_requests(control.agree("compare buffer requests", lambda: request))
        control.step("reserve SMs", lambda: self.backend.leave_sms(request.reserve_sms))
        kernel = control.step("build and load the kernel", lambda: self._load(request))
        layout = layout_for(request.shape, self.ranks, request.capacity, request.phase)
        return RankBuffer(self.backend, layout, rank, self.backend.fresh_name("buffer")), kernel

    def load_variants(self, request: BufferRequest) -> dict[KernelConfig, Kernel]:
        """Collective: every rank loads the same ones in the same order (``allocate`` compared the requests)."""
        control = self.backend.control
        return {config: control.step("build and load the kernel", lambda: self._load(replace(request, config=config)))  # noqa: B023
                for config in request.variants}

    def _load(self, request: BufferRequest) -> Kernel:
        key = (request.config, request.phase, request.shape)
        if key not in self._kernels:
            self._kernels[key] = self.backend.load(request.config, request.phase, request.shape)
        return self._kernels[key]

    def reset(self, buffer: RankBuffer) -> None:
        """Collective: nobody's buffer is zeroed while a peer's kernel may still write it."""
        control = self.backend.control
        control.step("wait for the device", self.backend.cuda.synchronize)
        buffer.memory.zero_()
        self.backend.clear_fault(buffer.rank)
        control.step("reset the buffer", self.backend.cuda.synchronize)

    def submit(self, buffer: RankBuffer, kernel: Kernel, call: Call) -> None:
        """Launches. A fault that an earlier launch left in host memory is raised here, before more is enqueued."""
        raise_pending_fault(self.backend, buffer)
        for name, tensor in (("y", call.y), ("w13", call.l1.weight), ("w13_sf", call.l1.scales), ("w2", call.l2.weight),
                             ("w2_sf", call.l2.scales), ("cumulative_local_expert_recv_stats", call.stats)):  # fmt: skip
            if tensor is not None and tensor.device != buffer.memory.device:
                raise UsageError(f"{name} is on {tensor.device}; it must be on {buffer.memory.device}", rule="device")
        grid = self.backend.grid(kernel.config, call.options.ctas)
        params = make_params(buffer, kernel, DeviceWeights(call.l1, call.l2), tokens=call.y.shape[0], y=call.y, grid=grid,
                             options=call.options, stats=call.stats)  # fmt: skip
        self.backend.enqueue(buffer.rank, kernel, params, grid)


def raise_pending_fault(backend: Backend, buffer: RankBuffer) -> None:
    """LaunchFault when the rank's record holds one."""
    record = backend.read_fault(buffer.rank)
    if record:
        raise LaunchFault(f"{record.describe(buffer.layout.shape.topk)}; reset the buffer on every rank before the next launch",
                          {buffer.rank: record})  # fmt: skip
