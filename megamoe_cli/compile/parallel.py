"""Compilers side by side: how many this machine can take, and a pool that an interruption really ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from megamoe_cli.compile.child import children_stopped

Item = TypeVar("Item")
Result = TypeVar("Result")

BYTES_PER_COMPILER = 1_500_000_000  # resident, the larger of NVRTC and g++ on a whole kernel, rounded up


def usable_cores() -> int:
    """Cores this process may use: affinity and the control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return max(1, cores)


def available_memory() -> int | None:
    """Bytes that can be had without swapping, by the kernel and by the control group; None when unknown."""
    found = []
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used)))
    return min(found) if found else None


def default_jobs() -> int:
    """One compiler per core, fewer when memory is short."""
    memory = available_memory()
    by_memory = memory // BYTES_PER_COMPILER if memory is not None else usable_cores()
    return max(1, min(usable_cores(), by_memory))


def map_parallel(function: Callable[[Item], Result], items: Sequence[Item], jobs: int,
                 on_done: Callable[[Result], None] = lambda result: None) -> list[Result]:
    """``function`` of each item, in order, ``jobs`` threads at a time; ``on_done`` sees results as they come.

    The first exception is raised and what has not begun is dropped. On Ctrl-C or SIGTERM running compilers are ended too.
    """
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="build")
    try:
        futures = [pool.submit(function, item) for item in items]
        for future in as_completed(futures):
            on_done(future.result())
        return [future.result() for future in futures]
    except Exception:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        with children_stopped():
            pool.shutdown(wait=True)
        raise
    finally:
        pool.shutdown(wait=True)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
