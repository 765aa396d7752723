#include "faults.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ucontext.h>

namespace megamoe::emu {

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
const int kInterrupt = SIGRTMIN + 7;
constexpr size_t kAlternateStack = 64 * 1024;
constexpr size_t kTopReserve = 4096;  // the ucontext fallback keeps its context there

struct sigaction g_old[3], g_old_interrupt;
pthread_t g_runner;
void* g_fault_address = nullptr;
void* g_fault_pc = nullptr;
int g_fault_signal = 0;

#if defined(__x86_64__)
u64 get_pc(const ucontext_t* c) { return static_cast<u64>(c->uc_mcontext.gregs[REG_RIP]); }
void redirect(ucontext_t* c, void (*target)(), void* stack_top) {
    c->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<long long>(target);
    c->uc_mcontext.gregs[REG_RSP] = reinterpret_cast<long long>(stack_top) - 8;
}
#elif defined(__aarch64__)
u64 get_pc(const ucontext_t* c) { return c->uc_mcontext.pc; }
void redirect(ucontext_t* c, void (*target)(), void* stack_top) {
    c->uc_mcontext.pc = reinterpret_cast<u64>(target);
    c->uc_mcontext.sp = reinterpret_cast<u64>(stack_top);
}
#else
#error "add the program counter of this machine"
#endif

bool in_kernel_code(u64 pc) {
    if (g_thread == nullptr) return false;
    const Kernel& k = *cta_of(*g_thread).launch->kernel;
    return pc >= k.image_begin && pc < k.image_end;
}

void crashed() {
    Thread& t = *g_thread;
    const Where where{nullptr, 0, g_fault_pc};
    const char* what = g_fault_signal == SIGFPE ? "arithmetic trap" : "memory fault";
    if (g_engine->stacks_.contains(g_fault_address) && g_engine->stacks_.index_of(g_fault_address) == t.stack)
        g_engine->fatal("stack", where, format("stack overflow: a thread of the emulator has %zu bytes", StackPool::kStackBytes));
    g_engine->fatal("bounds", where, format("%s: access to %s", what, describe_address(g_fault_address).c_str()));
}

void runaway() {
    g_engine->fatal("livelock", Where{nullptr, 0, g_fault_pc}, "a thread runs without ever calling an operation of hw:: (a loop on plain memory?)");
}

// The fiber's own stack may be the problem, and it is not needed any more: start again at its top.
void leave_fiber(ucontext_t* c, void (*target)()) {
    char* top = static_cast<char*>(g_engine->stacks_.stack(g_thread->stack)) + StackPool::kStackBytes - kTopReserve;
    redirect(c, target, top);
}

void on_fault(int signal, siginfo_t* info, void* context) {
    auto* c = static_cast<ucontext_t*>(context);
    const u64 pc = get_pc(c);
    const bool ours = pthread_equal(pthread_self(), g_runner) && g_thread != nullptr;
    // Only kernel code can be abandoned half way; a fault inside the runtime is our bug and must stay one, except
    // that a stack overflow may strike anywhere.
    const bool overflow = ours && g_engine->stacks_.contains(info->si_addr);
    if (ours && (in_kernel_code(pc) || pc == 0 || overflow)) {
        g_fault_address = info->si_addr;
        g_fault_pc = reinterpret_cast<void*>(pc);
        g_fault_signal = signal;
        leave_fiber(c, crashed);
        return;
    }
    for (size_t i = 0; i < 3; ++i)
        if (kSignals[i] == signal) sigaction(signal, &g_old[i], nullptr);  // the access repeats and meets the old handler
}

void on_interrupt(int, siginfo_t*, void* context) {
    auto* c = static_cast<ucontext_t*>(context);
    const u64 pc = get_pc(c);
    if (!pthread_equal(pthread_self(), g_runner) || !in_kernel_code(pc)) return;
    g_fault_pc = reinterpret_cast<void*>(pc);
    leave_fiber(c, runaway);
}

}  // namespace

FaultGuard::FaultGuard(Engine& engine) : engine_(engine), runner_(pthread_self()) {
    g_runner = runner_;
    alternate_stack_ = std::malloc(kAlternateStack);
    stack_t stack{};
    stack.ss_sp = alternate_stack_;
    stack.ss_size = kAlternateStack;
    sigaltstack(&stack, nullptr);
    struct sigaction action {};
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    action.sa_sigaction = on_fault;
    for (size_t i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &g_old[i]);
    action.sa_sigaction = on_interrupt;
    sigaction(kInterrupt, &action, &g_old_interrupt);
    watchdog_ = std::thread([this] {
        // The scheduler looks at the limits itself; this only catches a fiber that does not let it.
        using clock = std::chrono::steady_clock;
        const auto begin = clock::now();
        auto overdue = clock::time_point::max();
        while (!done_.load()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            const double elapsed = std::chrono::duration<double>(clock::now() - begin).count();
            const bool limit = engine_.options.wall_limit_s > 0 && elapsed > engine_.options.wall_limit_s;
            if (overdue == clock::time_point::max() && (limit || engine_.stop->load())) overdue = clock::now() + std::chrono::milliseconds(500);
            if (clock::now() > overdue && !done_.load()) pthread_kill(runner_, kInterrupt);
        }
    });
}

FaultGuard::~FaultGuard() {
    done_ = true;
    watchdog_.join();
    for (size_t i = 0; i < 3; ++i) sigaction(kSignals[i], &g_old[i], nullptr);
    sigaction(kInterrupt, &g_old_interrupt, nullptr);
    stack_t stack{};
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, nullptr);
    std::free(alternate_stack_);
}

}  // namespace megamoe::emu
