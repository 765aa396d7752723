"""What can be said of a configuration without a GPU: facts of its compilation, and a model of its time.

The facts (registers, spills, shared memory, CTAs per SM, tiles, waves, bytes) are true; the time is a model and is always
called one. It knows the ceilings that were measured (docs/measured.md) and nothing of latency, contention or clocks; how
far it is off, `megamoe table diff STATIC MEASURED` says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from megamoe_cli.bench import E4M3_FLOPS, HBM_BYTES_PER_S
from megamoe_cli.config import REGISTER_FILE
from megamoe_cli.layout import SMEM_LIMIT, smem_bytes
from megamoe_cli.shapes import Shape
from megamoe_cli.tuning.schema import Choice

MODEL_SMS = 132  # the ceilings are an H200's
SM_FEED_BYTES_PER_S = 66e9  # what one SM takes into shared memory, from L2 or HBM
FIXED_US = 12.0  # launch, counting, the rank barriers, the tail of combine
DRAWN_ENTRIES = 20_000  # up to so many (token, slot) entries a routing is drawn; above, experts get equal shares


@dataclass(frozen=True)
class Facts:
    """Of one choice at one size, per rank. ``model_us`` and ``floor_us`` are of the model; the rest follows from the
    configuration and the compiler's log (None where nothing was compiled)."""

    choice: str
    tokens: int
    model_us: float
    floor_us: float
    bound: str  # what the model says limits it: hbm, tensor, feed
    tiles: int
    waves: float
    ctas: int
    ctas_per_sm: int
    smem_bytes: int
    weight_bytes: int
    registers: int | None = None
    spill_bytes: int | None = None
    math_registers: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def facts(choice: Choice, shape: Shape, ranks: int, sms: int, tokens: int, *, shared: bool = True,
          resources: Mapping[str, int] | None = None) -> Facts:
    """``sms`` of one GPU; ``shared``: all ranks have one between them. ``choice`` is resolved. ``resources``: registers
    and spill_bytes of its kernel."""
    c = choice.config
    rows = expert_rows(shape, ranks, tokens)
    local = rows[: shape.experts // ranks]
    blocks = sum(-(-n // c.block_m) for n in local)
    l1, l2 = blocks * (2 * shape.intermediate // c.block_n), blocks * (-(-shape.hidden // c.block_n))
    ctas = choice.ctas or (sms // ranks if shared else sms) // c.cluster * c.cluster
    rate = E4M3_FLOPS / MODEL_SMS
    feed = (max(c.block_m, 16) + c.block_n) * 128 / SM_FEED_BYTES_PER_S
    tensor = max(c.block_m, 64) * c.block_n * 128 * 2 / rate
    steps = l1 * (shape.hidden // 128) + l2 * (shape.intermediate // 128)
    # Tiles flow through all CTAs in one stream, so only the last round is ragged: half a tile on average.
    tail = 0.5 * max(shape.hidden, shape.intermediate) / 128
    compute_s = max(feed, tensor) * (steps / max(ctas, 1) + (tail if steps else 0))
    hit = sum(n > 0 for n in local)
    weight_bytes = hit * 3 * shape.hidden * shape.intermediate
    share = ranks if shared else 1
    traffic = tokens * shape.hidden * (1 + 2 * shape.topk * 2)
    hbm_s = share * (weight_bytes + traffic) / HBM_BYTES_PER_S
    floor_s = max(share * weight_bytes / HBM_BYTES_PER_S, sum(local) * 6 * shape.hidden * shape.intermediate / rate / max(ctas, 1))
    smem = smem_bytes(c, shape, ranks)
    bound = "hbm" if hbm_s >= compute_s else "feed" if feed > tensor else "tensor"
    found = resources or {}
    return Facts(choice.name(), tokens, round(1e6 * max(compute_s, hbm_s) + FIXED_US, 2), round(1e6 * floor_s, 2), bound, l1 + l2,
                 round((l1 + l2) / max(ctas, 1), 2), ctas, ctas_per_sm(choice, smem), smem, weight_bytes, found.get("registers"),
                 found.get("spill_bytes"), c.register_plan()[2])


def ctas_per_sm(choice: Choice, smem: int) -> int:
    """By shared memory (1 KiB of it is the system's for each CTA), registers and threads."""
    c = choice.config
    return min((SMEM_LIMIT + 1024) // (smem + 1024), REGISTER_FILE // (c.threads * c.launch_registers), 2048 // c.threads)


@lru_cache(maxsize=256)
def expert_rows(shape: Shape, ranks: int, tokens: int) -> tuple[int, ...]:
    """Rows of every expert for a uniform routing: drawn (always the same way) when they are few."""
    entries = tokens * ranks * shape.topk
    if entries > DRAWN_ENTRIES:
        return tuple(entries // shape.experts + (e < entries % shape.experts) for e in range(shape.experts))
    draw = random.Random(f"{shape}/{ranks}/{tokens}")
    counts = [0] * shape.experts
    for _ in range(tokens * ranks):
        for expert in draw.sample(range(shape.experts), shape.topk):
            counts[expert] += 1
    return tuple(counts)


