// Findings and the text of a deadlock: every waiter and what it waits for.
#include <cstdarg>
#include <cstdio>
#include <map>
#include <tuple>

#include "async.h"
#include "engine.h"

namespace megamoe::emu {

std::string format(const char* fmt, ...) {
    va_list args, copy;
    va_start(args, fmt);
    va_copy(copy, args);
    const int n = std::vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::string out(static_cast<size_t>(n), '\0');
    std::vsnprintf(out.data(), out.size() + 1, fmt, copy);
    va_end(copy);
    return out;
}

std::string describe_thread(const Thread& t) {
    const Cta& c = cta_of(t);
    return format("rank %u CTA %u warp %u lane %u", c.rank, c.index, t.warp->index, t.lane);
}

void Engine::report(const char* kind, const Where& where, const std::string& text, const Thread* t) {
    if (t == nullptr) t = g_thread_or_issuer();
    Finding f;
    f.kind = kind;
    f.text = text;
    if (where.file != nullptr) f.file = where.file;
    f.line = where.line;
    f.pc = reinterpret_cast<u64>(where.pc);
    if (t != nullptr) {
        f.rank = static_cast<int>(cta_of(*t).rank);
        f.cta = static_cast<int>(cta_of(*t).index);
        f.warp = static_cast<int>(t->warp->index);
        f.lane = t->lane;
    }
    // One report per place: the same line in every thread says nothing new.
    for (const Finding& other : findings)
        if (other.kind == f.kind && other.file == f.file && other.line == f.line && (f.line != 0 || other.pc == f.pc)) return;
    findings.push_back(std::move(f));
    if (findings.size() >= options.max_findings) {
        ending = true;
        if (g_thread != nullptr) end_run();
    }
}

[[noreturn]] void Engine::fatal(const char* kind, const Where& where, const std::string& text) {
    report(kind, where, text);
    ending = true;
    if (g_thread != nullptr) end_run();
    throw RunEnded{};
}

namespace {

constexpr size_t kMaxWaiterLines = 400;  // 8 ranks x 4 CTAs x 12 warps, each with one reason to wait

std::string describe_wait(const Thread& t) {
    const Wait& w = t.wait;
    Cta& cta = cta_of(t);
    switch (w.kind) {
        case WaitKind::kMbarrier: {
            const Mbarrier& b = cta.mbarriers.at(static_cast<u32>(w.a));
            return format("mbarrier.try_wait smem+%llu parity %llu (phase %u, pending arrivals %u of %u, pending tx %lld)", w.a, w.b,
                          b.phase, b.pending, b.count, static_cast<long long>(b.tx));
        }
        case WaitKind::kNamedBarrier: {
            const NamedBarrier& b = cta.barriers[w.a];
            return format("barrier %llu (%u of %u threads arrived)", w.a, b.arrived, b.expected);
        }
        case WaitKind::kClusterBarrier: return format("cluster barrier (%u arrived)", cta.cluster->arrived);
        case WaitKind::kCollective: {
            u32 missing = static_cast<u32>(w.b);
            for (const Collective& c : t.warp->collectives)
                if (c.mask == w.b) missing = c.mask & ~c.arrived;
            return format("warp operation (mask 0x%08llx, missing lanes 0x%08x)", w.b, missing);
        }
        case WaitKind::kWgmma: return format("wgmma.wait_group %llu", w.a);
        case WaitKind::kBulk: return "cp.async.bulk.wait_group";
        case WaitKind::kRegisters: return format("setmaxnreg.inc to %llu (%lld registers free, each thread needs %llu more)", w.b, static_cast<long long>(cta.free_registers), w.a);
        case WaitKind::kPoll:
            if (w.a == 0) return "polling (nap)";
            return format("polling %s = %llu", describe_address(reinterpret_cast<const void*>(w.a)).c_str(), w.b);
        default: return "ready";
    }
}

}  // namespace

std::string describe_waiters(const Engine& e) {
    // Lanes that wait alike share a line.
    using Key = std::tuple<u32, u32, u32, std::string>;
    std::map<Key, u32> lines;
    std::string head;
    for (size_t r = 0; r < e.streams.size(); ++r) {
        const Stream& s = e.streams[r];
        if (!s.launch) continue;
        if (s.stopped) {
            head += format("rank %zu: dead since launch %u\n", r, s.launch->number);
            continue;
        }
        head += format("rank %zu: launch %u (%s), %u CTAs live\n", r, s.launch->number, s.launch->kernel->name.c_str(), s.launch->live_ctas);
        for (const auto& cta : s.launch->ctas)
            for (const Thread& t : cta->threads) {
                if (t.done) continue;
                const Wait& w = t.wait;
                std::string text = describe_wait(t);
                if (w.where.file != nullptr) text += format(" at %s:%d", w.where.file, w.where.line);
                if (w.where.pc != nullptr) text += format(" [[%llx]]", reinterpret_cast<u64>(w.where.pc));
                ++lines[Key{static_cast<u32>(r), cta->index, t.warp->index, text}];
            }
    }
    std::string out = head;
    size_t shown = 0;
    for (const auto& [key, count] : lines) {
        if (++shown > kMaxWaiterLines) {
            out += format("... and %zu more\n", lines.size() - kMaxWaiterLines);
            break;
        }
        out += format("rank %u CTA %u warp %u: %s x%u lanes\n", std::get<0>(key), std::get<1>(key), std::get<2>(key), std::get<3>(key).c_str(), count);
    }
    if (!e.pending_.empty()) out += format("%zu asynchronous operations in flight\n", e.pending_.size());
    return out;
}

}  // namespace megamoe::emu
