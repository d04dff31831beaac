// Between the virtual CUDA runtime (cudart_*.cpp, a library of its own that stands in front of libcudart in a CUDA
// build of torch) and who uses it. No header of CUDA or torch.
#pragma once
#include <cstddef>
#include <cstdint>

#include "device_event.h"

extern "C" {

// The GPUs that the runtime reports.
struct prism_cudart_gpu {
  int count;
  size_t memory_bytes;
  int major, minor;
  int num_sms;
  size_t l2_bytes;
  char name[256];
};
void prism_cudart_configure(const prism_cudart_gpu* gpu);

// Who wants to know what the runtime is asked to do; any member may be null.
struct prism_cudart_listener {
  void (*event_recorded)(prism::DeviceEvent*, uint32_t stream);
  void (*event_waited_for)(const prism::DeviceEvent*, uint32_t stream);
  void (*event_synchronized)(const prism::DeviceEvent*);
  void (*stream_synchronized)(uint32_t stream);
  void (*device_synchronized)();
  int (*is_pinned)(const void*);
};
void prism_cudart_listen(const prism_cudart_listener* listener);

// Our number of a cudaStream_t. Streams that are not of torch's pools get numbers of their own.
uint32_t prism_cudart_stream_id(const void* stream);
// The cudaStream_t of a number that prism_cudart_stream_id gave; null for the default stream.
void* prism_cudart_stream_of(int device, uint32_t id);

// Device memory held, and allocations that the limit refused.
size_t prism_cudart_memory_used(int device);
uint64_t prism_cudart_refusals();
// While more than zero in a thread, its allocations may exceed the memory of the GPU.
void prism_cudart_beyond_limit(int more);

// Lines "name\tcount": kernels launched, memory copied and functions called that this runtime does not carry out.
size_t prism_cudart_tally(char* out, size_t capacity);
}
