#include "c_api.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <mutex>
#include <stdexcept>

#include "async.h"
#include "engine.h"
#include "faults.h"

using namespace megamoe;
using namespace megamoe::emu;

namespace {

constexpr unsigned kApiVersion = 3;

thread_local std::string g_error;
std::mutex g_run_mutex;  // one run at a time: the running thread and engine are globals
StackPool g_stacks;

struct Program {
    std::vector<StreamOp> ops[32];
    u64 start_delay[32] = {}, stop_after[32] = {};
    u32 slow[32] = {};
    unsigned ranks = 0;
    struct RegionSpec {
        u64 address, bytes;
        int rank;
        std::string name;
        bool symmetric, initialised;
        bool undefined = false;  // some of it is declared never written on the way
    };
    std::vector<RegionSpec> regions;
    RegionMap overlap_check;
    std::vector<Finding> findings;
    Stats stats;
    u64 virtual_ns = 0;
    double seconds = 0;
    std::atomic<bool> stop{false};
};

int fail(const std::string& text) {
    g_error = text;
    return 1;
}

// The whole loaded image, so that a kernel's constants can be told from wild pointers.
int image_of(struct dl_phdr_info* info, size_t, void* data) {
    auto* k = static_cast<Kernel*>(data);
    u64 lo = ~0ull, hi = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& h = info->dlpi_phdr[i];
        if (h.p_type != PT_LOAD) continue;
        lo = std::min<u64>(lo, info->dlpi_addr + h.p_vaddr);
        hi = std::max<u64>(hi, info->dlpi_addr + h.p_vaddr + h.p_memsz);
    }
    const u64 body = reinterpret_cast<u64>(k->body);
    if (body < lo || body >= hi) return 0;
    k->image_begin = lo;
    k->image_end = hi;
    return 1;
}

}  // namespace

extern "C" {

const char* mm_emu_error() { return g_error.c_str(); }
unsigned mm_emu_abi() { return kApiVersion; }

void* mm_emu_kernel_open(const char* path, const char* name, mm_emu_kernel_info* info) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        fail(dlerror());
        return nullptr;
    }
    auto symbol = [&](const std::string& suffix) { return dlsym(handle, (name + suffix).c_str()); };
    auto k = std::make_unique<Kernel>();
    k->body = reinterpret_cast<void (*)(const void*)>(symbol(""));
    auto* threads = static_cast<const unsigned*>(symbol("_threads"));
    auto* cluster = static_cast<const unsigned*>(symbol("_cluster"));
    auto* bytes = static_cast<const unsigned*>(symbol("_params_bytes"));
    auto* checked = static_cast<const unsigned*>(symbol("_checked"));
    std::string why;
    if (k->body == nullptr || threads == nullptr || cluster == nullptr || bytes == nullptr || checked == nullptr)
        why = format("%s exports no kernel '%s' (MM_KERNEL_ENTRY)", path, name);
    else if (*threads == 0 || *threads % 32 != 0 || *threads > 1024)
        why = format("kernel '%s' has %u threads; a CTA has a multiple of 32 up to 1024", name, *threads);
    else if (*cluster == 0 || *cluster > 16)
        why = format("kernel '%s' has clusters of %u", name, *cluster);
    if (!why.empty()) {
        dlclose(handle);
        fail(why);
        return nullptr;
    }
    k->threads = *threads;
    k->cluster = *cluster;
    k->params_bytes = *bytes;
    k->checked = *checked != 0;
    k->name = name;
    k->path = path;
    k->handle = handle;
    dl_iterate_phdr(image_of, k.get());
    *info = mm_emu_kernel_info{k->threads, k->cluster, k->params_bytes, *checked, k->image_begin};
    return k.release();
}

void mm_emu_kernel_close(void* kernel) {
    auto* k = static_cast<Kernel*>(kernel);
    dlclose(k->handle);
    delete k;
}

void* mm_emu_program_new(unsigned ranks) {
    if (ranks == 0 || ranks > 32) {
        fail(format("%u ranks; the emulator runs 1 to 32", ranks));
        return nullptr;
    }
    auto* p = new Program;
    p->ranks = ranks;
    return p;
}
void mm_emu_program_free(void* program) { delete static_cast<Program*>(program); }

int mm_emu_start_delay(void* program, unsigned rank, u64 ns) {
    auto* p = static_cast<Program*>(program);
    if (rank >= p->ranks) return fail(format("rank %u of %u", rank, p->ranks));
    p->start_delay[rank] = ns;
    return 0;
}

int mm_emu_slow(void* program, unsigned rank, unsigned one_in) {
    auto* p = static_cast<Program*>(program);
    if (rank >= p->ranks) return fail(format("rank %u of %u", rank, p->ranks));
    p->slow[rank] = one_in;
    return 0;
}

int mm_emu_stop_after(void* program, unsigned rank, u64 slices) {
    auto* p = static_cast<Program*>(program);
    if (rank >= p->ranks) return fail(format("rank %u of %u", rank, p->ranks));
    p->stop_after[rank] = slices;
    return 0;
}

int mm_emu_add_region(void* program, u64 address, u64 bytes, int rank, const char* name, int symmetric, int initialised) {
    auto* p = static_cast<Program*>(program);
    if (rank < -1 || rank >= static_cast<int>(p->ranks)) return fail(format("region '%s': rank %d of %u", name, rank, p->ranks));
    const std::string why = p->overlap_check.add(address, bytes, rank, name, symmetric, initialised);
    if (!why.empty()) return fail(why);
    p->regions.push_back({address, bytes, rank, name, symmetric != 0, initialised != 0, false});
    return 0;
}

static int add_op(void* program, unsigned rank, StreamOp op) {
    auto* p = static_cast<Program*>(program);
    if (rank >= p->ranks) return fail(format("rank %u of %u", rank, p->ranks));
    p->ops[rank].push_back(std::move(op));
    return 0;
}

int mm_emu_copy(void* program, unsigned rank, u64 dst, u64 src, u64 bytes) {
    return add_op(program, rank, StreamOp{StreamOp::kCopy, reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes, 0, nullptr, {}, 0, 0, 0});
}
int mm_emu_fill(void* program, unsigned rank, u64 dst, unsigned value, u64 bytes) {
    return add_op(program, rank, StreamOp{StreamOp::kFill, reinterpret_cast<void*>(dst), nullptr, bytes, static_cast<u8>(value), nullptr, {}, 0, 0, 0});
}
int mm_emu_undefine(void* program, unsigned rank, u64 dst, u64 bytes) {
    auto* p = static_cast<Program*>(program);
    for (auto& r : p->regions)
        if (dst < r.address + r.bytes && r.address < dst + bytes) r.undefined = true;
    return add_op(program, rank, StreamOp{StreamOp::kUndefine, reinterpret_cast<void*>(dst), nullptr, bytes, 0, nullptr, {}, 0, 0, 0});
}
int mm_emu_launch(void* program, unsigned rank, void* kernel, const void* params, u64 params_bytes, unsigned grid, unsigned smem_bytes) {
    const auto* k = static_cast<const Kernel*>(kernel);
    if (params_bytes != k->params_bytes) return fail(format("kernel '%s' takes %u bytes of parameters, got %llu", k->name.c_str(), k->params_bytes, params_bytes));
    if (grid == 0 || grid % k->cluster != 0) return fail(format("a grid of %u CTAs is not a positive multiple of the cluster size %u", grid, k->cluster));
    if (smem_bytes > kSmemLimit) return fail(format("%u bytes of shared memory; a CTA has at most %u", smem_bytes, kSmemLimit));
    StreamOp op{StreamOp::kLaunch, nullptr, nullptr, 0, 0, k, {}, params_bytes, grid, smem_bytes};
    op.params.resize(params_bytes / sizeof(TensorMap) + 1);
    std::memcpy(op.params.data(), params, params_bytes);
    return add_op(program, rank, std::move(op));
}

int mm_emu_run(void* program, const mm_emu_options* options) {
    auto* p = static_cast<Program*>(program);
    std::lock_guard<std::mutex> lock(g_run_mutex);
    const auto begin = std::chrono::steady_clock::now();
    Engine engine(g_stacks);
    Options& o = engine.options;
    if (options->schedule > 2 || options->completion > 2) return fail("unknown schedule or completion");
    if (options->fp8_sum_bits > kMostSumBits) return fail(format("fp8_sum_bits %u is outside 0..%u", options->fp8_sum_bits, kMostSumBits));
    o.seed = options->seed;
    o.schedule = static_cast<Schedule>(options->schedule);
    o.completion = static_cast<Completion>(options->completion);
    o.races = options->races != 0;
    o.preempt = options->preempt != 0;
    o.uninit = options->uninit != 0;
    o.resident_ctas = options->resident_ctas;
    o.max_findings = options->max_findings == 0 ? 32 : options->max_findings;
    o.max_slices = options->max_slices;
    o.mutant = options->mutant;
    o.fp8_sum_bits = options->fp8_sum_bits;
    if (options->jump_ns != 0) engine.first_jump_ns_ = engine.jump_ns_ = options->jump_ns;
    o.wall_limit_s = options->wall_limit_s;
    p->findings.clear();
    p->stats = Stats{};
    p->stop = false;
    engine.stop = &p->stop;
    engine.streams.resize(p->ranks);
    for (unsigned r = 0; r < p->ranks; ++r) {
        engine.streams[r].ops = p->ops[r];
        engine.streams[r].slow = p->slow[r];
        engine.streams[r].stop_after = p->stop_after[r];
        engine.streams[r].start_delay = p->start_delay[r] == 0 ? 0 : engine.clock + p->start_delay[r];
        for (const StreamOp& op : p->ops[r])
            if (op.kind == StreamOp::kLaunch && o.resident_ctas != 0 && o.resident_ctas < op.kernel->cluster)
                return fail(format("resident_ctas %u is less than the cluster size %u", o.resident_ctas, op.kernel->cluster));
    }
    try {
        for (const auto& r : p->regions) engine.regions.add(r.address, r.bytes, r.rank, r.name.c_str(), r.symmetric, r.initialised, false, r.undefined);
        g_engine = &engine;
        FaultGuard guard(engine);
        engine.run();
    } catch (const std::exception& error) {
        g_engine = nullptr;
        return fail(error.what());
    }
    g_engine = nullptr;
    g_thread = nullptr;
    p->findings = std::move(engine.findings);
    p->stats = engine.stats;
    p->virtual_ns = engine.clock;
    p->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return 0;
}

void mm_emu_stop(void* program) { static_cast<Program*>(program)->stop = true; }

unsigned mm_emu_num_findings(void* program) { return static_cast<unsigned>(static_cast<Program*>(program)->findings.size()); }

int mm_emu_get_finding(void* program, unsigned index, mm_emu_finding* out) {
    auto* p = static_cast<Program*>(program);
    if (index >= p->findings.size()) return fail("no such finding");
    const Finding& f = p->findings[index];
    *out = mm_emu_finding{f.kind.c_str(), f.text.c_str(), f.file.c_str(), f.pc, f.line, f.rank, f.cta, f.warp, f.lane, 0};
    return 0;
}

void mm_emu_get_stats(void* program, mm_emu_stats* out) {
    auto* p = static_cast<Program*>(program);
    const Stats& s = p->stats;
    *out = mm_emu_stats{s.slices, s.switches, s.wgmmas, s.tensor_loads, s.bulk_copies, s.idle_rounds, s.launches, s.mutant_hits, p->virtual_ns, p->seconds};
}

}
