"""Whole rows and the protocol's cost with the real kernel on the emulator; only the clock is made up."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megamoe_cli.abi import KernelParams
from megamoe_cli.backends.base import Program
from megamoe_cli.backends.emulator import open_backend
from megamoe_cli.bench import Bench, protocol_cost
from megamoe_cli.bench.contender import Contender, ContenderFailed
from megamoe_cli.bench.judge import reference
from megamoe_cli.bench.ours import Ours
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError, WrongResult
from megamoe_cli.inputs import make_weights
from megamoe_cli.oracle.casedata import CaseData
from megamoe_cli.report import bench_table
from megamoe_cli.shapes import Problem, Shape

SHAPE = Shape(256, 256, 4, 2)
CONFIG = KernelConfig(block_m=32)


class StepDevice:
    """Every mark is 7 us after the one before; graphs call again."""

    def __init__(self) -> None:
        self.ticks, self.captures = 0, 0

    def using(self):
        return contextlib.nullcontext()

    def busy(self, us: float) -> None: ...
    def empty_cache(self) -> None: ...
    def wait(self, timeout_s: float) -> None: ...

    def mark(self) -> int:
        self.ticks += 1
        return self.ticks

    def between_us(self, start: int, stop: int) -> float:
        return 7.0 * (stop - start)

    def capture(self, enqueue):
        self.captures += 1
        return enqueue

    def now_s(self) -> float:
        return 0.0


def emulated(ranks: int = 1, ctas: int = 2):
    """An emulator backend that can be launched on as the GPU's runtime is: at once, from packed parameters."""
    backend = open_backend(ranks, ctas=ctas)
    kernels: dict = {}
    load = backend.load

    def remember(config, phase, shape):
        kernel = load(config, phase, shape)
        kernels[id(kernel.handle)] = kernel
        return kernel

    def launch(handle, grid, threads, packed, smem_bytes, stream) -> None:
        program, kernel = Program(1), kernels[id(handle)]
        assert (threads, smem_bytes, stream) == (kernel.config.threads, kernel.smem_bytes, "stream")
        program.launch(0, kernel, KernelParams.from_buffer_copy(packed), grid)
        done = backend.run(program, 60.0)
        done.raise_for_faults()
        assert done.report is None, done.report

    backend.load, backend.cuda = remember, SimpleNamespace(launch=launch)
    return backend


class Reference(Contender):
    """A rival that is right (or not), by the reference."""

    name, version, factor = "peer", "0.1.4", 1.0

    def prepare(self, problem, weights) -> None:
        self.problem, self.weights = problem, weights
        self.y = torch.empty(problem.tokens[0], problem.shape.hidden, dtype=torch.bfloat16)

    def load(self, inputs) -> None:
        self.inputs = inputs

    def enqueue(self) -> None:
        self.y.copy_(reference(CaseData(self.problem, [self.inputs], [self.weights])) * self.factor)

    def output(self) -> torch.Tensor:
        return self.y


@pytest.fixture
def bench():
    """A Bench whose GPU is the emulator."""
    made = object.__new__(Bench)
    made.shape, made.seed, made.backend, made.device = SHAPE, 1, emulated(), StepDevice()
    made.rivals, made.weights = [Reference()], make_weights(Problem.make(SHAPE, 1, 1), 0, 1)
    made.ours, made.where_tensors, made._lost = Ours(made.backend, stream=lambda cuda: "stream"), "cpu", False
    yield made
    made.close()


SMALL = {"samples": 3, "warmup": 1, "in_a_row": 2}


def test_a_row(bench) -> None:
    row = bench.measure(5, CONFIG, **SMALL)
    assert row.tokens == 5 and row.kernel_us == 7.0 and row.samples == 3 and row.times_us == (7.0,) * 3
    assert {mode: found.us for mode, found in row.times.items()} == {"kernel": 7.0, "cold": 7.0, "in_a_row": 3.5, "graph": 3.5}
    assert 0 <= row.worst_relative < 0.1 and row.config.startswith("m32") and row.overhead_us == 7.0
    # Every token goes to two of the four experts.
    assert 2 <= row.active_experts <= 4
    assert row.weight_floor_us == pytest.approx(row.active_experts * 3 * 256 * 256 / 4.7e12 * 1e6)
    assert row.tensor_floor_us == pytest.approx(5 * 2 * 6 * 256 * 256 / 1565e12 * 1e6)
    (rival,) = row.rivals
    assert (rival.name, rival.version, rival.difference) == ("peer", "0.1.4", (0.0, 0.0)) and rival.ratios["graph"]["median"] == 1.0
    document = row.to_dict()
    assert document["of_floor"] == pytest.approx(row.floor_us / 7.0) and document["times"]["cold"]["times_us"] == (7.0,) * 3
    only = bench.measure(5, replace(CONFIG, block_m=64), modes=("kernel",), **SMALL)
    assert set(only.times) == {"kernel"} and only.config.startswith("m64") and only.to_dict()["back_to_back_us"] is None
    assert bench_table.line(only.to_dict()).split()[4:7] == ["-", "-", "-"]


def test_wrong_outputs_have_no_times(bench, monkeypatch) -> None:
    bench.rivals[0].factor = 1.5
    with pytest.raises(ContenderFailed, match="peer failed: output wrong"):
        bench.measure(5, CONFIG, **SMALL)
    bench.rivals[0].factor = 1.0
    honest = Ours.enqueue

    def forgets_a_row(self) -> None:
        honest(self)
        self._y[1] = 0

    monkeypatch.setattr(Ours, "enqueue", forgets_a_row)
    with pytest.raises(WrongResult, match="its time means nothing"):
        bench.measure(5, CONFIG, **SMALL)


class Timed:
    """The emulator with made-up times: 100 us a launch on one rank, 110 and more on several."""

    def __init__(self, ranks: int, ctas: int) -> None:
        self.inner = open_backend(ranks, ctas=1)
        self.asked = ctas

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.inner.close()

    def run(self, program, timeout_s):
        done = self.inner.run(program, timeout_s)
        ranks = self.inner.ranks
        done.launch_ms = {rank: [0.1 if ranks == 1 else 0.11 + 0.001 * rank] * len(program.launches(rank)) for rank in range(ranks)}
        return done


def test_the_cost_of_the_protocol() -> None:
    opened: list[Timed] = []

    def opener(ranks: int, ctas: int) -> Timed:
        opened.append(Timed(ranks, ctas))
        return opened[-1]

    (cost,) = protocol_cost.measure_cost("small", SHAPE, [8], [2], config=CONFIG, samples=3, opener=opener, device="cpu")
    assert [(b.inner.ranks, b.asked) for b in opened] == [(1, 128), (2, 64)], "128 SMs in both"
    assert cost.one.us == pytest.approx(100.0) and cost.many.us == pytest.approx(111.0), "the slowest rank counts"
    assert cost.ratio["median"] == pytest.approx(1.11) and cost.difference <= 0.01
    assert cost.to_dict()["within"] is True and cost.to_dict()["limit"] == 1.15


@pytest.mark.parametrize("tokens, ranks, word", [([9], [2], "9 tokens"), ([8], [3], "3 ranks"), ([8], [1], "1 ranks")])
def test_what_does_not_divide(tokens, ranks, word) -> None:
    with pytest.raises(UsageError, match=word):
        protocol_cost.measure_cost("small", SHAPE, tokens, ranks)
