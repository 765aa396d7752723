// The run loop: picks warps, advances asynchronous operations and streams, and decides when nothing can move.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "async.h"
#include "engine.h"

namespace megamoe::emu {

Engine* g_engine = nullptr;
Thread* g_thread = nullptr;
Thread* g_issuer = nullptr;

namespace {
double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
constexpr u32 kQuietRounds = 3;      // rounds of polling unchanged memory before it is called a deadlock
constexpr u32 kMaxJumps = 4096;      // clock jumps granted to device-side timeouts after that
constexpr u32 kSpinCredit = 2048;    // polls of a spinner per jump
constexpr u64 kMaxJumpNs = 1'000'000'000'000;
}  // namespace

Engine::Engine(StackPool& stacks) : stacks_(stacks) {}
Engine::~Engine() = default;

u32 Engine::random(u32 bound) {
    rng_ ^= rng_ >> 12;
    rng_ ^= rng_ << 25;
    rng_ ^= rng_ >> 27;
    return static_cast<u32>(((rng_ * 0x2545F4914F6CDD1Dull) >> 33) % bound);
}

// ---- on fibers

void Engine::block(Thread& t, WaitKind kind, const Where& where, u64 a, u64 b) {
    t.wait = Wait{kind, where, a, b};
    t.released = false;
    t.ops = 0;
    fiber_switch(t.fiber, scheduler_);
    t.wait.kind = WaitKind::kNone;
}

void Engine::yield(Thread& t) {
    wake(t);
    t.ops = 0;
    fiber_switch(t.fiber, scheduler_);
}

void Engine::maybe_preempt(Thread& t, u32 one_in) {
    if (options.schedule != Schedule::kFifo && random(one_in) == 0) yield(t);
}

// A spinner sleeps until one of the words it polled changes, or until nothing else can run.
void Engine::park_poll(Thread& t, const Where& where) {
    if (t.spin_credit > 0) {
        --t.spin_credit;
        return;
    }
    pollers_.push_back(&t);
    for (u32 i = 0; i < t.num_polls; ++i) watches_[t.polls[i].address].push_back(&t);
    block(t, WaitKind::kPoll, where, t.num_polls ? reinterpret_cast<u64>(t.polls[0].address) : 0,
          t.num_polls ? t.polls[0].value : 0);
    t.num_polls = 0;
}

void Engine::unpark(Thread& t) {
    for (u32 i = 0; i < t.num_polls; ++i) {
        auto it = watches_.find(t.polls[i].address);
        if (it == watches_.end()) continue;
        auto& list = it->second;
        list.erase(std::remove(list.begin(), list.end(), &t), list.end());
        if (list.empty()) watches_.erase(it);
    }
    wake(t);
}

// Lanes of a warp that poll together leave together: their loop usually ends in a vote.
void Engine::wrote(const void* p, u64 bytes) {
    ++progress;
    if (watches_.empty()) return;
    std::vector<Thread*> woken;
    if (bytes <= 64) {
        const u64 first = reinterpret_cast<u64>(p) & ~3ull, last = reinterpret_cast<u64>(p) + bytes;
        for (u64 a = first; a < last; a += 4) {
            auto it = watches_.find(reinterpret_cast<const void*>(a));
            if (it != watches_.end()) woken.insert(woken.end(), it->second.begin(), it->second.end());
        }
    } else {
        for (auto& [address, list] : watches_)
            if (address >= p && address < static_cast<const u8*>(p) + bytes) woken.insert(woken.end(), list.begin(), list.end());
    }
    if (woken.empty()) return;
    std::vector<Warp*> warps;
    for (Thread* t : woken)
        if (std::find(warps.begin(), warps.end(), t->warp) == warps.end()) warps.push_back(t->warp);
    auto in_warp = [&](Thread* t) { return std::find(warps.begin(), warps.end(), t->warp) != warps.end(); };
    auto keep = std::stable_partition(pollers_.begin(), pollers_.end(), [&](Thread* t) { return !in_warp(t); });
    std::vector<Thread*> leave(keep, pollers_.end());
    pollers_.erase(keep, pollers_.end());
    for (Thread* t : leave) unpark(*t);
}

void Engine::wake_pollers() {
    std::vector<Thread*> all;
    all.swap(pollers_);
    watches_.clear();
    for (Thread* t : all) wake(*t);
}

void Engine::wake(Thread& t) {
    Warp& w = *t.warp;
    if (stream_of(w).stopped) return;
    w.ready |= 1u << t.lane;
    if (!w.queued && !w.running) {
        w.queued = true;
        ready_.push_back(&w);
    }
}

void Engine::end_run() {
    ending = true;
    fiber_switch(g_thread->fiber, scheduler_);
    __builtin_unreachable();
}

// ---- picking

Warp& Engine::pick() {
    size_t i = 0;
    if (options.schedule == Schedule::kRandom) {
        i = random(static_cast<u32>(ready_.size()));
    } else if (options.schedule == Schedule::kPct) {
        for (size_t j = 1; j < ready_.size(); ++j)
            if (ready_[j]->priority > ready_[i]->priority) i = j;
        // A change point: from here on the chosen warp ranks below all others.
        if (!pct_points_.empty() && stats.slices >= pct_points_.back()) {
            ready_[i]->priority = static_cast<u32>(pct_points_.size());
            pct_points_.pop_back();
        }
    }
    if (slow(*ready_[i]) && random(stream_of(*ready_[i]).slow) != 0)
        for (size_t j = 0; j < ready_.size(); ++j)
            if (!slow(*ready_[(i + j) % ready_.size()])) {
                i = (i + j) % ready_.size();
                break;
            }
    Warp* w = ready_[i];
    if (i == 0) {
        ready_.pop_front();
    } else {
        ready_[i] = ready_.back();
        ready_.pop_back();
    }
    w->queued = false;
    return *w;
}

bool Engine::slow(const Warp& w) const { return streams[w.cta->rank].slow > 1; }

// The rank dies where it stands: its warps never run again, what it has in flight never completes. Its memory stays.
void Engine::stop_rank(u32 rank) {
    streams[rank].stopped = true;
    ++progress;
    Finding f;
    f.kind = "rank-stopped";
    f.text = format("rank %u dies in launch %u, after %llu turns of its warps", rank, streams[rank].launch->number, streams[rank].stop_after);
    f.rank = static_cast<int>(rank);
    findings.push_back(std::move(f));
    auto ours = [&](const Thread* t) { return cta_of(*t).rank == rank; };
    for (Thread* t : pollers_)
        if (ours(t))
            for (u32 i = 0; i < t->num_polls; ++i) {
                auto it = watches_.find(t->polls[i].address);
                if (it != watches_.end()) it->second.erase(std::remove(it->second.begin(), it->second.end(), t), it->second.end());
            }
    pollers_.erase(std::remove_if(pollers_.begin(), pollers_.end(), ours), pollers_.end());
    ready_.erase(std::remove_if(ready_.begin(), ready_.end(), [&](const Warp* w) { return w->cta->rank == rank; }), ready_.end());
    pending_.erase(std::remove_if(pending_.begin(), pending_.end(), [&](const auto& op) { return op->cta->rank == rank; }), pending_.end());
}

void Engine::run_warp(Warp& w) {
    Stream& own = stream_of(w);
    if (own.stop_after != 0 && ++own.slices > own.stop_after) {
        stop_rank(w.cta->rank);
        return;
    }
    ++stats.slices;
    clock += 10;
    w.running = true;
    const bool fifo = options.schedule == Schedule::kFifo;
    const u32 passes = fifo ? 64 : 1 + random(8);
    const u32 first = fifo ? 0 : random(32);
    for (u32 pass = 0; pass < passes && w.ready != 0; ++pass) {
        const u32 mask = w.ready;
        w.ready = 0;
        for (u32 i = 0; i < 32; ++i) {
            const u32 lane = (first + i) % 32;
            if (!(mask >> lane & 1u)) continue;
            Thread& t = w.cta->threads[w.index * 32 + lane];
            g_thread = &t;
            ++stats.switches;
            fiber_switch(scheduler_, t.fiber);
            g_thread = nullptr;
            if (ending) return;
        }
    }
    w.running = false;
    if (w.ready != 0 && !w.queued) {
        w.queued = true;
        ready_.push_back(&w);
    }
}

// ---- asynchronous operations

void Engine::submit(std::unique_ptr<AsyncOp> op) {
    if (op->cta != nullptr) ++op->cta->async_pending;
    if (options.completion == Completion::kEager) {
        while (!async_step(*op)) {}
        if (op->cta != nullptr) --op->cta->async_pending;
        return;
    }
    pending_.push_back(std::move(op));
}

void Engine::step_async() {
    const size_t i = random(static_cast<u32>(pending_.size()));
    AsyncOp& op = *pending_[i];
    ++progress;
    if (!async_step(op)) return;
    if (op.cta != nullptr) --op.cta->async_pending;
    pending_[i] = std::move(pending_.back());
    pending_.pop_back();
}

// ---- nothing is ready

bool Engine::idle() {
    ++stats.idle_rounds;
    // A rank that has not started yet is the earliest thing that can happen.
    u64 earliest = ~0ull;
    for (const Stream& s : streams)
        if (!s.stopped && !s.launch && s.next < s.ops.size() && s.start_delay > clock) earliest = std::min(earliest, s.start_delay);
    if (earliest != ~0ull && (seen_progress_ == progress || pollers_.empty())) {
        clock = earliest;
        streams_dirty_ = true;
        ++progress;
        return true;
    }
    if (seen_progress_ != progress) {
        seen_progress_ = progress;
        quiet_ = 0;
        jump_ns_ = first_jump_ns_;
    } else {
        ++quiet_;
    }
    if (quiet_ < kQuietRounds && !pollers_.empty()) {
        clock += 1000;
        wake_pollers();
        return true;
    }
    if (!deadlock_reported_) {
        deadlock_reported_ = true;
        Finding f;
        // The others waiting for a rank that died is what must happen: then this only says who waited.
        f.kind = any_stopped() ? "waits-for-dead" : "deadlock";
        f.text = describe_waiters(*this);
        findings.push_back(std::move(f));
    }
    if (++jumps_ > kMaxJumps) return false;
    clock += jump_ns_;
    jump_ns_ = std::min(jump_ns_ * 2, kMaxJumpNs);
    for (Thread* t : pollers_) t->spin_credit = kSpinCredit;
    wake_pollers();
    // mbarrier.try_wait may give up; the kernel then looks at its deadline.
    for (Stream& s : streams) {
        if (!s.launch) continue;
        for (auto& cta : s.launch->ctas)
            for (Thread& t : cta->threads)
                if (!t.done && t.wait.kind == WaitKind::kMbarrier) {
                    t.released = true;
                    wake(t);
                }
    }
    return !ready_.empty();
}

bool Engine::any_stopped() const {
    return std::any_of(streams.begin(), streams.end(), [](const Stream& s) { return s.stopped; });
}

bool Engine::finished() const {
    for (const Stream& s : streams)
        if (!s.stopped && (s.launch || s.next < s.ops.size())) return false;
    return true;
}

bool Engine::over_limit() {
    const char* why = nullptr;
    if (stop->load(std::memory_order_relaxed)) why = "stopped by the caller";
    else if (options.max_slices != 0 && stats.slices > options.max_slices) why = "step limit reached";
    else if (options.wall_limit_s > 0 && now_s() - started_ > options.wall_limit_s) why = "wall-clock limit reached";
    if (why == nullptr) return false;
    Finding f;
    f.kind = stop->load() ? "stopped" : "livelock";
    f.text = std::string(why) + "\n" + describe_waiters(*this);
    findings.push_back(std::move(f));
    return true;
}

void Engine::run() {
    started_ = now_s();
    prepare();
    try {
        loop();
    } catch (const RunEnded&) {
    }
    ending = true;
}

void Engine::loop() {
    const bool fifo = options.schedule == Schedule::kFifo;
    u32 ticks = 0;
    while (!ending) {
        if ((++ticks & 255u) == 0 && over_limit()) break;
        if (clock >= next_start_) {
            streams_dirty_ = true;
            next_start_ = ~0ull;
        }
        if (streams_dirty_ && (ready_.empty() || fifo || random(8) == 0) && advance_streams()) continue;
        if (!ready_.empty()) {
            if (options.completion == Completion::kRandom && !pending_.empty() && random(4) == 0) step_async();
            else run_warp(pick());
            // Finished CTAs are recycled only here, where no fiber of theirs is running.
            while (!finished_ctas_.empty() && !ending) {
                Cta* cta = finished_ctas_.back();
                finished_ctas_.pop_back();
                recycle(*cta);
            }
            continue;
        }
        if (!pending_.empty()) {
            step_async();
            continue;
        }
        if (finished()) break;
        if (idle()) continue;
        if (!finished() && any_stopped()) {  // without a dead rank the deadlock has been reported
            Finding f;
            f.kind = "deadlock";
            f.text = "no wait ever gave up, however far the clock went\n" + describe_waiters(*this);
            findings.push_back(std::move(f));
        }
        break;
    }
}

}  // namespace megamoe::emu
