"""Phase dispatch: counts, index exchange, all-rank barrier, pull of rows, scales and weights, metadata, arrivals.

Everything is exact. The order of rows within one (expert, source rank) depends on atomics, so rows are identified by
``token_src_metadata``; the order of sources, the segments' places and all bytes are fixed.
"""

from __future__ import annotations

from typing import Any

import torch

from megamoe_cli.oracle.casedata import CaseData, PhaseOutput
from megamoe_cli.oracle.compare import Finding, Report, bits, check_bits
from megamoe_cli.oracle.pool import PoolPlan, Row, Segment, read_rows
from megamoe_cli.oracle.reference import rows_of

NAME = "dispatch"
INDEX = 1
VIEWS = ("l1_acts", "l1_acts_sf", "l1_topk_weights", "expert_recv_count_sum", "l1_arrival_count", "token_src_metadata")


def check(case: CaseData, got: PhaseOutput, metrics: dict[str, float] | None = None) -> list[Finding]:
    report, plan = Report(metrics), PoolPlan(case)
    for rank in range(case.problem.ranks):
        views, segments = got[rank], plan.segments(rank)
        _check_inputs(report, case, views, rank)
        _check_counts(report, case, views, segments, rank)
        _check_arrivals(report, case, got, segments, rank)
        for segment in segments:
            rows = read_rows(case, segment, views["token_src_metadata"])
            _check_order(report, case, segment, rows, rank)
            _check_bytes(report, case, views, rows)
    return report.findings()


def _check_inputs(report: Report, case: CaseData, views: dict[str, Any], rank: int) -> None:
    """Peers read the input views while the kernel runs: nobody may have written to them."""
    data = case.inputs[rank]
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        if name in views and data.tokens:
            have, want = views[name][: data.tokens], getattr(data, name)
            check_bits(report, "dispatch_input_changed", have, want.to(have.device), lambda r: (rank, r, None), what=name)


def _check_counts(report: Report, case: CaseData, views: dict[str, Any], segments: list[Segment], rank: int) -> None:
    have = views["expert_recv_count_sum"].cpu().tolist()
    if len(have) != len(segments):
        report.add("dispatch_count", f"{len(have)} counts for {len(segments)} local experts", rank=rank)
        return
    for segment, count in zip(segments, have):
        if count != segment.count:
            expert = rank * case.problem.experts_per_rank + segment.local
            report.add("dispatch_count", f"rows received for expert {expert}", rank=rank, got=count, expected=segment.count)


def _check_arrivals(report: Report, case: CaseData, got: PhaseOutput, segments: list[Segment], rank: int) -> None:
    have = got[rank]["l1_arrival_count"].cpu().view(torch.int32).long()
    want = torch.zeros_like(have)
    for segment in segments:
        blocks = -(-segment.count // got.block_m)
        first = segment.base // got.block_m
        want[first : first + blocks] = got.block_m
        if segment.count % got.block_m:
            want[first + blocks - 1] = segment.count % got.block_m
    for block in (have != want).nonzero().flatten().tolist():
        report.add("dispatch_arrival", f"rows arrived in pool rows from {block * got.block_m} on (block {block})", rank=rank,
                   got=int(have[block]), expected=int(want[block]))  # fmt: skip


def _check_order(report: Report, case: CaseData, segment: Segment, rows: Row, rank: int) -> None:
    """The segment holds exactly the expected entries, source by source in rotated order."""
    topk = case.problem.shape.topk
    expert = rank * case.problem.experts_per_rank + segment.local
    at = 0
    for source, entries in segment.sources:
        part = slice(at, at + len(entries))
        at += len(entries)
        here = rows.rank[part] == source
        have = (rows.token[part] * topk + rows.slot[part])[here].sort().values
        for row in (~here).nonzero().flatten().tolist():
            found = int(rows.rank[part][row])
            report.add("dispatch_source", f"pool row {int(rows.pool[part][row])} (expert {expert} on rank {rank}) belongs to "
                       "another source rank" + ("" if found >= 0 else " or to no token at all"), rank=source, got=found,
                       expected=source)  # fmt: skip
        if len(have) == len(entries) and torch.equal(have, entries):
            continue
        got_count = torch.bincount(have, minlength=int(entries.max()) + 1 if len(entries) else 0)
        want_count = torch.bincount(entries, minlength=len(got_count))
        for entry in (got_count != want_count).nonzero().flatten().tolist():
            report.add("dispatch_entry", f"times this entry is in the pool of expert {expert} on rank {rank}", rank=source,
                       token=entry // topk, slot=entry % topk, got=int(got_count[entry]), expected=int(want_count[entry]))  # fmt: skip


def _check_bytes(report: Report, case: CaseData, views: dict[str, Any], rows: Row) -> None:
    """Each row's bytes, scales and weight are those of the token its metadata names."""
    for source in range(case.problem.ranks):
        mine = rows.take(((rows.rank == source) & rows.valid).nonzero().flatten())
        if not len(mine):
            continue
        data = case.inputs[source]
        want_weight = rows_of(data.topk_weights, mine.token)
        slot = mine.slot.to(want_weight.device)
        for metric, view, want in (
            ("dispatch_x", "l1_acts", rows_of(data.x, mine.token)),
            ("dispatch_x_sf", "l1_acts_sf", rows_of(data.x_sf, mine.token)),
            ("dispatch_weight", "l1_topk_weights", want_weight.gather(1, slot[:, None])),
        ):
            have = rows_of(views[view], mine.pool)
            have = have[:, None] if have.dim() == 1 else have.contiguous()
            want = want.to(have.device)
            if not torch.equal(bits(have), bits(want)):
                check_bits(report, metric, have, want, mine.where, what=f"{view} row")
