"""Ranks that are not like the others, on the emulator: one starts late, one is slow, one dies. No torch.

A skew is spelled ``late:R``, ``slow:R`` or ``stop:R``, several joined by ``+``; R is a rank or ``any`` (drawn from the
seed). ``@N`` sets the amount, else it is drawn from the seed too: virtual ns for late, one turn in N for slow, and for
stop the turn of the rank's warps after which it dies.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError
from .shapes import nearest_name

# kind -> (backend option, least amount, least and most of a drawn amount)
KINDS: dict[str, tuple[str, int, int, int]] = {
    "late": ("start_delay", 1, 1_000, 4_000_000),
    "slow": ("slow", 2, 4, 64),
    "stop": ("stop_after", 1, 1, 5_000),
}
_FORM = re.compile(r"(?P<kind>[a-z]+):(?P<rank>any|\d+)(?:@(?P<amount>\d+))?")


@dataclass(frozen=True)
class Skew:
    """One rank's handicap. ``rank`` None: any; ``amount`` 0: drawn."""

    kind: str
    rank: int | None
    amount: int

    def __str__(self) -> str:
        return f"{self.kind}:{'any' if self.rank is None else self.rank}" + (f"@{self.amount}" if self.amount else "")


def parse_skew(text: str) -> list[Skew]:
    """UsageError (rule skew) for what is not of the form above."""
    out = []
    for part in filter(None, (p.strip() for p in text.split("+"))):
        match = _FORM.fullmatch(part)
        if match is None or match["kind"] not in KINDS:
            near = nearest_name(part.partition(":")[0], KINDS)
            raise UsageError(f"skew {part!r} is not KIND:RANK or KIND:RANK@AMOUNT (nearest kind: {near}; kinds: "
                             f"{', '.join(KINDS)}; a rank or 'any')", rule="skew")  # fmt: skip
        skew = Skew(match["kind"], None if match["rank"] == "any" else int(match["rank"]), int(match["amount"] or 0))
        least = KINDS[skew.kind][1]
        if match["amount"] and skew.amount < least:
            raise UsageError(f"skew {part!r}: the amount is at least {least}", rule="skew")
        out.append(skew)
    return out


def check_ranks(skews: list[Skew], ranks: int) -> None:
    """Every named rank exists, and not all die."""
    for skew in skews:
        if skew.rank is not None and skew.rank >= ranks:
            raise UsageError(f"skew '{skew}': there are only {ranks} ranks", rule="skew")
    if ranks < 2 and any(skew.kind == "stop" for skew in skews):
        raise UsageError("skew stop: with one rank nobody is left to see it die", rule="skew")
    if sum(skew.kind == "stop" for skew in skews) > 1:
        raise UsageError("skew stop is given twice; one rank can be told to die", rule="skew")


def backend_options(text: str, ranks: int, seed: int) -> dict[str, Any]:
    """The emulator's options for a skew: lists with one entry for each rank."""
    skews = parse_skew(text)
    check_ranks(skews, ranks)
    draw, out = random.Random(f"skew/{text}/{ranks}/{seed}"), {}
    for skew in skews:
        name, _, low, high = KINDS[skew.kind]
        rank = draw.randrange(ranks) if skew.rank is None else skew.rank
        drawn = int(low * (high / low) ** draw.random())
        out.setdefault(name, [0] * ranks)[rank] = skew.amount or drawn
    return out


def dead_ranks(options: Mapping[str, Any]) -> list[int]:
    """The ranks that were told to die."""
    return [rank for rank, turns in enumerate(options.get("stop_after") or ()) if turns]


# The emulator's findings that a death entails: that it happened, and who then waited for the dead rank.
DEATH = ("rank-stopped", "waits-for-dead")
# After a fault every wait of the launch returns at once: the survivors run to their end in no order, on garbage.
AFTER_DEATH = (*DEATH, "race", "uninit")
# A soft wait gives up at its limit; a CTA's own pipeline allows for eight of those, one after another. The emulated
# clock jumps in steps that double, so a wait may be seen to last twice as long.
LONGEST_WAIT = 2 * 8


def too_late(faults: Mapping[int, Any], timeout_ns: int) -> str:
    """The first fault record whose wait went on far beyond the device timeout, in words; empty when there is none."""
    for record in faults.values():
        if record.waited_ns > LONGEST_WAIT * timeout_ns:
            return f"a wait outlasted the device timeout of {timeout_ns / 1e9:g} s: {record.describe()}"
    return ""


def causes(diagnostics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The emulator's findings (in order of time) without what only follows from a deadlock: once waits have given up,
    nothing is ordered any more."""
    kinds = [item["kind"] for item in diagnostics]
    if "deadlock" not in kinds:
        return list(diagnostics)
    first = kinds.index("deadlock")
    return [item for n, item in enumerate(diagnostics) if n <= first or item["kind"] not in ("race", "uninit")]
