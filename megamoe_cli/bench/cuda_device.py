"""The GPU as ``timing`` sees it: one torch stream, events, an L2 that can be emptied, graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ..errors import EnvironmentUnfit, TimedOut
from .contender import DeviceLost

CYCLES_PER_US = 2000  # of an SM at its highest clock: a spin of so many cycles lasts at least a microsecond
_POLL_S = 0.0002


class CudaDevice:
    """The current CUDA device. Contenders find the stream as torch's current one inside ``using``."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise EnvironmentUnfit("times are taken on a GPU, and this torch sees none")
        self._torch = torch
        self.stream = torch.cuda.Stream()
        l2 = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 64 << 20)
        self._filler = torch.zeros(8 * l2 // 4, dtype=torch.int32, device="cuda")

    def using(self) -> AbstractContextManager[Any]:
        return self._torch.cuda.stream(self.stream)

    def busy(self, us: float) -> None:
        self._torch.cuda._sleep(int(us * CYCLES_PER_US))

    def empty_cache(self) -> None:
        # Read, not written: lines that must go back to memory would cost the timed kernel bandwidth.
        self._filler.sum()

    def mark(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def between_us(self, start: Any, stop: Any) -> float:
        return 1e3 * start.elapsed_time(stop)

    def wait(self, timeout_s: float) -> None:
        """Polls: a blocking call would have no timeout."""
        deadline = time.perf_counter() + timeout_s
        while True:
            try:
                if self.stream.query():
                    return
            except RuntimeError as error:
                raise DeviceLost(f"the device failed: {str(error).splitlines()[0]}") from error
            if time.perf_counter() > deadline:
                raise TimedOut(f"the device did not finish within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        graph = self._torch.cuda.CUDAGraph()
        # thread_local: a call that another thread of the process makes is no business of this capture.
        with self._torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            enqueue()
        return graph.replay

    def now_s(self) -> float:
        return time.perf_counter()
