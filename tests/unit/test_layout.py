"""Regions, views and the shared-memory plan: golden numbers worked out by hand, and the device's own formulae."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megamoe_cli import layout
from megamoe_cli.config import KernelConfig
from megamoe_cli.errors import UsageError
from megamoe_cli.layout import Layout
from megamoe_cli.paths import kernels_dir
from megamoe_cli.shapes import NAMED_SHAPES, Problem, Shape

TINY = Shape(256, 256, 16, 2)


def test_pool_rows_golden() -> None:
    # 8*128*2 = 2048 rows at worst, 2*127 = 254 of padding: 2302 -> 2304.
    assert Layout(TINY, 8, 128).pool_rows == 2304
    # Flash on 8 ranks at capacity 512: 8*512*6 = 24576, + 32*127 = 4064 -> 28640 -> 28672.
    assert Layout(NAMED_SHAPES["flash"], 8, 512).pool_rows == 28672


def test_region_offsets_golden() -> None:
    # P = align(1*4*1 + 1*127, 128) = 256, every small region takes one kilobyte.
    small = Layout(Shape(128, 128, 1, 1), 1, 4)
    assert small.pool_rows == 256
    expected = {
        "control": 0, "count_flag": 1024, "done_flag": 2048, "recv_count": 3072, "recv_list": 4096, "send_count": 5120,
        "l1_arrival": 6144, "l2_arrival": 7168, "pool_free": 8192, "recv_count_sum": 9216, "metadata": 10240,
        "x": 10240 + 3072, "x_sf": 14336, "topk_idx": 15360, "topk_weights": 16384, "l1_acts": 17408,
        "l1_acts_sf": 17408 + 32768, "l1_topk_weights": 51200, "l2_acts": 52224, "l2_acts_sf": 84992, "combine": 86016,
    }  # fmt: skip
    assert small.region_offset == expected
    assert small.total_bytes == 86016 + 1024  # 4 tokens * 128 * 2 bytes
    assert small.offsets == tuple(expected.values())


def test_a_ring_holds_part_of_the_pool() -> None:
    """Memory goes round, counters do not. The bytes of the public peer's ring at EP8 and 8,192 tokens: 700 and 1,113 MiB."""
    whole, ring = Layout(TINY, 8, 96), Layout(TINY, 8, 96, 256)
    assert (whole.ring, ring.ring, ring.pool_rows) == (1792, 256, whole.pool_rows)
    assert ring.view("l1_acts").shape == (256, 256) and ring.view("l2_acts_sf").strides == (1, 256)
    assert ring.view("l1_arrival_count").shape == whole.view("l1_arrival_count").shape and ring.view("pool_free").shape == (14,)
    assert Layout(TINY, 8, 96, 1 << 20).ring == 1792
    with pytest.raises(UsageError, match="multiple of 128"):
        Layout(TINY, 8, 96, 100)
    assert layout.layout_for(TINY, 8, 96, "l2").ring == 1792
    for name, peer in (("flash", 700), ("pro", 1113)):
        assert layout.layout_for(NAMED_SHAPES[name], 8, 8192).total_bytes < 0.9 * peer * 2**20


def test_views_golden() -> None:
    views = Layout(TINY, 8, 96).views()
    p = 1792  # 8*96*2 + 2*127 = 1790, rounded up
    assert tuple(views) == layout.VIEWS
    form = {name: (v.dtype, v.shape, v.strides) for name, v in views.items()}
    assert form == {
        "x": ("float8_e4m3fn", (96, 256), (256, 1)),
        "x_sf": ("float32", (96, 2), (2, 1)),
        "topk_idx": ("int64", (96, 2), (2, 1)),
        "topk_weights": ("float32", (96, 2), (2, 1)),
        "l1_acts": ("float8_e4m3fn", (p, 256), (256, 1)),
        "l1_acts_sf": ("float32", (p, 2), (1, p)),
        "l2_acts": ("float8_e4m3fn", (p, 256), (256, 1)),
        "l2_acts_sf": ("float32", (p, 2), (1, p)),
        "l1_topk_weights": ("float32", (p,), (1,)),
        "expert_recv_count_sum": ("int32", (2,), (1,)),
        "l1_arrival_count": ("int32", (112,), (1,)),
        "token_src_metadata": ("int32", (p, 3), (3, 1)),
    }


def test_arrival_counts_have_two_banks() -> None:
    view = Layout(TINY, 8, 96).view("l1_arrival_count")
    assert view.bank_bytes == 112 * 4
    assert (view.at(0), view.at(1), view.at(6), view.at(7)) == (view.offset, view.offset + 448, view.offset, view.offset + 448)


def test_unknown_view_is_one_line() -> None:
    with pytest.raises(UsageError, match="unknown buffer view 'l3_acts'"):
        Layout(TINY, 8, 96).view("l3_acts")


@given(
    hidden=st.integers(1, 64), intermediate=st.integers(1, 64), local=st.integers(1, 40), ranks=st.integers(1, 32),
    topk=st.integers(1, 32), capacity=st.integers(1, 5000),
)  # fmt: skip
def test_regions_never_overlap(hidden, intermediate, local, ranks, topk, capacity) -> None:
    shape = Shape(128 * hidden, 128 * intermediate, local * ranks, topk)
    lay = Layout(shape, ranks, capacity)
    assert lay.pool_rows == Problem(shape, ranks, (0,) * ranks, capacity).pool_rows
    end = 0
    for name in layout.REGIONS:
        start = lay.region_offset[name]
        assert start % 1024 == 0 and 0 <= start - end < 1024
        end = start + lay.region_bytes[name]
        view = lay.view(name)
        banks = 2 if view.bank_bytes else 1
        assert view.span_bytes * banks <= lay.region_bytes[name]
    assert end <= lay.total_bytes < end + 1024


@pytest.mark.parametrize(
    ("ranks", "capacity", "text"),
    [(0, 4, "1..32"), (33, 4, "1..32"), (3, 4, "divisible"), (8, 0, "at least 1"), (8, 1 << 28, "pool would have")],
)
def test_refusals(ranks: int, capacity: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Layout(TINY, ranks, capacity)


def test_smem_golden() -> None:
    # Flash, 8 ranks, 128x256, compact, 3 stages: a 49152 + b 98304 + sfa 1536 + carry 0 + amax 2048 + side 4*128*12
    # + ring 64 and barriers 8*(6+8+4+1)=152 -> 256 + rows 4*4096 + prefix align(4*257,16)=1040 + list 1024
    # + pool base align(132,16)=144 + counts 128 + active align(260,16)=272 + send 2*1024 + 64.
    config = KernelConfig(stages=3)
    flash = NAMED_SHAPES["flash"]
    plan = layout.smem_plan(config, flash, 8)
    assert list(plan.values()) == [49152, 98304, 1536, 0, 2048, 6144, 256, 16384, 1040, 1024, 144, 128, 272, 2048, 64]
    assert layout.smem_bytes(config, flash, 8) == 178544
    assert layout.require_smem(config, flash, 8) == 178544


def test_small_block_m_keeps_a_64_row_stage() -> None:
    wide, narrow = (layout.smem_plan(KernelConfig(block_m=m, stages=2), TINY, 8) for m in (64, 16))
    assert (narrow["a"], narrow["sfa"]) == (wide["a"], 2 * 32 * 4)


def test_row_chunks() -> None:
    assert [layout.row_chunk(h) for h in (128, 4096, 4224, 7168, 8192)] == [128, 4096, 2176, 3584, 4096]


def test_auto_stages_fit_and_one_more_does_not() -> None:
    from megamoe_cli.config import MAX_STAGES, largest_stages

    config = KernelConfig()
    for shape in NAMED_SHAPES.values():
        best = largest_stages(config, shape, 8)
        assert layout.smem_bytes(config, shape, 8) == layout.smem_bytes(KernelConfig(stages=best), shape, 8) <= layout.SMEM_LIMIT
        if best < MAX_STAGES:
            assert layout.smem_bytes(KernelConfig(stages=best + 1), shape, 8) > layout.SMEM_LIMIT


def test_too_much_shared_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="a block may own 232448"):
        layout.require_smem(KernelConfig(stages=8), TINY, 8)


_PROBE = r"""
#include <cstdio>
#include <cstdlib>
#include "layout/shared_plan.cuh"
using namespace megamoe;
template <unsigned M, unsigned N, unsigned S, unsigned W> struct C {
    static constexpr u32 kBlockM = M, kBlockN = N, kStages = S, kDispatchWarps = W, kRowDepth = 2, kMathWarpgroups = 2, kRowSplits = 1;
    static constexpr Policy kPolicy = Policy::kFused;
    static constexpr Promotion kPromotion = Promotion::kClassic;
};
template <class T> void plan(const BufferShape& s) {
    std::printf(" %u", SharedPlan<T>::bytes(s.hidden, s.experts / s.ranks, s.ranks));
}
int main(int argc, char** argv) {
    for (int a = 1; a + 6 <= argc; a += 6) {
        BufferShape s{};
        u32* f[6] = {&s.ranks, &s.capacity, &s.hidden, &s.intermediate, &s.experts, &s.topk};
        for (int i = 0; i < 6; ++i) *f[i] = std::strtoul(argv[a + i], nullptr, 10);
        std::printf("%llu", pool_rows(s));
        for (u32 r = 0; r <= kNumRegions; ++r) std::printf(" %llu", region_offset(s, r));
        plan<C<128, 256, 3, 2>>(s);
        plan<C<64, 256, 4, 2>>(s);
        plan<C<16, 128, 6, 4>>(s);
        std::printf("\n");
    }
}
"""
_CASES = [(8, 128, 256, 256, 16, 2), (1, 7, 128, 128, 1, 1), (5, 33, 256, 4224, 10, 3), (8, 512, 4096, 2048, 256, 6),
          (8, 8192, 7168, 3072, 384, 6), (32, 17, 7168, 4096, 288, 8)]  # fmt: skip


def test_device_states_the_same_layout(tmp_path: Path) -> None:
    source, binary = tmp_path / "probe.cpp", tmp_path / "probe"
    source.write_text(_PROBE)
    subprocess.run(["g++", "-std=c++17", "-I", str(kernels_dir()), "-o", str(binary), str(source)],
                   check=True, timeout=120, capture_output=True, text=True)  # fmt: skip
    numbers = [str(n) for case in _CASES for n in case]
    lines = subprocess.run([str(binary), *numbers], check=True, timeout=20, capture_output=True, text=True).stdout.splitlines()
    assert len(lines) == len(_CASES)
    configs = (
        KernelConfig(block_m=128, block_n=256, stages=3),
        KernelConfig(block_m=64, block_n=256, stages=4),
        KernelConfig(block_m=16, block_n=128, stages=6, frontend="standard"),
    )
    for (ranks, capacity, h, i, e, k), line in zip(_CASES, lines, strict=True):
        shape = Shape(h, i, e, k)
        lay = Layout(shape, ranks, capacity)
        smem = [layout.smem_bytes(c, shape, ranks) for c in configs]
        assert [int(n) for n in line.split()] == [lay.pool_rows, *lay.offsets, lay.total_bytes, *smem]
