"""TMA, bulk copies, mbarriers, clusters and WGMMA against numpy, at every completion policy."""

from __future__ import annotations

import numpy as np
import pytest

from .harness import Run, build, e4m3_values, random_e4m3, tensor_map

POLICIES = [
    {},
    {"completion": "lazy"},
    {"completion": "random", "schedule": "random", "seed": 5},
    {"completion": "lazy", "schedule": "pct", "seed": 6},
]

# The kernel undoes the 128-byte swizzle by hand, so that a mistake shared by TMA and WGMMA would show.
SWIZZLE = """
struct Params { TensorMap map; u64 out; i64 c0, c1; };
MM_DEVICE void body(const Params& p) {
    u8* tile = hw::dynamic_smem();
    u64* bar = reinterpret_cast<u64*>(tile + 64 * 128);
    const u32 t = hw::thread_idx();
    if (t == 0) {
        hw::mbarrier_init(bar, 1);
        hw::fence_mbarrier_init();
    }
    hw::cta_sync<64>();
    if (t == 0) {
        hw::mbarrier_arrive_expect_tx(bar, 64 * 128);
        hw::tma_load_2d(tile, &p.map, bar, static_cast<i32>(p.c0), static_cast<i32>(p.c1));
    }
    while (!hw::mbarrier_try_wait(bar, 0)) {}
    for (u32 chunk = 0; chunk < 8; ++chunk)
        hw::st_vec4(reinterpret_cast<u8*>(p.out) + t * 128 + chunk * 16, hw::lds_vec4(tile + t * 128 + ((chunk ^ (t % 8)) * 16)));
}
MM_KERNEL_ENTRY(mega_moe, 64, 1, Params, body)
"""


@pytest.mark.parametrize("options", POLICIES)
@pytest.mark.parametrize(("c0", "c1"), [(0, 0), (128, 7), (160, 100), (-32, -5), (1000, 0)])
def test_tma_box_swizzle_and_zero_fill(options: dict, c0: int, c1: int) -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (128, 256)).astype(np.uint8)
    out = np.zeros((64, 128), np.uint8)
    run = Run()
    words = tensor_map(run.region(source, name="source"), 128, 256, 64)
    run.launch(build(SWIZZLE), words, run.region(out, name="out"), c0, c1, smem=64 * 128 + 8)
    assert str(run.run(**options)) == ""
    padded = np.zeros((128 + 400, 256 + 2400), np.uint8)
    padded[200:328, 1200:1456] = source
    assert (out == padded[200 + c1:264 + c1, 1200 + c0:1328 + c0]).all()


WGMMA = """
struct Params { TensorMap a, b; u64 c, out; };
constexpr u32 kN = TILE_N;
MM_DEVICE void body(const Params& p) {
    u8* a = hw::dynamic_smem();
    u8* b = a + 64 * 128;
    u64* bar = reinterpret_cast<u64*>(b + kN * 128);
    const u32 t = hw::thread_idx(), warp = hw::warp_idx(), lane = hw::lane_idx();
    if (t == 0) {
        hw::mbarrier_init(bar, 1);
        hw::fence_mbarrier_init();
    }
    hw::cta_sync<128>();
    f32 d[kN / 2];
    for (u32 j = 0; j < kN / 8; ++j)
        for (u32 i = 0; i < 4; ++i)
            d[4 * j + i] = hw::ld_f32(reinterpret_cast<const f32*>(p.c) + (16 * warp + lane / 4 + 8 * (i / 2)) * kN + 8 * j + 2 * (lane % 4) + i % 2);
    for (u32 block = 0; block < 2; ++block) {
        if (warp == 0 && hw::elect_one()) {
            hw::mbarrier_arrive_expect_tx(bar, (64 + kN) * 128);
            hw::tma_load_2d(a, &p.a, bar, static_cast<i32>(block * 128), 0);
            hw::tma_load_2d(b, &p.b, bar, static_cast<i32>(block * 128), 0);
        }
        hw::warp_sync();
        while (!hw::mbarrier_try_wait(bar, block)) {}
        hw::wgmma_fence();
        for (u32 k = 0; k < 4; ++k) hw::wgmma_e4m3<kN>(d, hw::smem_descriptor(a) + 2 * k, hw::smem_descriptor(b) + 2 * k, ACCUMULATE || block + k > 0);
        hw::wgmma_commit();
        hw::wgmma_wait<0>(d);
        hw::bar_sync(1, 128);
    }
    for (u32 j = 0; j < kN / 8; ++j)
        for (u32 i = 0; i < 4; ++i)
            hw::st_f32(reinterpret_cast<f32*>(p.out) + (16 * warp + lane / 4 + 8 * (i / 2)) * kN + 8 * j + 2 * (lane % 4) + i % 2, d[4 * j + i]);
}
MM_KERNEL_ENTRY(mega_moe, 128, 1, Params, body)
"""


@pytest.mark.parametrize("n", [64, 128, 256])
@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize("options", POLICIES)
def test_wgmma_against_numpy(n: int, accumulate: int, options: dict) -> None:
    rng = np.random.default_rng(n)
    a, b = random_e4m3(rng, (64, 256)), random_e4m3(rng, (n, 256))
    a[3, 5] = 0x7F  # NaN stays in its row
    c, out = rng.standard_normal((64, n)).astype(np.float32), np.zeros((64, n), np.float32)
    run = Run()
    maps = tensor_map(run.region(a), 64, 256, 64) + tensor_map(run.region(b), n, 256, n)
    run.launch(build(WGMMA, False, f"TILE_N={n}", f"ACCUMULATE={accumulate}"), maps, run.region(c), run.region(out), smem=(64 + n) * 128 + 8)
    report = run.run(**options)
    assert str(report) == ""
    assert report.stats.wgmmas == 8 and report.stats.tensor_loads == 4
    values = e4m3_values()
    expected = values[a] @ values[b].T + accumulate * c
    assert np.isnan(out[3]).all()
    rows = np.arange(64) != 3
    scale = np.abs(values[a])[rows] @ np.abs(values[b]).T
    assert (np.abs(out[rows] - expected[rows]) <= 2e-6 * scale + 1e-6).all()


BULK = """
struct Params { u64 src, dst, flag; };
MM_DEVICE void body(const Params& p) {
    u8* buffer = hw::dynamic_smem();
    u64* bar = reinterpret_cast<u64*>(buffer + 4096);
    if (hw::thread_idx() == 0) {
        hw::mbarrier_init(bar, 1);
        hw::fence_mbarrier_init();
        for (u32 i = 0; i < 4; ++i) {
            hw::mbarrier_arrive_expect_tx(bar, 1024);
            hw::bulk_load(buffer + (i % 2) * 1024, reinterpret_cast<const u8*>(p.src) + i * 1024, 1024, bar);
            while (!hw::mbarrier_try_wait(bar, i & 1)) {}
            hw::bulk_store(reinterpret_cast<u8*>(p.dst) + i * 1024, buffer + (i % 2) * 1024, 1024);
            hw::bulk_commit();
            hw::bulk_wait_read<1>();
        }
        hw::bulk_wait<0>();
        hw::red_add_release<Scope::kSys>(reinterpret_cast<u32*>(p.flag), 1);
    }
}
MM_KERNEL_ENTRY(mega_moe, 32, 1, Params, body)
"""


@pytest.mark.parametrize("options", POLICIES)
def test_bulk_copies_between_ranks(options: dict) -> None:
    """Each rank pulls from its left neighbour's memory and pushes into its right neighbour's."""
    rng = np.random.default_rng(2)
    ranks = 3
    src = [rng.integers(0, 256, 4096).astype(np.uint8) for _ in range(ranks)]
    dst = [np.zeros(4096, np.uint8) for _ in range(ranks)]
    flags = np.zeros(ranks, np.uint32)
    run = Run(ranks)
    kernel = build(BULK)
    sources = [run.region(a, r, "src", symmetric=True) for r, a in enumerate(src)]
    targets = [run.region(a, r, "dst", symmetric=True) for r, a in enumerate(dst)]
    flag = run.region(flags, 0, "flags", symmetric=True)
    for r in range(ranks):
        run.launch(kernel, sources[r - 1], targets[(r + 1) % ranks], flag + 4 * r, rank=r, smem=4104)
    assert str(run.run(**options)) == ""
    assert (flags == 1).all()
    for r in range(ranks):
        assert (dst[(r + 1) % ranks] == src[r - 1]).all()


CLUSTER = """
struct Params { TensorMap map; u64 out; };
MM_DEVICE void body(const Params& p) {
    u8* tile = hw::dynamic_smem();
    u64* full = reinterpret_cast<u64*>(tile + 16 * 128);
    u64* empty = full + 1;
    const u32 t = hw::thread_idx(), self = hw::cluster_cta_rank();
    if (t == 0) {
        hw::mbarrier_init(full, 1);
        hw::mbarrier_init(empty, 2);
        hw::fence_mbarrier_init();
    }
    hw::cluster_arrive();
    hw::cluster_wait();
    for (u32 round = 0; round < 3; ++round) {
        if (t == 0) {
            if (round > 0) while (!hw::mbarrier_try_wait_cluster(empty, (round - 1) & 1)) {}
            // Each CTA loads half of the box into both.
            hw::mbarrier_arrive_expect_tx(full, 16 * 128);
            hw::tma_load_2d_multicast(tile + self * 1024, &p.map, full, 0, static_cast<i32>(round * 16 + self * 8), 3);
        }
        while (!hw::mbarrier_try_wait(full, round & 1)) {}
        u8* out = reinterpret_cast<u8*>(p.out) + ((hw::cta_idx() * 3 + round) * 16) * 128;
        for (u32 i = t; i < 16 * 8; i += 32) {
            const u32 row = i / 8, chunk = i % 8;
            hw::st_vec4(out + i * 16, hw::lds_vec4(tile + row * 128 + ((chunk ^ (row % 8)) * 16)));
        }
        hw::warp_sync();
        if (t < 2) hw::mbarrier_arrive_cluster(empty, t);
    }
    hw::cluster_arrive();
    hw::cluster_wait();
}
MM_KERNEL_ENTRY(mega_moe, 32, 2, Params, body)
"""


@pytest.mark.parametrize("options", [*POLICIES, {"resident_ctas": 2}])
def test_cluster_multicast(options: dict) -> None:
    rng = np.random.default_rng(3)
    source, out = rng.integers(0, 256, (48, 128)).astype(np.uint8), np.zeros((4, 48, 128), np.uint8)
    run = Run()
    run.launch(build(CLUSTER), tensor_map(run.region(source), 48, 128, 8), run.region(out), grid=4, smem=16 * 128 + 16)
    assert str(run.run(**options)) == ""
    assert (out == source).all()


def test_streams_run_in_order_and_ranks_drift() -> None:
    """copy, launch, copy out, copy in, launch: each launch sees its own data, however ranks are delayed."""
    rng = np.random.default_rng(4)
    data = rng.integers(0, 256, (2, 3, 4096)).astype(np.uint8)
    buffers, outs, sinks = np.zeros((2, 4096), np.uint8), np.zeros((2, 4096), np.uint8), np.zeros((2, 3, 4096), np.uint8)
    flags = np.zeros(2, np.uint32)
    run = Run(2)
    kernel = build(BULK)
    for r in range(2):
        buffer, out = run.region(buffers[r], r, "in"), run.region(outs[r], r, "out")
        flag = run.region(flags[r:r + 1], r, "flag")
        for g in range(3):
            run.program.copy(r, buffer, data[r, g].ctypes.data, 4096)
            run.program.fill(r, out, 0xEE, 4096)
            run.launch(kernel, buffer, out, flag, rank=r, smem=4104)
            run.program.copy(r, sinks[r, g].ctypes.data, out, 4096)
    report = run.run(schedule="random", completion="random", seed=8, start_delay=(0, 5_000_000))
    assert str(report) == "" and report.stats.launches == 6
    assert (sinks == data).all() and (flags == 3).all()
