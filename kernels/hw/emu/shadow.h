// Shadow state of shared memory and the race check's cells.
#pragma once
#include "engine.h"

namespace megamoe::emu {

struct AsyncOp;

void prepare_smem_shadow(size_t slots, bool track_written, bool track_races);
void reset_smem_shadow(u32 slot);
u8* smem_written(const void* p);                 // one byte per byte, or null when not tracked
ShadowCell* shadow_cells(const void* p, u64& room);  // cell of p's word and the words that follow it, or null

// Race check of an access by a thread through the generic proxy.
void shadow_access(Thread& t, const void* p, u32 bytes, bool write, Access kind, Scope scope, const Where& where);
// A relaxed load that sees a write it is not ordered after might as well have seen an older value. That is how a flag
// is polled; it is reported unless what the thread does next is a fence, or another look at the same word.
void note_unordered_load(Thread& t, const void* p, const Where& where);
void shadow_stream(Stream& s, const void* p, u64 bytes, bool write);

}  // namespace megamoe::emu
