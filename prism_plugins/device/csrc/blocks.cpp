// The block bookkeeping of torch's caching allocator. CPU builds of torch only.
#include "blocks.h"

#include <atomic>
#include <mutex>
#include <set>

#include "allocator.h"
#include "config.h"

namespace prism {

struct Block {
  uintptr_t address;
  size_t size;
  uint32_t stream;
  uint8_t device;
  bool small;
  bool free;
  size_t requested = 0;
  Block* previous = nullptr;  // neighbours within the segment
  Block* next = nullptr;
  bool is_split() const { return previous || next; }
};

namespace {

constexpr size_t kMinBlock = 512;
constexpr size_t kSmallSize = 1 << 20;
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kMinLarge = 10 << 20;
constexpr size_t kLargeSegment = 20 << 20;
constexpr size_t kRoundLarge = 2 << 20;

struct BySize {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    if (a->size != b->size) return a->size < b->size;
    return a->address < b->address;
  }
};
using Pool = std::set<Block*, BySize>;

size_t round_size(size_t n) { return n < kMinBlock ? kMinBlock : (n + kMinBlock - 1) / kMinBlock * kMinBlock; }

size_t segment_size(size_t n) {
  if (n <= kSmallSize) return kSmallSegment;
  if (n < kMinLarge) return kLargeSegment;
  return (n + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

class CachingAllocator {
 public:
  Block* malloc(size_t requested, int device, uint32_t stream);
  void free(Block* block);
  void release_free_segments();

  DeviceStats stats;

 private:
  void change(StatName name, const Block* b, int64_t n) {
    auto& s = stats.stats[name];
    for (int pool : {0, b->small ? 1 : 2}) {
      if (n > 0) s[pool].increase(n);
      if (n < 0) s[pool].decrease(-n);
    }
  }
  Pool& pool_of(const Block* b) { return b->small ? small_ : large_; }
  Block* take_free(size_t size, bool small, uint32_t stream);
  Block* new_segment(size_t size, bool small, int device, uint32_t stream);
  void absorb(Block* block, Block* neighbour);

  Pool small_, large_;
};

int64_t signed_size(const Block* b, int sign) { return sign * static_cast<int64_t>(b->size); }

Block* CachingAllocator::take_free(size_t size, bool small, uint32_t stream) {
  Pool& pool = small ? small_ : large_;
  Block key{0, size, stream, 0, small, true};
  auto it = pool.lower_bound(&key);
  if (it == pool.end() || (*it)->stream != stream) return nullptr;
  Block* b = *it;
  pool.erase(it);
  return b;
}

Block* CachingAllocator::new_segment(size_t size, bool small, int device, uint32_t stream) {
  static std::atomic<uintptr_t> next_address{kFakeBit | (1ull << 30)};
  size_t bytes = segment_size(size);
  auto reserved = [&] { return stats.stats[kReservedBytes][0].current; };
  if (reserved() + static_cast<int64_t>(bytes) > config().memory_bytes) {
    ++stats.num_alloc_retries;
    release_free_segments();
    if (reserved() + static_cast<int64_t>(bytes) > config().memory_bytes) ++stats.num_ooms;
  }
  auto* b = new Block{next_address.fetch_add(bytes), bytes, stream, static_cast<uint8_t>(device), small, true};
  ++stats.num_device_alloc;
  change(kSegment, b, 1);
  change(kReservedBytes, b, signed_size(b, 1));
  return b;
}

Block* CachingAllocator::malloc(size_t requested, int device, uint32_t stream) {
  size_t size = round_size(requested);
  bool small = size <= kSmallSize;
  Block* b = take_free(size, small, stream);
  if (!b) b = new_segment(size, small, device, stream);
  bool was_split = b->is_split();
  size_t rest = b->size - size;
  if (small ? rest >= kMinBlock : rest > kSmallSize) {
    auto* r = new Block{b->address + size, rest, stream, b->device, small, true};
    r->previous = b;
    r->next = b->next;
    if (r->next) r->next->previous = r;
    b->next = r;
    b->size = size;
    pool_of(r).insert(r);
    if (was_split) {  // the free part of a segment shrank
      change(kInactiveSplitBytes, b, signed_size(b, -1));
    } else {
      change(kInactiveSplit, r, 1);
      change(kInactiveSplitBytes, r, signed_size(r, 1));
    }
  } else if (was_split) {
    change(kInactiveSplit, b, -1);
    change(kInactiveSplitBytes, b, signed_size(b, -1));
  }
  b->free = false;
  b->requested = requested;
  change(kAllocation, b, 1);
  change(kActive, b, 1);
  change(kAllocatedBytes, b, signed_size(b, 1));
  change(kActiveBytes, b, signed_size(b, 1));
  change(kRequestedBytes, b, static_cast<int64_t>(requested));
  return b;
}

// Merges a free neighbour into `block`.
void CachingAllocator::absorb(Block* block, Block* neighbour) {
  if (!neighbour || !neighbour->free) return;
  pool_of(neighbour).erase(neighbour);
  change(kInactiveSplit, neighbour, -1);
  change(kInactiveSplitBytes, neighbour, signed_size(neighbour, -1));
  if (neighbour == block->previous) {
    block->address = neighbour->address;
    block->previous = neighbour->previous;
    if (block->previous) block->previous->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next) block->next->previous = block;
  }
  block->size += neighbour->size;
  delete neighbour;
}

void CachingAllocator::free(Block* b) {
  change(kAllocation, b, -1);
  change(kActive, b, -1);
  change(kAllocatedBytes, b, signed_size(b, -1));
  change(kActiveBytes, b, signed_size(b, -1));
  change(kRequestedBytes, b, -static_cast<int64_t>(b->requested));
  absorb(b, b->previous);
  absorb(b, b->next);
  b->free = true;
  b->requested = 0;
  pool_of(b).insert(b);
  if (b->is_split()) {
    change(kInactiveSplit, b, 1);
    change(kInactiveSplitBytes, b, signed_size(b, 1));
  }
}

void CachingAllocator::release_free_segments() {
  for (Pool* pool : {&small_, &large_}) {
    for (auto it = pool->begin(); it != pool->end();) {
      Block* b = *it;
      if (b->is_split()) {
        ++it;
        continue;
      }
      it = pool->erase(it);
      ++stats.num_device_free;
      change(kSegment, b, -1);
      change(kReservedBytes, b, signed_size(b, -1));
      delete b;
    }
  }
}

struct Devices {
  std::mutex mutex;
  std::array<CachingAllocator, kMaxDevices> all;
};
Devices& devices() {
  static auto* d = new Devices();  // leaked: tensors may die after static destruction
  return *d;
}

}  // namespace

Block* take_block(size_t nbytes, int device, uint32_t stream) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  return devices().all[device].malloc(nbytes, device, stream);
}

void give_back_block(Block* block) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  devices().all[block->device].free(block);
}

uintptr_t block_address(const Block* block) { return block->address; }
uint32_t block_stream(const Block* block) { return block->stream; }
void use_block_on(Block*, c10::Stream) {}

void empty_cache() {
  std::lock_guard<std::mutex> guard(devices().mutex);
  for (auto& d : devices().all) d.release_free_segments();
}

DeviceStats device_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  return devices().all.at(device).stats;
}

void reset_peak_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  for (auto& stat : devices().all.at(device).stats.stats)
    for (auto& pool : stat) pool.peak = pool.current;
}

void reset_accumulated_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  auto& d = devices().all.at(device).stats;
  for (auto& stat : d.stats)
    for (auto& pool : stat) pool.allocated = pool.freed = 0;
  d.num_alloc_retries = d.num_ooms = d.num_device_alloc = d.num_device_free = 0;
}

}  // namespace prism
