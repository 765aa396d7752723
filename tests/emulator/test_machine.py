"""Threads, warp collectives, barriers, registers, time: what a CTA does without touching global data much."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Run, build

WARP = """
struct Params { u64 out; };
MM_DEVICE void body(const Params& p) {
    u32* out = reinterpret_cast<u32*>(p.out) + 16 * (hw::cta_idx() * 64 + hw::thread_idx());
    const u32 lane = hw::lane_idx();
    out[0] = hw::thread_idx();
    out[1] = hw::cta_idx() * 1000 + hw::num_ctas();
    out[2] = hw::warp_idx() * 100 + lane;
    out[3] = hw::shfl(lane * 3, (lane + 5) % 32);
    out[4] = hw::shfl_xor(lane * 7, 9);
    out[5] = hw::shfl_up(lane, 3);
    out[6] = hw::ballot(lane % 3 == 0);
    out[7] = hw::all(lane < 32) * 2 + hw::any(lane == 40);
    out[8] = hw::elect_one();
    out[9] = hw::f32_to_bits(hw::shfl_xor_f32(static_cast<f32>(lane), 1));
    if (lane < 7) hw::warp_sync(0x7f);
    out[10] = hw::byte_perm(0x33221100, 0x77665544, 0x7531);
    out[11] = hw::cvt_bf16x2(1.0f, -2.5f);
    out[12] = hw::dynamic_smem_bytes();
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


@pytest.mark.parametrize("options", [{}, {"schedule": "random", "seed": 3}, {"schedule": "pct", "seed": 9}])
def test_identity_and_warp_collectives(options: dict) -> None:
    out = np.zeros((2, 64, 16), np.uint32)
    run = Run()
    run.launch(build(WARP), run.region(out), grid=2, smem=4096)
    assert str(run.run(**options)) == ""
    lane = np.arange(64) % 32
    for cta in range(2):
        got = out[cta].T
        assert (got[0] == np.arange(64)).all() and (got[1] == cta * 1000 + 2).all()
        assert (got[2] == np.arange(64) // 32 * 100 + lane).all()
        assert (got[3] == (lane + 5) % 32 * 3).all() and (got[4] == (lane ^ 9) * 7).all()
        assert (got[5] == np.where(lane >= 3, lane - 3, lane)).all()
        assert (got[6] == sum(1 << i for i in range(0, 32, 3))).all() and (got[7] == 2).all()
        assert got[8, :32].sum() == 1 and got[8, 32:].sum() == 1
        assert (got[9].view(np.float32) == (lane ^ 1)).all()
        assert (got[10] == 0x77553311).all() and (got[11] == (0xC020 << 16 | 0x3F80)).all() and (got[12] == 4096).all()
