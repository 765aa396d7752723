"""From options to cases: what ``megamoe test`` will run, all of it checked before anything starts. No torch.

A *case* is one launch sequence on one buffer set-up, judged at one phase. Its id spells every choice that made it, and
``Case.repro`` is the command that runs it alone.
"""

from __future__ import annotations

import ast
import fnmatch
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe_cli import config as kernel_config
from megamoe_cli import sanitize
from megamoe_cli.backends.picking import check_name
from megamoe_cli.backends.sm_share import check_emulated_grid
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import EnvironmentUnfit, UsageError
from megamoe_cli.paths import program
from megamoe_cli.plan_values import (
    UNEVEN, clamp_text, clamps, integers, names, per_rank, routing_fits, routings, split, uneven_counts,
)
from megamoe_cli.shapes import (
    MAX_RANKS, Problem, Shape, check_capacities, check_problem, check_shape, default_capacity, parse_shape,
)

if TYPE_CHECKING:
    from megamoe_cli.tuning.schema import Choice

# Launches in a row when --repeat is not given. Three wherever there is data: counters live in two banks by launch
# parity, so only the third launch meets a bank that was used and cleared.
LAUNCHES = 3
FEWER_LAUNCHES = {"stub": 1}


@dataclass(frozen=True)
class Case:
    """One case. ``tokens`` has one entry per rank; ``config`` holds only what differs from the defaults."""

    id: str
    phase: str
    problem: Problem
    routing: str
    clamp: float | None
    seed: int
    config: KernelConfig
    launches: int
    backend: str
    timeout_s: float
    options: dict[str, Any] = field(default_factory=dict)
    named: str = ""  # id of the named small-input case this is, or empty

    @property
    def ranks(self) -> int:
        return self.problem.ranks

    @property
    def sizes(self) -> str:
        """The case without its phase: the row it takes in a phase x case table."""
        return self.id.partition("-")[2]

    def repro(self) -> str:
        """The command line that runs this case and no other."""
        if self.named:
            words = ["--case", self.named, "--phase", self.phase]
        else:
            counts = self.problem.tokens
            words = ["--ranks", str(self.ranks), "--phase", self.phase, "--shape", self.problem.shape.name]
            words += (["--tokens", str(counts[0])] if len(set(counts)) == 1
                      else ["--tokens-per-rank", ",".join(map(str, counts))])
            if self.problem.capacity != Problem.make(self.problem.shape, self.ranks, counts).capacity:
                words += ["--capacity", str(self.problem.capacity)]
            words += ["--block-m", str(self.config.block_m), "--routing", self.routing,
                      "--clamp", clamp_text(self.clamp)]
        for key, value in changed(self.config).items():
            if key != "block_m" or self.named:
                words += ["--config", f"{key}={value}"]
        words += ["--seed", str(self.seed)]
        if not self.named:
            words += ["--repeat", str(self.launches)]
        words += sanitize.command_words(self.options)
        if "--sanitize" in words:  # which would run several seeds
            words += ["--seeds", "1"]
        return f"{program()} test {shlex.join([*words, '--backend', self.backend])}"

    def to_dict(self) -> dict[str, Any]:
        """The case object of the worker protocol."""
        return {
            "id": self.id, "phase": self.phase, "shape": self.problem.shape.as_list(), "ranks": self.ranks,
            "tokens": list(self.problem.tokens), "capacity": self.problem.capacity, "routing": self.routing,
            "clamp": self.clamp, "seed": self.seed, "config": self.config.to_dict(), "launches": self.launches,
            "timeout_s": self.timeout_s, "options": dict(self.options), "repro": self.repro(),
            **({"case": self.named} if self.named else {}),
        }


@dataclass
class Request:
    """What the user asked for, as text from the command line. None or empty: the default."""

    ranks: str = "8"
    phase: str = "all"
    tokens: str = "0,8,48,uneven:40"
    tokens_per_rank: str | None = None
    capacity: str | None = None
    shape: str = "tiny"
    block_m: str | None = None
    config: Sequence[str] = ()
    routing: str = "uniform"
    clamp: str = "none"
    seed: int = 0
    seeds: int = 1
    repeat: int | None = None
    backend: str = "auto"
    timeout_s: float = 120.0
    options: dict[str, Any] = field(default_factory=dict)
    # What a heuristic table picks for a problem, where the configuration is not given; None: the built-in default.
    pick: Callable[[Problem], Choice | None] | None = None


def changed(config: KernelConfig) -> dict[str, Any]:
    """The fields of ``config`` that differ from the defaults."""
    default = KernelConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if value != default[key]}


@lru_cache(maxsize=None)
def phase_names() -> tuple[str, ...]:
    """All phases in order. Read from the files' ``NAME`` and ``INDEX``, since importing them would import torch."""
    from importlib.util import find_spec

    spec = find_spec("megamoe_cli.phases")
    found: list[tuple[int, str]] = []
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).glob("[!_]*.py"):
            constants = _constants(path)
            if isinstance(constants.get("INDEX"), int) and isinstance(constants.get("NAME"), str):
                found.append((constants["INDEX"], constants["NAME"]))
    return tuple(name for _, name in sorted(found))


def _constants(path: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
                out[target.id] = node.value.value
    return out


def expand(request: Request) -> list[Case]:
    """Every case of ``request``, checked. Raises UsageError for the first rule broken; starts nothing."""
    known = phase_names()
    if not known:
        raise EnvironmentUnfit("no phase is installed: the phases folder is missing or empty")
    phases = names(request.phase, known, "phase")
    rank_counts = integers(request.ranks, "--ranks")
    for ranks in rank_counts:  # before anything is made once per rank
        if not 1 <= ranks <= MAX_RANKS:
            raise UsageError(f"ranks={ranks} is outside 1..{MAX_RANKS}, one NVLink domain "
                             f"(nearest: {min(max(ranks, 1), MAX_RANKS)})", rule="ranks-limit")
    shapes = [parse_shape(part) for part in split(request.shape)]
    if not shapes:
        raise UsageError("--shape: no shape given", rule="shape-name")
    recipes = routings(request.routing)
    everything = "all" in split(request.routing)
    limits = clamps(request.clamp)
    configs = _configs(request)
    check_name(request.backend)
    for option, value, low in (("--seeds", request.seeds, 1), ("--repeat", request.repeat, 1), ("--seed", request.seed, 0)):
        if value is not None and value < low:
            raise UsageError(f"{option}={value}; the least is {low}")
    if not request.timeout_s > 0:
        raise UsageError(f"--timeout={request.timeout_s:g}; a case needs a positive number of seconds")
    cases: dict[str, Case] = {}
    for ranks in rank_counts:
        for phase in phases:
            for shape in shapes:
                for config in configs:
                    check_shape(shape, ranks)
                    kernel_config.require(config, shape, ranks)
                    for seed in range(request.seed, request.seed + request.seeds):
                        for problem in _problems(request, shape, ranks, seed):
                            for routing in recipes:
                                if routing_fits(routing, problem, everything):
                                    for clamp in limits:
                                        case = _case(*_picked(request, problem, config), phase, problem, routing, clamp, seed)
                                        cases[case.id] = case
    return list(cases.values())


def _configs(request: Request) -> list[KernelConfig]:
    base = KernelConfig.parse(",".join(request.config))
    given = {part.partition("=")[0].strip() for text in request.config for part in split(text)}
    if not request.block_m:
        return [base]
    if "block_m" in given:
        raise UsageError("block_m is given twice: by --block-m and by --config", rule="config-syntax")
    return [KernelConfig.parse(f"block_m={value}", base) for value in integers(request.block_m, "--block-m")]


def _picked(request: Request, problem: Problem, config: KernelConfig) -> tuple[Request, KernelConfig]:
    """The configuration as it was given; else the table's pick, whose grid becomes a launch option."""
    choice = request.pick(problem) if request.pick is not None and not request.block_m and not any(request.config) else None
    if choice is None:
        return request, config
    kernel_config.require(choice.config, problem.shape, problem.ranks)
    return replace(request, options={**request.options, "launch_ctas": choice.ctas}) if choice.ctas else request, choice.config


def _problems(request: Request, shape: Shape, ranks: int, seed: int) -> list[Problem]:
    counts: list[tuple[int, ...] | int]
    if request.tokens_per_rank:
        counts = [tuple(per_rank(request.tokens_per_rank, "--tokens-per-rank"))]
    else:
        counts = []
        for part in split(request.tokens):
            if part.startswith(UNEVEN):
                counts.append(uneven_counts(integers(part[len(UNEVEN):], "--tokens", 0)[0], ranks, seed))
            else:
                counts.append(integers(part, "--tokens", 0)[0])
        if not counts:
            raise UsageError("--tokens: no value given", rule="tokens-per-rank")
    capacities = per_rank(request.capacity, "--capacity") if request.capacity else []
    problems = []
    for count in counts:
        if len(capacities) > 1 and len(capacities) != ranks:
            raise UsageError(f"--capacity: {len(capacities)} values for {ranks} ranks; give one, or one for each rank",
                             rule="capacity-equal")
        check_capacities(capacities)
        problem = Problem.make(shape, ranks, count, capacities[0] if capacities else None)
        check_problem(problem)
        problems.append(problem)
    return problems


def _case(request: Request, config: KernelConfig, phase: str, problem: Problem, routing: str, clamp: float | None,
          seed: int) -> Case:
    launches = request.repeat if request.repeat is not None else FEWER_LAUNCHES.get(phase, LAUNCHES)
    case = Case("", phase, problem, routing, clamp, seed, config, launches, request.backend, request.timeout_s, dict(request.options))
    return sanitize.settle(replace(case, id=identity(case)))


def identity(case: Case) -> str:
    """The id of a case: every choice that made it, options apart."""
    problem, counts, config, launches = case.problem, case.problem.tokens, case.config, case.launches
    tokens = str(counts[0]) if len(set(counts)) == 1 else "+".join(map(str, counts))
    parts = [case.phase, f"r{problem.ranks}", problem.shape.name, f"t{tokens}", f"m{config.block_m}", case.routing]
    if case.clamp is not None:
        parts.append(f"clamp{clamp_text(case.clamp)}")
    others = {key: value for key, value in changed(config).items() if key != "block_m"}
    parts += [f"{key}={value}" for key, value in others.items()]
    if problem.capacity != Problem.make(problem.shape, problem.ranks, counts).capacity:
        parts.append(f"c{problem.capacity}")
    if launches != FEWER_LAUNCHES.get(case.phase, LAUNCHES):
        parts.append(f"x{launches}")
    return "-".join([*parts, f"s{case.seed}"])


def resized(case: Case, *, shape: Shape | None = None, tokens: Sequence[int] | None = None, seed: int | None = None,
            launches: int | None = None, options: dict[str, Any] | None = None) -> Case:  # fmt: skip
    """``case`` with other sizes (as many ranks as ``tokens``), checked. Raises UsageError when they are not legal."""
    counts = tuple(case.problem.tokens if tokens is None else tokens)
    usual = case.problem.capacity == default_capacity(case.problem.tokens)
    problem = Problem.make(shape or case.problem.shape, len(counts), counts, None if usual else case.problem.capacity)
    check_problem(problem)
    routing_fits(case.routing, problem, False)
    kernel_config.require(case.config, problem.shape, problem.ranks)
    other = replace(case, problem=problem, seed=case.seed if seed is None else seed, options=dict(case.options if options is None else options),
                    launches=case.launches if launches is None else launches)  # fmt: skip
    if other.backend == "emulator":
        check_emulated_grid(other.config, other.options)
    return replace(other, id=identity(other))


def named(request: Request, ids: Sequence[str]) -> list[Case]:
    """The named small inputs ``ids`` (cases.py), one case for each phase asked for. Cases that must be refused, or
    need no launch, are judged by the unit tests and are a UsageError here; ``all`` is every one that launches."""
    from megamoe_cli import cases as catalogue

    if any(name == "all" for name in ids):
        chosen = [entry for entry in catalogue.load_cases() if entry.expect == "match"]
    else:
        chosen = [catalogue.load_case(name) for name in dict.fromkeys(ids)]
    known = phase_names()
    configs, out = _configs(request), []
    check_name(request.backend)
    for phase in names(request.phase, known, "phase"):
        for entry in chosen:
            if entry.expect != "match":
                raise UsageError(f"case {entry.id} launches nothing (it is judged by '{entry.expect}'): the test suite "
                                 f"runs it", hint="pytest -k small_inputs", rule="case-name")
            data = entry.data
            first = data["runs"][0]["tokens"] if "runs" in data else data["sweep"]["counts"][0]
            problem = Problem.make(Shape(*data["shape"]), data["ranks"], first, data.get("capacity"))
            check_problem(problem)
            for config in configs:
                kernel_config.require(config, problem.shape, problem.ranks)
                for seed in range(request.seed, request.seed + request.seeds):
                    name = "-".join([phase, entry.id, f"m{config.block_m}",
                                         *(f"{k}={v}" for k, v in changed(config).items() if k != "block_m"), f"s{seed}"])
                    case = Case(name, phase, problem, "", None, seed, config, 1, request.backend, request.timeout_s,
                                dict(request.options), entry.id)  # fmt: skip
                    out.append(sanitize.settle(case))
    return out


def select(cases: Sequence[Case], filters: Sequence[str]) -> list[Case]:
    """The cases whose id matches every filter: a part of the id, or a pattern with ``*`` and ``?``; ``!`` negates."""
    def matches(case: Case, text: str) -> bool:
        negated, text = text.startswith("!"), text.lstrip("!")
        identity = case.id.lower()
        hit = fnmatch.fnmatchcase(identity, text.lower()) if set("*?") & set(text) else text.lower() in identity
        return hit != negated

    return [case for case in cases if all(matches(case, text) for text in filters)]
