"""Which backend answers a request, and why. Looks at GPUs without making a context; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit, UsageError
from ..shapes import MAX_RANKS, nearest_name
from .driver import Gpu, visible_gpus

if TYPE_CHECKING:
    from .base import Backend

NAMES = ("auto", "emulator", "virtual", "nvlink", "processes")
_MODULES = {"emulator": "emulator", "virtual": "virtual", "nvlink": "nvlink", "processes": "nvlink"}


@dataclass(frozen=True)
class Choice:
    """``name`` is the backend, ``reason`` one clause for the user: why this one."""

    name: str
    ranks: int
    reason: str

    @property
    def text(self) -> str:
        return f"backend: {self.name} ({self.ranks} rank{'s' if self.ranks > 1 else ''}; {self.reason})"

    def open(self, **options: Any) -> Backend:
        """The backend itself. ``options`` go to the module's ``open_backend``; nvlink and processes run in processes
        of their own, one per rank, and are opened inside each."""
        module = import_module(f".{_MODULES[self.name]}", __package__)
        if self.name == "processes":
            options["share_gpu"] = True
        return module.open_backend(self.ranks, **options)


def check_name(name: str) -> str:
    if name not in NAMES:
        raise UsageError(f"unknown backend {name!r}; nearest name: {nearest_name(name, NAMES)} "
                         f"(backends: {', '.join(NAMES)})", rule="backend-name")  # fmt: skip
    return name


def pick(name: str, ranks: int, gpus: Sequence[Gpu] | None = None) -> Choice:
    """The backend for ``ranks`` ranks. ``auto``: real GPUs if there is one per rank, virtual ranks on one SM90 GPU,
    else the emulator. A backend asked for by name is never replaced: UsageError (bad request) or EnvironmentUnfit
    (this machine cannot). ``gpus`` replaces what the driver lists.
    """
    check_name(name)
    if not 1 <= ranks <= MAX_RANKS:
        raise UsageError(f"ranks={ranks} is outside 1..{MAX_RANKS}, one NVLink domain", rule="ranks-limit")
    if name == "emulator":
        return Choice("emulator", ranks, "asked for")
    found = list(visible_gpus() if gpus is None else gpus)
    hopper = [g for g in found if g.is_sm90]
    if name == "auto":
        return _auto(ranks, found, hopper)
    if not hopper:
        raise EnvironmentUnfit(f"--backend {name} needs an SM90 GPU and {_seen(found)}",
                               hint="use --backend emulator: it runs the same kernel source on the CPU")  # fmt: skip
    if name == "nvlink" and len(hopper) < ranks:
        raise EnvironmentUnfit(f"--backend nvlink runs one rank per GPU: {ranks} ranks, {len(hopper)} SM90 GPUs here",
                               hint=f"use --ranks {len(hopper)}, or --backend virtual for {ranks} ranks on one GPU")  # fmt: skip
    return Choice(name, ranks, "asked for")


def _auto(ranks: int, found: Sequence[Gpu], hopper: Sequence[Gpu]) -> Choice:
    if not hopper:
        return Choice("emulator", ranks, _seen(found))
    if 1 < ranks <= len(hopper):
        return Choice("nvlink", ranks, f"one of {len(hopper)} SM90 GPUs for each rank")
    if ranks == 1:
        return Choice("virtual", 1, f"one rank on 1x{hopper[0].name}")
    if len(hopper) == 1:
        return Choice("virtual", ranks, f"{ranks} ranks share 1x{hopper[0].name}")
    return Choice("virtual", ranks, f"{len(hopper)} SM90 GPUs are fewer than {ranks} ranks, so they share one of them")


def _seen(found: Sequence[Gpu]) -> str:
    if not found:
        return "no GPU is visible"
    names = ", ".join(f"{g.name} (sm_{g.cc[0]}{g.cc[1]})" for g in found)
    return f"no SM90 GPU is visible, only {names}"
