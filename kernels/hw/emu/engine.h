// The emulator's machine: threads as fibers, warps as the scheduling unit, CTAs, clusters, launches and one
// stream per rank, run by a single host thread. Blocked threads sit on what they wait for; nothing polls except
// spinners with nothing else left to do. See docs/internals.md.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clock.h"
#include "fiber.h"
#include "ops.h"
#include "regions.h"

namespace megamoe::emu {

// Where the kernel called from: file and line of the hw:: call, and the return address, which names the inlined
// call chain when the kernel has line tables.
struct Where {
    const char* file = nullptr;
    int line = 0;
    const void* pc = nullptr;
    int issuer = -1;        // of an asynchronous operation: the warp that issued it
};
#define MM_HERE Where{file, line, __builtin_return_address(0)}

enum class WaitKind : u8 { kNone, kCollective, kNamedBarrier, kClusterBarrier, kMbarrier, kPoll, kWgmma, kBulk, kRegisters };

// What a blocked thread waits for, as raw values: formatted only for a report.
struct Wait {
    WaitKind kind = WaitKind::kNone;
    Where where;
    u64 a = 0, b = 0;
};

struct Poll {
    const u32* address;
    u32 value;
};

struct Warp;
struct Cta;
struct Launch;
struct AsyncOp;
struct Accumulator;

// cp.async.bulk group of one thread: copies whose source is still to be read, and whose result is still to land.
struct BulkGroup {
    u32 unread = 0, unwritten = 0;
    Clock read_clock, write_clock;  // joined by the matching wait
};

struct Thread {
    Fiber fiber;
    Warp* warp = nullptr;
    size_t stack = 0;
    u16 index = 0;    // in the CTA
    u8 lane = 0;
    bool done = false;
    bool released = false;  // woken by the clock instead of by what it waited for
    bool mma_fenced = false;
    bool cluster_arrived = false;
    u32 cluster_phase = 0;
    u32 registers = 0;
    u32 result = 0;         // of the last warp collective
    f32* mma_sum = nullptr;             // of a warp-level product this thread waits in
    const u32* mma_operands = nullptr;
    u32 ops = 0;            // operations since the last switch: bounds how long a spin may run
    u32 num_polls = 0;
    u32 spin_credit = 0;    // polls granted after a clock jump: a wait loop may look at the time only now and then
    std::array<Poll, 4> polls;
    Wait wait;
    u64 mma_next = 0;       // next entry of the warpgroup's queue this thread will join
    u64 commits = 0;
    std::vector<BulkGroup*> bulk_groups;  // committed, oldest first
    BulkGroup* bulk_open = nullptr;
    Clock clock;            // what happened before, its own work apart
    u32 epoch = 0;          // of its own work; lanes of a warp count apart, from a common start
    const void* unordered = nullptr;  // word of the last relaxed load, if that was not ordered after the write it saw
    Where unordered_at;
    std::string unordered_text;
    u32 fenced[2] = {};     // own work up to here passed a proxy fence: shared, global
    FenceState fences;
};

struct Collective {
    WarpOp op;
    u32 mask, arrived;
    Where where;
    std::array<u32, 32> value, arg;
};

struct Warp {
    Cta* cta = nullptr;
    u32 index = 0;
    u32 ready = 0;          // lanes
    u32 exited = 0;
    bool queued = false, running = false;
    u32 priority = 0;       // pct
    std::vector<Collective> collectives;
    u32 agent = 0;
};

struct NamedBarrier {
    u32 expected = 0, arrived = 0;
    Where first;
    std::vector<Thread*> waiters;
    Clock clock;
};

struct Mbarrier {
    u32 count = 0, pending = 0;
    i64 tx = 0;
    u32 phase = 0;
    u32 init_warp = 0, init_lane = 0, init_agent = 0, init_epoch = 0;
    bool fenced = false;    // visible to the async proxy
    Where init;
    std::vector<Thread*> waiters;
    Clock cta_now, cluster_now, cta_done, cluster_done;
};

// Does `t` know that `b` was initialised?
bool knows_init(const Thread& t, const Mbarrier& b);

struct MmaEntry {
    bool commit = false, accumulate = false;
    u32 n = 0, arrivals = 0;
    u64 desc_a = 0, desc_b = 0;
    Where where;
    Accumulator* acc = nullptr;
    std::array<Clock, 4> warps;   // what each warp's threads know together
};

// The 64 x n tile one wgmma chain works on; d holds each thread's fragment while the chain is in flight.
struct Accumulator {
    u32 n = 0;
    u64 last_group = 0;     // commit group (1-based) of its last operation
    u32 attached = 0;       // threads whose d is in flight
    std::array<f32*, 128> d{};
    std::vector<f32> tile;
};

struct Warpgroup {
    Cta* cta = nullptr;
    u32 index = 0;
    std::deque<MmaEntry> queue;
    u64 base = 0;           // sequence number of queue.front()
    u64 offered = 0;        // entries handed to the asynchronous engine
    u64 groups_committed = 0, groups_done = 0;
    std::vector<std::unique_ptr<Accumulator>> accumulators;
    std::vector<Thread*> waiters;
    u32 agent = 0;
    Clock done_clock;
};

struct Cluster {
    std::vector<Cta*> ctas;
    u32 arrived = 0, phase = 0;
    std::vector<Thread*> waiters;
    Clock clock, done_clock;
};

struct Cta {
    static constexpr u32 kTmaAgents = 4;
    Launch* launch = nullptr;
    Cluster* cluster = nullptr;
    u32 index = 0, rank = 0, rank_in_cluster = 0;
    u8* smem = nullptr;
    u32 smem_bytes = 0;
    u32 live = 0;
    u32 async_pending = 0;  // asynchronous operations that touch this CTA's shared memory
    i64 free_registers = 0;
    u32 first_tma_agent = 0, next_tma = 0;
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::deque<Warpgroup> warpgroups;
    std::array<NamedBarrier, 16> barriers;
    std::unordered_map<u32, Mbarrier> mbarriers;  // by shared-memory offset
    std::deque<BulkGroup> bulk_groups;
    std::vector<Thread*> register_waiters;
};

struct Kernel {
    void (*body)(const void*) = nullptr;
    u32 threads = 0, cluster = 1, params_bytes = 0;
    bool checked = false;
    std::string name, path;
    u64 image_begin = 0, image_end = 0;  // the loaded library
    void* handle = nullptr;
};

struct Launch {
    const Kernel* kernel = nullptr;
    u32 rank = 0, number = 0, grid = 0, smem_bytes = 0;
    u32 next_cta = 0, live_ctas = 0;
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::unique_ptr<Cluster>> clusters;
    u8* params = nullptr;
    Clock start;            // everything before the launch in its stream
};

struct StreamOp {
    enum Kind : u8 { kCopy, kFill, kUndefine, kLaunch } kind;
    void* dst;
    const void* src;
    u64 bytes;
    u8 value;
    const Kernel* kernel;
    std::vector<TensorMap> params;  // as bytes; this type for its 64-byte alignment
    u64 params_bytes;
    u32 grid, smem_bytes;
};

struct Stream {
    std::vector<StreamOp> ops;
    size_t next = 0;
    u64 start_delay = 0;
    u32 slow = 0;           // picked one time in so many while others are ready
    u64 stop_after = 0;     // slices until this rank dies; 0 = never
    u64 slices = 0;
    bool stopped = false;
    u32 launches = 0;
    std::unique_ptr<Launch> launch;
    Clock clock;
    u32 agent = 0;
};

struct Finding {
    std::string kind, text, file;
    int line = 0, rank = -1, cta = -1, warp = -1, lane = -1;
    u64 pc = 0;
};

enum class Schedule : u32 { kFifo, kRandom, kPct };
enum class Completion : u32 { kEager, kRandom, kLazy };

struct Options {
    u64 seed = 0;
    Schedule schedule = Schedule::kFifo;
    Completion completion = Completion::kEager;
    bool races = false, preempt = false, uninit = true;
    u32 resident_ctas = 0;  // per rank; 0 = all
    u32 max_findings = 32;
    u64 max_slices = 0;     // 0 = no limit
    u32 mutant = 0;
    u32 fp8_sum_bits = 0;   // 0 = exact FP32 sums; else what a K=32 step keeps below its largest exponent
    double wall_limit_s = 0;
};

struct Stats {
    u64 slices = 0, switches = 0, wgmmas = 0, tensor_loads = 0, bulk_copies = 0, idle_rounds = 0, launches = 0, mutant_hits = 0;
};

struct Engine {
    Options options;
    Stats stats;
    std::vector<Finding> findings;
    RegionMap regions;
    std::vector<Stream> streams;
    std::atomic<bool>* stop = nullptr;  // set by another thread
    bool ending = false;
    u64 clock = 1'000'000;  // virtual nanoseconds
    u64 progress = 0;       // changes of memory, phases, exits: what a spinner could be waiting for
    Agents agents;

    void run();

    // Called on fibers.
    void block(Thread& t, WaitKind kind, const Where& where, u64 a = 0, u64 b = 0);
    void yield(Thread& t);
    void park_poll(Thread& t, const Where& where);
    void maybe_preempt(Thread& t, u32 one_in);
    void wake(Thread& t);
    [[noreturn]] void end_run();
    [[noreturn]] void fatal(const char* kind, const Where& where, const std::string& text);
    void report(const char* kind, const Where& where, const std::string& text, const Thread* t = nullptr);
    void thread_exit(Thread& t);

    // Memory that spinners may watch has changed.
    void wrote(const void* p, u64 bytes);

    void submit(std::unique_ptr<AsyncOp> op);
    u32 random(u32 bound);
    void recycle(Cta& cta);
    Stream& stream_of(const Warp& w) { return streams[w.cta->rank]; }

    // Scheduler state; the runtime's own files read it, kernels cannot.
    std::deque<Warp*> ready_;
    std::vector<std::unique_ptr<AsyncOp>> pending_;
    std::vector<Thread*> pollers_;
    std::vector<Cta*> finished_ctas_;
    std::unordered_map<const void*, std::vector<Thread*>> watches_;
    Fiber scheduler_;
    u64 rng_ = 1;
    u64 seen_progress_ = 0;
    u32 quiet_ = 0, jumps_ = 0;
    u64 next_start_ = ~0ull;   // when a rank that is held back may start
    u64 first_jump_ns_ = 1'000'000'000, jump_ns_ = first_jump_ns_;
    bool deadlock_reported_ = false, streams_dirty_ = true;
    std::vector<u64> pct_points_;
    StackPool& stacks_;
    std::vector<size_t> free_stacks_;
    std::vector<u8*> free_smem_;
    double started_ = 0;

    void prepare();
    void loop();
    void run_warp(Warp& w);
    void stop_rank(u32 rank);
    bool slow(const Warp& w) const;
    Warp& pick();
    void step_async();
    bool advance_streams();
    void stream_op(Stream& s, u32 rank);
    void start_launch(Stream& s, u32 rank, StreamOp& op);
    void start_ctas(Launch& l);
    bool idle();
    void wake_pollers();
    void unpark(Thread& t);
    bool finished() const;
    bool any_stopped() const;
    bool over_limit();

    explicit Engine(StackPool& stacks);
    ~Engine();
};

extern Engine* g_engine;
extern Thread* g_thread;     // running, or null in the scheduler
extern Thread* g_issuer;     // on whose behalf an asynchronous stage runs

// Thrown by fatal() outside a fiber (asynchronous stages, stream operations); ends the run loop.
struct RunEnded {};

inline Cta& cta_of(const Thread& t) { return *t.warp->cta; }
inline Thread* g_thread_or_issuer() { return g_thread != nullptr ? g_thread : g_issuer; }
void report_unordered_load(Thread& t);
// Start of every operation: clears the spin detector unless the operation is a poll itself. `again` is the word an
// ordered load looks at.
inline Thread& enter(bool poll = false, const void* again = nullptr) {
    Thread& t = *g_thread;
    if (t.unordered != nullptr && t.unordered != again) report_unordered_load(t);
    if (!poll) t.num_polls = 0;
    return t;
}

std::string describe_waiters(const Engine& e);
void spin_guard(Thread& t, const Where& where);
std::string describe_thread(const Thread& t);
std::string describe_address(const void* p);
std::string format(const char* fmt, ...) __attribute__((format(printf, 1, 2)));

// PCT: random priorities, lowered at a few random points.
constexpr u32 kPctPoints = 8, kPctHorizon = 1000, kPctHorizons = 8;  // 1000 to 128,000 slices, by the seed

// Shared memory is one reservation cut into slots of 256 KB, one per resident CTA.
constexpr u32 kSmemSlot = 256 * 1024, kSmemLimit = 232448, kSmemWindow = 1024;
Cta* smem_owner(const void* p);
void set_smem_owner(u8* slot, Cta* cta);
u32 smem_slot_index(const u8* slot);
void cluster_thread_exit(Cta& cta);
u32 smem_offset(Cta& cta, const void* p, u64 bytes, const Where& where, const char* what);

}  // namespace megamoe::emu
