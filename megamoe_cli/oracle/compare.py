"""Comparisons and their thresholds. Everything that decides "close enough" is in ``LIMITS``, with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Limit:
    value: float
    reason: str


# DESIGN's numbers, and the few that localise damage (an L2 norm over 7168 columns hides one bad element).
LIMITS: dict[str, Limit] = {
    "l1_rel": Limit(1e-3, "FP32 sums against float64; the tensor core keeps fewer bits inside one 128-wide sum"),
    "scale_rel": Limit(3e-3, "a scale is one element, the amax of silu(g)*u; H200 tensor cores leave accumulators 2e-4 off "
                             "(row L2), single elements 3-5 times that, and both factors count: 1.0e-3 seen at H 256"),
    "scale_rel_rescaled": Limit(6e-3, "the same with promotion=rescale: 2.9e-3 seen at H 640 on an H200; rows may be 7.8e-4 off, elements 3-5 times that"),
    "code_share": Limit(0.02, "share of codes that may differ (by one) on a rank: values on a rounding boundary"),
    "code_share_rescaled": Limit(0.06, "the same with promotion=rescale, whose sums may be 1e-3 off where classic ones are 1.6e-4 (l1_rel holds for "
                                       "both): 4.2e-2 at H 4224 on an H200 and with the emulator's sums cut at 13 bits"),
    "code_share_row": Limit(0.10, "the same within one row: a row wrong everywhere by one code must not hide"),
    "code_share_row_rescaled": Limit(0.20, "the same as code_share_row where 6 % differ on average"),
    "code_floor": Limit(3e-3, "of the group's amax: near zero a code is 2e-6 of the amax, less than single accumulators "
                              "are off on an H200, so there several codes are one error"),
    "l2_rel": Limit(1e-2, "bf16 rounding (2e-3) and the FP32 sum"),
    "l2_element": Limit(0.03, "of the row's rms, beyond bf16 rounding: 3x the row limit, for one element"),
    "e2e_rel": Limit(2e-2, "requantized codes differ by one here and there: 6e-3 in a typical row of full-size layers on an "
                           "H200, 1.28e-2 the worst of 1,787 rows (pro); each phase alone stays within its own limit"),
    "e2e_rel_small": Limit(8e-2, "the same for I < 1024, where a few codes carry a row: one code of 256 is 6-12 % of a large "
                                 "activation; 4.4e-2 seen on an H200 (worst of 384 rows), 1.1e-2 with exact accumulators"),
    "e2e_rel_medium": Limit(4e-2, "the same for I below 2048: a row that hangs on a few large activations; 2.8e-2 seen on an H200 at H 128, "
                                  "I 1024, the very value that the emulator gives with sums cut at 13 bits (2e-3 with exact ones)"),
    "e2e_rank": Limit(1.2e-2, "all rows of a rank together, where single codes average out"),
    "e2e_rank_small": Limit(2e-2, "the same for I < 1024"),
    "e2e_element": Limit(8.0, "times the row limit, of the row's rms: errors of a row are spread like noise, so 8 "
                              "standard deviations; a wrong element is 100 % off"),
    "e2e_cosine": Limit(0.999, "direction of a row; catches what a scale-only error hides"),
    "e2e_cosine_small": Limit(0.996, "the direction that goes with e2e_rel_small: 1 - rel^2/2"),
    "bf16_ulp": Limit(2.0**-7, "one bf16 step, relative: added to every element limit of bf16 data"),
}  # fmt: skip


@dataclass(frozen=True)
class EndToEndLimits:
    """Relative L2 of one row, of all rows of a rank together, and cosine of a row."""

    row: float
    rank: float
    cosine: float
    few: float = 1.0  # times the row's limit over sqrt(n), where that is the limit of n rows together


def end_to_end_limits(intermediate: int, rescaled: bool = False) -> EndToEndLimits:
    """``rescaled``: three times as many codes may differ (``code_share_rescaled``), so a few rows together may be sqrt(3) times as
    far off: 2.9e-2 over 11 rows of I 128 on an H200, and to the last digit on the emulator with sums cut at 13 bits. Rows alone,
    and many rows together, keep their limits."""
    row = "e2e_rel_small" if intermediate < 1024 else "e2e_rel_medium" if intermediate < 2048 else "e2e_rel"
    suffix = "_small" if intermediate < 1024 else ""
    few = math.sqrt(LIMITS["code_share_rescaled"].value / LIMITS["code_share"].value) if rescaled else 1.0
    return EndToEndLimits(LIMITS[row].value, LIMITS["e2e_rank" + suffix].value, LIMITS["e2e_cosine" + suffix].value, few)


def _limit(name: str, rescaled: bool) -> float:
    return LIMITS[f"{name}_rescaled" if rescaled else name].value


def code_share_limit(rescaled: bool, codes: int) -> float:
    """Of a rank with ``codes`` compared codes. Few of them average out less: four standard deviations of as many independent
    ones come on top (19 of 896 differed on an H200, as on the emulator with sums cut at 13 bits; of a million 2.06e-2 may)."""
    limit = _limit("code_share", rescaled)
    return limit + 4 * math.sqrt(limit / max(codes, 1))


MAX_PER_METRIC = 8  # findings listed for one metric of one check; the rest is counted


@dataclass(frozen=True)
class Finding:
    """One wrong thing. ``rank``/``token``/``slot`` name the token's own rank, its row there and its top-k slot
    (None where the thing is not about one token); ``column`` the worst element. ``metric`` is a stable name."""

    rank: int | None
    token: int | None
    slot: int | None
    column: int | None
    got: float | int | str | None
    expected: float | int | str | None
    metric: str
    message: str

    def to_dict(self) -> dict[str, object]:
        """JSON-safe (NaN and infinities as strings)."""
        return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(self).items()}

    def __str__(self) -> str:
        place = [f"{n} {v}" for n, v in (("rank", self.rank), ("token", self.token), ("slot", self.slot),
                                         ("column", self.column)) if v is not None]  # fmt: skip
        values = "" if self.got is None and self.expected is None else f" (got {self.got}, expected {self.expected})"
        return f"{self.metric}: {', '.join(place) or 'all ranks'}: {self.message}{values}"


class Report:
    """Collects findings of one check, at most ``MAX_PER_METRIC`` listed for each metric, and the worst of each
    measured number into ``metrics`` (kept across checks by the caller)."""

    def __init__(self, metrics: dict[str, float] | None = None) -> None:
        self.metrics = {} if metrics is None else metrics
        self._listed: dict[str, list[Finding]] = {}
        self._count: dict[str, int] = {}

    def add(self, metric: str, message: str, *, rank: int | None = None, token: int | None = None,
            slot: int | None = None, column: int | None = None, got: object = None, expected: object = None,
            count: int = 1) -> None:  # fmt: skip
        """``count`` > 1: this one finding stands for so many."""
        listed = self._listed.setdefault(metric, [])
        self._count[metric] = self._count.get(metric, 0) + count
        if len(listed) < MAX_PER_METRIC:
            listed.append(Finding(rank, token, slot, column, got, expected, metric, message))

    def more(self, metric: str, count: int) -> None:
        """So many further findings of a metric, not looked at one by one."""
        if count > 0:
            self._listed.setdefault(metric, [])
            self._count[metric] = self._count.get(metric, 0) + count

    def worst(self, name: str, value: float, limit: float | None = None) -> None:
        """Keeps the largest, or what comes nearest to its ``limit`` (then kept as ``NAME.limit``); NaN wins, so that it cannot hide."""
        old, of = self.metrics.get(name, -math.inf), f"{name}.limit"
        larger = value > old if limit is None else value * self.metrics.get(of, limit) > old * limit
        if math.isnan(value) or larger:
            self.metrics[name] = value
            if limit is not None:
                self.metrics[of] = limit

    def findings(self) -> list[Finding]:
        out: list[Finding] = []
        for metric, listed in self._listed.items():
            out += listed
            more = self._count[metric] - len(listed)
            if more > 0:
                out.append(Finding(None, None, None, None, None, None, metric, f"and {more} more"))
        return out


# row index within the compared block -> (rank, token, slot)
Where = Callable[[int], tuple[int | None, int | None, int | None]]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers, so that NaN equals itself and -0 differs from +0."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(views[tensor.element_size()])


def code_order(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 codes (as e4m3 or uint8) to int16 in order of value: neighbours differ by 1, both zeros are 0, NaN is
    +-127."""
    byte = codes.view(torch.uint8).to(torch.int16)
    magnitude = byte & 0x7F
    return torch.where(byte >= 0x80, -magnitude, magnitude)


def is_nan_code(codes: torch.Tensor) -> torch.Tensor:
    return (codes.view(torch.uint8) & 0x7F) == 0x7F


def relative_l2(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per row, float64. A zero row equals only a zero row (else inf)."""
    got, expected = got.double(), expected.double()
    error, size = (got - expected).norm(dim=-1), expected.norm(dim=-1)
    ratio = error / size.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(error == 0, torch.zeros_like(ratio), torch.where(size == 0, torch.full_like(ratio, math.inf), ratio))


def cosine(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Per row, float64; 1 where both rows are zero, 0 where only one is. Scaled first: no overflow at 1e38."""
    got, expected = got.double(), expected.double()
    a, b = got.abs().amax(-1, keepdim=True), expected.abs().amax(-1, keepdim=True)
    both_zero = ((a == 0) & (b == 0)).squeeze(-1)
    a, b = got / a.clamp_min(1e-300), expected / b.clamp_min(1e-300)
    value = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)).clamp_min(1e-300)
    return torch.where(both_zero, torch.ones_like(value), value)


def check_rows(report: Report, metric: str, got: torch.Tensor, expected: torch.Tensor, where: Where, *, rel: float,
               element: float | None = None, ulp: float = 0.0, cos: float | None = None,
               largest: float = torch.finfo(torch.float32).max, what: str = "row") -> None:  # fmt: skip
    """Rows [n,c] against float64 ``expected``. Metrics: ``metric`` (relative L2), ``metric_element``,
    ``metric_cosine``, ``metric_nonfinite``.

    NaN is expected exactly where the reference has it. Where the reference passes 0.99 * ``largest`` (the format's
    largest finite value), anything non-finite or as large will do. Those elements leave the norms.
    """
    if got.numel() == 0:
        return
    got, expected = got.double(), expected.double()
    want_nan = expected.isnan()
    want_over = expected.abs() > 0.99 * largest  # False for NaN
    finite = ~(want_nan | want_over)
    bad = (want_nan & ~got.isnan()) | (finite & ~got.isfinite())
    bad |= want_over & got.isfinite() & (got.abs() < 0.9 * largest)
    _per_row(report, bad, f"{metric}_nonfinite", got, expected, where,
             lambda r: f"{int(bad[r].sum())} element(s) of this {what} differ in being NaN, infinite or finite")  # fmt: skip
    keep = finite & got.isfinite()
    g, e = got.where(keep, torch.zeros_like(got)), expected.where(keep, torch.zeros_like(expected))
    ratio = relative_l2(g, e)
    report.worst(metric, float(ratio.max()))
    worst_column = (g - e).abs().argmax(dim=1)
    for r in _listed(report, metric, ratio > rel):
        c = int(worst_column[r])
        _add(report, metric, where, r, c, g, e, f"relative L2 of this {what} is {float(ratio[r]):.3g}, limit {rel:g}")
    if element is not None:
        rms = (e.square().sum(1) / keep.sum(1).clamp_min(1)).sqrt()
        over = (g - e).abs() > element * rms[:, None] + ulp * e.abs()
        _per_row(report, over, f"{metric}_element", g, e, where,
                 lambda r: f"{int(over[r].sum())} element(s) off by more than {element:.3g} of the {what}'s rms")  # fmt: skip
    if cos is not None:
        value = cosine(g, e)
        report.worst(f"{metric}_cosine_loss", 1 - float(value.min()))
        for r in _listed(report, f"{metric}_cosine", value < cos):
            c = int(worst_column[r])
            _add(report, f"{metric}_cosine", where, r, c, g, e, f"cosine of this {what} is {float(value[r]):.5f}, limit {cos:g}")


def check_rank(report: Report, metric: str, got: torch.Tensor, expected: torch.Tensor, rank: int, limits: EndToEndLimits) -> None:
    """All rows [n,c] of a rank together: catches what is small in every row and wrong on average. Non-finite elements are
    the rows' business and left out. A few rows average out less: the limit is the row's over sqrt(n) until that is smaller
    (with 13-bit sums on the emulator, as an H200's, 3 rows together are up to 2.6e-2 off at I = 256)."""
    if not len(got):
        return
    limit = max(limits.rank, min(1.0, limits.few / len(got) ** 0.5) * limits.row)
    keep = got.isfinite() & expected.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=got.device)
    g, e = got.double().where(keep, zero), expected.double().where(keep, zero)
    ratio = float(relative_l2(g.reshape(1, -1), e.reshape(1, -1)))
    report.worst(metric, ratio, limit)
    if not ratio <= limit:
        report.add(metric, f"relative L2 of all rows of this rank together is {ratio:.3g}, limit {limit:g}", rank=rank)


def _add(report: Report, metric: str, where: Where, row: int, column: int, got: torch.Tensor, expected: torch.Tensor,
         message: str, count: int = 1) -> None:  # fmt: skip
    rank, token, slot = where(row)
    report.add(metric, message, rank=rank, token=token, slot=slot, column=column, got=got[row, column].item(),
               expected=expected[row, column].item(), count=count)  # fmt: skip


def _listed(report: Report, metric: str, bad: torch.Tensor) -> list[int]:
    """The first rows of a mask that are worth a finding each; the others are only counted (each costs a few device
    synchronisations, and a broken run has thousands)."""
    rows = bad.nonzero().flatten().tolist()
    report.more(metric, len(rows) - MAX_PER_METRIC)
    return rows[:MAX_PER_METRIC]


def _per_row(report: Report, bad: torch.Tensor, metric: str, got: torch.Tensor, expected: torch.Tensor, where: Where,
             message: Callable[[int], str]) -> None:  # fmt: skip
    """One finding for each row that has a bad element, at its first bad column."""
    for row in _listed(report, metric, bad.any(dim=1)):
        _add(report, metric, where, row, int(bad[row].nonzero()[0]), got, expected, message(row))


def check_bits(report: Report, metric: str, got: torch.Tensor, expected: torch.Tensor, where: Where, *,
               what: str = "row", nan_equal: bool = False) -> None:  # fmt: skip
    """Rows [n,c] of one dtype, byte for byte; with ``nan_equal`` any NaN equals any other."""
    if got.numel() == 0:
        return
    bad = bits(got) != bits(expected)
    if nan_equal:
        bad &= ~(got.isnan() & expected.isnan())
    if bool(bad.any()):
        shown_got, shown_expected = (t.float() if t.is_floating_point() else t for t in (got, expected))
        _per_row(report, bad, metric, shown_got, shown_expected, where,
                 lambda r: f"{int(bad[r].sum())} of {bad.shape[1]} elements of this {what} are not bit-equal")  # fmt: skip


def check_activations(report: Report, got: torch.Tensor, got_sf: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor,
                      exact: torch.Tensor, where: Where, unclamped: torch.Tensor | None = None, rescaled: bool = False) -> tuple[int, int]:  # fmt: skip
    """Requantized rows: ``got`` [n,I] e4m3 and ``got_sf`` [n,I/128] against the reference's ``codes``, ``scales`` and
    its ``exact`` float64 activations. Returns (differing codes, compared codes) for the caller's share over a rank.

    ``unclamped`` [n,I]: the activations had there been no clamp (None: there is none). Accumulators are off in proportion
    to what they were before a clamp made them small, so the floor below which codes are not told apart follows those.
    ``rescaled``: see ``CaseData``. A group whose exact values overflow FP32 is not judged; where an exact value is NaN, the result must be NaN.
    """
    n, columns = got.shape
    if n == 0:
        return 0, 0
    groups = columns // 128

    def split(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(n, groups, 128)

    exact = split(exact)
    nan, over = exact.isnan(), (exact.abs() > 0.99 * torch.finfo(torch.float32).max).any(2)
    judged = ~(nan.any(2) | over)
    got_nan = split(is_nan_code(got)) | got_sf.isnan()[..., None]
    bad = ((nan & ~got_nan) | (judged[..., None] & got_nan)) & ~over[..., None]
    value, want = split(got.float()) * got_sf[..., None], split(codes.float()) * scales[..., None]
    flat = (value.reshape(n, columns), want.reshape(n, columns))
    bad = bad.reshape(n, columns)
    _per_row(report, bad, "l2_acts_nan", *flat, where, lambda r: f"{int(bad[r].sum())} element(s) differ in being NaN")

    ratio = ((got_sf - scales).abs() / scales).nan_to_num(nan=math.inf).where(judged, torch.zeros_like(scales))
    limit = _limit("scale_rel", rescaled)
    report.worst("l2_acts_sf", float(ratio.max()), limit)
    _per_row(report, ratio > limit, "l2_acts_sf", got_sf, scales, where,
             lambda r: f"a scale is off by {float(ratio[r].max()):.3g}, limit {limit:g} (column = group of 128)")  # fmt: skip

    step = (split(code_order(got)) - split(code_order(codes))).abs()
    step = step.where(judged[..., None] & ~got_nan, torch.zeros_like(step))
    amax = scales * 448.0
    if unclamped is not None:
        amax = amax.maximum(split(unclamped).abs().nan_to_num(nan=0.0, posinf=0.0).amax(2).to(amax.dtype))
    far = (step > 1) & ((value - want).abs() > LIMITS["code_floor"].value * amax[..., None])
    far = far.reshape(n, columns)
    _per_row(report, far, "l2_acts_code", *flat, where,
             lambda r: f"{int(far[r].sum())} code(s) are neither equal nor adjacent to the reference's")  # fmt: skip
    differing = (step > 0).reshape(n, columns).sum(1)
    row_limit = _limit("code_share_row", rescaled)
    for r in _listed(report, "l2_acts_share", differing > max(row_limit * columns, 8)):
        c = int(step.reshape(n, columns)[r].argmax())
        _add(report, "l2_acts_share", where, r, c, *flat,
             f"{int(differing[r])} of {columns} codes of this row differ, limit {row_limit:.0%}")  # fmt: skip
    return int(differing.sum()), int(judged.sum()) * 128


def bit_equal_rows(a: torch.Tensor, b: torch.Tensor, rank: int, metric: str, skip: tuple[int, ...] = ()) -> list[Finding]:
    """Two runs' rows [n,c] of one rank, byte for byte, except rows ``skip`` (token numbers)."""
    report = Report()
    rows = [t for t in range(a.shape[0]) if t not in skip]
    if a.shape != b.shape:
        report.add(metric, f"the two runs have shapes {tuple(a.shape)} and {tuple(b.shape)}", rank=rank)
    elif rows:
        index = torch.tensor(rows, device=a.device)
        check_bits(report, metric, a[index], b.to(a.device)[index], lambda r: (rank, rows[r], None), what="row")
    return report.findings()
