"""The public host API: sizes, views, weight transform, what it refuses, and what a call means when several are in flight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import profile

from megamoe_cli import api
from megamoe_cli.api import (
    LocalWorld, fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, get_symm_buffer_size_for_sm90_mega_moe,
    get_token_alignment_for_sm90_mega_moe, transform_weights_for_mega_moe_sm90,
)  # fmt: skip
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import LaunchFault, UsageError, WrongResult
from megamoe_cli.layout import Layout
from megamoe_cli.shapes import Shape
from megamoe_cli.weights import deinterleave_gate_up, tile_weights, untile_weights
from tests.api.scripted import ScriptedBackend

H, I, E, K, C = 256, 128, 8, 2, 128
F8 = torch.float8_e4m3fn


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(0, 120, shape, dtype=torch.uint8, generator=gen).view(F8)


def natural(local: int, seed: int = 0):
    return ((codes(local, 2 * I, H, seed=seed), torch.ones(local, 2 * I // 128, H // 128)),
            (codes(local, H, I, seed=seed + 1), torch.ones(local, H // 128, I // 128)))  # fmt: skip


def open_world(ranks: int = 2, script=None) -> LocalWorld:
    return LocalWorld(ranks, ScriptedBackend(ranks, script))


def open_buffers(world: LocalWorld, capacity: int = C, **options):
    return [get_symm_buffer_for_sm90_mega_moe(rank, E, capacity, K, H, I, **options) for rank in world.members]


def fill(buf, n: int, value: float) -> None:
    buf.x[:n].copy_(codes(n, H))
    buf.x_sf[:n].fill_(value)
    buf.topk_idx[:n].fill_(0)
    buf.topk_weights[:n].fill_(1)


def test_alignment_and_size() -> None:
    assert get_token_alignment_for_sm90_mega_moe() == 128
    size = get_symm_buffer_size_for_sm90_mega_moe(2, E, 100, K, H, I)
    assert size == Layout(Shape(H, I, E, K), 2, 128).total_bytes == get_symm_buffer_size_for_sm90_mega_moe(2, E, 128, K, H, I)
    assert size < get_symm_buffer_size_for_sm90_mega_moe(2, E, 129, K, H, I)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_views(ranks: int) -> None:
    world = open_world(ranks)
    for rank, buf in enumerate(open_buffers(world, capacity=100)):
        p = buf.layout.pool_rows
        want = {
            "x": (F8, (128, H), (H, 1)), "x_sf": (torch.float32, (128, 2), (2, 1)),
            "topk_idx": (torch.int64, (128, K), (K, 1)), "topk_weights": (torch.float32, (128, K), (K, 1)),
            "l1_acts": (F8, (p, H), (H, 1)), "l1_acts_sf": (torch.float32, (p, 2), (1, p)),
            "l2_acts": (F8, (p, I), (I, 1)), "l2_acts_sf": (torch.float32, (p, 1), (1, p)),
            "l1_topk_weights": (torch.float32, (p,), (1,)), "expert_recv_count_sum": (torch.int32, (E // ranks,), (1,)),
            "l1_arrival_count": (torch.int32, (p // 16,), (1,)), "token_src_metadata": (torch.int32, (p, 3), (3, 1)),
        }  # fmt: skip
        spans = []
        for name, (dtype, shape, strides) in want.items():
            view = getattr(buf, name)
            assert (view.dtype, tuple(view.shape), view.stride()) == (dtype, shape, strides), name
            start = view.data_ptr() - buf.buffer.data_ptr()
            spans.append((start, start + view.numel() * view.element_size()))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:])) and spans[-1][1] <= buf.num_bytes
        assert buf.num_max_tokens_per_rank == 128 and buf.rank == rank and buf.group.size() == ranks


def test_views_share_the_buffer() -> None:
    buf = open_buffers(open_world())[1]
    buf.x_sf[3, 1] = 7.5
    at = buf.layout.region_offset["x_sf"] + (3 * 2 + 1) * 4
    assert buf.buffer[at : at + 4].view(torch.float32).item() == 7.5


def test_stub_buffers_have_no_dispatch_views() -> None:
    buf = open_buffers(open_world(), phase="stub")[0]
    assert buf.x.shape == (C, H)
    with pytest.raises(UsageError, match="exists from the dispatch phase on"):
        _ = buf.token_src_metadata
    with pytest.raises(AttributeError, match="no attribute 'l3_acts'"):
        _ = buf.l3_acts


@settings(max_examples=20, deadline=None)
@given(local=st.integers(1, 3), i=st.integers(1, 3), h=st.integers(1, 2), seed=st.integers(0, 99))
def test_weight_transform_round_trip(local: int, i: int, h: int, seed: int) -> None:
    w13, w2 = codes(local, 256 * i, 128 * h, seed=seed), codes(local, 128 * h, 128 * i, seed=seed)
    sf13, sf2 = torch.rand(local, 2 * i, h), torch.rand(local, h, i)
    (t13, t13_sf), (t2, t2_sf) = transform_weights_for_mega_moe_sm90((w13, sf13), (w2, sf2))
    assert t13_sf is sf13 and t2_sf is sf2
    assert t13.is_contiguous() and t13.shape == (local, i, h, 256, 128)
    assert t2.is_contiguous() and t2.shape == (local, -(-h // 2), i, 256, 128)
    assert torch.equal(untile_weights(t2, 128 * h).view(torch.uint8), w2.view(torch.uint8))
    assert h % 2 == 0 or not t2[:, -1, :, 128:].view(torch.uint8).any()
    t13 = untile_weights(t13, 256 * i)
    bytes_ = t13.view(torch.uint8)
    for row in range(256 * i):
        block, at = divmod(row, 16)
        source = 8 * block + at if at < 8 else 128 * i + 8 * block + at - 8
        assert torch.equal(bytes_[:, row], w13.view(torch.uint8)[:, source])
    assert torch.equal(deinterleave_gate_up(t13).view(torch.uint8), w13.view(torch.uint8))


def test_a_tile_is_what_the_tensor_core_reads() -> None:
    """Rows 256n... of columns 128k... lie together; in row r the 16-byte piece c lies at c ^ (r % 8)."""
    w = codes(2, 512, 384, seed=3)
    tiled, plain = tile_weights(w).view(torch.uint8), w.view(torch.uint8)
    for expert, n, k, row, piece in ((0, 0, 0, 0, 0), (1, 1, 2, 5, 3), (0, 1, 1, 255, 7), (1, 0, 2, 130, 6)):
        got = tiled[expert, n, k, row, 16 * (piece ^ row % 8) :][:16]
        assert torch.equal(got, plain[expert, 256 * n + row, 128 * k + 16 * piece :][:16])


@pytest.mark.parametrize(("experts", "rows", "columns"), [(1, 256, 128), (7, 384, 256), (129, 128, 128)])
def test_weights_are_cut_in_few_steps(experts: int, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many experts there are, in one copy or several, and wherever the bytes begin."""
    w = codes(experts, rows, columns, seed=5).view(torch.uint8)
    apart = torch.empty(w.numel() + 3, dtype=torch.uint8)[3:].view(w.shape).copy_(w)
    with profile() as steps:
        tiled = tile_weights(w)
    assert sum(event.count for event in steps.key_averages()) < 60
    assert torch.equal(untile_weights(tiled, rows), w) and torch.equal(tile_weights(apart), tiled)
    monkeypatch.setattr("megamoe_cli.weights._COPY_BYTES", 2 * 512 * columns)
    assert torch.equal(tile_weights(w), tiled)


def _changed(part: int, which: int, change) -> tuple:
    weights = [list(pair) for pair in natural(4)]
    weights[part][which] = change(weights[part][which])
    return tuple(tuple(pair) for pair in weights)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (_changed(0, 0, lambda w: w.view(torch.uint8)), "w13 is uint8; it must be float8_e4m3fn"),
        (_changed(0, 0, lambda w: w.float()), "w13 is float32"),
        (_changed(1, 0, lambda w: w.view(torch.int8)), "w2 is int8"),
        (_changed(0, 1, lambda s: s.to(torch.uint8)), "w13_sf is uint8; it must be float32"),
        (_changed(1, 1, lambda s: s.double()), "w2_sf is float64"),
        (_changed(0, 1, lambda s: s[:, :, :1]), "w13_sf has shape"),
        (_changed(1, 1, lambda s: s.transpose(1, 2).contiguous()), "w2_sf has shape"),
        (_changed(0, 0, lambda w: w[:, :, :96]), "hidden=96 is not a multiple of 128"),
        (_changed(1, 0, lambda w: w.transpose(1, 2)), "w2 has shape"),
        (_changed(0, 0, lambda w: codes(4, H, 2 * I).transpose(1, 2)), "w13 has stride"),
        (_changed(0, 0, lambda w: w[0]), "w13 has 2 dimensions"),
        ((natural(4)[0][0], natural(4)[1]), "must be a pair"),
    ],
)
def test_weight_transform_refuses(weights, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        transform_weights_for_mega_moe_sm90(*weights)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"hidden": 200}, "hidden=200.*multiple of 128"),
        ({"intermediate_hidden": 96}, "intermediate=96.*multiple of 128"),
        ({"num_experts": 9}, "experts=9"),
        ({"num_topk": 0}, "topk=0"),
        ({"num_topk": 9}, "topk=9 is outside"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank=0"),
        ({"num_max_tokens_per_rank": 8.0}, "must be an integer, got float 8.0"),
        ({"use_fp8_dispatch": False}, "e4m3 activations only"),
        ({"activation": "gelu"}, "activation 'gelu' is unknown.*swiglu"),
        ({"activation": None}, "activation must be a name"),
        ({"phase": "dispach"}, "unknown phase 'dispach'"),
        ({"config": KernelConfig(block_m=48)}, "block_m=48"),
        ({"config": KernelConfig(stages=8)}, "shared memory"),
    ],
)  # fmt: skip
def test_allocation_refuses(arguments: dict, text: str) -> None:
    given_ = {"num_experts": E, "num_max_tokens_per_rank": C, "num_topk": K, "hidden": H, "intermediate_hidden": I} | arguments
    with pytest.raises(UsageError, match=text):
        get_symm_buffer_for_sm90_mega_moe(open_world()[0], **given_)


def test_more_than_32_ranks() -> None:
    with pytest.raises(UsageError, match="ranks=33"):
        get_symm_buffer_size_for_sm90_mega_moe(33, 33, 8, 2, H, I)


def test_capacities_must_agree_even_where_rounding_hides_it() -> None:
    world = open_world()
    get_symm_buffer_for_sm90_mega_moe(world[0], E, 64, K, H, I)
    with pytest.raises(UsageError, match="capacity differs between ranks: 64 on rank 0, 128 on rank 1"):
        get_symm_buffer_for_sm90_mega_moe(world[1], E, 128, K, H, I)


def test_shapes_and_configs_must_agree() -> None:
    world = open_world()
    get_symm_buffer_for_sm90_mega_moe(world[0], E, 64, K, H, I)
    with pytest.raises(UsageError, match="shape 256x128x8x2 on rank 0, 512x128x8x2 on rank 1"):
        get_symm_buffer_for_sm90_mega_moe(world[1], E, 64, K, 512, I)
    with pytest.raises(UsageError, match="config .* on rank 1"):
        get_symm_buffer_for_sm90_mega_moe(world[1], E, 64, K, H, I, config=KernelConfig(block_m=64))


Y = torch.zeros(5, H, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"y": Y.float()}, "y is float32; it must be bfloat16"),
        ({"y": Y[:, :128]}, "y has shape"),
        ({"y": torch.zeros(H, 5, dtype=torch.bfloat16).t()}, "y has stride"),
        ({"y": torch.zeros(C + 1, H, dtype=torch.bfloat16)}, "129 tokens but the buffer's capacity is 128"),
        ({"y": torch.zeros(H, dtype=torch.bfloat16)}, "y must be a bfloat16 tensor"),
        ({"recipe": (1, 1, 128)}, r"recipe \(1, 1, 128\) is unknown; \(128, 128, 128\) and \(1, 128, 128\)"),
        ({"recipe": 128}, "recipe 128 is unknown"),
        ({"activation": "swigul"}, "activation 'swigul' is unknown"),
        ({"activation_clamp": -1.0}, "clamp -1.0 is not a finite number >= 0"),
        ({"activation_clamp": float("nan")}, "clamp nan"),
        ({"num_tokens_bound": 4}, "num_tokens_bound=4 is outside 5"),
        ({"num_tokens_bound": C + 1}, "num_tokens_bound=129 is outside"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(4, dtype=torch.int64)}, "recv_stats is int64; it must be int32"),
        ({"cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)}, r"recv_stats has shape \(3,\)"),
        ({"l1_weights": natural(4)[0]}, "w13 is in natural layout; pass what transform_weights_for_mega_moe_sm90 returned"),
        ({"l1_weights": transform_weights_for_mega_moe_sm90(*natural(4))[1]}, "w13 has shape"),
        ({"l2_weights": transform_weights_for_mega_moe_sm90(*natural(2))[1]}, "w2 has shape"),
        ({"sym_buffer": None}, "sym_buffer is a NoneType"),
    ],
)
def test_launch_refuses(changes: dict, text: str) -> None:
    world = open_world()
    buf = open_buffers(world)[0]
    l1, l2 = transform_weights_for_mega_moe_sm90(*natural(4))
    arguments = {"y": Y, "l1_weights": l1, "l2_weights": l2, "sym_buffer": buf} | changes
    with pytest.raises(UsageError, match=text):
        fp8_mega_moe(**arguments)
    assert world.pending(0) == 0 and world.backend.launched == []


def test_calls_in_flight_keep_their_own_inputs() -> None:
    world = open_world(2)
    buffers = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    ys = {}
    for launch in range(3):
        for rank, buf in enumerate(buffers):
            n = 3 + launch + rank
            fill(buf, n, value=10 * launch + rank + 1)
            ys[launch, rank] = torch.full((n, H), -1, dtype=torch.bfloat16)
            fp8_mega_moe(ys[launch, rank], *weights, buf)
    assert all(bool((y == -1).all()) for y in ys.values()), "nothing runs before synchronize"
    world.synchronize()
    for (launch, rank), y in ys.items():
        assert bool((y == 10 * launch + rank + 1).all()), (launch, rank)
    # Three launches: the last had epoch 2, bank 0.
    assert buffers[0].l1_arrival_count.tolist() == [102] * buffers[0].l1_arrival_count.numel()
    fill(buffers[0], 1, 5), fill(buffers[1], 1, 5)
    for buf in buffers:
        fp8_mega_moe(torch.zeros(1, H, dtype=torch.bfloat16), *weights, buf)
    world.synchronize()
    assert set(buffers[1].l1_arrival_count.tolist()) == {103}


def test_staging_memory_is_reused() -> None:
    world = open_world(1)
    buf = open_buffers(world)[0]
    weights = transform_weights_for_mega_moe_sm90(*natural(8))
    seen = []
    for _ in range(4):
        fill(buf, 7, 1)
        fp8_mega_moe(torch.zeros(7, H, dtype=torch.bfloat16), *weights, buf)
        world.synchronize()
        seen.append(world.backend.allocations)
    assert seen[1] == seen[2] == seen[3]


def test_zero_tokens_and_statistics() -> None:
    world = open_world(2)
    buffers = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    stats = [torch.full((4,), 5, dtype=torch.int32) for _ in buffers]
    for n in (0, 6):
        for rank, buf in enumerate(buffers):
            fill(buf, n, 2)
            fp8_mega_moe(torch.zeros(n, H, dtype=torch.bfloat16), *weights, buf, stats[rank])
    world.synchronize()
    assert [s.tolist() for s in stats] == [[11] * 4] * 2


def test_ranks_must_be_called_equally_often() -> None:
    world = open_world(2)
    buffers = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    fp8_mega_moe(Y.clone(), *weights, buffers[0])
    with pytest.raises(UsageError, match="unequally often .rank 0: 1, rank 1: 0"):
        world.synchronize()
    assert world.backend.launched == []


@pytest.mark.parametrize(
    ("name", "values"), [("activation_clamp", (None, 2.0)), ("num_tokens_bound", (64, 128)), ("fast_math", (True, False))])  # fmt: skip
def test_ranks_must_agree_on_options(name: str, values: tuple) -> None:
    world = open_world(2)
    buffers = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    for buf, value in zip(buffers, values):
        fp8_mega_moe(Y.clone(), *weights, buf, **{name: value})
    with pytest.raises(UsageError, match=f"{name} differs between ranks: {values[0]} on rank 0, {values[1]} on rank 1"):
        world.synchronize()


def test_a_device_fault_is_raised_and_reset_clears_it() -> None:
    def script(backend, p, grid) -> None:
        if p.rank == 1:
            backend.raise_fault(1, code=1, wait=2, index=0, observed=0, expected=1, waited_ns=2 * 10**9)

    world = open_world(2, script)
    buffers = open_buffers(world)
    weights = transform_weights_for_mega_moe_sm90(*natural(4))
    for buf in buffers:
        fill(buf, 5, 1)
        fp8_mega_moe(Y.clone(), *weights, buf)
    with pytest.raises(UsageError, match="synchronize its world before the reset"):
        buffers[0].reset()
    with pytest.raises(LaunchFault, match="waited 2 s for the expert counts of rank 0: saw 0, expected 1") as caught:
        world.synchronize()
    assert set(caught.value.records) == {1}
    with pytest.raises(LaunchFault, match="reset the buffer"):
        buffers[1].check()
    for buf in buffers:
        buf.reset()
        buf.check()
        assert not buf.buffer.any()


def test_emulator_findings_are_raised() -> None:
    world = open_world(1)
    world.backend.diagnostics.append({"kind": "race", "text": "two warps write one word"})
    buf = open_buffers(world)[0]
    fp8_mega_moe(Y.clone(), *transform_weights_for_mega_moe_sm90(*natural(8)), buf)
    with pytest.raises(WrongResult, match="two warps write one word"):
        world.synchronize()


def test_weights_are_placed_once_until_they_change() -> None:
    world = open_world(1)
    adopted = []
    world.backend.adopt = lambda rank, tensor, *, name: adopted.append(name) or tensor.clone()
    buf = open_buffers(world)[0]
    l1, l2 = transform_weights_for_mega_moe_sm90(*natural(8))
    for expected in (4, 4, 8):
        fp8_mega_moe(Y.clone(), l1, l2, buf)
        fp8_mega_moe(Y.clone(), l1, l2, buf)
        if expected == 8:
            l1.scales.mul_(2)
        world.synchronize()
        assert len(adopted) == expected


def test_recipes_are_one_contract() -> None:
    assert set(api.RECIPES) == {(128, 128, 128), (1, 128, 128)}
    world = open_world(1)
    buf = open_buffers(world)[0]
    weights = transform_weights_for_mega_moe_sm90(*natural(8))
    for recipe in api.RECIPES:
        fp8_mega_moe(Y.clone(), *weights, buf, recipe=recipe)
    world.synchronize()
    assert len(world.backend.launched) == 2
