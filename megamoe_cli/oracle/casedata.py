"""What goes into a run and what came out of it, as plain torch tensors. The harness fills both.

``CaseData`` holds what every rank was given, in natural layout; ``PhaseOutput`` what every rank's buffer held
after the run. Tensors may live on any device; the checks compute where they find the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..routing import check_ids
from ..shapes import Problem, check_clamp, check_problem, check_tensor

# Every byte of an output (y, combine slots, activations) before a run. 0xFF is NaN in e4m3, bf16 and f32 and -1
# in the integer views, so a value that was never written can never pass for a result.
POISON_BYTE = 0xFF


@dataclass
class RankInputs:
    """One rank's tokens, T rows (not capacity rows; the harness copies them into its views).

    x [T,H] e4m3, x_sf [T,H/128] f32, topk_idx [T,K] int64 (-1 = masked), topk_weights [T,K] f32 (NaN where masked).
    """

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def tokens(self) -> int:
        return self.x.shape[0]

    def live_ids(self, experts: int) -> torch.Tensor:
        """topk_idx with every id outside [0, experts) as -1: a kernel that meets a bad id drops that slot."""
        return self.topk_idx.masked_fill((self.topk_idx < 0) | (self.topk_idx >= experts), -1)


@dataclass
class RankWeights:
    """One rank's experts in natural layout (gate rows, then up rows; the kernel side interleaves its own copy).

    w13 [E_l,2I,H] e4m3, w13_sf [E_l,2I/128,H/128] f32, w2 [E_l,H,I] e4m3, w2_sf [E_l,H/128,I/128] f32.
    """

    w13: torch.Tensor
    w13_sf: torch.Tensor
    w2: torch.Tensor
    w2_sf: torch.Tensor


@dataclass
class CaseData:
    """One launch's inputs on all ranks.

    ``launches``: how many times in a row to launch it on one buffer before the outputs are read.
    ``sample_rows``: None compares every row; n limits the float64 recomputation to about n rows per rank (first and
    last rows of first and last experts always included), for full-size layers on a CPU. Bit-exact checks (dispatch,
    combine) always cover everything.
    ``rescaled``: the L1 sums were kept in place and rescaled (``promotion=rescale``), so more codes may differ.
    """

    problem: Problem
    inputs: Sequence[RankInputs]
    weights: Sequence[RankWeights]
    clamp: float | None = None
    fast_math: bool = True
    label: str = ""
    seed: int = 0
    launches: int = 1
    sample_rows: int | None = None
    rescaled: bool = False

    def validate(self) -> None:
        """Raises UsageError for the first broken rule: sizes, dtypes, shapes, strides, ids."""
        check_problem(self.problem)
        check_clamp(self.clamp)
        h, i, k = self.problem.shape.hidden, self.problem.shape.intermediate, self.problem.shape.topk
        e = self.problem.experts_per_rank
        for rank, data in enumerate(self.inputs):
            t = self.problem.tokens[rank]
            for name, want in (
                ("topk_idx", (t, k)), ("topk_weights", (t, k)), ("x", (t, h)), ("x_sf", (t, h // 128)),
            ):  # fmt: skip
                value = getattr(data, name)
                check_tensor(f"{name}", value.dtype, value.shape, want, value.stride())
            check_ids(data.topk_idx, self.problem.shape.experts, rank)
        for weights in self.weights:
            for name, want in (
                ("w13", (e, 2 * i, h)), ("w13_sf", (e, 2 * i // 128, h // 128)),
                ("w2", (e, h, i)), ("w2_sf", (e, h // 128, i // 128)),
            ):  # fmt: skip
                value = getattr(weights, name)
                check_tensor(name, value.dtype, value.shape, want, value.stride())


@dataclass
class PhaseOutput:
    """What each rank's buffer held after the (last) launch. ``ranks[r]`` maps names to tensors:

    x, x_sf, topk_idx, topk_weights   the input views, C rows
    l1_acts [P,H] e4m3 · l1_acts_sf [P,H/128] f32, stride (1,P) · l1_topk_weights [P] f32
    l2_acts [P,I] e4m3 · l2_acts_sf [P,I/128] f32, stride (1,P)
    expert_recv_count_sum [E_l] i32 · token_src_metadata [P,3] i32 (source rank, token, slot)
    l1_arrival_count [>= P/block_m] i32 or u32: entry b counts the rows that arrived in pool rows [b*block_m, ...)
    combine [K,C,H] bf16 · y [C,H] bf16 (all C rows: those past the token count must keep the poison)
    l1_raw [P,2I] f32, gate columns then up columns, or None · stub_report u64/i64 words or None
    fault: the decoded FaultRecord or None

    Which are needed is each phase's VIEWS. ``poison`` is the byte outputs were filled with before the run;
    ``combine_poisoned`` says the combine slots were filled too, just before the launch that is judged (else the
    unwritten slots are not looked at).
    """

    ranks: list[dict[str, Any]]
    block_m: int = 128
    poison: int = POISON_BYTE
    combine_poisoned: bool = False
    meta: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, rank: int) -> dict[str, Any]:
        return self.ranks[rank]
