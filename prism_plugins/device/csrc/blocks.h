// Blocks of device memory: which addresses an allocation gets, what stays reserved, when memory runs out.
//
// In a CPU build of torch (blocks.cpp) this follows c10/cuda/CUDACachingAllocator.cpp: sizes rounded to 512 B; a small pool
// (<= 1 MiB, 2 MiB segments) and a large one (20 MiB segments below 10 MiB, else multiples of 2 MiB), one pair per stream;
// best fit, ties by address; splitting, coalescing; at the limit all free segments are released once; with
// expandable_segments one growing segment per stream and pool, in pages of 2 or 20 MiB; and what AllocatorSettings names.
// In a CUDA build (native_blocks.cpp) it is torch's own allocator.
// Beyond the limit an allocation still succeeds and is counted: running out of memory is a finding, not a crash.
#pragma once
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace prism {

struct Block;  // Opaque.

// Of the current device and its current stream.
Block* take_block(size_t nbytes, int device, uint32_t stream);
void give_back_block(Block* block);
// The same, when another stream than the block's uses it: the late ledger gives it back later (see below).
void give_back_shared_block(Block* block);
uintptr_t block_address(const Block* block);
uint32_t block_stream(const Block* block);
// The block is also used on `stream`: it may not be reused before that stream comes to this point.
void use_block_on(Block* block, c10::Stream stream);
void empty_cache();
// set_per_process_memory_fraction.
void limit_memory(int device, int64_t bytes);

constexpr int kRoundupIntervals = 16;  // powers of two from 1 MiB to 32 GiB and above
// PYTORCH_ALLOC_CONF, as program/allocator_settings.py reads it.
struct AllocatorSettings {
  bool expandable_segments = false;
  size_t max_split_size = SIZE_MAX;
  size_t max_non_split_rounding = 20 << 20;
  double garbage_collection_threshold = 0;
  std::array<size_t, kRoundupIntervals> roundup_divisions{};
};
AllocatorSettings& allocator_settings();

constexpr int kNumPools = 3;  // all, small_pool, large_pool
struct Stat {
  int64_t current = 0, peak = 0, allocated = 0, freed = 0;
  void increase(int64_t n) {
    current += n;
    allocated += n;
    if (current > peak) peak = current;
  }
  void decrease(int64_t n) {
    current -= n;
    freed += n;
  }
};
enum StatName {
  kAllocation, kSegment, kActive, kInactiveSplit, kAllocatedBytes, kReservedBytes, kActiveBytes,
  kInactiveSplitBytes, kRequestedBytes, kNumStats,
};
struct DeviceStats {
  std::array<std::array<Stat, kNumPools>, kNumStats> stats;
  int64_t num_alloc_retries = 0;
  int64_t num_ooms = 0;
  int64_t num_device_alloc = 0;
  int64_t num_device_free = 0;
};
DeviceStats device_stats(int device);

// The late ledger (CPU builds of torch): the same requests through a second allocator, in which a block that other streams use is
// free again only when the GPU has come to its release. A GPU that is busy is behind the host by the launches its queue
// holds: so many launches later, or at the next synchronisation.
constexpr int64_t kLaunchQueue = 1024;
void count_launch();
void host_has_waited();
DeviceStats late_stats(int device);
void reset_peak_stats(int device);
void reset_accumulated_stats(int device);

}  // namespace prism
