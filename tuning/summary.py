"""A finished run in numbers, and what a planned one will cost."""

from __future__ import annotations

import math
import statistics
from typing import Any

from megamoe_cli.tuning.measurer import Measurer
from megamoe_cli.tuning.plan import Plan, visiting_order
from megamoe_cli.tuning.schema import Choice, Table
from megamoe_cli.tuning.search import FINALISTS, LAUNCH_KERNELS, LEAST, SURVIVE, neighbours
from megamoe_cli.tuning.space import kernel_key, kernels_of
from megamoe_cli.tuning.static_model import facts
from megamoe_cli.tuning.tuner import Outcome

COMPILE_S = 20.0  # one kernel cold on one core, rounded up from what was seen
PER_TRIAL_S = 0.04  # judging, protocol, the pairs that are not timed
PER_SIZE_S = 0.2  # inputs and references, for each stage of a size


def summarize(plan: Plan, out: Outcome, measurer: Measurer, table: Table, seconds: float) -> dict[str, Any]:
    """The run in numbers: where every generated combination went, what was gained, what is open."""
    tried = {choice for _, _, choice in out.records} | {plan.incumbent(tokens) for tokens in out.noise}
    asked = {Choice.from_dict(t.a) for t in measurer.journal.trials.values() if t.stage != "build"}
    failed: dict[str, int] = {}
    for trial in measurer.failed.values():
        failed[trial.status] = failed.get(trial.status, 0) + 1
    measured = len([c for c in plan.candidates if (c in asked or c in tried) and c not in measurer.failed])
    lost = len([c for c in plan.candidates if c in measurer.failed])
    left = [c for c in plan.candidates if c not in asked and c not in tried and c not in measurer.failed]
    barred = sum(measurer.families.barred(c) for c in left)
    kernels = {kernel_key(c.config) for c in asked | tried}
    outranked = sum(kernel_key(c.config) in kernels and not measurer.families.barred(c) for c in left)
    accounts = {**{k: v for k, v in plan.accounts.items() if k != "why"}, "measured": measured, "failed": failed, "barred": barred,
                "outranked": outranked, "not_reached": len(plan.candidates) - measured - lost - barred - outranked}
    picks = [(p.tokens, s.choice, p.ratio(s.choice)) for s in out.fitted.segments for p in s.points if p.routing == plan.routing]
    return {
        "schema": "megamoe.tune-summary/1", "id": plan.run, "where": sorted({t.where for t in measurer.journal.trials.values() if t.where}),
        "seconds": round(seconds, 2), "trials": {"measured": measurer.measured, "replayed": measurer.replayed},
        "stopped": out.stopped, "partial": table.partial, "accounts": accounts, "noise": {str(t): round(n, 5) for t, n in sorted(out.noise.items())},
        "skipped_sizes": {str(t): why for t, why in measurer.skipped_sizes.items()},
        "disqualified": [{"config": c.name(), "status": t.status, "tokens": t.tokens, "why": t.message} for c, t in measurer.failed.items()],
        "not_confirmed": [{"tokens": t, "config": c.name()} for t, c in out.not_confirmed],
        "picks": [{"tokens": t, "config": c.name(), "vs_incumbent": round(r.median, 4) if r else None} for t, c, r in picks],
        "gain": gain(plan, out), "validation": table.validation, "notes": out.notes}


def gain(plan: Plan, out: Outcome) -> dict[str, Any] | None:
    """The picks over the incumbents' times at the tuned sizes: geometric mean, best and worst, and where one is slower beyond
    the noise. None when nothing was measured."""
    found = {p.tokens: (1.0, "same") if s.choice == p.incumbent else (p.ratios[s.choice].median, p.verdicts[s.choice])
             for s in out.fitted.segments for p in s.points if p.routing == plan.routing and (s.choice == p.incumbent or s.choice in p.ratios)}
    if not found:
        return None
    ratios = [ratio for ratio, _ in found.values()]
    return {"over": plan.incumbent_from, "sizes": len(found), "geomean": round(math.exp(statistics.fmean(map(math.log, ratios))), 4),
            "best": round(min(ratios), 4), "worst": round(max(ratios), 4), "slower": sorted(t for t, (_, said) in found.items() if said == "worse")}


def expected_trials(plan: Plan) -> dict[str, int]:
    """About how many trials each stage will take."""
    n, sizes, kernels = len(plan.candidates), len(plan.sizes), len(kernels_of(plan.candidates))
    named = len(plan.named) + 1  # and the default
    out = {"noise": sizes}
    if plan.strategy == "grid":
        out["final"] = sizes * n
    elif plan.strategy == "tpe":
        out |= {"tpe": sizes * min(n, plan.settings.tpe_trials), "final": sizes * (min(n, FINALISTS) + named)}
    else:
        order = visiting_order(plan.sizes)
        whole = sum(neighbours(tokens, order[:number]) is None for number, tokens in enumerate(order))
        survivors = min(kernels, max(LEAST, -(-kernels // SURVIVE)))
        screened = whole * kernels + (sizes - whole) * min(kernels, 2 * survivors) if kernels > survivors else 0
        out |= {"screen": screened, "second": sizes * survivors, "launch": sizes * LAUNCH_KERNELS * (n // kernels - 1),
                "final": sizes * (min(n, FINALISTS) + named)}
    return out | {"cross": sizes * 3, "confirm": sizes, "validate": 12 * 5}


def estimate(plan: Plan, jobs: int) -> dict[str, Any]:
    """Trials, kernels and seconds. Times are from the model, so they are called so."""
    s, trials = plan.settings, expected_trials(plan)
    rounds = {"noise": s.noise_rounds, "screen": s.screen_rounds, "second": s.second_rounds, "launch": s.second_rounds, "tpe": s.second_rounds}
    shared = plan.machine.backend != "nvlink"
    times = [facts(plan.incumbent(t), plan.shape, plan.ranks, plan.sms, t, shared=shared).model_us for t in plan.sizes]
    mean_s = 1e-6 * sum(times) / len(times)
    run_s = sum(count * (PER_TRIAL_S + 2.6 * mean_s * (rounds.get(stage, s.final_rounds) + 2)) for stage, count in trials.items())
    run_s += PER_SIZE_S * 4 * len(plan.sizes) * plan.ranks
    kernels = len(kernels_of([*plan.candidates, *(c for _, c in plan.incumbents)]))
    return {"trials": trials, "total_trials": sum(trials.values()), "kernels": kernels,
            "compile_s_cold": round(COMPILE_S * -(-kernels // jobs)), "run_s_model": round(run_s, 1)}
