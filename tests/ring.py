"""What a launch gives with a ring pool, on any backend."""

from __future__ import annotations

import torch

from megamoe_cli import inputs
from megamoe_cli.backends.base import Backend
from megamoe_cli.config import KernelConfig
from megamoe_cli.session import Session
from megamoe_cli.shapes import Problem


def outputs_on(backend: Backend, problem: Problem, config: KernelConfig, ring: int, launches: int = 3) -> list[torch.Tensor]:
    """``y`` of every launch and rank as bits, int16 [tokens, H]. ``ring``: rows of the pool in memory, 0 for all of it. Three
    launches: the third uses the counters of the first again, which the second must have cleared."""
    session = Session(backend, problem, config, "combine", ring=ring)
    datas = [inputs.make_case(problem, "powerlaw", 3, launch=n) for n in range(launches)]
    for rank in backend.local_ranks:
        session.set_weights(rank, datas[0].weights[rank])
        for n, data in enumerate(datas):
            session.stage(n, rank, data.inputs[rank])
    for n in range(launches):
        session.launch(n)
    result = session.run(60.0, snapshot="none")
    result.raise_for_faults()
    assert not result.run.diagnostics, result.run.report
    return [out["y"].view(torch.int16).clone() for ranks in result.launches for out in ranks if out is not None]
