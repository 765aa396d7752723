"""From the protocol's case object to tensors: sizes, options, and the inputs of every launch. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from . import cases as catalogue
from . import config as kernel_config
from . import inputs, phases, skew
from .buffers import LaunchOptions
from .case_options import parse_mix, split_options
from .config import KernelConfig
from .errors import UsageError
from .oracle.casedata import CaseData
from .plan_values import uneven_counts
from .routing import derive_seed
from .shapes import Problem, Shape, check_clamp, check_problem

BIG_WEIGHTS = 256 << 20  # bytes of all ranks' weights from which inputs are made on the GPU and rows are sampled
SAMPLED_ROWS = 96  # per rank, for the float64 reference of a big case
CHEAP_REFERENCE = 4e9  # multiply-adds up to which the FP32 reference of every row also runs on the CPU


@dataclass
class Plan:
    """One case, ready to run. ``datas[n]`` is launched ``datas[n].launches`` times in a row, all on one buffer."""

    id: str
    phase: str
    problem: Problem
    config: KernelConfig
    datas: list[CaseData]
    configs: list[KernelConfig]  # datas[n] is run by configs[n % len(configs)]
    options: dict[str, Any]
    backend_options: dict[str, Any]
    timeout_s: float
    repro: str
    big: bool
    named: catalogue.NamedCase | None = None
    kernel_text: dict[str, Any] = field(default_factory=dict)

    def launch_options(self, data: CaseData) -> LaunchOptions:
        return LaunchOptions(clamp=data.clamp, fast_math=data.fast_math, ctas=self.options.get("launch_ctas"),
                             timeout_ns=int(float(self.options.get("wait_s", 5.0)) * 1e9),
                             num_tokens_bound=self.options.get("tokens_bound"))  # fmt: skip

    @property
    def replays(self) -> int:
        """How often the whole sequence of launches runs, on the same staged inputs."""
        return int(self.options.get("replay", 1))

    def ends(self) -> list[int]:
        """Position, among all launches, of the last one of each data set (in the last replay)."""
        lengths = [data.launches for data in self.datas]
        return [sum(lengths) * (self.replays - 1) + sum(lengths[: n + 1]) - 1 for n in range(len(lengths))]

    @property
    def snapshot_all(self) -> bool:
        """Named cases are judged from the views of every run; others from the last launch's unless asked."""
        return self.named is not None or self.options.get("snapshot") == "all"

    @property
    def full_reference(self) -> bool:
        """Does the FP32 reference of every row run? By default wherever it is cheap or a GPU does it."""
        asked = self.options.get("full_reference")
        if asked is not None:
            return bool(asked)
        s = self.problem.shape
        work = 3.0 * s.hidden * s.intermediate * s.topk * sum(self.problem.tokens)
        return self.datas[0].weights[0].w13.is_cuda or work <= CHEAP_REFERENCE


def read_case(case: Mapping[str, Any], *, device: str, slow: bool, default_timeout_s: float = 120.0) -> Plan:
    """Checks a case object and makes its inputs.

    ``device``: where a GPU backend's rank lives ("cuda:0"), "cpu" for the emulator. ``slow``: named cases take their
    reduced size. Raises UsageError naming what is wrong, before anything is launched.
    """
    phases.load(str(case.get("phase")))
    options, backend_options = split_options(case.get("options") or {})
    config = KernelConfig.from_dict(case.get("config") or {})
    seed, timeout_s = _integer(case, "seed", 0), float(case.get("timeout_s") or default_timeout_s)
    named = catalogue.load_case(str(case["case"])) if case.get("case") else None
    if named is not None:
        datas = named.build(seed, reduced=slow and named.has_reduced)
        if not datas:
            raise UsageError(f"case {named.id} launches nothing (it is judged by '{named.expect}')", rule="case-name")
        problem, big = datas[0].problem, False
    else:
        problem = _problem(case)
        big = weight_bytes(problem) >= BIG_WEIGHTS
        on_device = options.get("inputs", "device" if big and device != "cpu" else "cpu") == "device"
        datas = _random(case, problem, seed, device if on_device else "cpu")
    configs = [config, *parse_mix(options.get("mix", ""), config)]
    for each in configs:
        kernel_config.require(each, problem.shape, problem.ranks)
    if "skew" in options:
        backend_options |= skew.backend_options(options["skew"], problem.ranks, seed)
    sample = options.get("sample_rows", SAMPLED_ROWS if big else 0)
    for data in datas:
        data.sample_rows = sample or None
        data.validate()
    return Plan(str(case.get("id", "")), str(case["phase"]), problem, config, datas, configs, options, backend_options, timeout_s,
                str(case.get("repro", "")), big, named)  # fmt: skip


def weight_bytes(problem: Problem) -> int:
    s = problem.shape
    return 3 * s.experts * s.hidden * s.intermediate


def _integer(case: Mapping[str, Any], key: str, default: int) -> int:
    value = case.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UsageError(f"case field {key}={value!r} must be an integer", rule="case-field")
    return value


def _problem(case: Mapping[str, Any]) -> Problem:
    shape, tokens = case.get("shape"), case.get("tokens")
    if not (isinstance(shape, (list, tuple)) and len(shape) == 4 and all(isinstance(n, int) for n in shape)):
        raise UsageError(f"case field shape={shape!r} must be [hidden, intermediate, experts, topk]", rule="case-field")
    if not (isinstance(tokens, (list, tuple)) and all(isinstance(n, int) for n in tokens)):
        raise UsageError(f"case field tokens={tokens!r} must list one count per rank", rule="case-field")
    ranks = _integer(case, "ranks", len(tokens))
    problem = Problem.make(Shape(*shape), ranks, tuple(tokens), case.get("capacity"))
    check_problem(problem)
    return problem


def _random(case: Mapping[str, Any], problem: Problem, seed: int, device: str) -> list[CaseData]:
    """``launches`` data sets with the same weights and other tokens and ids."""
    launches = _integer(case, "launches", 1)
    if launches < 1:
        raise UsageError(f"launches={launches}; at least 1 is needed", rule="case-field")
    clamp = case.get("clamp")
    check_clamp(clamp)
    weights: Sequence[Any] = inputs.LazyWeights(problem, seed, device, keep=_kept_ranks(problem, device))
    vary = (case.get("options") or {}).get("vary_tokens")
    problems = [problem if n == 0 or not vary else varied(problem, seed, n) for n in range(launches)]
    return [inputs.make_case(problems[n], str(case.get("routing") or "uniform"), seed, clamp=clamp, launch=n, device=device,
                             weights=weights, label=str(case.get("id", ""))) for n in range(launches)]  # fmt: skip


def varied(problem: Problem, seed: int, launch: int) -> Problem:
    """The same with other token counts, drawn from the seed: none on some ranks, never more than the capacity."""
    most = min(problem.capacity, max(*problem.tokens, 8))
    counts = uneven_counts(most, problem.ranks, derive_seed(seed, "vary", launch))
    if problem.ranks == 2 and launch % 2:
        counts = (counts[0], 0) if launch % 4 == 1 else (0, counts[1])
    return replace(problem, tokens=counts)


def _kept_ranks(problem: Problem, device: str) -> int:
    """How many ranks' weights stay in memory: all, unless they would take more than a quarter of a GPU's free part."""
    if device == "cpu":
        return problem.ranks
    free, _ = torch.cuda.mem_get_info(device)
    return problem.ranks if weight_bytes(problem) < free // 4 else 1
