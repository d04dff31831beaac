// What the slice tells the backend about the GPU it plays, set once before torch is used.
#pragma once
#include <cstddef>
#include <cstdint>

namespace prism {

constexpr int kMaxDevices = 16;

struct Config {
  size_t real_limit = 64 * 1024;  // storages up to this size have real memory
  size_t host_limit = 1 << 20;    // floating-point host tensors from this size on are shape only
  int num_devices = 8;
  int64_t memory_bytes = 80LL << 30;
  int capability_major = 9;
  int capability_minor = 0;
  size_t cublas_workspace_bytes = 32u << 20;
};

Config& config();

}  // namespace prism
