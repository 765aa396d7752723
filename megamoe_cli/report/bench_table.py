"""What ``megamoe bench`` prints: a line per row, a line per contender below it, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megamoe_cli.bench.intervals import geomean

_TITLES = {"kernel": "kernel", "cold": "cold", "in_a_row": "in a row", "graph": "graph"}


def header() -> str:
    return (f"{'shape':<8}{'tokens':>7}{'kernel us':>11}{'interval':>18}{'cold L2':>10}{'in a row':>10}{'graph':>10}{'floor':>9}"
            f"{'% floor':>9}  config")  # fmt: skip


def line(row: Mapping[str, Any]) -> str:
    interval = f"{row['low_us']:.1f}-{row['high_us']:.1f}"
    return (f"{row['shape']:<8}{row['tokens']:>7}{row['kernel_us']:>11.1f}{interval:>18}{_us(row, 'cold'):>10}"
            f"{_number(row['back_to_back_us']):>10}{_us(row, 'graph'):>10}{row['floor_us']:>9.1f}{100 * row['of_floor']:>8.0f}%  {row['config']}")


def rival_line(rival: Mapping[str, Any]) -> str:
    """``rival``: of a row's dict, with ``to_reach`` and ``verdict`` added."""
    times = " ".join(f"{_TITLES[mode]} {found['us']:.1f}" for mode, found in rival["times"].items())
    shares = ", ".join(f"{_TITLES[mode]} {rival['ratios'][mode]['median']:.3f}" for mode in rival["times"] if mode in rival["ratios"] and mode != "kernel")
    own = rival["ratios"].get("kernel")
    ratio = f"{own['median']:.3f} ({own['low']:.3f}-{own['high']:.3f})" if own else "-"
    reach = f"; to reach {rival['to_reach']:.2f}" if rival["to_reach"] is not None else ""
    return (f"        {rival['name']} {rival['version']}: {times} us; ours/{rival['name']} {ratio}{', ' + shares if shares else ''}"
            f"{reach}: {rival['verdict']}; its output differs by {rival['difference'][0]:.3f}")


def verdict(ratio: float, to_reach: float | None) -> str:
    """``met`` (the ratio to reach), ``ahead`` (but not met) or ``behind``."""
    if to_reach is not None and ratio <= to_reach:
        return "met"
    return "ahead" if ratio < 1 else "behind"


def summary(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> geomean of ours over it (kernel time), rows, how many ahead, how many of those with a ratio to reach met."""
    out: dict[str, dict[str, Any]] = {}
    for name in names:
        found = [rival for row in rows for rival in row.get("rivals", ()) if rival["name"] == name and "kernel" in rival["ratios"]]
        if found:
            out[name] = {"geomean": geomean(r["ratios"]["kernel"]["median"] for r in found), "rows": len(found),
                         "ahead": sum(r["ratios"]["kernel"]["median"] < 1 for r in found),
                         "met": sum(r["verdict"] == "met" for r in found), "with_target": sum(r["to_reach"] is not None for r in found)}
    return out


def summary_line(name: str, found: Mapping[str, Any]) -> str:
    met = f", {found['met']} of {found['with_target']} at the ratio to reach" if found["with_target"] else ""
    return f"ours/{name}: geomean {found['geomean']:.3f} over {found['rows']} rows, {found['ahead']} ahead{met}"


def cost_header() -> str:
    return f"{'shape':<8}{'tokens':>7}{'ranks':>7}{'1 rank us':>11}{'all us':>11}{'ratio':>8}{'interval':>16}  limit"


def cost_line(cost: Mapping[str, Any]) -> str:
    ratio = cost["ratio"]
    interval = f"{ratio['low']:.3f}-{ratio['high']:.3f}"
    return (f"{cost['shape']:<8}{cost['tokens']:>7}{cost['ranks']:>7}{cost['one']['us']:>11.1f}{cost['many']['us']:>11.1f}{ratio['median']:>8.3f}"
            f"{interval:>16}  {cost['limit']:.2f} {'kept' if cost['within'] else 'exceeded'}")


def _us(row: Mapping[str, Any], mode: str) -> str:
    found = row.get("times", {}).get(mode)
    return _number(found["us"]) if found else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
