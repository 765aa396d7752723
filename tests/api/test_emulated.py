"""The public API end to end on the emulator: the real kernel source, judged by the oracle."""

from __future__ import annotations

import pytest
import torch

from megamoe_cli import inputs, phases
from megamoe_cli.abi import ABI_VERSION, PARAMS_BYTES
from megamoe_cli.api import (
    LocalWorld, Session, fp8_mega_moe, get_symm_buffer_for_sm90_mega_moe, get_symm_buffer_size_for_sm90_mega_moe,
    transform_weights_for_mega_moe_sm90,
)  # fmt: skip
from megamoe_cli.backends.emulator import EmulatorBackend, warp_roles
from megamoe_cli.buffers import LaunchOptions
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import LaunchFault, TimedOut, UsageError
from megamoe_cli.oracle.casedata import PhaseOutput
from megamoe_cli.shapes import Problem, Shape

SHAPE = Shape(256, 256, 4, 2)


def load(buf, data) -> None:
    n = data.tokens
    for name in ("x", "x_sf", "topk_idx", "topk_weights"):
        getattr(buf, name)[:n].copy_(getattr(data, name))


def assert_close(y: torch.Tensor, case, rank: int) -> None:
    """Relative L2 of every row within the tolerance for I < 1024."""
    want = reference_y(case, rank)
    assert y.shape == want.shape
    scale = want.norm(dim=1).clamp_min(1e-30)
    assert bool(((y.double() - want).norm(dim=1) / scale <= 3e-2).all())


def reference_y(case, rank: int) -> torch.Tensor:
    """Row by row in float64, from the same bytes; written here again so that nothing is judged by itself."""
    data, shape, local = case.inputs[rank], case.problem.shape, case.problem.experts_per_rank
    out = torch.zeros(data.tokens, shape.hidden, dtype=torch.float64)
    x = dequantized(data.x, data.x_sf, 1)
    for token in range(data.tokens):
        for slot in range(shape.topk):
            expert = int(data.topk_idx[token, slot])
            if expert < 0:
                continue
            w, e = case.weights[expert // local], expert % local
            gate_up = dequantized(w.w13[e], w.w13_sf[e], 128) @ x[token]
            gate, up = gate_up[: shape.intermediate], gate_up[shape.intermediate :]
            if case.clamp is not None:
                gate, up = gate.clamp(max=case.clamp), up.clamp(-case.clamp, case.clamp)
            acts = torch.nn.functional.silu(gate) * up * float(data.topk_weights[token, slot])
            codes, scales = inputs.quantize_rows(acts.float()[None])
            out[token] += dequantized(w.w2[e], w.w2_sf[e], 128) @ dequantized(codes, scales, 1)[0]
    return out


def dequantized(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    return codes.double() * scales.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("clamp", [None, 0.5])
def test_three_calls_in_flight(clamp: float | None) -> None:
    cases = [inputs.make_case(Problem(SHAPE, 2, counts, 128), seed=seed) for seed, counts in enumerate([(5, 3), (0, 9), (17, 1)])]
    for case in cases:
        case.clamp = clamp
    with LocalWorld(2, "emulator", seed=3, schedule="random", completion="random") as world:
        buffers = [get_symm_buffer_for_sm90_mega_moe(rank, 4, 100, 2, 256, 256) for rank in world.members]
        assert all(b.num_bytes == get_symm_buffer_size_for_sm90_mega_moe(2, 4, 100, 2, 256, 256) for b in buffers)
        weights = [transform_weights_for_mega_moe_sm90((w.w13, w.w13_sf), (w.w2, w.w2_sf)) for w in cases[0].weights]
        stats = [torch.zeros(2, dtype=torch.int32) for _ in buffers]
        ys = []
        for case in cases:
            case.weights = cases[0].weights
            for rank, buf in enumerate(buffers):
                load(buf, case.inputs[rank])
                ys.append(torch.full((case.inputs[rank].tokens, 256), torch.nan, dtype=torch.bfloat16))
                fp8_mega_moe(ys[-1], *weights[rank], buf, stats[rank], activation_clamp=clamp)
        result = world.synchronize(timeout_s=100)
        assert not result.launch_ms, "emulator times are not performance"
        for n, case in enumerate(cases):
            for rank in range(2):
                assert_close(ys[2 * n + rank], case, rank)
        received = torch.stack([torch.stack([(d.topk_idx == e).sum() for e in range(4)]) for c in cases for d in c.inputs]).sum(0)
        assert torch.cat(stats).tolist() == received.tolist()
        last = torch.stack([(torch.cat([d.topk_idx for d in cases[-1].inputs]) == e).sum() for e in range(4)])
        assert torch.cat([b.expert_recv_count_sum for b in buffers]).tolist() == last.tolist()
        arrived = [int(b.l1_arrival_count.sum()) for b in buffers]
        assert arrived == [int(last[:2].sum()), int(last[2:].sum())]


def test_the_world_goes_on_after_synchronize() -> None:
    case = inputs.make_case(Problem(SHAPE, 1, (4,), 128), seed=5)
    w = case.weights[0]
    with LocalWorld(1, "emulator") as world:
        buf = get_symm_buffer_for_sm90_mega_moe(world[0], 4, 128, 2, 256, 256)
        weights = transform_weights_for_mega_moe_sm90((w.w13, w.w13_sf), (w.w2, w.w2_sf))
        load(buf, case.inputs[0])
        rounds = []
        for _ in range(3):
            y = torch.zeros(4, 256, dtype=torch.bfloat16)
            fp8_mega_moe(y, *weights, buf)
            world.synchronize()
            rounds.append(y)
        assert torch.equal(rounds[0], rounds[1]) and torch.equal(rounds[0], rounds[2]), "repeatable bit for bit"
        assert_close(rounds[0], case, 0)


def test_a_bad_id_is_named_and_only_its_slot_is_dropped() -> None:
    case = inputs.make_case(Problem(SHAPE, 1, (4,), 128), seed=6)
    w, data = case.weights[0], case.inputs[0]
    data.topk_idx[2, 1] = 4
    with LocalWorld(1, "emulator") as world:
        buf = get_symm_buffer_for_sm90_mega_moe(world[0], 4, 128, 2, 256, 256)
        load(buf, data)
        y = torch.zeros(4, 256, dtype=torch.bfloat16)
        fp8_mega_moe(y, *transform_weights_for_mega_moe_sm90((w.w13, w.w13_sf), (w.w2, w.w2_sf)), buf)
        with pytest.raises(LaunchFault, match="token 2 slot 1 names expert 4, but experts are 0..3"):
            world.synchronize()
        buf.reset()
    data.topk_idx[2, 1] = -1
    assert_close(y, case, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stub_agrees_with_the_host(ranks: int) -> None:
    """Launch ABI, region offsets, pool rows and shared memory, as the device states them, on every rank."""
    problem = Problem(SHAPE, ranks, (3,) * ranks, 40)
    case = inputs.make_case(problem, seed=1)
    with EmulatorBackend(ranks) as backend:
        session = Session(backend, problem, KernelConfig(), "stub")
        for rank in range(ranks):
            session.set_weights(rank, case.weights[rank])
            for launch in range(2):
                session.stage(launch, rank, case.inputs[rank])
        session.launch(0), session.launch(1)
        result = session.run(60, snapshot="all")
        assert not result.run.diagnostics and not result.faults
        for launch in range(2):
            meta = {"smem_bytes": session.kernel.smem_bytes, "grid": session.grid}
            got = PhaseOutput(result.outputs(launch), combine_poisoned=True, meta=meta)
            assert phases.check_upto("stub", case, got, {}) == []
            for out in result.outputs(launch):
                words = out["stub_report"].tolist()
                assert tuple(words[: len(session.layout.offsets)]) == session.layout.offsets
                assert words[len(session.layout.offsets) :][:5] == [
                    ABI_VERSION, PARAMS_BYTES, session.layout.pool_rows, session.layout.total_bytes, session.kernel.smem_bytes]  # fmt: skip


def test_a_missing_peer_ends_in_a_readable_fault() -> None:
    """Rank 1 counts its launches one ahead, so what rank 0 waits for never comes."""
    problem = Problem(SHAPE, 2, (3, 3), 40)
    case = inputs.make_case(problem, seed=1)
    with EmulatorBackend(2) as backend:
        session = Session(backend, problem, KernelConfig(), "combine", options=LaunchOptions(timeout_ns=1_000_000))
        for rank in range(2):
            session.set_weights(rank, case.weights[rank])
            session.stage(0, rank, case.inputs[rank])
        session.launch(0)
        session.buffers[1].view("control")[0] = 7
        result = session.run(60)
        with pytest.raises(LaunchFault, match=r"rank \d, CTA \d, warp \d+.*: waited [\d.]+ m?s for "):
            result.raise_for_faults()
        deadlock = result.run.diagnostics[0]
        # What was really missing: the flag word of rank 1 in rank 0's buffer, which reads 8.
        assert deadlock["kind"] == "deadlock" and "count_flag of rank 0 + 4 = 8 at" in deadlock["text"]
        session.reset()
        session.launch(0)
        again = session.run(60)
        assert not again.faults
        for rank in range(2):
            assert_close(again.outputs()[rank]["y"][:3], case, rank)


def test_a_run_that_takes_too_long_is_stopped() -> None:
    problem = Problem(SHAPE, 1, (64,), 64)
    case = inputs.make_case(problem, seed=1)
    with EmulatorBackend(1) as backend:
        session = Session(backend, problem, KernelConfig(), "combine")
        session.set_weights(0, case.weights[0])
        session.stage(0, 0, case.inputs[0])
        for _ in range(50):
            session.launch(0)
        with pytest.raises(TimedOut, match="not done within 0.05 s"):
            session.run(0.05)


def test_memory_of_dropped_tensors_is_no_longer_the_emulators() -> None:
    with EmulatorBackend(2) as backend:
        before = len(backend._blocks)
        kept = backend.alloc(0, 100, symmetric=False, name="kept")[10:20]
        backend.alloc(0, 100, symmetric=False, name="dropped")
        alive = [block.name for block in backend._blocks[before:] if block.array() is not None]
        assert alive == ["kept"] and kept.numel() == 10
        with pytest.raises(UsageError, match="rank 1 has no symmetric allocation"):
            first = backend.alloc(0, 8, symmetric=True, name="s")
            backend.peer_addresses(0, "s")
        assert first.data_ptr() % 256 == 0


def test_reports_name_the_warp_role() -> None:
    names = warp_roles(KernelConfig())
    assert len(names) == 12 and names[0] == "dispatch 0" and names[3] == "tma 1" and names[-1] == "math1 3"
