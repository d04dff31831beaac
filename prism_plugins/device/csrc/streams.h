// Streams, events and the current device of each thread.
#pragma once
#include <c10/core/Stream.h>

#include <cstdint>

#include "device_event.h"

namespace prism {

int current_device();
void set_current_device(int device);

// Streams are numbered: see device_event.h.
uint32_t current_stream(int device);
uint32_t stream_number(c10::Stream stream);
uint32_t exchange_stream(int device, uint32_t stream);
uint32_t stream_from_pool(bool high_priority);
uint32_t external_stream(uint64_t pointer);

void record_event(DeviceEvent& event, uint32_t stream);
void wait_event(const DeviceEvent& event, uint32_t stream);
void synchronize_event(const DeviceEvent& event);
void synchronize_stream(uint32_t stream, bool synthesized = false);
void synchronize_device();

}  // namespace prism
