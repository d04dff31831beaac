// The block bookkeeping of torch's caching allocator. CPU builds of torch only. Names of functions follow
// c10/cuda/CUDACachingAllocator.cpp where they do what theirs do.
#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <set>
#include <vector>

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
  uintptr_t range = 0;   // begin of the address range of its expandable segment; 0: an ordinary segment
  bool mapped = true;    // false: address space of an expandable segment without memory behind it
  int64_t free_since = 0;  // the pool's look-ups when it became free
  size_t requested = 0;
  Block* previous = nullptr;  // neighbours within the segment
  Block* next = nullptr;
  Block* late = nullptr;  // its twin in the late ledger
  bool is_split() const { return previous || next; }
  bool expandable() const { return range != 0; }
};

AllocatorSettings& allocator_settings() {
  static auto* s = new AllocatorSettings();
  return *s;
}

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
struct ByAddress {
  bool operator()(const Block* a, const Block* b) const {
    if (a->stream != b->stream) return a->stream < b->stream;
    return a->address < b->address;
  }
};
struct Pool {
  bool small;
  std::set<Block*, BySize> blocks;
  std::set<Block*, ByAddress> unmapped;
  int64_t lookups = 0;
  void insert(Block* b) {
    b->free = true;
    b->free_since = lookups;
    blocks.insert(b);
  }
};

size_t power_of_two_below(size_t n) { return size_t{1} << (63 - __builtin_clzll(n)); }

size_t round_size(size_t n) {
  if (n < kMinBlock) return kMinBlock;
  int interval = std::clamp(63 - __builtin_clzll(n) - 20, 0, kRoundupIntervals - 1);
  size_t divisions = allocator_settings().roundup_divisions[interval];
  if (divisions > 1 && n > kMinBlock * divisions) {
    if ((n & (n - 1)) == 0) return n;
    size_t floor = power_of_two_below(n);
    size_t step = floor / power_of_two_below(divisions);
    if (step == 0) return floor << 1;
    return (n + step - 1) / step * step;
  }
  return (n + kMinBlock - 1) / kMinBlock * kMinBlock;
}

size_t segment_size(size_t n) {
  if (n <= kSmallSize) return kSmallSegment;
  if (n < kMinLarge) return kLargeSegment;
  return (n + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

uintptr_t take_addresses(size_t bytes) {
  static std::atomic<uintptr_t> next{kFakeBit | (1ull << 30)};
  return next.fetch_add(bytes);
}

class CachingAllocator {
 public:
  Block* malloc(size_t requested, int device, uint32_t stream);
  void free(Block* block);
  void release_cached_blocks();

  DeviceStats stats;
  int64_t allowed_bytes = std::numeric_limits<int64_t>::max();  // set_per_process_memory_fraction

 private:
  struct Request {
    size_t size;
    int device;
    uint32_t stream;
    Pool& pool;
  };

  void change(StatName name, const Block* b, int64_t n) {
    auto& s = stats.stats[name];
    for (int pool : {0, b->small ? 1 : 2}) {
      if (n > 0) s[pool].increase(n);
      if (n < 0) s[pool].decrease(-n);
    }
  }
  void change_split(const Block* b, int64_t blocks, int64_t bytes) {
    if (b->expandable()) return;  // torch does not count whole pages, which it can always give back
    change(kInactiveSplit, b, blocks);
    change(kInactiveSplitBytes, b, bytes);
  }
  Pool& pool_of(const Block* b) { return b->small ? small_ : large_; }
  int64_t reserved() const { return stats.stats[kReservedBytes][0].current; }
  bool limited() const { return allowed_bytes != std::numeric_limits<int64_t>::max(); }
  bool fits(size_t bytes) const { return reserved() + static_cast<int64_t>(bytes) <= config().memory_bytes; }

  Block* get_free_block(const Request& r);
  Block* alloc_block(const Request& r, bool beyond);
  Block* try_allocate_expandable_block(const Request& r, bool beyond);
  Block* find_expandable_block(const Request& r);
  bool map_block(Block* b, size_t size, bool beyond);
  void unmap_block(Block* b);
  void release_block(Block* b);
  void release_blocks(Pool& pool);
  bool release_available_cached_blocks(const Request& r);
  void garbage_collect_cached_blocks();
  bool should_split(const Block* b, size_t size) const;
  bool try_merge(Block* into, Block* neighbour);

  Pool small_{true, {}, {}}, large_{false, {}, {}};
};

int64_t signed_size(const Block* b, int sign) { return sign * static_cast<int64_t>(b->size); }

// A new block behind `b` that takes its last `size` bytes.
Block* split_off(Block* b, size_t size) {
  auto* rest = new Block{b->address + b->size - size, size, b->stream, b->device, b->small, true, b->range, b->mapped};
  rest->previous = b;
  rest->next = b->next;
  if (rest->next) rest->next->previous = rest;
  b->next = rest;
  b->size -= size;
  return rest;
}

Block* CachingAllocator::get_free_block(const Request& r) {
  const auto& settings = allocator_settings();
  auto& blocks = r.pool.blocks;
  if (limited() && settings.garbage_collection_threshold > 0) ++r.pool.lookups;
  Block key{0, r.size, r.stream, 0, r.pool.small, true};
  auto it = blocks.lower_bound(&key);
  if (it == blocks.end() || (*it)->stream != r.stream) return nullptr;
  if ((*it)->expandable() && settings.expandable_segments) {
    // The size of a block at the end of what is mapped is the size it can grow to.
    auto size = [](const Block* b) { return b->size + (b->next && !b->next->mapped ? b->next->size : 0); };
    for (auto next = std::next(it); (*it)->expandable() && next != blocks.end() && (*next)->stream == r.stream &&
                                    size(*next) < size(*it);)
      it = next++;
  }
  if (r.size < settings.max_split_size && (*it)->size >= settings.max_split_size) return nullptr;
  if (r.size >= settings.max_split_size && (*it)->size >= r.size + settings.max_non_split_rounding) return nullptr;
  Block* b = *it;
  blocks.erase(it);
  return b;
}

// nullptr where there is no memory for it; `beyond`: there always is.
Block* CachingAllocator::alloc_block(const Request& r, bool beyond) {
  size_t bytes = segment_size(r.size);
  if (!beyond && reserved() + static_cast<int64_t>(bytes) > allowed_bytes) return nullptr;
  if (allocator_settings().expandable_segments) return try_allocate_expandable_block(r, beyond);
  if (!beyond && !fits(bytes)) return nullptr;
  auto device = static_cast<uint8_t>(r.device);
  auto* b = new Block{take_addresses(bytes), bytes, r.stream, device, r.pool.small, true};
  ++stats.num_device_alloc;
  change(kSegment, b, 1);
  change(kReservedBytes, b, signed_size(b, 1));
  return b;
}

Block* CachingAllocator::find_expandable_block(const Request& r) {
  auto usable = [](const Block* b) { return b && b->free; };
  auto has_room = [&](const Block* b) {
    size_t bytes = 0;
    for (; bytes < r.size && usable(b); b = b->next) bytes += b->size;
    return bytes >= r.size;
  };
  Block key{0, 0, r.stream, 0, r.pool.small, true};
  for (auto it = r.pool.unmapped.lower_bound(&key); it != r.pool.unmapped.end() && (*it)->stream == r.stream; ++it) {
    Block* b = *it;
    if (usable(b->previous)) b = b->previous;
    if (has_room(b)) return b;
  }
  size_t page = r.pool.small ? kSmallSegment : kLargeSegment;
  size_t memory = static_cast<size_t>(config().memory_bytes);
  size_t bytes = (memory + memory / 8 + page - 1) / page * page;
  uintptr_t begin = take_addresses(bytes);
  auto* b = new Block{begin, bytes, r.stream, static_cast<uint8_t>(r.device), r.pool.small, true, begin, false};
  r.pool.unmapped.insert(b);
  return b;
}

Block* CachingAllocator::try_allocate_expandable_block(const Request& r, bool beyond) {
  Block* b = find_expandable_block(r);
  if (!b->mapped && !map_block(b, std::min(b->size, r.size), beyond)) return nullptr;
  while (b->size < r.size) {
    Block* next = b->next;
    if (!map_block(next, std::min(r.size - b->size, next->size), beyond)) return nullptr;
    b = next;  // it took in what was before it
  }
  r.pool.blocks.erase(b);
  return b;
}

// Puts memory behind the first `size` bytes of an unmapped block, whole pages.
bool CachingAllocator::map_block(Block* b, size_t size, bool beyond) {
  size_t page = b->small ? kSmallSegment : kLargeSegment;
  size_t bytes = (size + page - 1) / page * page;
  if (!beyond && !fits(bytes)) return false;
  Pool& pool = pool_of(b);
  pool.unmapped.erase(b);
  if (bytes < b->size) pool.unmapped.insert(split_off(b, b->size - bytes));
  b->mapped = true;
  ++stats.num_device_alloc;
  change(kReservedBytes, b, static_cast<int64_t>(bytes));
  try_merge(b, b->previous);
  try_merge(b, b->next);
  pool.insert(b);
  return true;
}

// Gives back the whole pages of a free block of an expandable segment.
void CachingAllocator::unmap_block(Block* b) {
  size_t page = b->small ? kSmallSegment : kLargeSegment;
  size_t begin = (b->address - b->range + page - 1) / page * page;
  size_t end = (b->address + b->size - b->range) / page * page;
  if (begin >= end) return;
  Pool& pool = pool_of(b);
  pool.blocks.erase(b);
  size_t after = b->address + b->size - b->range - end;
  if (after) pool.insert(split_off(b, after));
  if (size_t before = begin - (b->address - b->range)) {
    Block* rest = split_off(b, b->size - before);
    pool.insert(b);
    b = rest;
  }
  b->mapped = false;
  ++stats.num_device_free;
  change(kReservedBytes, b, signed_size(b, -1));
  try_merge(b, b->previous);
  try_merge(b, b->next);
  if (b->is_split())
    pool.unmapped.insert(b);
  else
    delete b;  // the whole address range
}

bool CachingAllocator::should_split(const Block* b, size_t size) const {
  const auto& settings = allocator_settings();
  size_t rest = b->size - size;
  if (b->small || settings.expandable_segments) return rest >= kMinBlock;
  return size < settings.max_split_size && rest > kSmallSize;
}

Block* CachingAllocator::malloc(size_t requested, int device, uint32_t stream) {
  size_t size = round_size(requested);
  Request r{size, device, stream, size <= kSmallSize ? small_ : large_};
  Block* b = get_free_block(r);
  if (!b) {
    if (limited() && allocator_settings().garbage_collection_threshold > 0) garbage_collect_cached_blocks();
    b = alloc_block(r, false);
    if (!b && release_available_cached_blocks(r)) b = alloc_block(r, false);
    if (!b) {
      release_cached_blocks();
      ++stats.num_alloc_retries;
      b = alloc_block(r, false);
    }
    if (!b) {
      ++stats.num_ooms;
      b = alloc_block(r, true);
    }
  }
  bool was_split = b->is_split();
  if (should_split(b, size)) {
    if (was_split) change_split(b, 0, -static_cast<int64_t>(size));
    Block* rest = split_off(b, b->size - size);
    pool_of(rest).insert(rest);
    if (!was_split) change_split(rest, 1, signed_size(rest, 1));
  } else if (was_split) {
    change_split(b, -1, signed_size(b, -1));
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

// Takes a free neighbour in, if it is mapped as `into` is; the neighbour is gone then.
bool CachingAllocator::try_merge(Block* into, Block* neighbour) {
  if (!neighbour || !neighbour->free || neighbour->mapped != into->mapped) return false;
  Pool& pool = pool_of(neighbour);
  if (neighbour->mapped)
    pool.blocks.erase(neighbour);
  else
    pool.unmapped.erase(neighbour);
  if (neighbour == into->previous) {
    into->address = neighbour->address;
    into->previous = neighbour->previous;
    if (into->previous) into->previous->next = into;
  } else {
    into->next = neighbour->next;
    if (into->next) into->next->previous = into;
  }
  into->size += neighbour->size;
  delete neighbour;
  return true;
}

void CachingAllocator::free(Block* b) {
  change(kAllocation, b, -1);
  change(kActive, b, -1);
  change(kAllocatedBytes, b, signed_size(b, -1));
  change(kActiveBytes, b, signed_size(b, -1));
  change(kRequestedBytes, b, -static_cast<int64_t>(b->requested));
  b->requested = 0;
  for (Block* neighbour : {b->previous, b->next}) {
    auto bytes = static_cast<int64_t>(neighbour ? neighbour->size : 0);
    if (try_merge(b, neighbour)) change_split(b, -1, -bytes);
  }
  pool_of(b).insert(b);
  if (b->is_split()) change_split(b, 1, signed_size(b, 1));
}

// Gives a whole free segment back.
void CachingAllocator::release_block(Block* b) {
  pool_of(b).blocks.erase(b);
  ++stats.num_device_free;
  change(kSegment, b, -1);
  change(kReservedBytes, b, signed_size(b, -1));
  delete b;
}

void CachingAllocator::release_blocks(Pool& pool) {
  std::vector<Block*> pages;
  for (auto it = pool.blocks.begin(); it != pool.blocks.end();) {
    Block* b = *it++;
    if (b->expandable())
      pages.push_back(b);
    else if (!b->is_split())
      release_block(b);
  }
  for (Block* b : pages) unmap_block(b);
}

void CachingAllocator::release_cached_blocks() {
  release_blocks(large_);
  release_blocks(small_);
}

// Where max_split_size is set: gives back blocks above it, one that is large enough or the largest ones.
bool CachingAllocator::release_available_cached_blocks(const Request& r) {
  size_t limit = allocator_settings().max_split_size;
  if (limit == std::numeric_limits<size_t>::max()) return false;
  auto& blocks = r.pool.blocks;
  Block key{0, std::max(r.size, limit), r.stream, 0, r.pool.small, true};
  auto it = blocks.lower_bound(&key);
  if (it != blocks.end() && (*it)->stream == r.stream && !(*it)->expandable()) {
    release_block(*it);
    return true;
  }
  size_t released = 0;
  while (it != blocks.begin() && released < key.size) {
    Block* b = *--it;
    if (b->size < limit || b->stream != r.stream) break;
    if (b->expandable()) continue;
    ++it;
    released += b->size;
    release_block(b);
  }
  return released >= key.size;
}

void CachingAllocator::garbage_collect_cached_blocks() {
  double threshold = allocator_settings().garbage_collection_threshold * static_cast<double>(allowed_bytes);
  auto target = static_cast<size_t>(threshold);
  if (static_cast<size_t>(reserved()) <= target) return;
  target = static_cast<size_t>(reserved()) - target;
  auto age = [&](const Block* b) { return static_cast<double>(large_.lookups - b->free_since); };
  double total_age = 0;
  int count = 0;
  for (Block* b : large_.blocks) {
    if (b->is_split()) continue;
    total_age += age(b);
    ++count;
  }
  size_t reclaimed = 0;
  for (bool freed = true; reclaimed < target && freed && count > 0;) {
    double old = total_age / count;
    freed = false;
    for (auto it = large_.blocks.begin(); it != large_.blocks.end();) {
      Block* b = *it++;
      if (b->is_split() || b->expandable() || age(b) < old) continue;
      freed = true;
      reclaimed += b->size;
      total_age -= age(b);
      --count;
      release_block(b);
    }
  }
}

// The late ledger of a device.
struct LateAllocator {
  CachingAllocator blocks;
  struct Release {
    Block* block;
    int64_t at;  // launches before it
  };
  std::deque<Release> pending;

  void free_passed(int64_t launches, int64_t waited) {
    for (; !pending.empty() && (pending.front().at + kLaunchQueue <= launches || pending.front().at <= waited);
         pending.pop_front())
      blocks.free(pending.front().block);
  }
  void free_all() {
    for (auto& r : pending) blocks.free(r.block);
    pending.clear();
  }
};

std::atomic<int64_t> launches{0};
std::atomic<int64_t> waited{-1};  // launches before the host last waited for the device

struct Devices {
  std::mutex mutex;
  std::array<CachingAllocator, kMaxDevices> all;
  std::array<LateAllocator, kMaxDevices> late;
};
Devices& devices() {
  static auto* d = new Devices();  // leaked: tensors may die after static destruction
  return *d;
}

}  // namespace

Block* take_block(size_t nbytes, int device, uint32_t stream) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  auto& late = devices().late[device];
  late.free_passed(launches, waited);
  Block* block = devices().all[device].malloc(nbytes, device, stream);
  block->late = late.blocks.malloc(nbytes, device, stream);
  return block;
}

void give_back_block(Block* block) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  devices().late[block->device].blocks.free(block->late);
  devices().all[block->device].free(block);
}

void give_back_shared_block(Block* block) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  devices().late[block->device].pending.push_back({block->late, launches});
  devices().all[block->device].free(block);
}

void count_launch() { launches.fetch_add(1, std::memory_order_relaxed); }
void host_has_waited() { waited = launches.load(); }

DeviceStats late_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  return devices().late.at(device).blocks.stats;
}

uintptr_t block_address(const Block* block) { return block->address; }
uint32_t block_stream(const Block* block) { return block->stream; }
void use_block_on(Block*, c10::Stream) {}

void empty_cache() {
  std::lock_guard<std::mutex> guard(devices().mutex);
  for (auto& d : devices().all) d.release_cached_blocks();
  for (auto& d : devices().late) {
    d.free_all();
    d.blocks.release_cached_blocks();
  }
}

void limit_memory(int device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  devices().all.at(device).allowed_bytes = bytes;
  devices().late.at(device).blocks.allowed_bytes = bytes;
}

DeviceStats device_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  return devices().all.at(device).stats;
}

void reset_peak_stats(int device) {
  std::lock_guard<std::mutex> guard(devices().mutex);
  for (auto* stats : {&devices().all.at(device).stats, &devices().late.at(device).blocks.stats})
    for (auto& stat : stats->stats)
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
