"""Text from the command line to checked values: lists, names with the nearest one, routings, clamps, token counts.

Every error is a UsageError of one line that names the option or the rule. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megamoe_cli.errors import UsageError
from megamoe_cli.routing import ROUTINGS, parse_routing
from megamoe_cli.shapes import Problem, check_clamp, nearest_name

UNEVEN = "uneven:"


def split(text: str) -> list[str]:
    return [part.strip() for part in str(text).split(",") if part.strip()]


def integers(text: str, option: str, low: int | None = None) -> list[int]:
    """``"1,2,8"`` to numbers; UsageError names the option and the item."""
    values = []
    for part in split(text):
        try:
            value = int(part)
        except ValueError:
            raise UsageError(f"{option}: {part!r} is not an integer") from None
        if low is not None and value < low:
            raise UsageError(f"{option}: {value} is below {low}")
        values.append(value)
    if not values:
        raise UsageError(f"{option}: no value given")
    return list(dict.fromkeys(values))


def per_rank(text: str, option: str) -> list[int]:
    """One number for each rank, in order; repeats are kept."""
    return [integers(part, option)[0] for part in split(text)]


def names(text: str, known: Sequence[str], what: str) -> list[str]:
    """Checked names in the order given; ``all`` stands for every one."""
    out: list[str] = []
    for part in split(text):
        if part == "all":
            out += known
        elif part in known:
            out.append(part)
        else:
            raise UsageError(f"unknown {what} {part!r}; nearest name: {nearest_name(part, known)} "
                             f"(names: {', '.join(known)}, or all)", rule=f"{what}-name")
    if not out:
        raise UsageError(f"no {what} given (names: {', '.join(known)}, or all)", rule=f"{what}-name")
    return list(dict.fromkeys(out))


def routings(text: str) -> list[str]:
    """Checked routings; ``all`` is every generator that needs no argument. ``fixed:...`` has commas of its own, so it
    takes the rest of the text."""
    head, fixed, rows = text.partition("fixed:")
    out: list[str] = []
    for part in split(head):
        if part == "all":
            out += [name for name in ROUTINGS if name != "fixed"]
        else:
            parse_routing(part)
            out.append(part)
    if fixed:
        out.append(str(parse_routing(fixed + rows.strip())))
    if not out:
        raise UsageError(f"no routing given (names: {', '.join(ROUTINGS)}, or all)", rule="routing-name")
    return list(dict.fromkeys(out))


def routing_fits(routing: str, problem: Problem, asked_for_all: bool) -> bool:
    """Can ``routing`` be generated for ``problem``? False only for what ``all`` included and one rank cannot have;
    what was asked for by name and is impossible raises UsageError (rule routing-name or expert-id)."""
    recipe, experts, topk = parse_routing(routing), problem.shape.experts, problem.shape.topk
    if recipe.name == "remote" and problem.ranks < 2:
        if asked_for_all:
            return False
        raise UsageError("routing 'remote' needs at least 2 ranks (nearest: local)", rule="routing-name")
    if recipe.name == "one-hot-expert" and int(recipe.value or 0) >= experts:
        raise UsageError(f"routing '{recipe}': there are only {experts} experts", rule="expert-id")
    for token, row in enumerate(recipe.rows):
        if len(row) != topk:
            raise UsageError(f"routing '{recipe}': row {token} has {len(row)} ids for topk={topk}", rule="routing-name")
        rank = next((r for r, count in enumerate(problem.tokens) if count > token), None)
        for slot, expert in enumerate(row):
            if rank is not None and not -1 <= expert < experts:
                raise UsageError(f"rank {rank}, token {token}, slot {slot}: expert id {expert} is not -1 (masked) or in "
                                 f"0..{experts - 1}", rule="expert-id")
    return True


def clamps(text: str) -> list[float | None]:
    """``none``, a limit, or a list of both."""
    out: list[float | None] = []
    for part in split(text):
        if part.lower() == "none":
            value = None
        else:
            try:
                value = float(part)
            except ValueError:
                raise UsageError(f"--clamp: {part!r} is neither a number nor 'none'", rule="clamp") from None
        check_clamp(value)
        out.append(value)
    if not out:
        raise UsageError("--clamp: no value given", rule="clamp")
    return list(dict.fromkeys(out))


def clamp_text(clamp: float | None) -> str:
    """The inverse of ``clamps`` for one value, exactly."""
    return "none" if clamp is None else repr(clamp).removesuffix(".0")


def uneven_counts(largest: int, ranks: int, seed: int) -> tuple[int, ...]:
    """Seeded token counts in [0, largest]: one rank has ``largest``, with three or more ranks one has none."""
    draw = random.Random(f"uneven/{largest}/{ranks}/{seed}")
    counts = [draw.randint(0, largest) for _ in range(ranks)]
    order = draw.sample(range(ranks), ranks)
    counts[order[0]] = largest
    if ranks >= 3:
        counts[order[1]] = 0
    return tuple(counts)


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """``KEY=VAL`` items for the worker; true/false and numbers become what they look like."""
    out: dict[str, Any] = {}
    for item in (part for text in items for part in split(text)):
        key, equals, raw = (part.strip() for part in item.partition("="))
        if not equals or not key:
            raise UsageError(f"--option {item!r} is not KEY=VALUE")
        value: Any = {"true": True, "false": False}.get(raw.lower(), raw)
        for number in (int, float):
            if isinstance(value, str):
                try:
                    value = number(value)
                except ValueError:
                    pass
        out[key.replace("-", "_")] = value
    return out
