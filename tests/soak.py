"""Thousands of launches on one buffer while ranks drift apart at random: nothing may hang, every result stays the same.
The same function runs on the emulator (a few launches) and on a GPU (thousands)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from megamoe_cli import inputs
from megamoe_cli.backends.base import Backend, Program
from megamoe_cli.buffers import LaunchOptions
from megamoe_cli.case_plan import varied
from megamoe_cli.config import KernelConfig
from megamoe_cli.session import Session
from megamoe_cli.shapes import Problem

IN_FLIGHT = 50  # launches per run: far below the depth of a hardware queue, which would block the host


def soak(backend: Backend, problem: Problem, config: KernelConfig, launches: int, seed: int, delay_bytes: int,
         mix: Sequence[KernelConfig] = ()) -> int:  # fmt: skip
    """Runs ``launches`` launches of data sets with different token counts, each rank held up before each by a fill of up
    to ``delay_bytes`` (a long tail: most are short, a few much longer). Every ``y`` must equal, bit for bit, what its
    data set gave the first time. Returns the number of launches run; raises what the backend raises."""
    draws = {rank: random.Random(f"{seed}/{rank}") for rank in backend.local_ranks}  # also apart where each rank is a process
    problems = [problem, *(varied(problem, seed, n) for n in range(1, 4))]
    datas = [inputs.make_case(each, "uniform", seed, launch=n) for n, each in enumerate(problems)]
    session = Session(backend, problem, config, "combine", options=LaunchOptions(timeout_ns=20_000_000_000))
    kernels = [session.kernel, *(backend.load(other, "combine", problem.shape) for other in mix)]
    scratch = {rank: backend.alloc(rank, delay_bytes, symmetric=False, name="delay") for rank in backend.local_ranks}
    for rank in backend.local_ranks:
        session.set_weights(rank, datas[0].weights[rank])
        for n, data in enumerate(datas):
            session.stage(n, rank, data.inputs[rank])

    def hold_up(program: Program, position: int, rank: int) -> None:
        size = int(delay_bytes ** draws[rank].random())
        program.fill(rank, scratch[rank][:size], 1)

    expected: dict[int, list[torch.Tensor]] = {}
    done = 0
    while done < launches:
        batch = min(IN_FLIGHT, launches - done)
        order = [n % len(datas) for n in range(done, done + batch)]
        for position, n in enumerate(order):
            session.launch(n, kernel=kernels[(done + position) % len(kernels)])
        result = session.run(60.0, snapshot="none", before=hold_up)
        result.raise_for_faults()
        assert not result.run.diagnostics, result.run.report
        for n, ranks in zip(order, result.launches, strict=True):
            ys = [out["y"][: out["tokens"]].view(torch.int16) for out in ranks if out is not None]
            first = expected.setdefault(n, [y.clone() for y in ys])
            assert all(torch.equal(a, b) for a, b in zip(first, ys, strict=True)), f"data set {n} gave other bits after launch {done}"
        done += batch
    return done
