"""The named small cases of ``tests/data/small_inputs.yaml``: inputs on which such kernels have gone wrong before.

A runner does, for each case: ``datas = case.build(seed)``; run them in order **on one buffer** (each ``launches``
times; poison outputs before each), one PhaseOutput for each; ``findings = case.judge(datas, outputs)``. Cases with
``expect`` "refuse" or "plan" have ``refusals()`` and ``legal()`` instead; "router" has ``check_router(seed)``.
Loading is cheap (no torch); building imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import shapes
from .errors import EnvironmentUnfit, UsageError
from .shapes import Problem, Shape, check_problem, nearest_name

if TYPE_CHECKING:
    from .oracle.casedata import CaseData, PhaseOutput
    from .oracle.compare import Finding

DEFAULT_PATH = Path(__file__).resolve().parent.parent / "tests" / "data" / "small_inputs.yaml"
SCHEMA = "megamoe.cases/1"
_DEFAULT_SEED = 20


@dataclass(frozen=True)
class Refusal:
    """Something that must be refused: ``attempt()`` raises UsageError with this rule and these words in one line."""

    label: str
    rule: str
    contains: tuple[str, ...]
    attempt: Callable[[], object]

    def verdict(self) -> str | None:
        """None if refused as it must be, else what went wrong."""
        try:
            self.attempt()
        except UsageError as error:
            missing = [word for word in self.contains if word not in str(error)]
            if error.rule != self.rule:
                return f"{self.label}: refused by rule {error.rule}, expected {self.rule}: {error}"
            if missing or "\n" in str(error):
                return f"{self.label}: the message lacks {missing} or is not one line: {error}"
            return None
        return f"{self.label}: accepted, must be refused by rule {self.rule}"


@dataclass(frozen=True)
class NamedCase:
    """One case of the file. ``expect``: match, refuse, plan or router; ``data``: its entry as loaded."""

    id: str
    why: str
    expect: str
    data: dict[str, Any]

    @property
    def has_reduced(self) -> bool:
        """True if the full size is meant for a GPU and a smaller one exists for a slow backend."""
        return "reduced" in self.data

    def _runs(self, reduced: bool) -> list[dict[str, Any]]:
        data = self.data | (self.data.get("reduced", {}) if reduced else {})
        if "sweep" in data:
            sweep, ranks = data["sweep"], data["ranks"]
            return [{"tokens": [n] * ranks, "routing": sweep["routing"], "data": n} for n in sweep["counts"]]
        return list(data.get("runs", [])) * data.get("repeat", 1)

    def build(self, seed: int = _DEFAULT_SEED, *, device: str = "cpu", reduced: bool = False) -> list[CaseData]:
        """The runs in order; all have the same sizes but for the token counts, and the same capacity, so that one
        buffer serves them. Empty for cases without data (plan, router)."""
        from . import inputs

        runs = self._runs(reduced)
        if not runs:
            return []
        shape, ranks = Shape(*self.data["shape"]), self.data["ranks"]
        largest = [max(run["tokens"][r] for run in runs) for r in range(ranks)]
        capacity = self.data.get("capacity") or shapes.default_capacity(largest)
        weights = [inputs.make_weights(Problem.make(shape, ranks, 0, capacity), r, seed, device) for r in range(ranks)]
        out: list[CaseData] = []
        for number, run in enumerate(runs):
            problem = Problem(shape, ranks, tuple(run["tokens"]), capacity)
            case = inputs.make_case(problem, run["routing"], seed, clamp=run.get("clamp", self.data.get("clamp")),
                                    launch=run.get("data", 0), device=device, weights=weights,
                                    label=f"{self.id}.{number}")  # fmt: skip
            case.launches = run.get("launches", 1)
            for name, given in run.get("tweak", {}).items():
                for arguments in given if isinstance(given, list) else [given]:
                    case = TWEAKS[name](case, **arguments)
            out.append(case)
        return out

    def judge(self, cases: Sequence[CaseData], outputs: Sequence[PhaseOutput], phase: str = "combine",
              metrics: dict[str, float] | None = None) -> list[Finding]:  # fmt: skip
        """All phase checks up to ``phase`` on every run, then the case's own relations between and about the runs
        (those that read y only when ``phase`` is the last one)."""
        from . import phases
        from .oracle.relations import RELATIONS

        if len(cases) != len(outputs):
            raise ValueError(f"{self.id}: {len(outputs)} outputs for {len(cases)} runs")
        findings: list[Finding] = []
        for case, got in zip(cases, outputs):
            findings += phases.check_upto(phase, case, got, metrics)
        done = phases.load(phase).INDEX
        for relation in self.data.get("judge", []):
            arguments = {k: v for k, v in relation.items() if k != "kind"}
            needed, judge = RELATIONS[relation["kind"]]
            if done >= phases.load(needed).INDEX:
                findings += judge(cases, outputs, **arguments)
        return findings

    def refusals(self, seed: int = _DEFAULT_SEED) -> list[Refusal]:
        """What must be refused, ready to be attempted."""
        out = []
        for entry in self.data.get("refuse", []):
            label = ", ".join(f"{k}={v}" for k, v in entry.items() if k not in ("rule", "contains", "what"))
            out.append(Refusal(f"{self.id} {label}", entry["rule"], tuple(entry["contains"]), lambda e=entry: _plan(e)))
        if self.expect == "refuse":
            for run, case in zip(self._runs(False), self.build(seed)):
                out.append(Refusal(case.label, run["rule"], tuple(run["contains"]), case.validate))
        return out

    def legal(self) -> list[tuple[str, Callable[[], object]]]:
        """(label, attempt) of what must be accepted: ``attempt()`` raises UsageError if it is not."""
        return [(f"{self.id} {entry}", lambda e=entry: _plan(e)) for entry in self.data.get("legal", [])]

    def check_router(self, seed: int = _DEFAULT_SEED) -> list[Finding]:
        """Rows each rank receives, for ``expect: router``."""
        from .oracle.compare import Report
        from .routing import route

        data, report = self.data, Report()
        problem = Problem.make(Shape(*data["shape"]), data["ranks"], data["tokens"])
        received = [0] * problem.ranks
        for rank in range(problem.ranks):
            for expert in route(data["routing"], problem, rank, seed)[0].flatten().tolist():
                received[problem.owner(expert)] += 1
        for rank, count in enumerate(received):
            if count != data["rows_per_rank"]:
                report.add("router", "rows this rank receives", rank=rank, got=count, expected=data["rows_per_rank"])
        return report.findings()


def load_cases(path: Path | str | None = None) -> list[NamedCase]:
    """All cases in file order. Raises EnvironmentUnfit without the file (an installed wheel has no tests), UsageError
    for a file that is not of this schema."""
    import yaml

    file = Path(path) if path is not None else DEFAULT_PATH
    if not file.is_file():
        raise EnvironmentUnfit(f"no case file at {file}", hint="run from a checkout, or name the file")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{file} is no YAML in UTF-8: {' '.join(str(error).split())}", rule="case-file") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{file} is not of schema {SCHEMA}", rule="case-file")
    return [NamedCase(str(c["id"]), c["why"], c["expect"], c) for c in content["cases"]]


def load_case(name: str, path: Path | str | None = None) -> NamedCase:
    """One case by id; UsageError with the nearest id."""
    cases = {case.id: case for case in load_cases(path)}
    if name not in cases:
        raise UsageError(f"unknown case '{name}'; nearest id: {nearest_id(name, list(cases))}", rule="case-name")
    return cases[name]


def nearest_id(name: str, ids: Sequence[str]) -> str:
    """For a letter and a number the id with that letter whose number is nearest (the lower of two), unless the number has
    one digit too many; else by likeness."""
    asked = re.fullmatch(r"([a-z]+)[-_ ]?0*(\d+)", name.strip().lower())
    if asked is not None:
        numbered = [(int(found[2]), each) for each in ids
                    if (found := re.fullmatch(r"([a-z]+)(\d+)", each.lower())) and found[1] == asked[1]]
        if numbered:
            typed_twice = [pair for pair in numbered if asked[2].startswith(str(pair[0])) and len(asked[2]) > 2]
            if typed_twice:
                return max(typed_twice)[1]
            return min(numbered, key=lambda pair: (abs(pair[0] - int(asked[2])), pair[0]))[1]
    return nearest_name(name, ids)


def _plan(entry: dict[str, Any]) -> None:
    """Applies the predicate an entry names."""
    what = entry["what"]
    if what == "shape":
        shapes.check_shape(Shape(*entry["shape"]), entry["ranks"])
    elif what == "capacities":
        problem = Problem(Shape(*entry["shape"]), entry["ranks"], tuple(entry["tokens"]), max(entry["capacities"]))
        check_problem(problem, entry["capacities"])
    elif what == "dtype":
        shapes.check_dtype(entry["name"], entry["dtype"])
    elif what == "weights":
        shapes.check_weight_format(entry["format"])
    elif what == "architecture":
        shapes.check_architecture(entry["architecture"])
    else:
        raise UsageError(f"case file: nothing can be planned for '{what}'", rule="case-file")


# ---- tweaks: (case, arguments of the file) -> a changed case; inputs and weights of other runs are never touched ----


def _with_inputs(case: CaseData, rank: int, **changed: Any) -> CaseData:
    inputs = list(case.inputs)
    inputs[rank] = replace(inputs[rank], **changed)
    return replace(case, inputs=inputs)


def _bad_id(case: CaseData, rank: int, token: int, slot: int, id: int) -> CaseData:
    ids = case.inputs[rank].topk_idx.clone()
    ids[token, slot] = id
    return _with_inputs(case, rank, topk_idx=ids)


def _scale_row(case: CaseData, rank: int, token: int, factor: float) -> CaseData:
    """Multiplies a token by ``factor`` (through its scales; its codes stay)."""
    scales = case.inputs[rank].x_sf.clone()
    scales[token] *= factor
    return _with_inputs(case, rank, x_sf=scales)


def _topk_weight(case: CaseData, value: float) -> CaseData:
    """Sets every unmasked routing weight."""
    for rank, data in enumerate(case.inputs):
        weights = data.topk_weights.clone()
        weights[data.topk_idx >= 0] = value
        case = _with_inputs(case, rank, topk_weights=weights)
    return case


def _expert_scales(case: CaseData, expert: int, value: float) -> CaseData:
    """Sets every block scale of one expert, of both matrices."""
    weights, rank = list(case.weights), case.problem.owner(expert)
    w13_sf, w2_sf = weights[rank].w13_sf.clone(), weights[rank].w2_sf.clone()
    w13_sf[expert % case.problem.experts_per_rank] = value
    w2_sf[expert % case.problem.experts_per_rank] = value
    weights[rank] = replace(weights[rank], w13_sf=w13_sf, w2_sf=w2_sf)
    return replace(case, weights=weights)


def _block_scale(case: CaseData, matrix: str, expert: int, at: Sequence[Sequence[int]], value: float) -> CaseData:
    """Sets the scales of blocks ``at`` ((row block, K-block) each) of one expert's ``w13`` or ``w2``."""
    weights, rank = list(case.weights), case.problem.owner(expert)
    name = {"w13": "w13_sf", "w2": "w2_sf"}[matrix]
    scales = getattr(weights[rank], name).clone()
    for row, k in at:
        scales[expert % case.problem.experts_per_rank, row, k] = value
    weights[rank] = replace(weights[rank], **{name: scales})
    return replace(case, weights=weights)


def _x_scale(case: CaseData, rank: int, token: int, at: Sequence[int], value: float) -> CaseData:
    """Sets the scales of groups ``at`` of one token."""
    scales = case.inputs[rank].x_sf.clone()
    scales[token, list(at)] = value
    return _with_inputs(case, rank, x_sf=scales)


def _below_power_of_two(case: CaseData, group: int, times: float) -> CaseData:
    """Routing weights in [0.5, 1) that put the amax of each row's L2-input ``group`` 5e-5 below 448 times a power of
    two, then multiplied by ``times``: a power-of-two scale would double at 1.0001."""
    import torch

    from .oracle.reference import end_to_end

    for rank, reference in enumerate(end_to_end(_topk_weight(case, 1.0))):
        amax = reference.acts_amax[:, :, group]
        weight = 448 / amax * (1 - 5e-5)
        weight = weight * torch.exp2(-torch.floor(torch.log2(weight)) - 1)
        device = case.inputs[rank].topk_weights.device
        case = _with_inputs(case, rank, topk_weights=(weight * times).float().to(device))
    return case


def _constant_layer(case: CaseData, x: float, gate: float, up: float) -> CaseData:
    """Every token is ``x`` everywhere, every gate accumulator ``gate``, every up accumulator ``up``; the second matrix
    averages, so each output element is the activation itself. Routing weights are 1. Exact in e4m3 and FP32 for the
    values of the file."""
    import torch

    from .oracle.casedata import RankWeights

    h, i = case.problem.shape.hidden, case.problem.shape.intermediate
    for rank, data in enumerate(case.inputs):
        ones = torch.full_like(data.x.float(), 448.0).to(torch.float8_e4m3fn)
        case = _with_inputs(case, rank, x=ones, x_sf=torch.full_like(data.x_sf, x / 448))
    weights = []
    for old in case.weights:
        one = torch.ones_like(old.w13.float()).to(torch.float8_e4m3fn)
        w13_sf = torch.full_like(old.w13_sf, gate / (x * h))
        w13_sf[:, i // 128 :] = up / (x * h)
        weights.append(RankWeights(one, w13_sf, torch.ones_like(old.w2.float()).to(torch.float8_e4m3fn),
                                   torch.full_like(old.w2_sf, 1 / i)))  # fmt: skip
    return replace(_topk_weight(case, 1.0), weights=weights)


TWEAKS: dict[str, Callable[..., Any]] = {
    "bad_id": _bad_id, "scale_row": _scale_row, "topk_weight": _topk_weight, "expert_scales": _expert_scales, "block_scale": _block_scale, "x_scale": _x_scale,
    "below_power_of_two": _below_power_of_two, "constant_layer": _constant_layer,
}  # fmt: skip
