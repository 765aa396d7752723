"""Where the cycles of a launch go: averages over CTAs of what a build with ``trace=1`` counts (kernels/comm/trace.cuh)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import KernelConfig

WORDS = 32  # kTraceWords
PER_WARPGROUP = 12
# The enum TraceWord.
MATH_WORDS = ("tile wait", "stage wait", "main loop", "L1 epilogue", "L2 epilogue", "finish", "combine", "tiles", "first stage wait", "total",
              "L1 signal", "ring signal")
DISPATCH_WORDS = {24: "sent", 25: "tables", 26: "pulled", 27: "dispatch end"}


def trace(bench: Any, tokens: int, config: KernelConfig, launches: int = 3) -> dict[str, Any]:
    """Runs ``launches`` launches of one rank and returns the last one's counts, in cycles, averaged over CTAs (with the
    largest total). ``bench``: a megamoe_cli.bench.Bench."""
    import torch

    from .inputs import make_case
    from .session import Session
    from .shapes import Problem

    problem = Problem.make(bench.shape, 1, tokens)
    session = Session(bench.backend, problem, replace(config, trace=1), "combine", poison=False)
    session.set_weights(0, bench.weights)
    words = [bench.backend.alloc(0, session.grid * WORDS * 4, symmetric=False, name=f"trace:{n}") for n in range(launches)]
    for n in range(launches):
        case = make_case(problem, "uniform", bench.seed, launch=n, device="cuda", weights=[bench.weights])
        session.stage(n, 0, case.inputs[0])
        session.launch(n)
    done = session.run(60.0, snapshot="none", to_cpu=False, edit={(n, 0): {"report": words[n].data_ptr()} for n in range(launches)})
    done.raise_for_faults()
    counts = words[-1].view(torch.int32).view(session.grid, WORDS).cpu().double()
    out: dict[str, Any] = {"kernel_us": 1e3 * done.run.launch_ms[0][-1], "grid": session.grid, "config": session.config.name()}
    for warpgroup in (0, 1):
        part = counts[:, warpgroup * PER_WARPGROUP : (warpgroup + 1) * PER_WARPGROUP]
        out[f"warpgroup {warpgroup}"] = {name: float(part[:, i].mean()) for i, name in enumerate(MATH_WORDS)}
    out["dispatch"] = {name: float(counts[:, i].mean()) for i, name in DISPATCH_WORDS.items()}
    out["spread of total"] = [float(counts[:, 9].min()), float(counts[:, 9].max())]
    return out
