"""Arguments of the host API that cannot work: one clear line that names them, before anything is recorded or launched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megamoe_cli.api import LocalWorld, fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, transform_weights_for_mega_moe_sm90
from megamoe_cli.errors import LaunchFault, UsageError
from tests.api.test_surface import E, H, I, K, fill, natural, open_buffers, open_world

ROOT = Path(__file__).resolve().parents[2]


def output(n: int = 2) -> torch.Tensor:
    return torch.zeros(n, H, dtype=torch.bfloat16)


def refused(match: str, *args, **options) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        fp8_mega_moe(*args, **options)
    assert "\n" not in str(caught.value) and caught.value.rule


@pytest.mark.parametrize("options, match", [
    ({"cumulative_local_expert_recv_stats": [0, 0, 0, 0]}, "cumulative_local_expert_recv_stats is a list; it must be an int32 tensor"),
    ({"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int32, device="meta")}, "recv_stats is on meta; it must be on cpu"),
    ({"activation_clamp": "x"}, "clamp 'x' is a str"),
    ({"activation_clamp": True}, "clamp True is a bool"),
    ({"activation_clamp": [1.0]}, r"clamp \[1.0\] is a list"),
    ({"activation_clamp": float("nan")}, "clamp nan is not a finite number"),
    ({"num_tokens_bound": "3"}, "num_tokens_bound must be an integer, got str '3'"),
    ({"num_tokens_bound": 6.5}, "num_tokens_bound must be an integer, got float 6.5"),
    ({"num_tokens_bound": True}, "num_tokens_bound must be an integer, got bool"),
    ({"fast_math": "no"}, "fast_math must be True or False, got str 'no'"),
])
def test_options(options, match) -> None:
    world = open_world()
    buf = open_buffers(world)[0]
    refused(match, output(), *transform_weights_for_mega_moe_sm90(*natural(4)), buf, **options)
    assert world.pending(0) == 0


def test_a_number_of_any_kind_is_a_clamp() -> None:
    import numpy

    world = open_world()
    buf = open_buffers(world)[0]
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    for clamp in (7, 7.0, numpy.float32(7)):
        fp8_mega_moe(output(), *weights, buf, activation_clamp=clamp)
    assert world.pending(0) == 3


def test_outputs_a_launch_cannot_write() -> None:
    world = open_world()
    buf = open_buffers(world)[0]
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    refused("y is on meta; it must be on cpu", output().to("meta"), *weights, buf)
    refused("y requires a gradient", output().requires_grad_(), *weights, buf)
    start = buf.layout.region_offset["x"]
    inside = buf.buffer[start : start + 2 * H * 2].view(torch.bfloat16).view(2, H)
    refused("y lies in the symmetric buffer", inside, *weights, buf)
    assert world.pending(0) == 0


def test_two_ranks_may_not_share_what_they_write() -> None:
    world = open_world()
    bufs = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    both, stats = output(4), torch.zeros(4, dtype=torch.int32)
    fp8_mega_moe(both[:2], *weights, bufs[0], cumulative_local_expert_recv_stats=stats)
    refused("y of rank 1 shares memory with that of rank 0", both[1:3], *weights, bufs[1])
    refused("recv_stats of rank 1 shares memory", both[2:], *weights, bufs[1], cumulative_local_expert_recv_stats=stats)
    assert (world.pending(0), world.pending(1)) == (1, 0)
    fp8_mega_moe(both[2:], *weights, bufs[1])
    fp8_mega_moe(both[:2], *weights, bufs[0])  # a rank's own calls come one after the other
    assert (world.pending(0), world.pending(1)) == (2, 1)


@pytest.mark.parametrize("group", [None, 3, "world", object()])
def test_what_is_no_group(group) -> None:
    with pytest.raises(UsageError, match=f"group is a {type(group).__name__}; it must be a torch.distributed process group or a rank"):
        get_symm_buffer_for_sm90_mega_moe(group, E, 128, K, H, I)


@pytest.mark.parametrize("options, match", [
    ({"races": "maybe"}, "option races='maybe' must be true or false"), ({"seed": -1}, "option seed=-1 is outside 0"),
    ({"slow": 3}, "option slow=3 must be a list with a value for each rank"), ({"slow": ["x"]}, "option slow='x' must be a whole number"),
    ({"schedule": "fifi"}, "nearest: fifo"),
])
def test_emulator_options(options, match) -> None:
    with pytest.raises(UsageError, match=match):
        LocalWorld(1, "emulator", **options)


def test_a_config_that_is_none() -> None:
    with pytest.raises(UsageError, match="config is a dict; it must be a KernelConfig"):
        open_buffers(open_world(), config={"block_m": 64})


@pytest.mark.parametrize("rank", [5, -3, "0", None, True])
def test_ranks_that_do_not_exist(rank) -> None:
    with pytest.raises(UsageError, match=r"there is no rank .*; this world has ranks 0\.\.1") as caught:
        _ = open_world()[rank]
    assert caught.value.rule == "ranks-limit"


def test_a_world_can_be_walked_through() -> None:
    world = open_world(3)
    assert [member.rank() for member in world] == [0, 1, 2] and world[-1] is world[2]


def test_a_fault_must_be_reset_on_every_rank() -> None:
    broken = []

    def script(backend, params, grid):
        if params.rank == 1 and not broken:
            broken.append(params.rank)
            backend.raise_fault(1, code=1, wait=2, index=0, observed=0, expected=1, waited_ns=2 * 10**9)

    world = open_world(2, script)
    bufs = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))

    def call() -> None:
        for buf in bufs:
            fill(buf, 2, 1.0)
            fp8_mega_moe(output(), *weights, buf)

    call()
    with pytest.raises(LaunchFault):
        world.synchronize()
    for done in range(2):
        with pytest.raises(LaunchFault, match="reset the buffer on every rank before the next launch"):
            call()
        assert [world.pending(rank) for rank in range(2)] == [0, 0]
        bufs[done].reset()
    call()
    world.synchronize()


def test_a_group_on_a_machine_without_a_gpu(tmp_path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a process that sees no GPU")
    script = f"""
import torch.distributed as dist
from megamoe_cli.api import get_symm_buffer_for_sm90_mega_moe
from megamoe_cli.errors import EnvironmentUnfit
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
try:
    get_symm_buffer_for_sm90_mega_moe(dist.group.WORLD, {E}, 128, {K}, {H}, {I})
except EnvironmentUnfit as error:
    print(error, "|", error.hint)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"})
    assert "this process sees no CUDA GPU" in done.stdout and "LocalWorld" in done.stdout, done.stderr
    assert "AssertionError" not in done.stdout
