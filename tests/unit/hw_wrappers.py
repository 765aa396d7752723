"""A kernel that calls every wrapper of kernels/hw/sm90 once, at each scope or width it has. Compiled, never run."""

SCOPED = """
template <megamoe::Scope S> MM_DEVICE void scoped(u32* p) {
    u32 v = hw::ld_acquire<S>(p) + hw::ld_relaxed<S>(p);
    hw::st_release<S>(p, v);
    hw::st_relaxed<S>(p, v);
    hw::red_add_release<S>(p, v);
    hw::red_add_relaxed<S>(p, v);
    v += hw::atom_add_relaxed<S>(p, v) + hw::atom_add_acq_rel<S>(p, v) + hw::atom_cas_relaxed<S>(p, v, 1);
    hw::fence_acq_rel<S>();
    hw::st_u32(p, v);
}
"""

MEMORY = """
    scoped<megamoe::Scope::kCta>(out);
    scoped<megamoe::Scope::kGpu>(out);
    scoped<megamoe::Scope::kSys>(out);
    u32* shared = reinterpret_cast<u32*>(hw::dynamic_smem());
    f32* fshared = reinterpret_cast<f32*>(shared) + 64;
    Vec4 v = hw::ld_vec4(out);
    hw::st_vec4(out + 8, hw::ld_vec4_streaming(out + 4));
    hw::sts_vec4(shared + 4, v);
    hw::st_vec4(out + 12, hw::lds_vec4(shared + 4));
    hw::sts_vec4_cluster(shared + 8, 1, v);
    hw::sts_u32(shared, hw::ld_u32(out));
    hw::sts_f32(fshared, hw::ld_f32(fout) + hw::ld_nc_f32(fout + 1));
    hw::st_f32(fout, hw::lds_f32(fshared));
    hw::st_u32(out + 1, hw::lds_u32(shared));
    hw::st_u64(reinterpret_cast<u64*>(out + 2), static_cast<u64>(hw::ld_i64(reinterpret_cast<megamoe::i64*>(out + 4))));
"""

THREAD = """
    hw::st_u32(out, hw::thread_idx() + hw::thread_idx_volatile() + hw::cta_idx() + hw::num_ctas() + hw::lane_idx() + hw::warp_idx() + hw::cluster_cta_rank() +
                        hw::dynamic_smem_bytes() + hw::smem_addr(out));
    hw::st_u64(reinterpret_cast<u64*>(out + 2), hw::global_timer_ns());
    hw::nap(hw::mutant(1) ? hw::clock_cycles() : 100);
    hw::grid_dependency_wait();
    hw::grid_dependency_launch();
    if (hw::ld_u32(out) == 12345) hw::trap();
"""

SYNC = """
    u64* bar = reinterpret_cast<u64*>(hw::dynamic_smem() + 65536);
    hw::mbarrier_init(bar, 1);
    hw::fence_mbarrier_init();
    hw::fence_proxy_async();
    hw::fence_proxy_async_shared();
    hw::fence_proxy_async_global();
    hw::cluster_arrive();
    hw::cluster_wait();
    hw::cta_sync<384>();
    hw::bar_arrive(1, 384);
    hw::bar_sync(2, 384);
    hw::warp_sync();
    hw::mbarrier_arrive(bar);
    hw::mbarrier_arrive_expect_tx(bar, 128);
    hw::mbarrier_arrive_cluster(bar, 0);
    hw::mbarrier_arrive_release_cluster(bar, 0);
    hw::st_u32(out, hw::mbarrier_test_wait(bar, 0) + hw::mbarrier_try_wait(bar, 0) + hw::mbarrier_try_wait_cluster(bar, 1));
"""

TMA = """
    u8* tile = hw::dynamic_smem();
    hw::tma_prefetch_descriptor(&map);
    hw::tma_load_2d(tile, &map, bar, 0, 0, hw::CacheHint::kEvictFirst);
    hw::tma_load_2d_multicast(tile, &map, bar, 0, 0, 1);
    hw::bulk_load(tile, out, 128, bar);
    hw::bulk_load_multicast(tile, out, 128, bar, 1);
    hw::bulk_store(out, tile, 128);
    hw::bulk_commit();
    hw::bulk_wait_read<1>();
    hw::bulk_wait<0>();
    hw::bulk_prefetch_l2(out, 128);
    hw::tma_prefetch_2d(&map, 0, 0);
"""

WARP_MATH = """
    u32 w = hw::shfl(hw::ld_u32(out), 1) + hw::shfl_xor(2, 1) + hw::shfl_up(3, 1) + hw::ballot(true) + hw::all(true) + hw::any(false);
    f32 f = hw::shfl_xor_f32(hw::ld_f32(fout), 2);
    if (hw::elect_one()) f = hw::exp2_approx(f) + hw::rcp_approx(f) + hw::div_exact(f, 3.f) + hw::exp_exact(f) + hw::fma(f, f, f);
    f = hw::min_nan(f, 1.f) + hw::max_nan(f, 0.f) + hw::max_f32(hw::abs_f32(f), 2.f);
    w += hw::uniform(w) + hw::popcount(w);
    w += hw::cvt_e4m3x2(f, f) + hw::cvt_bf16x2(f, f) + hw::f32_to_bits(hw::bits_to_f32(w)) + hw::byte_perm(w, w, 0x3210);
    f32 d[4] = {f, f, f, f};
    hw::mma_e4m3_m16n8k32(d[0], d[1], d[2], d[3], w, w + 1, w + 2, w + 3, w + 4, w + 5);
    for (u32 i = 0; i < 4; ++i) hw::st_f32(fout + i, d[i]);
    hw::st_u32(out, w);
"""

WGMMA = """
    if (hw::warp_idx() >= 4) {
        hw::reg_alloc<232>();
        multiply<64>(fout);
        multiply<128>(fout);
        multiply<256>(fout);
    } else {
        hw::reg_dealloc<40>();
    }
"""
MULTIPLY = """
template <u32 kN> MM_DEVICE void multiply(f32* fout) {
    f32 d[kN / 2];
    const u64 a = hw::smem_descriptor(hw::dynamic_smem()), b = hw::smem_descriptor(hw::dynamic_smem() + 8192);
    hw::wgmma_pin(d);
    hw::wgmma_fence();
    hw::wgmma_e4m3<kN>(d, a, b, false);
    hw::wgmma_e4m3<kN>(d, a + 2, b + 2, true);
    hw::wgmma_commit();
    hw::wgmma_wait<0>(d);
    for (u32 i = 0; i < kN / 2; ++i) hw::st_f32(fout + i * 384 + hw::thread_idx(), d[i]);
}
"""

WRAPPERS = SCOPED + MEMORY + THREAD + SYNC + TMA + WARP_MATH + MULTIPLY + WGMMA
KERNEL = ('#include "hw/hw.cuh"\nnamespace megamoe {\n' + SCOPED + MULTIPLY
          + "struct Arguments {\n    TensorMap map;\n    u32* out;\n    f32* fout;\n};\n"
          + "MM_DEVICE void everything(const Arguments& arguments) {\n"
          + "    u32* out = arguments.out;\n    f32* fout = arguments.fout;\n    const TensorMap& map = arguments.map;\n"
          + MEMORY + THREAD + SYNC + TMA + WARP_MATH + WGMMA
          + "}\n}  // namespace megamoe\nMM_KERNEL_ENTRY(mega_moe, 384, 1, megamoe::Arguments, megamoe::everything)\n")
