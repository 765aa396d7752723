"""Has the kernel become slower? Times of now against a stored baseline, with the noise of both.

A measurement is a few rounds of samples. Launches of one round share its clocks and its neighbours, so their spread says
little about how far the next round lies away: the interval resamples rounds first and samples within them second.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamoe_cli.errors import ExitCode, UsageError

SCHEMA = "megamoe.bench-baseline/1"
MIN_ROUNDS = 3  # two show no spread worth the name
_RESAMPLES = 1000
_TAIL = 0.005  # of either side: a gate that runs daily on 15 rows must not cry wolf weekly

Rounds = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Judgement:
    """``ratio``: now over baseline; ``low``/``high``: its 99 % interval. ``verdict``: slower, same, faster, unclear."""

    shape: str
    tokens: int
    verdict: str
    ratio: float
    low: float
    high: float

    def text(self, limit: float) -> str:
        said = {"slower": f"slower by more than {limit:.1%}", "unclear": "too noisy to say", "same": "not slower", "faster": "faster"}
        return (f"{self.shape} at {self.tokens} tokens: {self.ratio - 1:+.1%} ({self.low - 1:+.1%} to {self.high - 1:+.1%}), "
                f"{said[self.verdict]}")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_limit(text: str) -> float:
    """``3%`` or ``0.03`` -> 0.03. UsageError when it is no share between 0 and 1."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UsageError(f"--fail-on-regression takes a share such as 3% or 0.03, not {text!r}", rule="regression-limit")
    return value


def center(rounds: Rounds) -> float:
    """Median of the medians of the rounds, in microseconds."""
    return statistics.median(statistics.median(samples) for samples in rounds)


def judge(shape: str, tokens: int, base: Rounds, now: Rounds, limit: float) -> Judgement:
    """Compares two measurements (microseconds). The resampling is seeded: the same numbers get the same verdict."""
    draw = random.Random(f"{shape}/{tokens}")
    ratios = sorted(_resampled(now, draw) / _resampled(base, draw) for _ in range(_RESAMPLES))
    low, high = ratios[int(_TAIL * _RESAMPLES)], ratios[-1 - int(_TAIL * _RESAMPLES)]
    verdict = "slower" if low > 1 + limit else "unclear" if high > 1 + limit else "faster" if high < 1 else "same"
    return Judgement(shape, tokens, verdict, center(now) / center(base), low, high)


def _resampled(rounds: Rounds, draw: random.Random) -> float:
    chosen = draw.choices(rounds, k=len(rounds))
    return statistics.median(statistics.median(draw.choices(samples, k=len(samples))) for samples in chosen)


def exit_code_of(verdicts: Iterable[str]) -> int:
    """1 when something is slower; else 6 when something is unclear."""
    found = set(verdicts)
    return int(ExitCode.NO if "slower" in found else ExitCode.INCONCLUSIVE if "unclear" in found else ExitCode.DONE)


# ---- the stored baseline ----


def row_key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return str(row["shape"]), int(row["tokens"]), str(row["config"])


def baseline_document(where: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], source: Mapping[str, Any]) -> dict[str, Any]:
    """``rows``: shape, tokens, config and ``rounds_us``. ``settings``: what must be equal to compare (rank_of, seed, ...)."""
    kept = [{"shape": r["shape"], "tokens": r["tokens"], "config": r["config"], "rounds_us": r["rounds_us"]} for r in rows]
    return {"schema": SCHEMA, "where": where, "settings": dict(settings), "source": dict(source),
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "rows": kept}


def load_baseline(path: Path) -> dict[str, Any]:
    """UsageError when it is missing or no baseline."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"no baseline to compare with: {path}: {error.strerror}",
                         hint=f"make one on a commit you trust: megamoe bench --save-baseline {path}", rule="baseline") from None
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}", rule="baseline") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path} is no baseline of bench (schema {SCHEMA})", rule="baseline")
    for row in rows:
        if not all(isinstance(samples, list) and samples for samples in row.get("rounds_us", [])) or len(row["rounds_us"]) < MIN_ROUNDS:
            raise UsageError(f"{path}: a row has fewer than {MIN_ROUNDS} rounds of samples", rule="baseline")
    return document


def check_comparable(baseline: Mapping[str, Any], settings: Mapping[str, Any], wanted: Sequence[tuple[str, int, str]],
                     where: str | None = None) -> None:  # fmt: skip
    """UsageError when the two are not about the same thing: other settings, rows that are missing, another GPU."""
    for name, value in settings.items():
        if baseline["settings"].get(name) != value:
            raise UsageError(f"the baseline was measured with {name} {baseline['settings'].get(name)}, this run has {value}", rule="baseline")
    known = {row_key(row) for row in baseline["rows"]}
    missing = [key for key in wanted if key not in known]
    if missing:
        shape, tokens, config = missing[0]
        raise UsageError(f"the baseline has no row for {shape} at {tokens} tokens with {config}", rule="baseline")
    if where is not None and where != baseline["where"]:
        raise UsageError(f"the baseline is of {baseline['where']}, this is {where}: times of different machines do not compare", rule="baseline")


def judge_rows(baseline: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], limit: float) -> list[Judgement]:
    """One judgement for each row measured now."""
    base = {row_key(row): row["rounds_us"] for row in baseline["rows"]}
    return [judge(row["shape"], row["tokens"], base[row_key(row)], row["rounds_us"], limit) for row in rows]
