#include "fiber.h"

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

// MEGAMOE_EMU_UCONTEXT forces the fallback, so that it can be tested on x86-64.
#if defined(__x86_64__) && !defined(MEGAMOE_EMU_UCONTEXT)
#define MM_EMU_ASM_SWITCH 1
#else
#define MM_EMU_ASM_SWITCH 0
#include <ucontext.h>
#endif

namespace megamoe::emu {

#if MM_EMU_ASM_SWITCH

// Leaving through `pop; jmp` rather than `ret` keeps the return predictor intact: returning into another stack
// mispredicts every time and was measured six times slower.
asm(R"(
.text
.globl mm_emu_fiber_switch
.type mm_emu_fiber_switch,@function
mm_emu_fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
.size mm_emu_fiber_switch,.-mm_emu_fiber_switch
)");
extern "C" void mm_emu_fiber_switch(void** save, void* load) __attribute__((visibility("hidden")));

void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, FiberEntry entry) {
    auto top = reinterpret_cast<uintptr_t>(stack) + bytes;
    top &= ~uintptr_t(15);
    auto* slots = reinterpret_cast<uintptr_t*>(top);
    // At entry the stack pointer must look as if a call had just pushed a return address.
    slots[-1] = 0;
    slots[-2] = reinterpret_cast<uintptr_t>(entry);
    for (int i = 3; i <= 8; ++i) slots[-i] = 0;
    fiber.context = slots - 8;
}

void fiber_switch(Fiber& from, Fiber& to) { mm_emu_fiber_switch(&from.context, to.context); }

#else

// The context lives at the top of the fiber's own stack, so a fiber owns nothing that must be freed.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, FiberEntry entry) {
    const auto top = (reinterpret_cast<uintptr_t>(stack) + bytes - sizeof(ucontext_t)) & ~uintptr_t(63);
    auto* context = reinterpret_cast<ucontext_t*>(top);
    fiber.context = context;
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = top - reinterpret_cast<uintptr_t>(stack);
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}

void fiber_switch(Fiber& from, Fiber& to) {
    static thread_local ucontext_t scheduler;  // the one fiber that was never prepared
    if (from.context == nullptr) from.context = &scheduler;
    swapcontext(static_cast<ucontext_t*>(from.context), static_cast<ucontext_t*>(to.context));
}

#endif

void StackPool::reserve(size_t count) {
    if (count <= count_) return;
    if (base_ != nullptr) munmap(base_, count_ * kStackBytes);
    base_ = nullptr;
    count_ = 0;
    const size_t bytes = count * kStackBytes;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::runtime_error("cannot reserve fiber stacks");
    base_ = static_cast<char*>(p);
    count_ = count;
    // Each guard page splits a mapping in two and the kernel allows about 65,000 mappings per process.
    if (count <= 24000) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        for (size_t i = 0; i < count; ++i) mprotect(base_ + i * kStackBytes, page, PROT_NONE);
    }
}

}  // namespace megamoe::emu
