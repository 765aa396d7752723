"""The kernel's phases, in order. Each module says what the phase is, which buffer views it makes meaningful, and how
its output is judged. Adding a phase is adding one file here: it is found by its ``INDEX``.

    NAME, INDEX     "l1", 2; the kernel's Phase enum has the same order
    VIEWS           names in ``PhaseOutput.ranks[r]`` that are meaningful after it
    check(case, got, metrics=None) -> list[Finding]     empty = right; ``metrics`` collects the worst numbers seen
                    (and ``NAME.limit``, see ``Report.worst``)
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from megamoe_cli.errors import UsageError
from megamoe_cli.shapes import nearest_name

if TYPE_CHECKING:
    from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
    from megamoe_cli.oracle.compare import Finding


@lru_cache(maxsize=None)
def load_all() -> tuple[ModuleType, ...]:
    """Every phase module, in order of INDEX (imports torch)."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return tuple(sorted((m for m in modules if hasattr(m, "INDEX")), key=lambda m: m.INDEX))


def names() -> list[str]:
    return [module.NAME for module in load_all()]


def load(name: str) -> ModuleType:
    """The module of one phase. Raises UsageError (rule phase-name) with the nearest name."""
    for module in load_all():
        if module.NAME == name:
            return module
    raise UsageError(
        f"unknown phase '{name}'; nearest name: {nearest_name(name, names())} (phases: {', '.join(names())})",
        rule="phase-name",
    )


def check_upto(name: str, case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    """What a cumulative build of phase ``name`` must satisfy: its own check and those of the phases before it.

    The stub's check needs the stub build's report, so it is part of its own phase only.
    """
    last, findings = load(name), []
    for module in load_all():
        if module is last or (module.INDEX < last.INDEX and module.NAME != "stub"):
            findings += module.check(case, got, metrics)
    return findings
