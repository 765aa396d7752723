"""How the candidates of one size are searched: all of them (``grid``), by halving, or by optuna's TPE (``tpe``)."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

from megamoe_cli.errors import EnvironmentUnfit
from megamoe_cli.tuning.journal import Trial
from megamoe_cli.tuning.paired import ratio
from megamoe_cli.tuning.schema import Choice

if TYPE_CHECKING:
    from megamoe_cli.tuning.tuner import Tuner

FINALISTS = 4
SURVIVE = 4  # one in so many survives a screening round
LEAST = 6


def search(tuner: Tuner, tokens: int) -> None:
    """Measures until this size's finalists have a final. The default is always one of them."""
    {"grid": _grid, "halving": _halving, "tpe": _tpe}[tuner.plan.strategy](tuner, tokens)
    tuner.final(tokens, tuner.plan.default)


def _grid(tuner: Tuner, tokens: int) -> None:
    for choice in tuner.alive():
        if tokens in tuner.measurer.skipped_sizes:
            return
        tuner.final(tokens, choice)


def _halving(tuner: Tuner, tokens: int) -> None:
    settings, own = tuner.plan.settings, tuner.plan.incumbent(tokens)
    hints = _hints(tuner, tuner.alive())
    left = [c for c in dict.fromkeys([*hints, *_shuffled(tuner, tokens)]) if c != own]
    scores: dict[Choice, list[list[float]]] = {c: [] for c in left}
    for stage, rounds in (("screen", settings.screen_rounds), ("second", settings.second_rounds)):
        keep = FINALISTS if stage == "second" else max(LEAST, math.ceil(len(left) / SURVIVE))
        if len(left) <= keep:
            continue
        ranked = []
        for choice in left:
            if tuner.slice_over() and len(ranked) >= keep:
                break
            trial = tuner.measurer.duel(stage, tokens, choice, own, rounds, stop_ratio=settings.stop_ratio)
            if trial.ok:
                scores[choice] += trial.pairs
                ranked.append((ratio(scores[choice]).median, tuner.registers(choice), choice.name(), choice))
        ranked.sort(key=lambda entry: entry[:3])
        # Those that noise alone separates from the last survivor go on too, but not more than as many again.
        if ranked:
            limit = ranked[min(keep, len(ranked)) - 1][0] * math.exp(tuner.out.noise.get(tokens, 0.0))
            left = [entry[3] for n, entry in enumerate(ranked) if n < keep or (entry[0] <= limit and n < 2 * keep)]
        else:
            left = []
    for choice in left:
        tuner.final(tokens, choice)


def _shuffled(tuner: Tuner, tokens: int) -> list[Choice]:
    """Candidates in an order of their own at each size: when time ends the screening, it has seen a sample of all axes."""
    order = sorted(tuner.alive(), key=lambda c: c.name())
    random.Random(tuner.plan.stage_seed("order", tokens, tuner.plan.routing)).shuffle(order)
    return order


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
        if choice is None or choice in tuner.measurer.failed:
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
