"""Executes one case: inputs, kernel, one buffer, launches in a row, checks. Runs inside a worker.

With one process per rank every process runs this on its own rank; rank 0 gathers what the others' buffers held and
judges it all. Every stage then ends with an all-gather of ok or error (``Control.step``).
"""

from __future__ import annotations

import inspect
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, TypeVar

from . import skew
from .backends.picking import check_name
from .errors import ExitCode, LaunchFault, MegamoeError, TimedOut, UsageError
from .protocol import CaseResult

if TYPE_CHECKING:
    from .backends.base import Backend, Kernel, RunResult
    from .backends.control import Control
    from .case_plan import Plan
    from .oracle.casedata import PhaseOutput

T = TypeVar("T")
Opener = Callable[..., "Backend"]  # (ranks, **options) -> Backend


class Runner:
    """Runs cases of one backend. ``control`` is given when this process is one rank of several.

    ``opener`` replaces the backend's ``open_backend``; ``on_stage`` hears stage names; ``device`` is where a GPU
    backend's tensors live.
    """

    def __init__(self, backend: str, ranks: int, *, control: Control | None = None, opener: Opener | None = None,
                 on_stage: Callable[[str, str], None] | None = None, device: str | None = None) -> None:
        self.backend, self.ranks, self.control = check_name(backend), ranks, control
        self.opener = opener or default_opener(backend, control)
        self.on_stage = on_stage or (lambda *_: None)
        self.slow = backend == "emulator"
        self.device = device or ("cpu" if self.slow else "cuda:0")
        self._stages: dict[str, float] = {}
        self._where = backend
        self._kernel: dict[str, Any] = {}

    @property
    def judges(self) -> bool:
        """This process reports results."""
        return self.control is None or self.control.rank == 0

    def run(self, case: Mapping[str, Any]) -> CaseResult:
        """Never raises for what a case can do wrong; the result says it."""
        began, self._stages, self._kernel = time.perf_counter(), {}, {}
        result = CaseResult(str(case.get("id", "")), "error", repro=str(case.get("repro", "")))
        try:
            self._run(case, result)
        except Exception as error:  # noqa: BLE001
            explain(result, error, gpu=not self.slow)
        if self.control is not None and self.control.broken:
            result.respawn = True
        if not self.slow and not result.respawn:
            _return_memory()
        result.where, result.kernel, result.stages = self._where, self._kernel, self._stages
        result.seconds = time.perf_counter() - began
        return result

    # -- stages --------------------------------------------------------------------------------

    def _run(self, case: Mapping[str, Any], result: CaseResult) -> None:
        from . import case_plan

        case_id = str(case.get("id", ""))
        with self._stage("inputs", case_id):
            plan = self._together("read the case", lambda: case_plan.read_case(case, device=self.device, slow=self.slow))
        if plan.problem.ranks != self.ranks:
            raise UsageError(f"the case has {plan.problem.ranks} ranks, this worker {self.ranks}", rule="ranks-limit")
        with self._stage("open", case_id):
            options = dict(plan.backend_options)
            if self.slow:
                options.setdefault("seed", plan.datas[0].seed)
            backend = _open(self.opener, self.ranks, options)
        self._where = backend.where
        try:
            self._launch(plan, backend, result)
        finally:
            backend.close()

    def _launch(self, plan: Plan, backend: Backend, result: CaseResult) -> None:
        from .session import Session

        with self._stage("compile", plan.id):
            kernels = self._together("build the kernel", lambda: [
                backend.load(config, plan.phase, plan.problem.shape) for config in plan.configs])  # fmt: skip
        self._kernel = describe_kernel(kernels[0])
        with self._stage("upload", plan.id):
            session = Session(backend, plan.problem, plan.config, plan.phase, kernel=kernels[0], raw=plan.options.get("raw"),
                              options=plan.launch_options(plan.datas[0]))  # fmt: skip
            self._kernel["grid"] = session.grid
            self._together("upload", lambda: self._upload(plan, backend, session, kernels))
        ends = plan.ends()
        wanted = ends if plan.snapshot_all else [ends[-1]]
        with self._stage("run", plan.id):
            # Below the supervisor's limit, so that the backend's own word (who waited, on what) is what is seen.
            limit = max(1.0, 0.9 * plan.timeout_s)
            done = self._together("run", lambda: session.run(limit, snapshot=wanted, to_cpu=not plan.big or self._many))
        outputs = [[done.launches[at][rank] for rank in range(self.ranks)] for at in ends]
        if self._many:
            with self._stage("gather", plan.id):
                outputs = self._gather(outputs, done.run)
        if not self.judges:
            return
        faults, diagnostics = done.run.faults, skew.causes(done.run.diagnostics)
        dead = skew.dead_ranks(plan.backend_options)
        if dead and any(d["kind"] in skew.DEATH for d in diagnostics):
            _survivors(result, plan, dead, done.run)
            return
        if done.run.launch_ms:
            result.metrics["launch_ms"] = {"ranks": {str(r): [round(m, 4) for m in ms] for r, ms in done.run.launch_ms.items()}}
        if faults:
            _fault(result, faults, plan.problem.shape.topk, gpu=not self.slow)
        if diagnostics:
            _diagnostics(result, diagnostics, keep_status=bool(faults))
        if faults or diagnostics:
            return
        with self._stage("check", plan.id):
            self._judge(plan, kernels, session.grid, outputs, [at in wanted for at in ends], result)
        result.metrics.update(_notes(done.run))

    def _upload(self, plan: Plan, backend: Backend, session: Any, kernels: list[Kernel]) -> None:
        for rank in backend.local_ranks:
            session.set_weights(rank, plan.datas[0].weights[rank])
        for n, data in enumerate(plan.datas):
            for rank in backend.local_ranks:
                session.stage(n, rank, data.inputs[rank])
        for _ in range(plan.replays):
            for n, data in enumerate(plan.datas):
                for _ in range(data.launches):
                    session.launch(n, plan.launch_options(data), kernels[n % len(kernels)])

    def _judge(self, plan: Plan, kernels: list[Kernel], grid: int, outputs: list[list[dict]], full: list[bool],
               result: CaseResult) -> None:  # fmt: skip
        from . import judging
        from .oracle.casedata import PhaseOutput

        got: list[PhaseOutput] = [
            PhaseOutput(ranks, block_m=kernel.config.block_m, combine_poisoned=True, meta={"smem_bytes": kernel.smem_bytes, "grid": grid})
            for ranks, kernel in zip(outputs, cycle(kernels))
        ]  # fmt: skip
        findings, metrics = judging.judge(plan, got, full)
        result.metrics.update(metrics)
        result.findings, result.findings_total = judging.first_findings(findings), len(findings)
        result.status, result.exit_code = ("fail", int(ExitCode.NO)) if findings else ("pass", int(ExitCode.DONE))
        result.message = str(findings[0]) if findings else ""
        if plan.options.get("save"):
            result.metrics["saved"] = str(judging.save_outputs(plan.options["save"], plan, got[-1]))

    # -- one process per rank ------------------------------------------------------------------

    @property
    def _many(self) -> bool:
        return self.control is not None and self.control.ranks > 1

    def _together(self, name: str, work: Callable[[], T]) -> T:
        return work() if self.control is None else self.control.step(name, work)

    def _gather(self, outputs: list[list[dict]], run: RunResult) -> list[list[dict]]:
        """Rank 0 gets every rank's outputs, and everything that ``run`` holds of the others; they keep their own."""
        from .abi import FaultRecord
        from .backends.exchange import collect

        rank = self.control.rank
        mine = [ranks[rank] | {"fault": None} for ranks in outputs]  # fault records travel as bytes
        records = {r: bytes(record) for r, record in run.faults.items()}
        got = collect(self.control, {"outputs": mine, "faults": records, "ms": run.launch_ms, "diagnostics": run.diagnostics})
        if got is None:
            return outputs
        run.faults = {r: FaultRecord.from_bytes(raw) for part in got for r, raw in part["faults"].items()}
        run.launch_ms = {r: ms for part in got for r, ms in part["ms"].items()}
        run.diagnostics = [d for part in got for d in part["diagnostics"]]
        return [[part["outputs"][n] for part in got] for n in range(len(outputs))]

    @contextmanager
    def _stage(self, name: str, case_id: str) -> Any:
        self.on_stage(case_id, name)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = round(self._stages.get(name, 0.0) + time.perf_counter() - began, 4)


def _return_memory() -> None:
    """Gives torch's cached blocks back to the device: buffers are allocated beside torch, which would not see them."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def default_opener(backend: str, control: Control | None) -> Opener:
    """``open_backend`` of the module behind ``backend``."""
    from importlib import import_module

    if backend in ("nvlink", "processes"):
        from .backends.nvlink import open_backend

        return lambda ranks, **options: open_backend(ranks, control=control, share_gpu=backend == "processes", **options)
    return import_module(f".backends.{backend}", __package__).open_backend


def _open(opener: Opener, ranks: int, options: dict[str, Any]) -> Backend:
    try:
        return opener(ranks, **options)
    except TypeError as error:
        try:
            inspect.signature(opener).bind(ranks, **options)
        except TypeError:
            raise UsageError(f"this backend does not know an option that was given: {error}", rule="backend-option") from error
        raise


def describe_kernel(kernel: Kernel) -> dict[str, Any]:
    """What identifies the kernel of a result: configuration, digest, and the compiler's numbers where there are any."""
    config = kernel.config
    out = {"name": config.name(), "digest": config.digest(), "phase": kernel.phase, "config": config.to_dict(),
           "smem_bytes": kernel.smem_bytes, "threads": kernel.threads, "file": kernel.path.name}  # fmt: skip
    built = kernel.build
    if built is not None:
        out |= {"source_digest": built.source_digest, "cache_hit": built.hit, "build_seconds": round(built.seconds, 3)}
        if built.resources is not None:
            used = built.resources
            out |= {"registers": used.registers, "spill_bytes": used.spill_stores + used.spill_loads}
    return out


def explain(result: CaseResult, error: Exception, gpu: bool) -> None:
    """Puts an exception into the result; whatever may have hurt the device asks for a fresh process."""
    result.findings, result.findings_total = [], 0
    result.message = str(error) or type(error).__name__
    if isinstance(error, LaunchFault):
        _fault(result, error.records, None, gpu, said=str(error))
    elif isinstance(error, TimedOut):
        result.status, result.exit_code, result.respawn = "hang", int(ExitCode.TIMEOUT), True
    elif isinstance(error, MegamoeError):
        result.status, result.exit_code = "error", int(error.exit_code)
        if error.hint:
            result.message += f" ({error.hint})"
        log = getattr(error, "log", "")
        if log:
            print(log, file=sys.stderr)
        result.respawn = gpu and result.exit_code not in (ExitCode.USAGE, ExitCode.BUILD_FAILED)
    else:
        traceback.print_exc()
        result.status, result.exit_code, result.respawn = "error", int(ExitCode.BUG), gpu
        result.message = f"internal: {type(error).__name__}: {error}"


def _fault(result: CaseResult, records: Mapping[int, Any], topk: int | None, gpu: bool, said: str = "") -> None:
    text = said or "; ".join(r.describe(topk) for r in sorted(records.values(), key=lambda r: r.at_ns))
    result.status, result.exit_code, result.message = "fault", int(ExitCode.NO), text
    result.fault = {"text": text, "records": {str(rank): record.to_dict() for rank, record in records.items()}}
    result.respawn = gpu


def _diagnostics(result: CaseResult, diagnostics: list[dict[str, Any]], keep_status: bool) -> None:
    """The emulator's findings (races, deadlocks, bounds): each is a failure, whatever the output looks like."""
    from .judging import FINDINGS_KEPT

    for item in diagnostics[:FINDINGS_KEPT]:
        rank = item.get("rank", -1)
        result.findings.append({"rank": rank if rank >= 0 else None, "token": None, "slot": None, "column": None, "got": None,
                                "expected": None, "metric": f"emulator_{item.get('kind', 'report')}",
                                "place": f"{item.get('file', '')}:{item.get('line', '')}".strip(":0"),
                                "message": _in_words(item)})  # fmt: skip
    result.findings_total = len(diagnostics)
    if not keep_status:
        first = diagnostics[0]
        result.status, result.exit_code = "fail", int(ExitCode.NO)
        result.message = f"emulator: {_in_words(first).splitlines()[0]}"


def _in_words(item: Mapping[str, Any]) -> str:
    """A finding in full: kind, place, who, both sides, and the seed that shows it again."""
    text = item.get("report") or f"{item.get('kind', 'report')}: {item.get('file', '')}:{item.get('line', '')}: {item.get('text', item)}"
    first, newline, rest = str(text).partition("\n")
    return first + (f" (seed {item['seed']})" if "seed" in item else "") + newline + rest


def _survivors(result: CaseResult, plan: Plan, dead: list[int], run: RunResult) -> None:
    """A rank was told to die, and others waited for it: what must be true is that they all ended, each by a fault
    record or by finishing its work, and nothing else went wrong."""
    others = [d for d in run.diagnostics if d["kind"] not in skew.AFTER_DEATH]
    missed = any(d["kind"] == "waits-for-dead" for d in run.diagnostics)
    late = skew.too_late(run.faults, plan.launch_options(plan.datas[0]).timeout_ns)
    ended = sorted(set(run.faults) - set(dead))
    result.metrics["survivors_with_fault_record"] = len(ended)
    result.fault = {"text": "; ".join(run.faults[r].describe(plan.problem.shape.topk) for r in ended),
                    "records": {str(r): run.faults[r].to_dict() for r in ended}}  # fmt: skip
    result.status, result.exit_code = "pass", int(ExitCode.DONE)
    if others:
        _diagnostics(result, others, keep_status=False)
    elif late or (missed and not ended):
        result.status, result.exit_code = "fail", int(ExitCode.NO)
        result.message = late or f"rank {dead[0]} died and others waited for it, but none left a fault record"


def _notes(run: RunResult) -> dict[str, Any]:
    return {"notes": "; ".join(run.notes)} if run.notes else {}
