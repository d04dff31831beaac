#include "streams.h"

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "config.h"
#include "recorder.h"

namespace prism {
namespace {

thread_local int t_device = 0;
thread_local uint32_t t_streams[kMaxDevices] = {};
std::atomic<uint32_t> next_event{1};

}  // namespace

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }

uint32_t current_stream(int device) { return t_streams[device]; }

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

void record_event(DeviceEvent& event, uint32_t stream) {
  auto& r = Recorder::get();
  event.id = next_event++;
  event.session = r.session();
  event.recorded = true;
  event.time_ns = now_ns();
  r.add(EventKind::kEventRecord, stream, event.id);
}

// An event of an earlier session has passed when the iteration begins: nothing waits for it.
static bool pending(const DeviceEvent& event) {
  return event.recorded && event.session == Recorder::get().session();
}

void wait_event(const DeviceEvent& event, uint32_t stream) {
  if (pending(event)) Recorder::get().add(EventKind::kEventWait, stream, event.id);
}

void synchronize_event(const DeviceEvent& event) {
  if (pending(event)) Recorder::get().add(EventKind::kEventSync, 0, event.id);
}

void synchronize_stream(uint32_t stream, bool synthesized) {
  Recorder::get().add(EventKind::kStreamSync, stream, 0, 0, synthesized ? kFlagSynthesized : 0);
}

void synchronize_device() { Recorder::get().add(EventKind::kDeviceSync, 0, 0); }

}  // namespace prism
