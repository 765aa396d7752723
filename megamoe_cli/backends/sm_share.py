"""How many CTAs a rank may launch: an SM for each, on a device that ranks may share, with some SMs left to other kernels.

A grid must be resident as a whole, or its CTAs wait for one that cannot start. A kernel that runs beside it (a library's
collective, another stream's) may hold SMs, so ``reserve_sms`` of them are never counted on. Ranks need not agree on it:
every barrier inside a rank counts that rank's own grid, between ranks each raises one flag. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import KernelConfig, grid_ctas
from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .driver import Gpu

DEFAULT_CTAS = 2  # SMs of each emulated GPU: the least that shows cooperation between CTAs
VARIABLE = "MEGAMOE_RESERVE_SMS"


def check_reserve(reserve: int, sms: int | None = None) -> int:
    """``reserve``; UsageError when it is negative or leaves none of ``sms`` SMs (None: not known yet)."""
    if reserve < 0:
        raise UsageError(f"reserve_sms={reserve} is negative", rule="reserve-sms")
    if sms is not None and reserve >= sms:
        raise UsageError(f"reserve_sms={reserve} leaves no SM for the kernel: the device has {sms}, so at most {sms - 1}", rule="reserve-sms")
    return reserve


def usable_sms(sms: int, reserve: int) -> int:
    """SMs of a device that the kernel may use."""
    return sms - check_reserve(reserve, sms)


def reserve_from_environment(environ: Mapping[str, str] = os.environ) -> int:
    """``MEGAMOE_RESERVE_SMS``, 0 when it is not set: what the host API takes when its caller says nothing."""
    text = environ.get(VARIABLE, "")
    if not text:
        return 0
    try:
        return check_reserve(int(text))
    except ValueError:
        raise UsageError(f"{VARIABLE}: {text!r} is not a whole number", rule="reserve-sms") from None


@dataclass(frozen=True)
class SmShare:
    """A rank's part of a device: ``sms`` SMs, ``sharing`` ranks on it at once, ``reserve`` SMs for other kernels.
    ``wanted``: CTAs per rank somebody asked for, None for as many as fit."""

    sms: int
    sharing: int = 1
    reserve: int = 0
    wanted: int | None = None

    @property
    def ctas(self) -> int:
        """CTAs each rank may launch (a grid is this rounded down to whole clusters). UsageError when there is none."""
        return ctas_per_rank(self.sms, self.sharing, self.wanted, self.reserve)

    def clusters(self, resident: int) -> int:
        """Clusters each rank may launch where ``resident`` fit on the empty device: a reserved SM may be any, so in the
        worst case each spoils a cluster of its own."""
        return max(0, resident - self.reserve) // self.sharing

    def said(self, place: str) -> str:
        """``virtual(8 on 1xH200)`` with the reserve, when there is one."""
        if not self.reserve:
            return place
        return f"{place.removesuffix(')')}, {self.reserve} SM{'s' if self.reserve > 1 else ''} reserved)"


def ctas_per_rank(sms: int, sharing: int, wanted: int | None = None, reserve: int = 0) -> int:
    """CTAs each of ``sharing`` ranks may launch when every CTA has an SM to itself and ``reserve`` SMs stay free;
    UsageError when there is none, or not so many as are ``wanted``."""
    left = usable_sms(sms, reserve)
    on = f"{left} SMs" + (f" ({sms} less {reserve} reserved)" if reserve else "")
    fits = grid_ctas(KernelConfig(), sharing, left)
    if fits < 1:
        raise UsageError(f"{sharing} ranks cannot be resident at once on {on} (one CTA each at least): at most {left} ranks",
                         rule="co-residency")  # fmt: skip
    if wanted is None:
        return fits
    if wanted < 1 or wanted > fits:
        raise UsageError(f"{wanted} CTAs per rank: {sharing} rank{'s' if sharing > 1 else ''} on {on} leave 1..{fits} for each",
                         rule="co-residency")  # fmt: skip
    return wanted


def check_emulated_grid(config: KernelConfig, options: Mapping[str, Any]) -> None:
    """UsageError when the emulated CTAs of a rank, or those that are resident at once, are fewer than a cluster (of the
    configuration, or of one that launches alternate with)."""
    from ..case_options import parse_mix

    cluster = max(each.cluster for each in (config, *parse_mix(options.get("mix", ""), config)))
    for name, count in (("ctas", options.get("ctas", DEFAULT_CTAS)), ("resident_ctas", options.get("resident_ctas", 0) or cluster)):
        if count < cluster:
            raise UsageError(f"{name}={count}: a cluster has {cluster} CTAs", rule="co-residency")


def check_case(backend: str, ranks: int, config: KernelConfig, options: Mapping[str, Any], gpus: Sequence[Gpu]) -> None:
    """Before anything starts: does a case's grid, after its reserve, leave every rank at least one cluster? ``gpus``: the
    SM90 GPUs."""
    if backend == "emulator":
        check_emulated_grid(config, options)
    reserve = options.get("reserve_sms", 0)
    if not reserve:
        return
    if backend == "emulator":
        share = SmShare(options.get("ctas", DEFAULT_CTAS), 1, reserve)
    else:
        sharing = {"virtual": ranks, "nvlink": 1}.get(backend, -(-ranks // len(gpus)))
        share = SmShare(gpus[0].sms, sharing, reserve, options.get("ctas"))
    if share.ctas < config.cluster:
        raise UsageError(f"reserve_sms={reserve} leaves {share.ctas} of {share.sms} SMs for each rank, less than a cluster of "
                         f"{config.cluster}", rule="co-residency")  # fmt: skip
