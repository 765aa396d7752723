// C interface of libmegamoe_emu.so, as megamoe_cli/backends/emu_binding.py calls it.
//
// Building (what megamoe_cli/compile/emu_build.py runs; docs/internals.md says the same):
//   runtime  g++ -std=c++17 -O3 -g1 -fPIC -shared -pthread -Wl,-soname,libmegamoe_emu.so kernels/hw/emu/*.cpp -ldl
//            -o libmegamoe_emu.so
//   plain    g++ -std=c++17 -O2 -g1 -fPIC -ffp-contract=off -fno-strict-aliasing -DMEGAMOE_EMULATOR -I kernels
//            -shared -Wl,--no-undefined entry.cpp -L<dir of the runtime> -lmegamoe_emu -o kernel.so
//   checked  the same compile flags plus -fsanitize=thread --param tsan-instrument-func-entry-exit=0 and -c, then a
//            separate link WITHOUT -fsanitize (libtsan must not be linked: the runtime defines __tsan_*)
// The runtime must be loaded before a kernel library; its soname satisfies the kernel's dependency.
#pragma once
#include "../types.cuh"

extern "C" {

struct mm_emu_options {
    megamoe::u64 seed;
    megamoe::u32 schedule;       // 0 fifo, 1 random, 2 pct
    megamoe::u32 completion;     // 0 eager, 1 random, 2 lazy
    megamoe::u32 races;          // needs checked kernels
    megamoe::u32 preempt;        // may switch at plain accesses (checked kernels, random or pct)
    megamoe::u32 uninit;         // report reads of bytes never written (checked kernels)
    megamoe::u32 resident_ctas;  // per rank; 0 = all
    megamoe::u32 max_findings;
    megamoe::u32 mutant;         // the fault hw::mutant() switches on; 0 = none
    megamoe::u32 fp8_sum_bits;   // 0 = FP8 products summed in FP32; 1 to 23: truncated as on the tensor core (13 there)
    megamoe::u64 max_slices;     // 0 = no limit
    megamoe::u64 jump_ns;        // first jump of the clock when nothing can run; 0 = 1 s
    double wall_limit_s;         // 0 = no limit
};

struct mm_emu_finding {
    const char *kind, *text, *file;
    megamoe::u64 pc;
    int line, rank, cta, warp, lane, reserved;
};

struct mm_emu_stats {
    megamoe::u64 slices, switches, wgmmas, tensor_loads, bulk_copies, idle_rounds, launches, mutant_hits, virtual_ns;
    double seconds;
};

struct mm_emu_kernel_info {
    megamoe::u32 threads, cluster, params_bytes, checked;
    megamoe::u64 image_begin;
};

// Functions that can fail return 0 on success and otherwise leave a text for mm_emu_error().
const char* mm_emu_error();
unsigned mm_emu_abi();

void* mm_emu_kernel_open(const char* path, const char* name, mm_emu_kernel_info* info);  // null on failure
void mm_emu_kernel_close(void* kernel);

void* mm_emu_program_new(unsigned ranks);
void mm_emu_program_free(void* program);
int mm_emu_start_delay(void* program, unsigned rank, megamoe::u64 ns);
int mm_emu_slow(void* program, unsigned rank, unsigned one_in);            // runs one time in so many when others could
int mm_emu_stop_after(void* program, unsigned rank, megamoe::u64 slices);  // dies after so many turns of its warps; 0 = never
int mm_emu_add_region(void* program, megamoe::u64 address, megamoe::u64 bytes, int rank, const char* name, int symmetric, int initialised);
int mm_emu_copy(void* program, unsigned rank, megamoe::u64 dst, megamoe::u64 src, megamoe::u64 bytes);
int mm_emu_fill(void* program, unsigned rank, megamoe::u64 dst, unsigned value, megamoe::u64 bytes);
int mm_emu_undefine(void* program, unsigned rank, megamoe::u64 dst, megamoe::u64 bytes);  // counts as never written from here on
int mm_emu_launch(void* program, unsigned rank, void* kernel, const void* params, megamoe::u64 params_bytes, unsigned grid, unsigned smem_bytes);
int mm_emu_run(void* program, const mm_emu_options* options);
void mm_emu_stop(void* program);  // from another thread
unsigned mm_emu_num_findings(void* program);
int mm_emu_get_finding(void* program, unsigned index, mm_emu_finding* out);
void mm_emu_get_stats(void* program, mm_emu_stats* out);

}
