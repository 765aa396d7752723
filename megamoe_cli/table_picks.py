"""What the heuristic table of the running GPU picks for every load of one buffer, looked up once, when the buffer is made.

Serving reads a sorted list: no file, no YAML and no predicate is touched between launches. The environment is read once.
"""

from __future__ import annotations

import bisect
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .tuning.lookup import Library, Machine, Query, edge_counts, lookup

if TYPE_CHECKING:
    from .backends.base import Backend
    from .config import KernelConfig
    from .shapes import Shape
    from .tuning.schema import Choice

log = logging.getLogger("megamoe")


@dataclass(frozen=True)
class TablePicks:
    """``starts[i]``: the first token count that gets ``choices[i]``. ``lines``: each pick and why, as it was logged."""

    starts: tuple[int, ...]
    choices: tuple[Choice, ...]
    lines: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: Backend, shape: Shape, ranks: int, capacity: int, setting: str | None = None) -> TablePicks | None:
        """None on the emulator and with ``MEGAMOE_TABLE=none``: then the built-in default is used. UsageError for a table
        that was named and is broken or for something else."""
        setting = setting or os.environ.get("MEGAMOE_TABLE") or "auto"
        gpu = getattr(backend, "gpu", None) or getattr(getattr(backend, "cuda", None), "gpu", None)
        if gpu is None or setting == "none":
            return None
        query = Query(shape, ranks, Machine(gpu.sms, backend.name, gpu.name))
        library = Library.of(setting)
        starts: list[int] = []
        choices: list[Choice] = []
        lines: list[str] = []
        for tokens in (n for n in edge_counts(library, query) if n <= capacity):
            pick = lookup(query, tokens, library, named=setting != "auto")
            if not choices or choices[-1] != pick.choice:
                starts.append(tokens)
                choices.append(pick.choice)
                lines.append(pick.line())
                log.info("%s", pick.line())
                for warning in pick.warnings:
                    log.warning("%s", warning)
        return cls(tuple(starts), tuple(choices), tuple(lines))

    def choice(self, tokens: int) -> Choice:
        return self.choices[bisect.bisect_right(self.starts, tokens) - 1]

    def configs(self) -> tuple[KernelConfig, ...]:
        return tuple(dict.fromkeys(choice.config for choice in self.choices))

