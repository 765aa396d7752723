// Stackful fibers. x86-64 uses a hand-written switch (about 10 ns); other machines fall back to ucontext.
#pragma once
#include <cstddef>

namespace megamoe::emu {

struct Fiber {
    void* context = nullptr;  // saved stack pointer, or a ucontext_t
};

using FiberEntry = void (*)();

// Prepares `fiber` to run `entry` on [stack, stack + bytes). `entry` must never return.
void fiber_prepare(Fiber& fiber, void* stack, size_t bytes, FiberEntry entry);
// Saves the running context in `from` and continues `to`.
void fiber_switch(Fiber& from, Fiber& to);

// One contiguous reservation cut into equal stacks; pages are touched lazily. With `guard`, the lowest page of
// each stack faults. `reserve` keeps an earlier reservation that is large enough.
class StackPool {
  public:
    static constexpr size_t kStackBytes = 64 * 1024;
    void reserve(size_t count);
    void* stack(size_t index) const { return base_ + index * kStackBytes; }
    bool contains(const void* p) const { return p >= base_ && p < base_ + count_ * kStackBytes; }
    size_t index_of(const void* p) const { return static_cast<size_t>(static_cast<const char*>(p) - base_) / kStackBytes; }

  private:
    char* base_ = nullptr;
    size_t count_ = 0;
};

}  // namespace megamoe::emu
