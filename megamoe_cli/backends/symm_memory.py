"""Peer memory from PyTorch symmetric memory (``torch.distributed._symmetric_memory``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit

if TYPE_CHECKING:
    import torch

    from .control import Control

ALIGNMENT = 1024  # every region of a buffer starts at a multiple of this


def available() -> bool:
    """True when this torch has symmetric memory for CUDA (2.9 and later)."""
    import torch

    try:
        import torch.distributed._symmetric_memory as symm
    except ImportError:
        return False
    return torch.version.cuda is not None and hasattr(symm, "empty") and hasattr(symm, "rendezvous")


def prepare_environment(shared_gpu: bool) -> None:
    """What torch reads at rendezvous. Must be set in every rank before the first one.

    torch would create a multicast object over the group by itself; on shared machines such objects have outlived
    their processes, so it is told not to, whatever the user's environment says.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if shared_gpu:  # torch refuses two ranks on one device otherwise
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


class SymmetricMemory:
    """Keeps every tensor and handle until ``close``."""

    name = "PyTorch symmetric memory"

    def __init__(self, device: int) -> None:
        self.device = device
        self._kept: list[tuple[Any, Any]] = []

    def allocate(self, control: Control, nbytes: int, name: str) -> tuple[torch.Tensor, list[int]]:
        import torch
        import torch.distributed._symmetric_memory as symm

        if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
            raise EnvironmentUnfit("TORCH_SYMM_MEM_DISABLE_MULTICAST must be 1 before symmetric memory is used")

        def local() -> torch.Tensor:
            tensor = symm.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self.device))
            tensor.zero_()
            torch.cuda.synchronize(self.device)  # peers may read and write as soon as they have the handle
            return tensor

        tensor = control.step(f"allocate {nbytes} bytes for {name}", local)
        handle = control.step(f"map {name} of all ranks", lambda: symm.rendezvous(tensor, control.group.group_name))
        addresses = control.step(f"check {name} of all ranks", lambda: self._addresses(handle, control, tensor))
        self._kept.append((tensor, handle))
        return tensor, addresses

    def _addresses(self, handle: Any, control: Control, tensor: torch.Tensor) -> list[int]:
        addresses = [int(a) for a in handle.buffer_ptrs]
        if (handle.rank, handle.world_size, len(addresses)) != (control.rank, control.ranks, control.ranks):
            raise EnvironmentUnfit(f"symmetric memory numbers this rank {handle.rank} of {handle.world_size}, "
                                   f"the process group {control.rank} of {control.ranks}")  # fmt: skip
        # An offset appears where torch packs several tensors into one block; the local part must be this tensor.
        offset = tensor.data_ptr() - addresses[control.rank]
        addresses = [a + offset for a in addresses]
        if addresses[control.rank] % ALIGNMENT:
            raise EnvironmentUnfit(f"symmetric memory is aligned to less than {ALIGNMENT} bytes")
        if getattr(handle, "multicast_ptr", 0):
            raise EnvironmentUnfit("torch made a multicast object although it was told not to; refusing to go on",
                                   hint="set MEGAMOE_PEER_MEMORY=ipc")  # fmt: skip
        return addresses

    def close(self) -> None:
        self._kept.clear()
