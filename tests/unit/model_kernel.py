"""A model of the kernel in plain torch that works on raw memory through KernelParams alone, as the device does: it
reads peers' buffers and writes their combine slots through ``peer_base``. For harness tests without a device.

``launch(params, phase, config)`` is a generator that yields where the kernel has an all-rank barrier; whoever drives
it makes that a barrier (in lockstep within one process, or over the control plane between processes).
"""

from __future__ import annotations

import ctypes

import torch

from megamoe_cli import abi, layout
from megamoe_cli.backends.base import Backend, Copy, Fill, Kernel, Launch, RunResult, check_program
from megamoe_cli.config import resolve
from megamoe_cli.shapes import Shape
from megamoe_cli.weights import deinterleave_gate_up, untile_weights

PHASES = ("stub", "dispatch", "l1", "l2", "combine")


def at(address, dtype, *shape):
    """Memory at ``address`` as a tensor."""
    count = 1
    for extent in shape:
        count *= extent
    size = count * torch.empty(0, dtype=dtype).element_size()
    if not size:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


class Buffer:
    """A rank's symmetric buffer, from its base address and the launch's own region offsets."""

    def __init__(self, params, rank):
        self.base, self.offset = params.peer_base[rank], dict(zip(layout.REGIONS, params.region))
        self.params = params

    def __call__(self, region, dtype, *shape, bank_bytes=0):
        return at(self.base + self.offset[region] + bank_bytes, dtype, *shape)


def launch(p, phase, block_m=128, damage=None):
    """One rank's launch. ``damage(params, region name -> tensor)`` may spoil what is in memory once all ranks have
    written their slots."""
    index, r, ranks = PHASES.index(phase), p.rank, p.num_ranks
    h, i, e, k, c, pool = p.hidden, p.intermediate, p.num_experts, p.topk, p.capacity, p.pool_rows
    local = e // ranks
    mine = Buffer(p, r)
    control = mine("control", torch.int32, 256)
    bank = int(control[0]) & 1
    yield  # everyone has entered: inputs are there
    if phase == "stub":
        shape = Shape(h, i, e, k)
        plan = layout.Layout(shape, ranks, c)
        words = [*plan.offsets, abi.ABI_VERSION, abi.PARAMS_BYTES, pool, plan.total_bytes, p.smem_bytes, p.smem_bytes, 0, p.reserved[0]]
        at(p.report, torch.int64, len(words)).copy_(torch.tensor(words))
    if index >= 1:
        counts = mine("recv_count_sum", torch.int32, local)
        meta, acts = mine("metadata", torch.int32, pool, 3), mine("l1_acts", torch.uint8, pool, h)
        acts_sf = mine("l1_acts_sf", torch.float32, h // 128, pool)
        weight = mine("l1_topk_weights", torch.float32, pool)
        arrival = mine("l1_arrival", torch.int32, pool // 16, bank_bytes=bank * pool // 16 * 4)
        arrival.zero_()
        peers = [Buffer(p, s) for s in range(ranks)]
        # Each rank's token count is its own business; rows past it hold -1 (poison) and name no expert.
        ids = [peer("topk_idx", torch.int64, c, k) for peer in peers]
        segments, base = [], 0
        for expert in range(local):
            row = base
            for s in [(r + j) % ranks for j in range(ranks)]:
                for token, slot in (ids[s] == r * local + expert).nonzero().tolist():
                    meta[row] = torch.tensor([s, token, slot], dtype=torch.int32)
                    acts[row] = peers[s]("x", torch.uint8, c, h)[token]
                    acts_sf[:, row] = peers[s]("x_sf", torch.float32, c, h // 128)[token]
                    weight[row] = peers[s]("topk_weights", torch.float32, c, k)[token, slot]
                    arrival[row // block_m] += 1
                    row += 1
            counts[expert] = row - base
            segments.append(slice(base, row))
            base += -(-(row - base) // 128) * 128
        if p.stats:
            at(p.stats, torch.int32, local).add_(counts)
    if index >= 2:
        w13 = deinterleave_gate_up(untile_weights(at(p.w13, torch.float8_e4m3fn, local, i // 128, h // 128, 256, 128), 2 * i))
        w13_sf = at(p.w13_sf, torch.float32, local, 2 * i // 128, h // 128)
        l2_acts, l2_sf = mine("l2_acts", torch.uint8, pool, i), mine("l2_acts_sf", torch.float32, i // 128, pool)
        for expert, rows in enumerate(segments):
            if rows.stop == rows.start:
                continue
            acc = _gemm(acts[rows].view(torch.float8_e4m3fn), acts_sf[:, rows].T, w13[expert], w13_sf[expert])
            if p.l1_raw:
                at(p.l1_raw, torch.float32, pool, 2 * i)[rows] = acc
            g, u = acc[:, :i], acc[:, i:]
            if p.flags & abi.ParamFlags.HAS_CLAMP:
                g, u = g.clamp(max=p.clamp), u.clamp(-p.clamp, p.clamp)
            a = g * torch.sigmoid(g) * u * weight[rows][:, None]
            groups = a.view(len(a), i // 128, 128)
            s = groups.nan_to_num(0.0, posinf=torch.inf, neginf=-torch.inf).abs().amax(2).clamp_min(1e-10) / 448
            codes = (groups / s[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
            l2_acts[rows], l2_sf[:, rows] = codes.view(len(a), i).view(torch.uint8), s.T
    if index >= 3:
        w2 = untile_weights(at(p.w2, torch.float8_e4m3fn, local, -(-h // 256), i // 128, 256, 128), h)
        w2_sf = at(p.w2_sf, torch.float32, local, h // 128, i // 128)
        for expert, rows in enumerate(segments):
            if rows.stop > rows.start:
                out = _gemm(l2_acts[rows].view(torch.float8_e4m3fn), l2_sf[:, rows].T, w2[expert], w2_sf[expert]).bfloat16()
                for value, (s, token, slot) in zip(out, meta[rows].tolist()):
                    peers[s]("combine", torch.bfloat16, k, c, h)[slot, token] = value
    yield  # every combine slot is written
    if damage:
        damage(p, mine)
    if index >= 4 and p.num_tokens:
        y, combine = at(p.y, torch.bfloat16, p.num_tokens, h), mine("combine", torch.bfloat16, k, c, h)
        total = torch.zeros(p.num_tokens, h)
        own = mine("topk_idx", torch.int64, c, k)[: p.num_tokens]
        for slot in range(k):
            total = torch.where((own[:, slot] >= 0)[:, None], total + combine[slot, : p.num_tokens].float(), total)
        y.copy_(total)
    control[0] += 1
    yield  # nobody starts the next launch before all are here


def _gemm(a, sa, w, sb):
    acc = torch.zeros(a.shape[0], w.shape[0])
    for b in range(a.shape[1] // 128):
        cols = slice(128 * b, 128 * b + 128)
        acc += (a[:, cols].float() @ w[:, cols].float().T) * sa[:, b, None] * sb[:, b].repeat_interleave(128)
    return acc


def built_kernel(config, phase, shape, ranks):
    """A Kernel that names a variant without a binary."""
    from pathlib import Path

    config = resolve(config, shape, ranks)
    return Kernel(config, phase, layout.smem_bytes(config, shape, ranks), Path(f"model-{config.name()}"))


class ModelBackend(Backend):
    """All ranks in this process, on the CPU. ``damage`` spoils launches, ``fail`` raises inside ``run``."""

    name = "emulator"

    def __init__(self, ranks, damage=None, fail=None, faults=None, diagnostics=None):
        self.ranks, self.local_ranks, self.where = ranks, tuple(range(ranks)), f"model({ranks})"
        self.max_ctas_per_rank, self.closed = 4, 0
        self.damage, self.fail, self.faults, self.diagnostics = damage, fail, faults or {}, diagnostics or []
        self._parts, self._kept = {}, []
        self._records = torch.zeros(ranks * abi.FAULT_BYTES, dtype=torch.uint8)

    def alloc(self, rank, nbytes, *, symmetric, name):
        raw = torch.zeros(nbytes + 1024, dtype=torch.uint8)
        tensor = raw[-raw.data_ptr() % 1024 :][:nbytes]
        self._kept.append(raw)
        if symmetric:
            self._parts.setdefault(name, {})[rank] = tensor
        return tensor

    def peer_addresses(self, rank, name):
        return [self._parts[name][r].data_ptr() for r in range(self.ranks)]

    def fault_address(self, rank):
        return self._records.data_ptr() + rank * abi.FAULT_BYTES

    def adopt(self, rank, tensor, *, name):
        self._kept.append(tensor.contiguous())
        return self._kept[-1]

    def encode_tensor_map(self, address, rows, cols, box_rows, box_cols):
        return abi.pack_tensor_map_image(address, rows, cols, cols, box_rows, box_cols)

    def load(self, config, phase, shape):
        return built_kernel(config, phase, shape, self.ranks)

    def run(self, program, timeout_s):
        check_program(self, program)
        if self.fail:
            raise self.fail
        queues = [list(ops) for ops in program.ops]
        while any(queues):
            running = []
            for queue in queues:
                while queue and not isinstance(queue[0], Launch):
                    apply(queue.pop(0))
                if queue:
                    running.append(queue.pop(0))
            steps = [launch(with_grid(op), op.kernel.phase, op.kernel.config.block_m, self.damage) for op in running]
            while steps:
                steps = [s for s in steps if next(s, StopIteration) is not StopIteration]
        return RunResult(faults=dict(self.faults), diagnostics=list(self.diagnostics))

    def close(self):
        self.closed += 1


def apply(op):
    if isinstance(op, Copy):
        ctypes.memmove(op.dst.data_ptr(), op.src.data_ptr(), op.nbytes)
    else:
        assert isinstance(op, Fill)
        ctypes.memset(op.dst.data_ptr(), op.byte, op.nbytes)


def with_grid(op):
    """The parameters, with the grid where the stub's report finds it (a device would ask its hardware)."""
    params = abi.KernelParams.from_buffer_copy(op.params)
    params.reserved[0] = op.grid
    return params
