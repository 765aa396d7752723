"""What CudaRuntime does with CuPy, against a stand-in for it: no GPU needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megamoe_cli.backends.cuda_runtime import CudaRuntime
from megamoe_cli.layout import SMEM_LIMIT


def test_one_file_loaded_for_two_sizes_may_use_both() -> None:
    """CuPy gives one function for one file: the later, smaller use must not take room from the earlier one."""
    function = SimpleNamespace(max_dynamic_shared_size_bytes=0)
    cupy: Any = SimpleNamespace(RawModule=lambda path: SimpleNamespace(get_function=lambda name: function),
                                cuda=SimpleNamespace(driver=SimpleNamespace(CUDADriverError=OSError),
                                                     runtime=SimpleNamespace(CUDARuntimeError=OSError)))  # fmt: skip
    runtime = SimpleNamespace(cupy=cupy)
    for size in (200_000, 190_000):
        assert CudaRuntime.load(runtime, Path("a.cubin"), "kernel", size) is function  # type: ignore[arg-type]
        assert function.max_dynamic_shared_size_bytes >= 200_000
    assert function.max_dynamic_shared_size_bytes == SMEM_LIMIT
