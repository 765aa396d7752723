"""The part of optuna that the tuner calls, with a sampler that draws at random: for machines without optuna."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

FAIL, COMPLETE = "fail", "complete"


class Study:
    def __init__(self, seed: int) -> None:
        self.draw, self.queue, self.told = random.Random(seed), [], []

    def enqueue_trial(self, params: dict[str, Any]) -> None:
        self.queue.append(params)

    def ask(self, distributions: dict[str, Any]) -> Any:
        params = self.queue.pop(0) if self.queue else {axis: self.draw.choice(values) for axis, values in distributions.items()}
        assert params.keys() == distributions.keys()
        return SimpleNamespace(params=params)

    def tell(self, proposal: Any, value: float | None = None, state: str = COMPLETE) -> None:
        assert (value is None) == (state == FAIL)
        self.told.append((proposal.params, value))


STUDIES: list[Study] = []


def create_study(sampler: int) -> Study:
    STUDIES.append(Study(sampler))
    return STUDIES[-1]


samplers = SimpleNamespace(TPESampler=lambda seed, n_startup_trials: seed)
distributions = SimpleNamespace(CategoricalDistribution=lambda values: values)
trial = SimpleNamespace(TrialState=SimpleNamespace(FAIL=FAIL))
logging = SimpleNamespace(ERROR=40, set_verbosity=lambda level: None)
