// The only door to the machine. Two implementations with the same names:
//   sm90/  one PTX instruction per wrapper, for NVRTC and nvcc
//   emu/   the same operations on fibers, shadow memory and an asynchronous engine, for the host compiler
// This is the only file outside emu/ that asks which of the two is being compiled.
#pragma once

#include "types.cuh"

#if defined(MEGAMOE_EMULATOR)
#include "emu/device.cuh"
#else
#include "sm90/thread.cuh"
#include "sm90/memory.cuh"
#include "sm90/sync.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"
#include "sm90/warp_math.cuh"
#endif
