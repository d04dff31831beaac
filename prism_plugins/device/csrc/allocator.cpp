#include "allocator.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "blocks.h"
#include "config.h"
#include "recorder.h"
#include "streams.h"

namespace prism {

namespace {

struct State {
  std::mutex mutex;
  uint32_t next_id = 0;
  Allocation* first = nullptr;
  Allocation* last = nullptr;
  std::vector<uint32_t> used_elsewhere;  // ids
  std::map<std::pair<std::thread::id, uint32_t>, c10::DataPtr> workspaces;  // by cuBLAS handle (thread) and stream
};
State& state() {
  static auto* s = new State();  // leaked: tensors may die after static destruction
  return *s;
}

void delete_allocation(void* context) {
  auto* a = static_cast<Allocation*>(context);
  auto& s = state();
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    (a->previous ? a->previous->next : s.first) = a->next;
    (a->next ? a->next->previous : s.last) = a->previous;
    Recorder::get().add(EventKind::kFree, block_stream(a->block), a->id);
  }
  if (a->other_stream) {
    counters().delayed_reuse++;
    give_back_shared_block(a->block);
  } else {
    give_back_block(a->block);
  }
  if (a->real) std::free(a->ptr);
  delete a;
}

void delete_nothing(void*) {}

Allocation* allocate(size_t nbytes, Category category) {
  auto* a = new Allocation();
  a->nbytes = nbytes;
  a->category = category;
  a->device = static_cast<uint8_t>(current_device());
  a->real = nbytes <= config().real_limit && category != kWorkspace;
  uint32_t stream = current_stream(a->device);
  try {
    a->block = take_block(nbytes, a->device, stream);
  } catch (...) {
    delete a;
    throw;
  }
  auto& s = state();
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    a->id = s.next_id++;
    a->previous = s.last;
    (s.last ? s.last->next : s.first) = a;
    s.last = a;
    Recorder::get().add(EventKind::kAlloc, stream, a->id, static_cast<int64_t>(nbytes));
  }
  if (a->real) {
    // Zeroed, so that a slice does not depend on what happened to be in memory.
    size_t padded = (nbytes + 63) / 64 * 64;
    a->ptr = std::aligned_alloc(64, padded);
    TORCH_CHECK(a->ptr, "prism: the host has no ", nbytes, " bytes left for a real tensor");
    std::memset(a->ptr, 0, padded);
  } else {
    a->ptr = reinterpret_cast<void*>(block_address(a->block));
    a->synthesized = true;
  }
  return a;
}

c10::Device device_of(const Allocation* a) {
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(a->device)};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) {
      auto d = static_cast<c10::DeviceIndex>(current_device());
      return {nullptr, nullptr, &delete_nothing, c10::Device(c10::DeviceType::CUDA, d)};
    }
    auto* a = prism::allocate(n, kOther);
    return {a->ptr, a, &delete_allocation, device_of(a)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    auto fake = [](const void* p) { return (reinterpret_cast<uintptr_t>(p) & kFakeBit) != 0; };
    if (!fake(to) && !fake(from)) std::memcpy(to, from, n);
  }
};

}  // namespace

c10::Allocator* device_allocator() {
  static auto* a = new DeviceAllocator();
  return a;
}

Allocation* allocation_of(const c10::StorageImpl* storage) { return allocation_of(storage->data_ptr()); }

Allocation* allocation_of(const c10::DataPtr& p) {
  return p.get_deleter() == &delete_allocation ? static_cast<Allocation*>(p.get_context()) : nullptr;
}

void allocate_workspace(size_t nbytes) {
  if (nbytes == 0) return;
  auto& s = state();
  std::pair<std::thread::id, uint32_t> key(std::this_thread::get_id(), current_stream(current_device()));
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    if (s.workspaces.count(key)) return;
  }
  auto* a = allocate(nbytes, kWorkspace);
  c10::DataPtr p(a->ptr, a, &delete_allocation, device_of(a));
  std::lock_guard<std::mutex> guard(s.mutex);
  s.workspaces.emplace(key, std::move(p));
}

void free_workspaces() {
  decltype(State::workspaces) dead;
  auto& s = state();
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    dead.swap(s.workspaces);
  }
}

void use_on_stream(Allocation* a, c10::Stream stream) {
  if (stream_number(stream) == block_stream(a->block)) return;
  {
    auto& s = state();
    std::lock_guard<std::mutex> guard(s.mutex);
    a->other_stream = true;
    if (Recorder::get().on()) s.used_elsewhere.push_back(a->id);
  }
  use_block_on(a->block, stream);
}

void use_in_message(Allocation* a) {
  std::lock_guard<std::mutex> guard(state().mutex);
  a->other_stream = true;
}

std::vector<uint32_t> used_on_other_streams() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.used_elsewhere;
}

void forget_uses() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.used_elsewhere.clear();
}

std::vector<LiveAllocation> live_allocations() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  std::vector<LiveAllocation> out;
  for (auto* a = s.first; a; a = a->next) out.push_back({a->id, a->category, static_cast<int64_t>(a->nbytes)});
  return out;
}

}  // namespace prism
