"""What ``megamoe bench --ranks`` prints: a line per row, a line per contender below it, what was lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def header() -> str:
    return (f"{'shape':<8}{'ranks':>6}{'tokens':>7}{'kernel us':>11}{'interval':>18}{'slowest':>9}{'skew':>7}{'in a row':>10}{'graph':>10}{'floor':>9}"
            f"{'% floor':>9}{'link fl.':>9}{'MB in':>9}{'MB out':>9}{'GB/s in':>9}{'GB/s out':>9}  config")  # fmt: skip


def line(row: Mapping[str, Any]) -> str:
    """``skew``: between the medians of the slowest and the fastest rank. Bytes are those that cross between ranks; where ranks
    share a GPU there is no link that they could cross."""
    ranks, link = row["per_rank_us"], row["link"]
    interval = f"{row['low_us']:.1f}-{row['high_us']:.1f}"
    rates = f"{link['in_gb_s']:>9.0f}{link['out_gb_s']:>9.0f}" if link["is_link"] else f"{'no link':>9}{'-':>9}"
    bytes_ = f"{link['in_bytes'] / 1e6:>9.2f}{link['out_bytes'] / 1e6:>9.2f}" if link["is_link"] else f"{'-':>9}{'-':>9}"
    return (f"{row['shape']:<8}{row['ranks']:>6}{row['tokens']:>7}{row['kernel_us']:>11.1f}{interval:>18}{row['slowest_rank']:>9}"
            f"{max(ranks) - min(ranks):>7.1f}{_number(row['back_to_back_us']):>10}{_number(row['graph_us']):>10}{row['floor_us']:>9.1f}"
            f"{100 * row['of_floor']:>8.0f}%{_number(row['link_floor_us']):>9}{bytes_}{rates}  {row['config']}")


def notes(row: Mapping[str, Any]) -> list[str]:
    """What the columns of a row cannot say."""
    said = []
    if row["graph_us"] is None and row["no_graph"]:
        said.append(f"        no graph: {row['no_graph']}")
    if not row["link"]["is_link"]:
        said.append(f"        {row['where']}: the ranks share a GPU, so nothing crosses a link and no time is that of several GPUs")
    return said


def failure_line(failed: Mapping[str, Any]) -> str:
    return f"        {failed['contender']} at {failed['tokens']} tokens: {failed['status']}: {failed['reason']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
