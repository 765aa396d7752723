"""One CUDA device through CuPy and torch: plain allocations, streams, launches. Everything the virtual backend asks of
CUDA goes through this class, so its logic can be tested with a stand-in. Imported only where a GPU is used.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..abi import PARAMS_BYTES
from ..errors import BuildFailed, EnvironmentUnfit
from ..layout import SMEM_LIMIT
from .driver import NOT_READY, Gpu, driver, encode_tensor_map, has_few_queues, prepare_environment, visible_gpus

if TYPE_CHECKING:
    import torch

_HINT = "megamoe test --backend emulator runs the same kernel source on the CPU"
_HOST_PORTABLE, _HOST_MAPPED = 1, 2  # cudaHostAllocPortable, cudaHostAllocMapped


class CudaRuntime:
    """Device ``index`` with its primary context. EnvironmentUnfit when this process cannot use it."""

    def __init__(self, index: int = 0) -> None:
        prepare_environment()
        self.gpu = _require_sm90(index)
        try:
            import cupy
            import torch
        except ImportError as error:
            raise EnvironmentUnfit(f"GPU backends need cupy and torch: {error}", hint="install the missing package; " + _HINT)
        if not torch.cuda.is_available():
            raise EnvironmentUnfit("this torch has no CUDA support, so it cannot hold device tensors",
                                   hint="install a CUDA build of torch; " + _HINT)  # fmt: skip
        self.cupy, self.torch = cupy, torch
        self.few_queues = has_few_queues()
        self.device = torch.device("cuda", index)
        cupy.cuda.Device(index).use()
        torch.cuda.set_device(index)
        self._driver = driver()
        self._pinned: list[int] = []

    # ---- memory ----

    def alloc(self, nbytes: int) -> torch.Tensor:
        """Zeroed uint8 [nbytes] from cudaMalloc itself: no pool, so that sanitizers see its bounds."""
        size = max(nbytes, 1)
        try:
            memory = self.cupy.cuda.Memory(size)
        except self.cupy.cuda.runtime.CUDARuntimeError as error:
            free, total = self.cupy.cuda.runtime.memGetInfo()
            raise EnvironmentUnfit(
                f"cannot allocate {size / 2**30:.2f} GiB on {self.gpu.name}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are "
                f"free ({error})", hint="use fewer tokens, a smaller capacity or fewer ranks") from error
        array = self.cupy.ndarray((size,), self.cupy.uint8, memptr=self.cupy.cuda.MemoryPointer(memory, 0))
        tensor = self.torch.as_tensor(array, device=self.device)  # shares the memory and keeps the array alive
        if tensor.data_ptr() != array.data.ptr:
            raise EnvironmentUnfit("torch copied a device array instead of sharing it; torch and cupy disagree on the device")
        tensor.zero_()
        return tensor[:nbytes]

    def alloc_pinned(self, nbytes: int) -> int:
        """Address of zeroed page-locked memory that host and device reach at the same address."""
        pointer = int(self.cupy.cuda.runtime.hostAlloc(nbytes, _HOST_PORTABLE | _HOST_MAPPED))
        self._pinned.append(pointer)
        ctypes.memset(pointer, 0, nbytes)
        return pointer

    def is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    # ---- streams and events ----

    def stream(self) -> Any:
        return self.cupy.cuda.Stream(non_blocking=True)

    def event(self) -> Any:
        return self.cupy.cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def elapsed_ms(self, start: Any, stop: Any) -> float:
        return float(self.cupy.cuda.get_elapsed_time(start, stop))

    def copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        self.cupy.cuda.runtime.memcpyAsync(dst, src, nbytes, self.cupy.cuda.runtime.memcpyDeviceToDevice, stream.ptr)

    def fill(self, dst: int, byte: int, nbytes: int, stream: Any) -> None:
        self.cupy.cuda.runtime.memsetAsync(dst, byte, nbytes, stream.ptr)

    def hold(self, stream: Any, address: int) -> None:
        """The stream waits until the 32-bit word at ``address`` (pinned) is nonzero."""
        self._driver.wait_value(stream.ptr, address, 1)

    def is_done(self, stream: Any) -> bool:
        """False while work is queued or running. Raises the device's error when one occurred."""
        # Stream.done cannot tell a failed stream from a busy one.
        code = self.cupy.cuda.runtime.streamQuery(stream.ptr)
        if code == NOT_READY:
            return False
        self.cupy.cuda.runtime.check_status(code)
        return True

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()

    # ---- kernels ----

    def load(self, path: Path, name: str, smem_bytes: int) -> Any:
        """The kernel, loaded, allowed to use ``smem_bytes`` of dynamic shared memory."""
        try:
            kernel = self.cupy.RawModule(path=str(path)).get_function(name)
            # Always, and always the most there is: without it launches above 48 KiB fail, and CuPy hands out one function for
            # one file, so that of two uses with tables of different sizes the second must not take room from the first.
            kernel.max_dynamic_shared_size_bytes = SMEM_LIMIT
        except (self.cupy.cuda.driver.CUDADriverError, self.cupy.cuda.runtime.CUDARuntimeError) as error:
            raise BuildFailed(f"the driver does not load {path.name}: {error}", hint="megamoe doctor shows the versions")
        return kernel

    def resident_blocks(self, kernel: Any, threads: int, smem_bytes: int) -> int:
        """Blocks per SM."""
        return self._driver.resident_blocks(kernel.kernel.ptr, threads, smem_bytes)

    def resident_clusters(self, kernel: Any, cluster: int, threads: int, smem_bytes: int, grid: int) -> int:
        return self._driver.resident_clusters(kernel.kernel.ptr, cluster, threads, smem_bytes, grid)

    def launch(self, kernel: Any, grid: int, threads: int, params: bytes, smem_bytes: int, stream: Any) -> None:
        """``params``: the KernelParams blob, passed by value as one argument."""
        with stream:
            kernel((grid,), (threads,), (pack_argument(params),), shared_mem=smem_bytes)

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        return encode_tensor_map(address, rows, cols, box_rows, box_cols)

    def close(self) -> None:
        for pointer in self._pinned:
            self.cupy.cuda.runtime.freeHost(pointer)
        self._pinned.clear()


def pack_argument(params: bytes) -> Any:
    """The blob as one numpy.void scalar, which CuPy passes by value."""
    import numpy

    if len(params) != PARAMS_BYTES:
        raise ValueError(f"kernel parameters are {PARAMS_BYTES} bytes, got {len(params)}")
    return numpy.void(params)


def _require_sm90(index: int) -> Gpu:
    gpus = visible_gpus()
    if not gpus:
        raise EnvironmentUnfit("no GPU is visible to this process", hint=_HINT)
    if index >= len(gpus):
        raise EnvironmentUnfit(f"there is no GPU {index}; {len(gpus)} visible", hint=_HINT)
    gpu = gpus[index]
    if not gpu.is_sm90:
        raise EnvironmentUnfit(f"GPU {index} is {gpu.name} (sm_{gpu.cc[0]}{gpu.cc[1]}); the kernel needs SM90", hint=_HINT)
    return gpu

