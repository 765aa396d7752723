"""What a launch over several ranks moves between them, counted from the routing that was drawn, and what no launch can
beat there. Nothing here is measured: it is what the protocol must move, each (token, slot) once in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from .floors import tensor_us, weight_us

if TYPE_CHECKING:
    import torch

    from ..shapes import Problem, Shape

# NVLink 4: 18 links of 25 GB/s in each direction. Nominal: no packet header is taken off, nothing was measured.
NOMINAL_BYTES_PER_S = 450e9
LIST_ENTRY = 4  # of the list that says which (token, slot) an owner is to pull


def dispatch_bytes(shape: Shape) -> int:
    """Of one (token, slot) on its way to the expert's rank: codes, scales, routing weight, list entry."""
    return shape.hidden + shape.hidden // 128 * 4 + 4 + LIST_ENTRY


def combine_bytes(shape: Shape) -> int:
    """Of one (token, slot) on its way back: a BF16 row."""
    return 2 * shape.hidden


def rows_between(problem: Problem, ids: Sequence[torch.Tensor]) -> list[list[int]]:
    """``[source][owner]``: (token, slot) entries of rank ``source`` whose expert lives on ``owner``. ``ids``: each rank's
    topk_idx [T,K]; entries outside the experts count for nobody."""
    import torch

    out = []
    for own in ids:
        used = own[(own >= 0) & (own < problem.shape.experts)].flatten()
        out.append(torch.bincount(used // problem.experts_per_rank, minlength=problem.ranks).tolist())
    return out


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank and launch. ``dispatch_in``: rows it pulls; ``combine_out``: rows it pushes back; the other two are
    what its peers pull from it and push to it."""

    dispatch_in: float = 0.0
    dispatch_out: float = 0.0
    combine_in: float = 0.0
    combine_out: float = 0.0

    @property
    def into(self) -> float:
        return self.dispatch_in + self.combine_in

    @property
    def out(self) -> float:
        return self.dispatch_out + self.combine_out

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"in_bytes": self.into, "out_bytes": self.out}


def traffic(problem: Problem, rows: Sequence[Sequence[int]]) -> list[Traffic]:
    """Each rank's. ``rows``: of ``rows_between``."""
    there, back = dispatch_bytes(problem.shape), combine_bytes(problem.shape)
    out = []
    for rank in range(problem.ranks):
        pulled = sum(rows[source][rank] for source in range(problem.ranks) if source != rank)
        sent = sum(rows[rank][owner] for owner in range(problem.ranks) if owner != rank)
        out.append(Traffic(pulled * there, sent * there, sent * back, pulled * back))
    return out


def mean_traffic(problem: Problem, draws: Sequence[Sequence[torch.Tensor]]) -> list[Traffic]:
    """Each rank's mean over several routings."""
    found = [traffic(problem, rows_between(problem, ids)) for ids in draws]
    return [Traffic(*(sum(getattr(each[rank], f.name) for each in found) / len(found) for f in fields(Traffic))) for rank in range(problem.ranks)]


def floors_by_rank(problem: Problem, draws: Sequence[Sequence[torch.Tensor]]) -> list[tuple[float, float]]:
    """Of each rank, means over the draws, microseconds: bytes of the weights of its experts that were hit over the HBM rate,
    FLOPs of the rows it received over the tensor rate."""
    import torch

    shape, per = problem.shape, problem.experts_per_rank
    sums = [[0.0, 0.0] for _ in range(problem.ranks)]
    for ids in draws:
        every = torch.cat([own.flatten() for own in ids])
        counts = torch.bincount(every[(every >= 0) & (every < shape.experts)], minlength=shape.experts).cpu()
        for rank, own in enumerate(counts.split(per)):
            sums[rank][0] += weight_us(shape, int((own > 0).sum()))
            sums[rank][1] += tensor_us(shape, int(own.sum()))
    return [(weights / len(draws), tensor / len(draws)) for weights, tensor in sums]


def facts(problem: Problem, draws: Sequence[Sequence[torch.Tensor]], backend: str) -> dict[str, Any]:
    """Floors and traffic of a row as plain data. Ranks that share a GPU share its HBM and tensor cores, and what they move
    between them crosses no link."""
    floors, moved = floors_by_rank(problem, draws), mean_traffic(problem, draws)
    linked = backend == "nvlink"
    if linked:
        weights, tensor = max(floors, key=max)
    else:
        weights, tensor = (sum(part) for part in zip(*floors))
    busiest = max(range(problem.ranks), key=lambda rank: max(moved[rank].into, moved[rank].out))
    seconds = max(moved[busiest].into, moved[busiest].out) / NOMINAL_BYTES_PER_S
    return {"weight_floor_us": weights, "tensor_floor_us": tensor, "floors_us": [list(each) for each in floors],
            "link": {"is_link": linked, "busiest_rank": busiest, "in_bytes": moved[busiest].into, "out_bytes": moved[busiest].out,
                     "floor_us": seconds * 1e6 if linked else None, "nominal_gb_s": NOMINAL_BYTES_PER_S / 1e9 if linked else None,
                     "per_rank": [each.to_dict() for each in moved]}}  # fmt: skip
