// What Python sees: C functions for ctypes, and operators for what takes tensors.
#include <torch/library.h>
#include <torch/version.h>

#include <cstring>

#include "allocator.h"
#include "blocks.h"
#include "config.h"
#include "fallback.h"
#include "host_memory.h"
#include "kernels.h"
#include "record_times.h"
#include "recorder.h"
#include "streams.h"
#include "tensors.h"

using namespace prism;

namespace {

// Copies as much as fits; returns the full length.
size_t give(const std::string& s, char* out, size_t capacity) {
  std::memcpy(out, s.data(), std::min(capacity, s.size()));
  return s.size();
}

Allocation* allocation_behind(const void* storage) {
  return allocation_of(static_cast<const c10::StorageImpl*>(storage));
}

}  // namespace

extern "C" {

const char* prism_torch_version() { return TORCH_VERSION; }

void prism_configure(size_t real_limit, size_t host_limit, int num_devices, int64_t memory_bytes, int major, int minor,
                     size_t cublas_workspace_bytes) {
  auto& c = config();
  c.real_limit = real_limit;
  c.host_limit = host_limit;
  c.num_devices = num_devices;
  c.memory_bytes = memory_bytes;
  c.capability_major = major;
  c.capability_minor = minor;
  c.cublas_workspace_bytes = cublas_workspace_bytes;
}
void prism_register() { register_kernels(); }

// Devices and streams.
int prism_get_device() { return current_device(); }
uint32_t prism_current_stream(int device) { return current_stream(device); }
uint32_t prism_exchange_stream(int device, uint32_t stream) { return exchange_stream(device, stream); }
uint32_t prism_external_stream(uint64_t pointer) { return external_stream(pointer); }

// Recorder.
void prism_start() {
  forget_uses();
  Recorder::get().start();
}
void prism_stop() { Recorder::get().stop(); }
int prism_recording() { return Recorder::get().on(); }
void prism_add_event(int kind, uint32_t ref, int64_t value, int flags) {
  if (kind == static_cast<int>(EventKind::kKernel) || kind == static_cast<int>(EventKind::kComm)) count_launch();
  Recorder::get().add(static_cast<EventKind>(kind), current_stream(current_device()), ref, value,
                      static_cast<uint8_t>(flags));
}
size_t prism_num_events() { return Recorder::get().events().size(); }
void prism_copy_events(void* out) {
  const auto& e = Recorder::get().events();
  if (!e.empty()) std::memcpy(out, e.data(), e.size() * sizeof(Event));
}
uint32_t prism_intern(const char* json, size_t n) { return Recorder::get().intern(std::string(json, n)); }
size_t prism_num_signatures() { return Recorder::get().num_signatures(); }
size_t prism_signature(uint32_t id, char* out, size_t capacity) {
  return give(Recorder::get().signature(id), out, capacity);
}

// Memory.
void prism_empty_cache() { empty_cache(); }
void prism_free_workspaces() { free_workspaces(); }
void prism_reset_peak_stats(int device) { reset_peak_stats(device); }
void prism_reset_accumulated_stats(int device) { reset_accumulated_stats(device); }
// kNumStats x kNumPools x (current, peak, allocated, freed), then retries, ooms, device allocs, device frees.
void prism_device_stats(int device, int64_t* out) {
  auto s = device_stats(device);
  for (const auto& stat : s.stats)
    for (const auto& pool : stat)
      for (int64_t v : {pool.current, pool.peak, pool.allocated, pool.freed}) *out++ = v;
  for (int64_t v : {s.num_alloc_retries, s.num_ooms, s.num_device_alloc, s.num_device_free}) *out++ = v;
}
// The late ledger's peaks: active bytes, reserved bytes. 0, 0 where there is none.
void prism_late_peaks(int device, int64_t* out) {
  auto s = late_stats(device);
  out[0] = s.stats[kActiveBytes][0].peak;
  out[1] = s.stats[kReservedBytes][0].peak;
}
void prism_limit_memory(int device, int64_t bytes) { limit_memory(device, bytes); }
void prism_configure_allocator(int expandable_segments, size_t max_split_size, size_t max_non_split_rounding,
                               double garbage_collection_threshold, const uint64_t* roundup_divisions) {
  auto& s = allocator_settings();
  s.expandable_segments = expandable_segments != 0;
  s.max_split_size = max_split_size;
  s.max_non_split_rounding = max_non_split_rounding;
  s.garbage_collection_threshold = garbage_collection_threshold;
  std::copy_n(roundup_divisions, kRoundupIntervals, s.roundup_divisions.begin());
}
// Rows of (id, category, bytes); returns how many there are.
size_t prism_live_allocations(int64_t* out, size_t capacity) {
  auto live = live_allocations();
  for (size_t i = 0; i < std::min(capacity, live.size()); ++i) {
    out[3 * i] = live[i].id;
    out[3 * i + 1] = live[i].category;
    out[3 * i + 2] = live[i].nbytes;
  }
  return live.size();
}

// Ids of allocations that other streams than their block's used; returns how many there are.
size_t prism_used_on_other_streams(uint32_t* out, size_t capacity) {
  auto ids = used_on_other_streams();
  std::copy_n(ids.begin(), std::min(capacity, ids.size()), out);
  return ids.size();
}

// pageable, its peak, pinned, its peak, page-locked, peak of all, untouched, its peak.
void prism_host_stats(int64_t* out) {
  auto s = host_stats();
  for (int64_t v : {s.pageable, s.pageable_peak, s.pinned, s.pinned_peak, s.page_locked, s.total_peak, s.untouched, s.untouched_peak})
    *out++ = v;
}
void prism_reset_host_peaks() { reset_host_peaks(); }
int prism_is_host_shape_only(const void* storage) {
  return is_host_shape_only(static_cast<const c10::StorageImpl*>(storage));
}
void prism_real_host(int more) { RealHostScope::depth() += more; }

// Storages, given as StorageImpl* (UntypedStorage._cdata). -1: not on the virtual device, or empty.
int64_t prism_allocation_id(const void* storage) {
  auto* a = allocation_behind(storage);
  return a ? static_cast<int64_t>(a->id) : -1;
}
// Bit 0: real memory; bit 1: synthesized.
int prism_storage_state(const void* storage) {
  auto* a = allocation_behind(storage);
  return a ? (a->real ? 1 : 0) | (a->synthesized ? 2 : 0) : -1;
}
void prism_set_synthesized(const void* storage, int synthesized) {
  if (auto* a = allocation_behind(storage)) a->synthesized = synthesized != 0 || !a->real;
}
void prism_set_category(const void* storage, int category) {
  if (auto* a = allocation_behind(storage)) a->category = static_cast<uint8_t>(category);
}

void prism_use_in_message(const void* storage) {
  if (auto* a = allocation_behind(storage)) use_in_message(a);
}

// UntypedStorage.resize_, which CPU builds refuse for CUDA storages.
void prism_resize_storage(void* storage, size_t nbytes) {
  resize_storage(static_cast<c10::StorageImpl*>(storage), nbytes);
}
// Id of an event's last record: the ref of its kEventRecord.
uint32_t prism_event_record(const void* event) { return static_cast<const DeviceEvent*>(event)->id; }

// ops, computed, cache hits, cache misses, cache size, delayed reuse, timed records, median ns of them.
void prism_counters(int64_t* out) {
  auto& c = counters();
  auto [samples, median_ns] = record_times().count_and_median();
  for (int64_t v : {c.ops.load(), c.computed.load(), c.cache_hits.load(), c.cache_misses.load(),
                    static_cast<int64_t>(shape_cache_size()), c.delayed_reuse.load(), int64_t{samples}, int64_t{median_ns}})
    *out++ = v;
}
// Lines "name\tcount". 0: synthesized reads; 1: no CPU kernel; 2: no Meta kernel.
size_t prism_tally(int which, char* out, size_t capacity) {
  auto& c = counters();
  auto& tally = which == 0 ? c.synthesized_reads : which == 1 ? c.no_cpu_kernel : c.no_meta_kernel;
  std::string text;
  for (const auto& [name, n] : tally.snapshot()) text += name + "\t" + std::to_string(n) + "\n";
  return give(text, out, capacity);
}

}  // extern "C"

TORCH_LIBRARY(prism, m) {
  m.def("host_view(Tensor t) -> Tensor");
  m.def("host_bytes(int nbytes) -> Tensor", [](int64_t nbytes) { return new_host_bytes(nbytes); });
  m.impl("host_view", c10::DispatchKey::CompositeExplicitAutograd,
         [](const at::Tensor& t) { return cpu_alias(t); });
}
