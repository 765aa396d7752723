"""A finished run in numbers, and what a planned one will cost."""

from __future__ import annotations

from typing import Any

from megamoe_cli.tuning.measurer import Measurer
from megamoe_cli.tuning.plan import Plan
from megamoe_cli.tuning.schema import Choice, Table
from megamoe_cli.tuning.search import FINALISTS, LEAST, SURVIVE
from megamoe_cli.tuning.space import kernels_of
from megamoe_cli.tuning.static_model import facts
from megamoe_cli.tuning.tuner import Outcome

COMPILE_S = 20.0  # one kernel cold on one core, rounded up from what was seen
PER_TRIAL_S = 0.02  # judging, protocol, the pair that is not timed


def summarize(plan: Plan, out: Outcome, measurer: Measurer, table: Table, seconds: float) -> dict[str, Any]:
    """The run in numbers: where every generated combination went, what was gained, what is open."""
    tried = {choice for _, _, choice in out.records} | {plan.incumbent(tokens) for tokens in out.noise}
    asked = {Choice.from_dict(t.a) for t in measurer.journal.trials.values() if t.stage != "build"}
    failed: dict[str, int] = {}
    for trial in measurer.failed.values():
        failed[trial.status] = failed.get(trial.status, 0) + 1
    measured = len([c for c in plan.candidates if (c in asked or c in tried) and c not in measurer.failed])
    lost = len([c for c in plan.candidates if c in measurer.failed])
    accounts = {**{k: v for k, v in plan.accounts.items() if k != "why"}, "measured": measured, "failed": failed,
                "not_reached": len(plan.candidates) - measured - lost}
    picks = [(p.tokens, s.choice, p.ratio(s.choice)) for s in out.fitted.segments for p in s.points if p.routing == plan.routing]
    return {
        "schema": "megamoe.tune-summary/1", "id": plan.run, "where": sorted({t.where for t in measurer.journal.trials.values() if t.where}),
        "seconds": round(seconds, 2), "trials": {"measured": measurer.measured, "replayed": measurer.replayed},
        "stopped": out.stopped, "partial": table.partial, "accounts": accounts, "noise": {str(t): round(n, 5) for t, n in sorted(out.noise.items())},
        "skipped_sizes": {str(t): why for t, why in measurer.skipped_sizes.items()},
        "disqualified": [{"config": c.name(), "status": t.status, "tokens": t.tokens, "why": t.message} for c, t in measurer.failed.items()],
        "not_confirmed": [{"tokens": t, "config": c.name()} for t, c in out.not_confirmed],
        "picks": [{"tokens": t, "config": c.name(), "vs_incumbent": round(r.median, 4) if r else None} for t, c, r in picks],
        "validation": table.validation, "notes": out.notes}


def expected_trials(plan: Plan) -> dict[str, int]:
    """About how many trials each stage will take."""
    n, sizes = len(plan.candidates), len(plan.sizes)
    if plan.strategy == "grid":
        out = {"noise": sizes, "final": sizes * n}
    else:
        screened = n if plan.strategy == "halving" else 0
        survivors = min(n, max(LEAST, -(-n // SURVIVE)))
        out = {"noise": sizes, "screen": sizes * screened, "second": sizes * (survivors if screened else min(n, plan.settings.tpe_trials)),
               "final": sizes * min(n, FINALISTS + 1), "cross": sizes * 3}
    return out | {"confirm": sizes, "validate": 12 * 3}


def estimate(plan: Plan, jobs: int) -> dict[str, Any]:
    """Trials, kernels and seconds. Times are from the model, so they are called so."""
    s, trials = plan.settings, expected_trials(plan)
    rounds = {"noise": s.noise_rounds, "screen": s.screen_rounds, "second": s.second_rounds}
    shared = plan.machine.backend != "nvlink"
    times = [facts(plan.incumbent(t), plan.shape, plan.ranks, plan.machine.sms, t, shared=shared).model_us for t in plan.sizes]
    mean_s = 1e-6 * sum(times) / len(times)
    run_s = sum(count * (PER_TRIAL_S + 2.6 * mean_s * (rounds.get(stage, s.final_rounds) + 2)) for stage, count in trials.items())
    kernels = len(kernels_of([*plan.candidates, *(c for _, c in plan.incumbents)]))
    return {"trials": trials, "total_trials": sum(trials.values()), "kernels": kernels,
            "compile_s_cold": round(COMPILE_S * -(-kernels // jobs)), "run_s_model": round(run_s, 1)}
