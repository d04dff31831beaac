// Device memory: the block bookkeeping of torch's CUDACachingAllocator, and the ledger of live allocations.
//
// Follows c10/cuda/CUDACachingAllocator.cpp with its default settings: sizes rounded to 512 B; a small pool
// (<= 1 MiB, 2 MiB segments) and a large one (20 MiB segments below 10 MiB, else multiples of 2 MiB), one pair per
// stream; best fit, ties by address; splitting, coalescing; at the limit all free segments are released once.
// Beyond the limit an allocation still succeeds and is counted: running out of memory is a finding, not a crash.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace prism {

struct Block;

// The context behind every DataPtr the backend hands out.
struct Allocation {
  uint32_t id;
  size_t nbytes;               // as requested
  void* ptr;                   // host memory, or an address that nothing may touch
  bool real;                   // ptr is host memory
  std::atomic<bool> synthesized{false};  // shape-only, or computed from shape-only values
  uint8_t category;            // index into kCategories
  uint8_t device;
  bool other_stream = false;   // record_stream named a stream other than the block's
  Block* block;
  Allocation* previous = nullptr;
  Allocation* next = nullptr;
};

// Order of prism_plugins/program/model.py: MemoryCategory.
enum Category : uint8_t {
  kParameters, kGradients, kOptimizerState, kActivations, kCommunication, kWorkspace, kTemporary, kOther,
};

// Shape-only storages live at addresses with this bit, which no process can touch.
constexpr uintptr_t kFakeBit = 1ull << 62;

c10::Allocator* device_allocator();

// The allocation of a storage, or nullptr when it is not ours (CPU, zero bytes).
Allocation* allocation_of(const c10::StorageImpl* storage);

// Memory the libraries under torch take: charged to the ledger, never freed unless asked to.
void allocate_workspace(size_t nbytes);
void free_workspaces();
void empty_cache();

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
void reset_peak_stats(int device);
void reset_accumulated_stats(int device);

struct LiveAllocation {
  uint32_t id;
  uint32_t category;
  int64_t nbytes;
};
// In allocation order, all devices.
std::vector<LiveAllocation> live_allocations();

}  // namespace prism
