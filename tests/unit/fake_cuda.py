"""A CUDA device made of queues: what the virtual backend asks of ``CudaRuntime``, on the CPU.

Streams hold their operations until ``is_done`` is asked; a held stream runs nothing before its word is set. ``kernel``
replaces a launch; a kernel that returns False is still running.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megamoe_cli.abi import KernelParams
from megamoe_cli.backends.driver import DriverError, Gpu

H200 = Gpu(0, "NVIDIA H200", (9, 0), 132, 232448)


@dataclass
class Stream:
    index: int
    queue: deque = field(default_factory=deque)


class FakeCuda:
    def __init__(self, gpu: Gpu = H200, kernel: Callable[[KernelParams, int], Any] | None = None) -> None:
        self.gpu, self.kernel = gpu, kernel or (lambda params, grid: True)
        self.few_queues = False
        self.blocks, self.clusters, self.can_hold, self.failure = 1, 1000, True, None
        self.log: list[tuple[Any, ...]] = []
        self.clock = 0.0
        self.streams: list[Stream] = []
        self.pinned: list[Any] = []
        self.closed = False

    def alloc(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def alloc_pinned(self, nbytes: int) -> int:
        self.pinned.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.pinned[-1])

    def is_here(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta

    def stream(self) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def event(self) -> list[float]:
        return [-1.0]

    def record(self, event: list[float], stream: Stream) -> None:
        stream.queue.append(lambda: event.__setitem__(0, self._tick()) or True)

    def elapsed_ms(self, start: list[float], stop: list[float]) -> float:
        assert start[0] >= 0 <= stop[0], "an event that never happened"
        return stop[0] - start[0]

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        self.log.append(("enqueue copy", stream.index))
        stream.queue.append(lambda: ctypes.memmove(dst, src, nbytes) or True)

    def fill(self, dst: int, byte: int, nbytes: int, stream: Stream) -> None:
        self.log.append(("enqueue fill", stream.index))
        stream.queue.append(lambda: ctypes.memset(dst, byte, nbytes) or True)

    def hold(self, stream: Stream, address: int) -> None:
        if not self.can_hold:
            raise DriverError("cuStreamWaitValue32_v2 failed: CUDA_ERROR_NOT_SUPPORTED (801)")
        self.log.append(("hold", stream.index))
        stream.queue.append(lambda: ctypes.c_uint32.from_address(address).value != 0)

    def launch(self, kernel: Any, grid: int, threads: int, params: bytes, smem_bytes: int, stream: Stream) -> None:
        self.log.append(("enqueue launch", stream.index, grid, threads, smem_bytes))
        stream.queue.append(lambda: self._launch(KernelParams.from_buffer_copy(params), grid))

    def _launch(self, params: KernelParams, grid: int) -> bool:
        done = self.kernel(params, grid) is not False
        if done:
            self.log.append(("ran", params.rank))
        return done

    def is_done(self, stream: Stream) -> bool:
        if self.failure:
            raise RuntimeError(self.failure)
        while stream.queue and stream.queue[0]():
            stream.queue.popleft()
        return not stream.queue

    def synchronize(self) -> None:
        self.log.append(("synchronize",))

    def load(self, path: Path, name: str, smem_bytes: int) -> Any:
        self.log.append(("load", path.name, name, smem_bytes))
        return (path, name)

    def resident_blocks(self, kernel: Any, threads: int, smem_bytes: int) -> int:
        return self.blocks

    def resident_clusters(self, kernel: Any, cluster: int, threads: int, smem_bytes: int, grid: int) -> int:
        return self.clusters

    def encode_tensor_map(self, address: int, rows: int, cols: int, box_rows: int, box_cols: int) -> bytes:
        return bytes(128)

    def close(self) -> None:
        self.closed = True

    def _tick(self) -> float:
        self.clock += 1.0
        return self.clock
