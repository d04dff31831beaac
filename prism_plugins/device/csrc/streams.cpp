// The streams of each thread. CPU builds of torch only: in a CUDA build they are torch's own (native_streams.cpp).
#include "streams.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "config.h"

namespace prism {
namespace {

thread_local int t_device = 0;
thread_local uint32_t t_streams[kMaxDevices] = {};

}  // namespace

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }

uint32_t current_stream(int device) { return t_streams[device]; }
uint32_t stream_number(c10::Stream stream) { return static_cast<uint32_t>(stream.id()); }

uint32_t exchange_stream(int device, uint32_t stream) {
  uint32_t old = t_streams[device];
  t_streams[device] = stream;
  return old;
}

uint32_t stream_from_pool(bool high_priority) {
  static std::atomic<uint32_t> next[2];
  return 1 + (next[high_priority]++ % kStreamsPerPool) + (high_priority ? kStreamsPerPool : 0);
}

uint32_t external_stream(uint64_t pointer) {
  if (pointer <= 2 * kStreamsPerPool) return static_cast<uint32_t>(pointer);
  static std::mutex mutex;
  static std::unordered_map<uint64_t, uint32_t> ids;
  std::lock_guard<std::mutex> guard(mutex);
  return ids.emplace(pointer, 2 * kStreamsPerPool + 1 + ids.size()).first->second;
}

}  // namespace prism
