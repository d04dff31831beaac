// What the parts of the virtual runtime share.
#pragma once
#include <cstdint>

#include "cudart_api.h"
#include "cudart_types.h"

#define PRISM_EXPORT extern "C" __attribute__((visibility("default")))
#define PRISM_CUDART PRISM_EXPORT int

namespace prism::cudart {

inline bool is_fake(const void* p) { return (reinterpret_cast<uintptr_t>(p) & kFakeBit) != 0; }

const prism_cudart_gpu& gpu();
int current_device();
// Addresses that nothing can touch.
void* reserve_addresses(size_t nbytes);
// Takes device memory of the current device; false when it has no more.
bool take_memory(size_t nbytes, int device);
void give_back_memory(size_t nbytes, int device);
int attribute(int which);
// Something was asked for that is not carried out.
void count(const char* what);

// The last error of the calling thread, as cudaGetLastError reports it.
int fail(int status);

}  // namespace prism::cudart
