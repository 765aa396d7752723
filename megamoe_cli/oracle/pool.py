"""What the ids alone say about every rank's activation pool: which entries, grouped and ordered how.

An *entry* is one unmasked (token, slot) of one source rank, numbered ``token * K + slot`` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ..shapes import POOL_ALIGNMENT, align
from .casedata import CaseData


@dataclass(frozen=True)
class Segment:
    """One local expert's rows [base, base + count) of a rank's pool.

    ``sources`` lists (source rank, entries ascending) in the order the segment must hold them: this rank first, then
    rank+1, ... modulo R. Within one source any order is right.
    """

    local: int
    base: int
    count: int
    sources: tuple[tuple[int, torch.Tensor], ...]


class PoolPlan:
    """The pool of every rank, from ``case.inputs[r].topk_idx`` and nothing else. All tensors on the CPU."""

    def __init__(self, case: CaseData) -> None:
        self.problem = case.problem
        self._entries: list[list[torch.Tensor]] = []  # [source][expert] -> entries ascending
        for data in case.inputs:
            flat = data.live_ids(self.problem.shape.experts).cpu().flatten()
            order = flat.argsort(stable=True)
            counts = torch.bincount(flat + 1, minlength=self.problem.shape.experts + 1).tolist()
            self._entries.append(list(order.split(counts))[1:])  # the first are the masked ones

    def count(self, source: int, expert: int) -> int:
        return len(self._entries[source][expert])

    def segments(self, rank: int) -> list[Segment]:
        """All local experts of ``rank``, also those without rows."""
        p, out, base = self.problem, [], 0
        for local in range(p.experts_per_rank):
            expert = rank * p.experts_per_rank + local
            order = [(rank + j) % p.ranks for j in range(p.ranks)]
            sources = tuple((src, self._entries[src][expert]) for src in order)
            count = sum(len(entries) for _, entries in sources)
            out.append(Segment(local, base, count, sources))
            base += align(count, POOL_ALIGNMENT)
        return out


@dataclass(frozen=True)
class Row:
    """Where pool rows come from: tensors [n], on the CPU."""

    pool: torch.Tensor
    rank: torch.Tensor
    token: torch.Tensor
    slot: torch.Tensor

    def __len__(self) -> int:
        return len(self.pool)

    def where(self, row: int) -> tuple[int, int, int]:
        return int(self.rank[row]), int(self.token[row]), int(self.slot[row])

    @cached_property
    def valid(self) -> torch.Tensor:
        return (self.rank >= 0) & (self.token >= 0) & (self.slot >= 0)

    def take(self, index: torch.Tensor) -> Row:
        return Row(self.pool[index], self.rank[index], self.token[index], self.slot[index])


def read_rows(case: CaseData, segment: Segment, metadata: torch.Tensor) -> Row:
    """The segment's rows as ``token_src_metadata`` [P,3] tells them; an impossible (rank, token, slot) becomes -1."""
    p = case.problem
    pool = torch.arange(segment.base, segment.base + segment.count)
    meta = metadata[segment.base : segment.base + segment.count].cpu().long()
    rank, token, slot = meta.unbind(1)
    tokens = torch.tensor(p.tokens)
    good = (rank >= 0) & (rank < p.ranks) & (slot >= 0) & (slot < p.shape.topk) & (token >= 0)
    good &= token < tokens[rank.clamp(0, p.ranks - 1)]
    minus = torch.full_like(rank, -1)
    return Row(pool, rank.where(good, minus), token.where(good, minus), slot.where(good, minus))


def sample_index(count: int, limit: int, seed: int) -> torch.Tensor:
    """Up to ``limit`` of 0..count-1, ascending, always with the first and the last."""
    if count <= limit:
        return torch.arange(count)
    inner = torch.randperm(count - 2, generator=torch.Generator().manual_seed(seed))[: max(limit - 2, 0)] + 1
    return torch.cat([inner, torch.tensor([0, count - 1])]).sort().values


def sampled_segments(case: CaseData, segments: list[Segment], seed: int) -> list[tuple[Segment, torch.Tensor]]:
    """Non-empty segments with the row numbers (within the segment) to recompute: all, or about
    ``case.sample_rows`` of a rank spread over a few experts, the first and the last of them always."""
    filled = [s for s in segments if s.count]
    if case.sample_rows is None or sum(s.count for s in filled) <= case.sample_rows:
        return [(s, torch.arange(s.count)) for s in filled]
    experts = sample_index(len(filled), max(2, case.sample_rows // 8), seed)
    each = max(2, case.sample_rows // len(experts))
    return [(filled[e], sample_index(filled[e].count, each, seed + 1 + e)) for e in experts.tolist()]


def sampled_tokens(case: CaseData, rank: int) -> torch.Tensor:
    """Tokens of ``rank`` to recompute end to end: all, or about sample_rows / K of them."""
    count = case.problem.tokens[rank]
    if case.sample_rows is None or count * case.problem.shape.topk <= case.sample_rows:
        return torch.arange(count)
    return sample_index(count, max(2, case.sample_rows // case.problem.shape.topk), case.seed + rank)
