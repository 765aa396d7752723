"""One process per rank: calls are enqueued at once, and what is collective goes through the control plane."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megamoe_cli import api
from megamoe_cli.api import fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, transform_weights_for_mega_moe_sm90
from megamoe_cli.errors import LaunchFault, UsageError
from megamoe_cli.worlds import GroupWorld
from tests.api.scripted import ScriptedBackend


class Group:
    """What the API asks of a process group."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


class OneRank(ScriptedBackend):
    """Rank 0 of two; the other rank is ``peer_request``."""

    def __init__(self) -> None:
        super().__init__(2)
        self.local_ranks = (0,)
        self.peer_request = None
        self.steps: list[str] = []
        self.enqueued: list[tuple[int, int]] = []
        self.control = SimpleNamespace(step=self._step, agree=self._agree)
        self.cuda = SimpleNamespace(synchronize=lambda: None)

    def _step(self, name, work):
        self.steps.append(name)
        return work()

    def _agree(self, name, work):
        mine = work()
        return [mine, self.peer_request or mine]

    def alloc(self, rank, nbytes, *, symmetric, name):
        if symmetric:
            super().alloc(1, nbytes, symmetric=True, name=name)
        return super().alloc(rank, nbytes, symmetric=symmetric, name=name)

    def enqueue(self, rank, kernel, params, grid) -> None:
        self.enqueued.append((params.num_tokens, params.timeout_ns))
        self.script(self, params, grid)


def opened() -> tuple[OneRank, Group]:
    backend, group = OneRank(), Group(0, 2)
    api._group_worlds[group] = GroupWorld(group, backend)
    return backend, group


def weights():
    f8 = torch.float8_e4m3fn
    return transform_weights_for_mega_moe_sm90(
        (torch.zeros(4, 256, 256, dtype=torch.uint8).view(f8), torch.ones(4, 2, 2)),
        (torch.zeros(4, 256, 128, dtype=torch.uint8).view(f8), torch.ones(4, 2, 1)),
    )  # fmt: skip


def test_calls_are_enqueued_at_once() -> None:
    backend, group = opened()
    buf = get_symm_buffer_for_sm90_mega_moe(group, 8, 64, 2, 256, 128)
    for n in (3, 0, 5):
        buf.x_sf[:n].fill_(n)
        y = torch.zeros(n, 256, dtype=torch.bfloat16)
        fp8_mega_moe(y, *weights(), buf)
        assert bool((y == n).all())
    assert backend.enqueued == [(n, 300 * 10**9) for n in (3, 0, 5)]
    assert set(buf.l1_arrival_count.tolist()) == {102}
    second = get_symm_buffer_for_sm90_mega_moe(group, 8, 64, 2, 256, 128)
    assert second.buffer.data_ptr() != buf.buffer.data_ptr()


def test_every_rank_sees_that_requests_differ() -> None:
    backend, group = opened()
    buf = get_symm_buffer_for_sm90_mega_moe(group, 8, 64, 2, 256, 128)
    backend.peer_request = buf.request
    with pytest.raises(UsageError, match="capacity differs between ranks: 128 on rank 0, 64 on rank 1"):
        get_symm_buffer_for_sm90_mega_moe(group, 8, 128, 2, 256, 128)


def test_tensors_must_be_on_the_device() -> None:
    backend, group = opened()
    buf = get_symm_buffer_for_sm90_mega_moe(group, 8, 64, 2, 256, 128)
    with pytest.raises(UsageError, match="y is on meta; it must be on cpu"):
        fp8_mega_moe(torch.zeros(3, 256, dtype=torch.bfloat16, device="meta"), *weights(), buf)
    assert backend.enqueued == []


def test_a_fault_stops_the_next_call_until_the_reset() -> None:
    backend, group = opened()
    buf = get_symm_buffer_for_sm90_mega_moe(group, 8, 64, 2, 256, 128)
    y = torch.zeros(3, 256, dtype=torch.bfloat16)
    backend.raise_fault(0, code=2, index=3, observed=8, expected=8)
    with pytest.raises(LaunchFault, match="token 1 slot 1 names expert 8.*reset the buffer on every rank"):
        fp8_mega_moe(y, *weights(), buf)
    assert backend.enqueued == []
    buf.reset()
    assert backend.steps[-2:] == ["wait for the device", "reset the buffer"]
    fp8_mega_moe(y, *weights(), buf)
    assert len(backend.enqueued) == 1
