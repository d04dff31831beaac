// Blocks of device memory from torch's own caching allocator, in a CUDA build of torch: what is reserved, split, cached
// and refused is its doing, PYTORCH_CUDA_ALLOC_CONF included. Its cudaMalloc is the virtual runtime's.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include "blocks.h"
#include "cudart_api.h"
#include "native_mode.h"

namespace prism {

struct Block {
  c10::DataPtr memory;
  uint32_t stream;
};

namespace {

c10::DeviceAllocator* g_allocator = nullptr;

c10::DeviceIndex index(int device) { return static_cast<c10::DeviceIndex>(device); }

struct BeyondLimit {
  BeyondLimit() { prism_cudart_beyond_limit(1); }
  ~BeyondLimit() { prism_cudart_beyond_limit(-1); }
};

void copy_stat(Stat& to, const c10::CachingAllocator::Stat& from) {
  to = {from.current, from.peak, from.allocated, from.freed};
}

}  // namespace

void adopt_caching_allocator() {
  if (!g_allocator) g_allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
}

Block* take_block(size_t nbytes, int, uint32_t stream) {
  Unheard unheard;
  uint64_t refusals = prism_cudart_refusals();
  try {
    return new Block{g_allocator->allocate(nbytes), stream};
  } catch (const c10::Error&) {
    // The GPU of the target job would be full here: counted by torch's allocator, and the slice goes on beyond. A limit
    // that the script has set itself (set_per_process_memory_fraction) holds.
    if (prism_cudart_refusals() == refusals) throw;
  }
  BeyondLimit beyond;
  return new Block{g_allocator->allocate(nbytes), stream};
}

void give_back_block(Block* block) {
  Unheard unheard;
  delete block;
}

void give_back_shared_block(Block* block) { give_back_block(block); }
void count_launch() {}
void host_has_waited() {}
DeviceStats late_stats(int) { return {}; }

uintptr_t block_address(const Block* block) { return reinterpret_cast<uintptr_t>(block->memory.get()); }
uint32_t block_stream(const Block* block) { return block->stream; }

void use_block_on(Block* block, c10::Stream stream) {
  Unheard unheard;
  g_allocator->recordStream(block->memory, stream);
}

void empty_cache() {
  Unheard unheard;
  g_allocator->emptyCache();
}

void limit_memory(int, int64_t) {}  // torch's own

AllocatorSettings& allocator_settings() {
  static auto* s = new AllocatorSettings();  // not read: torch's allocator has its own
  return *s;
}

DeviceStats device_stats(int device) {
  auto from = g_allocator->getDeviceStats(index(device));
  DeviceStats to;
  const c10::CachingAllocator::StatArray* arrays[kNumStats] = {
      &from.allocation,     &from.segment,      &from.active,
      &from.inactive_split, &from.allocated_bytes, &from.reserved_bytes,
      &from.active_bytes,   &from.inactive_split_bytes, &from.requested_bytes};
  for (int s = 0; s < kNumStats; ++s)
    for (int pool = 0; pool < kNumPools; ++pool) copy_stat(to.stats[s][pool], (*arrays[s])[pool]);
  to.num_alloc_retries = from.num_alloc_retries;
  to.num_ooms = from.num_ooms;
  to.num_device_alloc = from.num_device_alloc;
  to.num_device_free = from.num_device_free;
  return to;
}

void reset_peak_stats(int device) { g_allocator->resetPeakStats(index(device)); }
void reset_accumulated_stats(int device) { g_allocator->resetAccumulatedStats(index(device)); }

}  // namespace prism
