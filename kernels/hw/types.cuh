// Fixed-width names, the tensor-map blob and the pure arithmetic both implementations of hw/ share.
// NVRTC ships no <cstdint>, so the names are our own.
#pragma once

namespace megamoe {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;
using f32 = float;

static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "megamoe assumes an LP64 host and device");

// A CUtensorMap as the driver encodes it (or, on the emulator, emu::TensorMapImage): opaque here.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

struct alignas(16) Vec4 {
    u32 x, y, z, w;
};

// Memory scopes of the PTX memory consistency model (PTX ISA, section 8.5).
enum class Scope { kCta, kGpu, kSys };

}  // namespace megamoe

// Everything callable from the kernel. On the host compiler the macro is plain inline.
#if defined(__CUDACC__)
#define MM_DEVICE __device__ __forceinline__
#define MM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MM_DEVICE inline
#define MM_HOST_DEVICE inline
#endif
