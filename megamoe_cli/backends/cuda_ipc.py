"""Peer memory from CUDA IPC: a plain cudaMalloc allocation per rank, its handle opened by every other rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import EnvironmentUnfit

if TYPE_CHECKING:
    import torch

    from .control import Control

# cudaMalloc may carve small allocations out of one 2 MiB block, and a handle exports the whole block: own it all.
GRANULE = 2 << 20
LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only legal flag


class CudaIpcMemory:
    """``runtime`` replaces ``cupy.cuda.runtime`` in tests; ``wrap`` the making of a tensor from an address."""

    name = "CUDA IPC"

    def __init__(self, device: int, runtime: Any = None, wrap: Any = None) -> None:
        if runtime is None:
            from cupy.cuda import runtime
        self.device, self._runtime = device, runtime
        self._wrap = wrap or _device_tensor
        self._own: list[int] = []
        self._opened: list[int] = []

    def allocate(self, control: Control, nbytes: int, name: str) -> tuple[torch.Tensor, list[int]]:
        runtime = self._runtime

        def local() -> tuple[int, bytes]:
            runtime.setDevice(self.device)
            size = -(-max(nbytes, 1) // GRANULE) * GRANULE
            address = runtime.malloc(size)
            self._own.append(address)
            runtime.memset(address, 0, size)
            runtime.deviceSynchronize()  # peers may read and write as soon as they have the handle
            return address, bytes(runtime.ipcGetMemHandle(address))

        own: list[int] = []

        def export() -> bytes:
            address, handle = local()
            own.append(address)
            return handle

        handles = control.agree(f"allocate {nbytes} bytes for {name}", export)

        def open_all() -> list[int]:
            addresses = []
            for rank, handle in enumerate(handles):
                if rank == control.rank:
                    addresses.append(own[0])
                    continue
                try:
                    address = runtime.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS)
                except Exception as error:
                    raise EnvironmentUnfit(f"cannot map the memory of rank {rank}: {error}") from error
                self._opened.append(address)
                addresses.append(address)
            return addresses

        addresses = control.step(f"map {name} of all ranks", open_all)
        return self._wrap(own[0], nbytes, self.device), addresses

    def close(self) -> None:
        """Closes what was opened, then frees what is ours."""
        for address in self._opened:
            self._runtime.ipcCloseMemHandle(address)
        for address in self._own:
            self._runtime.free(address)
        self._opened.clear()
        self._own.clear()


class _Region:
    """An address range as __cuda_array_interface__, which torch wraps without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def _device_tensor(address: int, nbytes: int, device: int) -> torch.Tensor:
    import torch

    with torch.cuda.device(device):
        return torch.as_tensor(_Region(address, nbytes), device=torch.device("cuda", device))
