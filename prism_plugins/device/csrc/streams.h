// Streams, events and the current device of each thread.
#pragma once
#include <cstdint>

namespace prism {

int current_device();
void set_current_device(int device);

// Stream 0 is the default stream; 1-32 the normal pool, 33-64 the high-priority pool, handed out in turn as in
// c10/cuda/CUDAStream.cpp; larger ids are external streams.
constexpr uint32_t kStreamsPerPool = 32;
uint32_t current_stream(int device);
uint32_t exchange_stream(int device, uint32_t stream);
uint32_t stream_from_pool(bool high_priority);
uint32_t external_stream(uint64_t pointer);

// A CUDA event: a marker in a stream, numbered anew by every record.
struct DeviceEvent {
  uint32_t id = 0;
  uint32_t session = 0;  // Recorder session it was recorded in
  bool recorded = false;
  int64_t time_ns = 0;   // host time of the record
};
void record_event(DeviceEvent& event, uint32_t stream);
void wait_event(const DeviceEvent& event, uint32_t stream);
void synchronize_event(const DeviceEvent& event);
void synchronize_stream(uint32_t stream, bool synthesized = false);
void synchronize_device();

}  // namespace prism
