"""Synthetic routers: which experts each token goes to, and with what weight. torch is imported on first use only.

Every generator is a function of (problem, rank, seed, launch) and nothing else, and always runs on the CPU, so that
each process of a multi-rank run can make its own part, and an emulator and a GPU get the same bytes. A rank's rows
depend on the other ranks only through ``problem`` (its sizes).

A routing is spelled ``name`` or ``name:argument``:

    uniform             K distinct experts, all alike
    powerlaw:1.2        K distinct experts, popularity of the n-th most popular ~ n^-argument (default 1.2); which
                        expert is popular is the same on all ranks
    one-hot-expert:0    slot 0 is that expert (default 0), the other slots distinct others
    local               K experts of the token's own rank (repeats only if K > E/R)
    remote              K experts of other ranks (repeats only if K > E - E/R)
    masked:0.3          uniform, then that share of slots is -1, including whole rows
    balanced            every rank and every expert get the same number of rows, within one
    fixed:0,1;2,3       these rows, over and over (one row: every token); -1 allowed
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import UsageError
from .shapes import Problem, nearest_name

if TYPE_CHECKING:
    import torch

ROUTINGS = ("uniform", "powerlaw", "one-hot-expert", "local", "remote", "masked", "balanced", "fixed")


def derive_seed(seed: int, *labels: object) -> int:
    """An independent 63-bit seed for each purpose; never Python's per-process string hash."""
    text = "/".join(str(part) for part in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seeded_generator(seed: int, *labels: object, device: str | torch.device = "cpu") -> torch.Generator:
    import torch

    return torch.Generator(device=device).manual_seed(derive_seed(seed, *labels))


@dataclass(frozen=True)
class Routing:
    """A parsed recipe. ``rows`` only for ``fixed``; ``value`` is the number behind the colon."""

    name: str
    value: float | None = None
    rows: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        if self.name == "fixed":
            return "fixed:" + ";".join(",".join(map(str, row)) for row in self.rows)
        return self.name if self.value is None else f"{self.name}:{self.value:g}"


_DEFAULTS = {"powerlaw": 1.2, "one-hot-expert": 0, "masked": 0.3}


def parse_routing(text: str) -> Routing:
    """Raises UsageError (rule routing-name) for an unknown name (nearest named) or an argument out of range."""
    name, colon, argument = text.strip().partition(":")
    if name not in ROUTINGS:
        raise UsageError(
            f"unknown routing '{name}'; nearest name: {nearest_name(name, ROUTINGS)} (names: {', '.join(ROUTINGS)})",
            rule="routing-name",
        )
    try:
        if name == "fixed":
            rows = tuple(tuple(int(n) for n in row.split(",")) for row in argument.split(";"))
            return Routing(name, rows=rows)
        if not colon:
            return Routing(name, _DEFAULTS.get(name))
        value = float(argument)
    except ValueError:
        raise UsageError(f"routing '{text}': cannot read '{argument}' as its argument", rule="routing-name") from None
    legal = {
        "powerlaw": 0 <= value <= 16,
        "one-hot-expert": value >= 0 and value == int(value),
        "masked": 0 <= value <= 1,
    }.get(name)
    if legal is None:
        raise UsageError(f"routing '{name}' takes no argument", rule="routing-name")
    if not legal:
        raise UsageError(f"routing '{text}': the argument is out of range", rule="routing-name")
    return Routing(name, value)


def check_ids(topk_idx: torch.Tensor | Sequence[torch.Tensor], experts: int, rank: int = 0) -> None:
    """Every id is -1 or in [0, experts), and the tensor is int64. Raises UsageError naming rank, token, slot, value.

    ``topk_idx`` is one rank's [T,K] (``rank`` says whose) or a list with one tensor per rank.
    """
    if isinstance(topk_idx, (list, tuple)):
        for r, ids in enumerate(topk_idx):
            check_ids(ids, experts, r)
        return
    if str(topk_idx.dtype) != "torch.int64":
        got = str(topk_idx.dtype).removeprefix("torch.")
        raise UsageError(f"topk_idx is {got} on rank {rank}; it must be int64", rule="dtype")
    bad = (topk_idx < -1) | (topk_idx >= experts)
    if bool(bad.any()):
        token, slot = bad.nonzero()[0].tolist()
        raise UsageError(
            f"rank {rank}, token {token}, slot {slot}: expert id {int(topk_idx[token, slot])} is not -1 (masked) "
            f"or in 0..{experts - 1} ({int(bad.sum())} bad ids on this rank)",
            rule="expert-id",
        )


def route(
    routing: str | Routing, problem: Problem, rank: int, seed: int, launch: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's ``topk_idx`` [T,K] int64 and ``topk_weights`` [T,K] f32 (CPU).

    Weights are positive, sum to 0.5..1.5 per token (as with a routed scaling factor), and are NaN where the id is
    -1: whoever reads a masked slot's weight shows it. Raises UsageError where a recipe cannot be met.
    """
    import torch

    recipe = parse_routing(routing) if isinstance(routing, str) else routing
    gen = seeded_generator(seed, "route", launch, rank)
    ids = _GENERATORS[recipe.name](recipe, problem, rank, gen, seed)
    tokens, topk = problem.tokens[rank], problem.shape.topk
    weights = 0.1 + torch.rand(tokens, topk, generator=gen)
    total = 0.5 + torch.rand(tokens, 1, generator=gen)
    weights = (weights / weights.sum(1, keepdim=True) * total).float()
    weights[ids < 0] = float("nan")
    return ids, weights


def _distinct(scores: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns of the ``topk`` largest of random ``scores`` per row, in random order; repeats (in whole rounds of all
    columns) only when there are fewer columns than ``topk``."""
    import torch

    columns = scores.shape[1]
    order = scores.argsort(dim=1, descending=True)
    return torch.cat([order] * -(-topk // columns), dim=1)[:, :topk].contiguous()


def _uniform(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    return _distinct(torch.rand(problem.tokens[rank], problem.shape.experts, generator=gen), problem.shape.topk)


def _powerlaw(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    experts, tokens = problem.shape.experts, problem.tokens[rank]
    popularity = torch.randperm(experts, generator=seeded_generator(seed, "popularity")).double() + 1
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, generator=gen).double().clamp(1e-12, 1 - 1e-12)))
    # Gumbel top-k samples without replacement in proportion to exp(score)
    picked = _distinct(gumbel - recipe.value * popularity.log(), problem.shape.topk)
    return picked.gather(1, torch.rand(picked.shape, generator=gen).argsort(dim=1))


def _one_hot(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    hot, experts = int(recipe.value), problem.shape.experts
    if hot >= experts:
        raise UsageError(f"routing '{recipe}': there are only {experts} experts", rule="routing-name")
    scores = torch.rand(problem.tokens[rank], experts, generator=gen)
    scores[:, hot] = 2.0  # sorts first
    return _distinct(scores, problem.shape.topk)


def _local(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    mine = problem.experts_per_rank
    return _distinct(torch.rand(problem.tokens[rank], mine, generator=gen), problem.shape.topk) + rank * mine


def _remote(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    if problem.ranks < 2:
        raise UsageError("routing 'remote' needs at least 2 ranks (nearest: local)", rule="routing-name")
    mine = problem.experts_per_rank
    scores = torch.rand(problem.tokens[rank], problem.shape.experts - mine, generator=gen)
    picked = _distinct(scores, problem.shape.topk)
    return picked + mine * (picked >= rank * mine)  # skips over this rank's own experts


def _masked(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    ids, share = _uniform(recipe, problem, rank, gen, seed), recipe.value
    tokens, topk = ids.shape
    # Half of the share as whole rows, so that any share > 0 has both kinds; the rest as single slots of other rows.
    whole = torch.rand(tokens, generator=gen) < share / 2
    single = torch.rand(tokens, topk, generator=gen) < (share - share / 2) / (1 - share / 2)
    masked = whole[:, None] | single
    if tokens >= 2 and 0 < share < 1:  # both kinds of row for certain, however few tokens
        rows = torch.randperm(tokens, generator=gen)
        masked[rows[0]] = True
        masked[rows[1], 0] = False
    ids[masked] = -1
    return ids


def _balanced(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    topk, tokens = problem.shape.topk, problem.tokens[rank]
    # Entries are numbered over all ranks; entry s goes to rank s % R, and there to local expert (s // R) % E_l. Any
    # R consecutive entries touch every rank once and any E consecutive ones every expert once, so both are balanced
    # within each source and over all, and the K <= E entries of a token are distinct.
    first = sum(problem.tokens[:rank]) * topk
    entry = torch.arange(first, first + tokens * topk).view(tokens, topk)
    ids = entry % problem.ranks * problem.experts_per_rank + entry // problem.ranks % problem.experts_per_rank
    ids = ids[torch.randperm(tokens, generator=gen)]
    return ids.gather(1, torch.rand(tokens, topk, generator=gen).argsort(dim=1))


def _fixed(recipe: Routing, problem: Problem, rank: int, gen: torch.Generator, seed: int) -> torch.Tensor:
    import torch

    tokens, topk = problem.tokens[rank], problem.shape.topk
    for row in recipe.rows:
        if len(row) != topk:
            raise UsageError(f"routing '{recipe}': a row has {len(row)} ids, topk is {topk}", rule="routing-name")
    rows = torch.tensor(recipe.rows, dtype=torch.int64)
    return rows[torch.arange(tokens) % len(recipe.rows)]


_GENERATORS = {
    "uniform": _uniform, "powerlaw": _powerlaw, "one-hot-expert": _one_hot, "local": _local, "remote": _remote,
    "masked": _masked, "balanced": _balanced, "fixed": _fixed,
}  # fmt: skip
