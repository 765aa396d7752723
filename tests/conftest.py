"""Shared by all tests: where no SM90 GPU is, tests marked ``gpu`` say so and are skipped; with one they share a process."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

import pytest

# Before anything imports torch: with several pytest processes its threads would outnumber the cores and spin at each
# other's barriers, which costs a factor of ten. Processes that tests start inherit it.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def own_gpu(environ: Mapping[str, str]) -> str | None:
    """What this pytest process shall see of the GPUs: with ``MEGAMOE_TEST_GPU_EACH=1`` (make test-gpu) and several processes
    each has one, the n-th of those that are visible. None: all."""
    worker = environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if environ.get("MEGAMOE_TEST_GPU_EACH") != "1" or not worker.isdigit():
        return None
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[int(worker) % len(visible)] if visible else worker


# Before anything looks for GPUs.
if (_own := own_gpu(os.environ)) is not None:
    os.environ["CUDA_VISIBLE_DEVICES"] = _own


@functools.cache
def gpu_reason() -> str | None:
    """Why the gpu tests cannot run here, or None when they can."""
    if not any(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev")):
        return "no NVIDIA device"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"the GPU is sm_{major}{minor}, not sm_90"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and os.environ.get("MEGAMOE_LONG_TESTS") != "1":
            item.add_marker(pytest.mark.skip(reason="long: set MEGAMOE_LONG_TESTS=1"))
        if item.get_closest_marker("gpu"):
            if _own is None:
                item.add_marker(pytest.mark.xdist_group("gpu"))
            reason = gpu_reason()
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
