// Crashes and endless loops inside kernel code end the run with a finding instead of killing the process. Signal
// handlers only redirect the faulting fiber to a function that reports and leaves it.
#pragma once
#include <pthread.h>
#include <atomic>
#include <thread>

#include "engine.h"

namespace megamoe::emu {

// For the duration of one run: SIGSEGV, SIGBUS and SIGFPE handlers, and a watchdog for the wall limit and stop
// requests that the scheduler does not get to see because a fiber never gives way.
class FaultGuard {
  public:
    explicit FaultGuard(Engine& engine);
    ~FaultGuard();

  private:
    Engine& engine_;
    pthread_t runner_;
    std::atomic<bool> done_{false};
    std::thread watchdog_;
    void* alternate_stack_ = nullptr;
};

}  // namespace megamoe::emu
