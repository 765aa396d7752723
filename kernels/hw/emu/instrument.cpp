// Plain loads and stores of a checked kernel. g++'s thread-sanitizer pass calls these instead of libtsan's: every
// access arrives with address, size and return address, with no change to the source. Calls made through an
// operation of ops.h check themselves.
#include "engine.h"
#include "shadow.h"

namespace megamoe::emu {

namespace {

void plain(const void* p, u32 bytes, u32 align, bool write, const void* pc) {
    Thread* t = g_thread;
    if (t == nullptr) return;  // static initialisation of the kernel library
    Engine& e = *g_engine;
    const size_t into = static_cast<size_t>(static_cast<const char*>(p) - static_cast<const char*>(e.stacks_.stack(t->stack)));
    if (into < StackPool::kStackBytes) return;
    const Kernel& k = *cta_of(*t).launch->kernel;
    const u64 address = reinterpret_cast<u64>(p);
    if (!write && address >= k.image_begin && address < k.image_end) return;  // constants of the kernel
    const Where where{nullptr, 0, pc};
    spin_guard(*t, where);
    if (e.options.preempt) e.maybe_preempt(*t, 64);
    check_access(p, bytes, align, write, Access::kPlain, Scope::kCta, where);
    if (write) e.wrote(p, bytes);
}

}  // namespace

}  // namespace megamoe::emu

using megamoe::emu::plain;

#define MM_PC __builtin_return_address(0)
#define MM_TSAN(n)                                                                                     \
    void __tsan_read##n(void* p) { plain(p, n, n, false, MM_PC); }                                     \
    void __tsan_write##n(void* p) { plain(p, n, n, true, MM_PC); }                                     \
    void __tsan_volatile_read##n(void* p) { plain(p, n, n, false, MM_PC); }                            \
    void __tsan_volatile_write##n(void* p) { plain(p, n, n, true, MM_PC); }
#define MM_TSAN_UNALIGNED(n)                                                                           \
    void __tsan_unaligned_read##n(void* p) { plain(p, n, n, false, MM_PC); }                           \
    void __tsan_unaligned_write##n(void* p) { plain(p, n, n, true, MM_PC); }                           \
    void __tsan_unaligned_volatile_read##n(void* p) { plain(p, n, n, false, MM_PC); }                  \
    void __tsan_unaligned_volatile_write##n(void* p) { plain(p, n, n, true, MM_PC); }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
MM_TSAN(1)
MM_TSAN(2)
MM_TSAN(4)
MM_TSAN(8)
MM_TSAN(16)
MM_TSAN_UNALIGNED(2)
MM_TSAN_UNALIGNED(4)
MM_TSAN_UNALIGNED(8)
MM_TSAN_UNALIGNED(16)
void __tsan_read_range(void* p, unsigned long n) { plain(p, static_cast<unsigned>(n), 0, false, MM_PC); }
void __tsan_write_range(void* p, unsigned long n) { plain(p, static_cast<unsigned>(n), 0, true, MM_PC); }
}
