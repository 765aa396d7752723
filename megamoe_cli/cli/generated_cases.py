"""``megamoe test`` with sizes and configurations that it chooses by itself: ``--campaign`` and ``--policy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megamoe_cli import sanitize, testplan
from megamoe_cli.cli.app import App
from megamoe_cli.errors import UsageError
from megamoe_cli.plan_values import integers, names, parse_options
from megamoe_cli.testplan import Case

# What a named case fixes by itself, and what the plans below choose.
SWEEP_OPTIONS = ("ranks", "tokens", "tokens_per_rank", "capacity", "shape", "routing", "clamp", "repeat")


# Flags of case options that these plans choose as well.
_CHOSEN = tuple(name for name in sanitize.FLAGS if name != "reserve_sms")


def reserving(values: Mapping[str, Any], cases: list[Case]) -> list[Case]:
    """The cases with ``--reserve-sms`` as an option, unless it is 0 or a case has one of its own."""
    reserve = values["reserve_sms"]
    return [replace(case, options={"reserve_sms": reserve, **case.options}) for case in cases] if reserve else cases


def campaign(values: Mapping[str, Any], flags: set[str]) -> list[Case]:
    """The cases of ``--sanitize --campaign N``. ``flags``: parameters given on the command line."""
    from megamoe_cli import seed_campaign

    if not values["sanitize"]:
        raise UsageError("--campaign is a part of --sanitize")
    extra = [name for name in (*SWEEP_OPTIONS, "block_m", "config", "policy", "seeds", "case_ids", *_CHOSEN) if name in flags]
    if extra:
        raise UsageError(f"--campaign chooses sizes, configurations and schedules; leave out --{extra[0].replace('_', '-')}")
    phases = names(values["phase"], testplan.phase_names(), "phase")
    return seed_campaign.seeds(values["campaign"], values["seed"], phases, values["timeout"])


def policies(values: dict[str, Any], flags: set[str], app: App,
             check_options: Callable[[Sequence[Case], Mapping[int, str]], None]) -> list[Case]:  # fmt: skip
    """The cases of ``--policy``; says how many combinations there are and which rules refused the others, and leaves the
    numbers in ``values["combinations"]`` for the record."""
    from megamoe_cli import policy_plan

    fixed = [name for name in SWEEP_OPTIONS if name != "ranks"]
    extra = [name for name in (*fixed, "block_m", "config", "seeds", "case_ids", "sanitize", *_CHOSEN) if name in flags]
    if extra:
        raise UsageError(f"--policy chooses sizes and configurations; leave out --{extra[0].replace('_', '-')}")
    ranks = integers(values["ranks"], "--ranks") if "ranks" in flags else policy_plan.RANKS
    phases = names(values["phase"], testplan.phase_names(), "phase") if "phase" in flags else policy_plan.PHASES
    plan = policy_plan.plan(values["policy"], ranks=ranks, phases=phases, seed=values["seed"], backend=values["backend"],
                            timeout_s=values["timeout"], options=parse_options(values["options"]))  # fmt: skip
    check_options(plan.cases, dict.fromkeys((case.ranks for case in plan.cases), values["backend"]))
    app.say(plan.sentence())
    values["combinations"] = plan.to_dict()
    return plan.cases
