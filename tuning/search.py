"""How the candidates of one size are searched: all of them (``grid``), by halving, or by optuna's TPE (``tpe``)."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megamoe_cli.errors import EnvironmentUnfit
from megamoe_cli.tuning.journal import Trial
from megamoe_cli.tuning.paired import ratio
from megamoe_cli.tuning.schema import Choice
from megamoe_cli.tuning.space import kernel_key

if TYPE_CHECKING:
    from megamoe_cli.config import KernelConfig
    from megamoe_cli.tuning.tuner import Tuner

FINALISTS = 4
SURVIVE = 4  # one in so many survives a screening round
LEAST = 6
LAUNCH_KERNELS = 2  # kernels of a size whose launch parameters are varied (ties too), the incumbent's if it is so good
NEAR = 4.0  # a size between two screened ones this close (as a factor) screens only what was good at one of them
TRANSFER = 1.15  # good: within this factor of the best there


def search(tuner: Tuner, tokens: int) -> None:
    """Measures until this size's finalists have a final. The default is always one of them, and so is what was named by hand."""
    {"grid": _grid, "halving": _halving, "tpe": _tpe}[tuner.plan.strategy](tuner, tokens)
    for choice in [*tuner.plan.named, tuner.plan.default]:
        tuner.final(tokens, choice)


def _grid(tuner: Tuner, tokens: int) -> None:
    for choice in tuner.alive():
        if tokens in tuner.measurer.skipped_sizes:
            return
        tuner.final(tokens, choice)


# -- halving ---------------------------------------------------------------------------------------


def _halving(tuner: Tuner, tokens: int) -> None:
    """Every kernel with its first launch parameters, then those parameters for the best kernels, then finals."""
    settings, own = tuner.plan.settings, tuner.plan.incumbent(tokens)
    left = _entrants(tuner, tokens)
    scores: dict[Choice, list[list[float]]] = {choice: [] for choice in left}
    keep = max(LEAST, math.ceil(len(left) / SURVIVE))
    if len(left) > keep:
        _measure(tuner, tokens, "screen", settings.screen_rounds, left, scores, least=keep)
        left = _best(tuner, tokens, left, keep, scores)
        found = {kernel_key(choice.config): ratio(pairs).median for choice, pairs in scores.items() if pairs}
        if found:  # the incumbent's own kernel is 1 by definition
            found.setdefault(kernel_key(own.config), 1.0)
            tuner.screened[tokens] = {kernel: value / min(found.values()) for kernel, value in found.items()}
    _measure(tuner, tokens, "second", settings.second_rounds, left, scores, least=FINALISTS)
    # Hints may be one kernel several times: places here are for kernels, whatever becomes of their variants as finalists.
    judged = scores | {own: [[1.0, 1.0]]}
    kernels = _best(tuner, tokens, _best_of_each_kernel(tuner, [*left, own], judged), LAUNCH_KERNELS, judged)
    variants = _variants(tuner, kernels, {*left, own})
    left = _best(tuner, tokens, left, FINALISTS, scores)
    scores |= {choice: [] for choice in variants}
    _measure(tuner, tokens, "launch", settings.second_rounds, variants, scores, least=0)
    for choice in _best(tuner, tokens, [*left, *variants], FINALISTS, scores):
        tuner.final(tokens, choice)


def _measure(tuner: Tuner, tokens: int, stage: str, rounds: int, choices: list[Choice], scores: dict[Choice, list[list[float]]], least: int) -> None:
    """Adds pairs to ``scores``. When the size's time is over it stops, but not before ``least`` have some."""
    own, good = tuner.plan.incumbent(tokens), 0
    for choice in choices:
        if tuner.slice_over() and good >= least:
            return
        if tuner.measurer.barred(choice):
            continue
        trial = tuner.measurer.duel(stage, tokens, choice, own, rounds, stop_ratio=tuner.plan.settings.stop_ratio)
        if trial.ok:
            scores[choice] += trial.pairs
            good += 1


def _score(scores: dict[Choice, list[list[float]]], choice: Choice) -> float:
    """Over the incumbent's time; its own is 1."""
    return ratio(scores[choice]).median if scores.get(choice) else 1.0


def _best(tuner: Tuner, tokens: int, choices: list[Choice], keep: int, scores: dict[Choice, list[list[float]]]) -> list[Choice]:
    """The best ``keep`` of those with pairs; what noise alone separates from the last of them goes on too, but not more than as
    many again."""
    ranked = sorted((_score(scores, c), tuner.registers(c), c.name(), n) for n, c in enumerate(choices)
                    if scores[c] and c not in tuner.measurer.failed)
    if not ranked:
        return []
    limit = ranked[min(keep, len(ranked)) - 1][0] * math.exp(tuner.out.noise.get(tokens, 0.0))
    return [choices[entry[3]] for n, entry in enumerate(ranked) if n < keep or (entry[0] <= limit and n < 2 * keep)]


def _entrants(tuner: Tuner, tokens: int) -> list[Choice]:
    """One candidate for each kernel: the best of the sizes before, then the others in an order of their own at each size:
    when time ends the screening, it has seen a sample of all axes."""
    own, named = tuner.plan.incumbent(tokens), set(tuner.plan.named)
    alive = [c for c in tuner.alive() if c not in named]
    first: dict[Any, Choice] = {}
    for choice in alive:
        first.setdefault(kernel_key(choice.config), choice)
    order = sorted(first.values(), key=lambda c: c.name())
    random.Random(tuner.plan.stage_seed("order", tokens, tuner.plan.routing)).shuffle(order)
    near = neighbours(tokens, tuner.screened)
    if near is not None:
        order = [c for c in order if any(tuner.screened[t].get(kernel_key(c.config), math.inf) <= TRANSFER for t in near)]
    return [c for c in dict.fromkeys([*_hints(tuner, alive), *order]) if c != own]


def neighbours(tokens: int, screened: Iterable[int]) -> tuple[int, int] | None:
    """The screened sizes on both sides of ``tokens`` when both are near; None: everything is to be screened here."""
    below = max((t for t in screened if t < tokens), default=None)
    above = min((t for t in screened if t > tokens), default=None)
    if below is None or above is None or tokens > NEAR * below or above > NEAR * tokens:
        return None
    return below, above


def _best_of_each_kernel(tuner: Tuner, choices: list[Choice], scores: dict[Choice, list[list[float]]]) -> list[Choice]:
    """Of those with pairs that did not fail, one for each kernel."""
    best: dict[KernelConfig, Choice] = {}
    for choice in (c for c in choices if scores[c] and c not in tuner.measurer.failed):
        key = kernel_key(choice.config)
        if key not in best or _score(scores, choice) < _score(scores, best[key]):
            best[key] = choice
    return list(best.values())


def _variants(tuner: Tuner, kernels: list[Choice], known: set[Choice]) -> list[Choice]:
    """Candidates that are these kernels with launch parameters not in ``known``, the best kernel's first."""
    keys = dict.fromkeys(kernel_key(c.config) for c in kernels)
    return [c for key in keys for c in tuner.alive() if kernel_key(c.config) == key and c not in known and c not in tuner.plan.named]


# -- TPE -------------------------------------------------------------------------------------------


def optuna_module() -> Any:
    """optuna, quiet. EnvironmentUnfit without it."""
    try:
        import optuna
    except ImportError:
        raise EnvironmentUnfit("--strategy tpe needs optuna, which is not installed", hint="pip install 'megamoe[tune]', or --strategy halving") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _tpe(tuner: Tuner, tokens: int) -> None:
    """Ask and tell: optuna proposes, the journal remembers. What it proposes and the space does not have is told as a
    failure and costs nothing; candidates named by hand, and the best of the sizes before, are proposed first."""
    optuna = optuna_module()
    settings, own = tuner.plan.settings, tuner.plan.incumbent(tokens)
    alive = [c for c in tuner.alive() if c != own]
    by_values = {_values(c): c for c in alive}
    axes = _axes(alive)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=tuner.plan.stage_seed("tpe", tokens, tuner.plan.routing), n_startup_trials=8))
    for choice in _hints(tuner, alive):
        study.enqueue_trial({axis: dict(_values(choice))[axis] for axis in axes})
    found: dict[Choice, float] = {}
    asked = 0
    while len(found) < min(settings.tpe_trials, len(alive)) and asked < 8 * settings.tpe_trials:
        asked += 1
        proposal = study.ask({axis: optuna.distributions.CategoricalDistribution(values) for axis, values in axes.items()})
        choice = next((c for values, c in by_values.items() if all(dict(values)[axis] == proposal.params[axis] for axis in axes)), None)
        if choice is None or tuner.measurer.barred(choice):
            study.tell(proposal, state=optuna.trial.TrialState.FAIL)
            continue
        trial: Trial = tuner.measurer.duel("tpe", tokens, choice, own, settings.second_rounds, stop_ratio=settings.stop_ratio)
        if trial.ok:
            found[choice] = math.log(ratio(trial.pairs).median)
            study.tell(proposal, found[choice])
        else:
            study.tell(proposal, state=optuna.trial.TrialState.FAIL)
    for choice in sorted(found, key=lambda c: (found[c], tuner.registers(c), c.name()))[:FINALISTS]:
        tuner.final(tokens, choice)


def _values(choice: Choice) -> tuple[tuple[str, Any], ...]:
    return tuple(choice.to_dict().items()) + ((("ctas", 0),) if not choice.ctas else ())


def _axes(choices: list[Choice]) -> dict[str, list[Any]]:
    """What differs between candidates. Registers follow from the rest, so they are no axis."""
    seen: dict[str, dict[Any, None]] = {}
    for choice in choices:
        for axis, value in _values(choice):
            seen.setdefault(axis, {})[value] = None
    return {axis: sorted(values, key=str) for axis, values in seen.items() if len(values) > 1 and not axis.startswith("regs_")}


def _hints(tuner: Tuner, alive: list[Choice]) -> list[Choice]:
    best = [min(rows, key=lambda r: r.found.median).choice
            for t in sorted(tuner.out.searched) if (rows := [r for r in tuner.out.records.values() if r.tokens == t])]
    return [c for c in dict.fromkeys([tuner.plan.default, *best[-4:]]) if c in alive]
