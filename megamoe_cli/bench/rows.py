"""The rows of ``bench --rows peer`` and what is to be reached in each (rows.yaml)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..shapes import nearest_name

PATH = Path(__file__).with_name("rows.yaml")
SETS = ("peer",)


@dataclass(frozen=True)
class RowSet:
    """``targets``: (shape name, tokens) -> {"target_us": ..., release: its microseconds}, in the order of the file."""

    rank_of: int
    targets: dict[tuple[str, int], dict[str, float]]

    def sizes(self, shapes: Sequence[str] | None = None, tokens: Sequence[int] | None = None) -> dict[str, list[int]]:
        """Shape name -> token counts. UsageError when nothing is left."""
        found: dict[str, list[int]] = {}
        for shape, size in self.targets:
            if (shapes is None or shape in shapes) and (tokens is None or size in tokens):
                found.setdefault(shape, []).append(size)
        if not found:
            raise UsageError("no row of that set has the given shapes and tokens", rule="rows")
        return found

    def ratio_to_reach(self, shape: str, tokens: int, rank_of: int, release: str) -> float | None:
        """Ours over ``release``, both run now; None where nothing was measured."""
        row = self.targets.get((shape, tokens)) if rank_of == self.rank_of else None
        return row["target_us"] / row[release] if row and release in row else None


def load_rows(name: str = "peer") -> RowSet:
    """UsageError for an unknown set."""
    import yaml

    if name not in SETS:
        raise UsageError(f"--rows does not know {name!r}; nearest name: {nearest_name(name, SETS)}", rule="rows")
    document: dict[str, Any] = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    columns = [str(column) for column in document["columns"]]
    targets = {}
    for shape, rows in document["shapes"].items():
        for row in rows:
            named = dict(zip(columns, row, strict=True))
            targets[shape, int(named.pop("tokens"))] = {key: float(value) for key, value in named.items()}
    return RowSet(int(document["rank_of"]), targets)
