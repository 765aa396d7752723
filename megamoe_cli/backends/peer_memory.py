"""Where the symmetric memory of one-process-per-rank runs comes from.

A provider allocates this rank's part and tells where every rank's part is mapped here. Its collective parts run
through ``Control.step``: zeroed and synchronised first, handed out only then. Never a multicast object.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError

if TYPE_CHECKING:
    import torch

    from .control import Control

ENVIRONMENT = "MEGAMOE_PEER_MEMORY"
NAMES = ("auto", "symmetric", "ipc")


class PeerMemory(Protocol):
    """One rank's view of symmetric memory."""

    name: str

    def allocate(self, control: Control, nbytes: int, name: str) -> tuple[torch.Tensor, list[int]]:
        """Collective. (zeroed uint8 [nbytes] of this rank, address of every rank's part as this process maps it)."""

    def close(self) -> None:
        """Unmaps and frees everything; after it the tensors are invalid. Not collective: the caller has made sure
        that no peer's kernel still runs."""


def choose(device: int, wanted: str | None = None) -> PeerMemory:
    """The provider for CUDA device ``device``: PyTorch symmetric memory where this torch has it, else CUDA IPC.

    ``wanted`` (or MEGAMOE_PEER_MEMORY) forces one. The choice is made from what is installed, never by trying one
    and falling back: ranks could then disagree.
    """
    wanted = wanted or os.environ.get(ENVIRONMENT) or "auto"
    if wanted not in NAMES:
        raise UsageError(f"unknown peer memory {wanted!r} (names: {', '.join(NAMES)})", rule="peer-memory")
    from . import cuda_ipc, symm_memory

    if wanted == "symmetric" or (wanted == "auto" and symm_memory.available()):
        return symm_memory.SymmetricMemory(device)
    return cuda_ipc.CudaIpcMemory(device)
