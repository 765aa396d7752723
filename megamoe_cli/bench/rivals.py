"""The names ``--against`` knows, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..config import KernelConfig, require
from ..errors import UsageError
from ..shapes import nearest_name

if TYPE_CHECKING:
    from .contender import Contender
    from .ours import Ours

NAMES = {
    "peer": "the installed public package's fused kernel (import name deep_gemm)",
    "unfused": "separate kernels in a CUDA graph: torch's grouped FP8 GEMM and torch steps",
    "unfused-peer": "the same with the package's grouped GEMMs",
}
OWN = "config:"  # and KEY=VAL+KEY=VAL: our kernel in another configuration


def parse_names(text: str) -> list[str]:
    """``peer,unfused,config:split=m`` -> names, each once. UsageError for an unknown one."""
    names = list(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))
    for name in names:
        if name.startswith(OWN):
            variant(name)
            continue
        if name not in NAMES:
            raise UsageError(f"--against does not know {name!r}; nearest name: {nearest_name(name, NAMES)} (names: {', '.join(NAMES)}, {OWN}KEY=VAL+KEY=VAL)",
                             rule="against")  # fmt: skip
    if not names:
        raise UsageError(f"--against takes names: {', '.join(NAMES)}", rule="against")
    return names


def variant(name: str) -> KernelConfig:
    """The configuration of a ``config:KEY=VAL+KEY=VAL``. UsageError."""
    config = KernelConfig.parse(name.removeprefix(OWN).replace("+", ","))
    require(config)
    return config


def open_rivals(names: Sequence[str], device: Any, ours: Ours | None = None) -> list[Contender]:
    """``ours``: what our other configurations share their weights and buffers with. EnvironmentUnfit when a contender is
    not installed here."""
    found: list[Contender] = []
    for name in names:
        if name.startswith(OWN):
            from .ours import Variant

            assert ours is not None
            found.append(Variant(name, variant(name), ours))
        elif name == "peer":
            from .peer import Peer, load_package

            found.append(Peer(load_package()))
        else:
            from .peer import load_package
            from .unfused import PeerGemms, TorchGemms, Unfused

            found.append(Unfused(name, TorchGemms() if name == "unfused" else PeerGemms(load_package()), device))
    return found
