// Device memory: the ledger of live allocations, over the blocks of a caching allocator (blocks.h).
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "device_event.h"

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
  bool other_stream = false;   // a stream other than the block's uses it (record_stream)
  Block* block;
  Allocation* previous = nullptr;
  Allocation* next = nullptr;
};

// Order of prism_plugins/program/model.py: MemoryCategory.
enum Category : uint8_t {
  kParameters, kGradients, kOptimizerState, kActivations, kCommunication, kWorkspace, kTemporary, kOther,
};

c10::Allocator* device_allocator();

// The allocation of a storage, or nullptr when it is not ours (CPU, zero bytes).
Allocation* allocation_of(const c10::StorageImpl* storage);
Allocation* allocation_of(const c10::DataPtr& p);

// Memory the libraries under torch take: charged to the ledger, never freed unless asked to.
void allocate_workspace(size_t nbytes);
void free_workspaces();

struct LiveAllocation {
  uint32_t id;
  uint32_t category;
  int64_t nbytes;
};
// In allocation order, all devices.
std::vector<LiveAllocation> live_allocations();

// A stream uses the allocation: what record_stream and autograd's engine tell the caching allocator. Where it is not the
// block's own, the block's reuse waits for that stream.
void use_on_stream(Allocation* a, c10::Stream stream);
// A send or receive uses it, on NCCL's stream.
void use_in_message(Allocation* a);
// Ids of the allocations of which that was said since the recording began.
std::vector<uint32_t> used_on_other_streams();
void forget_uses();

}  // namespace prism
