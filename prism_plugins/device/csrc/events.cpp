// What CUDA events and synchronisation put into the recording.
#include <atomic>

#include "blocks.h"
#include "recorder.h"
#include "streams.h"

namespace prism {

static std::atomic<uint32_t> next_event{1};

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
  host_has_waited();
  if (pending(event)) Recorder::get().add(EventKind::kEventSync, 0, event.id);
}

void synchronize_stream(uint32_t stream, bool synthesized) {
  host_has_waited();
  Recorder::get().add(EventKind::kStreamSync, stream, 0, 0, synthesized ? kFlagSynthesized : 0);
}

void synchronize_device() {
  host_has_waited();
  Recorder::get().add(EventKind::kDeviceSync, 0, 0);
}

}  // namespace prism
