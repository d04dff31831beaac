// A CUDA event: a marker in a stream, numbered anew by every record. Plain, as both libraries know it.
#pragma once
#include <cstdint>

namespace prism {

struct DeviceEvent {
  uint32_t id = 0;
  uint32_t session = 0;  // Recorder session it was recorded in
  bool recorded = false;
  int64_t time_ns = 0;   // host time of the record
};

// Stream 0 is the default stream; 1-32 the normal pool, 33-64 the high-priority pool, handed out in turn as in
// c10/cuda/CUDAStream.cpp; larger ids are other streams.
constexpr uint32_t kStreamsPerPool = 32;

// Shape-only storages live at addresses with this bit, which no process can touch.
constexpr uintptr_t kFakeBit = 1ull << 62;

}  // namespace prism
