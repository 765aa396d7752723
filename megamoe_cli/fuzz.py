"""Random legal cases against the oracle, on the emulator: configuration x shape x tokens x routing x schedule x skew.

``Fuzzer(seed)`` draws cases in groups that share a few configurations, since each costs a compile. The corpus
(tests/data/fuzz_corpus.jsonl) keeps cases worth running again: those that failed once, made small, and a spread of
others. No torch.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import config as kernel_config
from . import sanitize, testplan
from .config import KernelConfig
from .errors import UsageError
from .routing import ROUTINGS
from .seed_campaign import legal_configs, policies
from .shapes import Problem, Shape, check_problem
from .testplan import Case

PHASES = ("combine", "combine", "combine", "l2", "l1", "dispatch")
MOST_WORK = 6e8  # multiply-adds of one launch on all ranks: about a second on the emulator


class Fuzzer:
    """An endless, repeatable sequence of legal cases."""

    def __init__(self, seed: int, timeout_s: float = 120.0) -> None:
        self.seed, self.timeout_s, self.count = seed, timeout_s, 0
        self._draw = random.Random(f"fuzz/{seed}")

    def group(self, size: int) -> list[Case]:
        """``size`` cases of one rank count under two configurations, one of them race-checked."""
        ranks = self._draw.choice((1, 2, 2, 2, 3, 3, 4, 5))
        configs = [self._config(), self._config()]
        races = self._draw.randrange(2)
        cases: list[Case] = []
        while len(cases) < size:
            which = self._draw.randrange(2)
            try:
                cases.append(self._case(ranks, configs[which], configs[1 - which], races == which))
            except UsageError:
                continue  # drawn sizes that break a rule: draw again
        return cases

    def _config(self) -> KernelConfig:
        draw = self._draw
        config = draw.choice(legal_configs(draw.choice(policies())))
        return replace(config, stages=draw.choice((2, 2, 3, 4)), lag=draw.choice((0, 1, 2, 8, 32)), unit_blocks=draw.choice((1, 2, 3, 8)))

    def _case(self, ranks: int, config: KernelConfig, other: KernelConfig, races: bool) -> Case:
        draw = self._draw
        experts = ranks * draw.choice((1, 1, 2, 2, 3, 5))
        shape = Shape(128 * draw.choice((1, 2, 2, 3, 5, 33)), 128 * draw.choice((1, 2, 2, 3)), experts, draw.randint(1, min(experts, 8)))
        tokens = tuple(self._tokens(config.block_m) for _ in range(ranks))
        if sum(tokens) * shape.topk * 3.0 * shape.hidden * shape.intermediate > MOST_WORK:
            raise UsageError("too large")
        capacity = draw.choice((None, max(*tokens, 1), max(*tokens, 1) + draw.randint(0, 50)))
        problem = Problem.make(shape, ranks, tokens, capacity)
        check_problem(problem)
        routing = self._routing(experts)
        testplan.routing_fits(routing, problem, False)
        kernel_config.require(config, shape, ranks)
        mixed = other if kernel_config.check(other, shape, ranks) else None  # launches alternate only where both fit
        self.count += 1
        case = Case("", draw.choice(PHASES), problem, routing, draw.choice((None, None, 0.5, 10.0)), draw.randrange(1 << 30), config,
                    draw.randint(1, 4), "emulator", self.timeout_s, self._options(ranks, config, mixed, races))  # fmt: skip
        return replace(case, id=testplan.identity(case))

    def _tokens(self, block_m: int) -> int:
        draw = self._draw
        return draw.choice((0, 1, draw.randint(2, 12), draw.randint(8, 90), block_m + draw.randint(-1, 1)))

    def _routing(self, experts: int) -> str:
        draw, name = self._draw, self._draw.choice([name for name in ROUTINGS if name != "fixed"])
        argument = {"powerlaw": f":{draw.choice((0.5, 1.2, 3)):g}", "one-hot-expert": f":{draw.randrange(experts)}",
                    "masked": f":{draw.choice((0.1, 0.5, 0.95)):g}"}  # fmt: skip
        return name + argument.get(name, "")

    def _options(self, ranks: int, config: KernelConfig, other: KernelConfig | None, races: bool) -> dict[str, Any]:
        draw = self._draw
        options: dict[str, Any] = dict(sanitize.CHECKS) if races else {}
        options["schedule"] = draw.choice(("fifo", "random", "random", "pct"))
        options["completion"] = draw.choice(("eager", "random", "lazy", "lazy"))
        options["ctas"] = max(draw.choice((1, 2, 2, 3, 4)), config.cluster, other.cluster if other else 1)  # a cluster at least
        if ranks > 1 and draw.random() < 0.4:
            options["skew"] = f"{draw.choice(('late', 'late', 'slow', 'slow', 'stop'))}:any"
        if draw.random() < 0.3:
            options["vary_tokens"] = True
        if draw.random() < 0.2:
            options["tokens_bound"] = 4000
        if draw.random() < 0.15:
            options["replay"] = 2
        if draw.random() < 0.2 and other not in (None, config):
            changes = {key: value for key, value in other.to_dict().items() if value != config.to_dict()[key]}
            options["mix"] = "+".join(f"{key}={value}" for key, value in changes.items())
        if draw.random() < 0.2:
            options["snapshot"] = "all"
        return options


# ---- the corpus: one JSON object a line, {"why": ..., "case": {...}}


def to_entry(case: Case, why: str) -> dict[str, Any]:
    drop = ("id", "repro", "timeout_s")
    return {"why": why, "case": {key: value for key, value in case.to_dict().items() if key not in drop}}


def from_entry(entry: Mapping[str, Any], timeout_s: float = 120.0) -> Case:
    """The case of a corpus line, checked. UsageError when it breaks a rule, KeyError or TypeError when it is no case."""
    data = entry["case"]
    problem = Problem.make(Shape(*data["shape"]), data["ranks"], tuple(data["tokens"]), data["capacity"])
    check_problem(problem)
    config = KernelConfig.from_dict(data["config"])
    kernel_config.require(config, problem.shape, problem.ranks)
    case = Case("", data["phase"], problem, data["routing"], data["clamp"], data["seed"], config, data["launches"], "emulator",
                timeout_s, dict(data["options"]))  # fmt: skip
    return replace(case, id=testplan.identity(case))


def read_corpus(path: Path, timeout_s: float = 120.0) -> list[Case]:
    """The cases of a corpus file; UsageError names the line that is none."""
    cases = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}", rule="corpus") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                cases.append(from_entry(json.loads(line), timeout_s))
            except (ValueError, KeyError, TypeError, UsageError) as error:
                raise UsageError(f"{path.name} line {number} is no case: {error}", rule="corpus") from None
    return cases


def add_to_corpus(path: Path, case: Case, why: str) -> bool:
    """Appends a case unless it is there; False when it was."""
    entry = to_entry(case, why)
    known = [json.loads(line)["case"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()] if path.is_file() else []
    if entry["case"] in known:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry, separators=(",", ":")) + "\n")
    return True


def batches(cases: list[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Cases by rank count, as workers take them."""
    for ranks in dict.fromkeys(case.ranks for case in cases):
        yield ranks, [case for case in cases if case.ranks == ranks]
