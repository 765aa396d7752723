"""A hang's list of waiting warps, short enough for a screen. The run record keeps every line.

The emulator names each waiting warp of each rank: ``rank 3 CTA 1 warp 7: mbarrier.try_wait ... at FILE:12 x32 lanes``.
Warps that wait at the same place are one line here, with one of them as an example.
"""

from __future__ import annotations

import re

GROUPS = 6  # places where warps wait
OTHERS = 4  # other lines of the message
_WAITER = re.compile(r"rank (\d+) CTA \d+ warp \d+(?: \(.*?\))?: (?P<what>.+?)(?: x\d+ lanes)?\)?$")


def shortened(message: str) -> str:
    """``message`` as it is when it is short; else its first lines, and its waiters by place: most first."""
    lines = message.splitlines()
    waiters = [(line.strip(), match) for line in lines if (match := _WAITER.match(line.strip()))]
    others = [line for line in lines if line.strip() and not _WAITER.match(line.strip())]
    if len(lines) <= OTHERS + 1:
        return message
    groups: dict[str, list[tuple[str, re.Match[str]]]] = {}
    for line, match in waiters:
        what, at, place = match["what"].rpartition(" at ")
        groups.setdefault(place if at else re.sub(r"\d+", "#", match["what"]), []).append((line, match))
    out = others[:OTHERS]
    largest = sorted(groups.values(), key=len, reverse=True)
    for members in largest[:GROUPS]:
        ranks = len({match[1] for _, match in members})
        more = f" (and {len(members) - 1} more like it, {ranks} rank{'s' * (ranks > 1)})" if len(members) > 1 else ""
        out.append(f"  {members[0][0]}{more}")
    left = [f"{sum(map(len, largest[GROUPS:]))} more waits at {len(largest) - GROUPS} more places"] if len(largest) > GROUPS else []
    left += [f"{len(others) - OTHERS} more lines"] if len(others) > OTHERS else []
    return "\n".join([*out, *([f"  ... {' and '.join(left)} in the run record"] if left else [])])
