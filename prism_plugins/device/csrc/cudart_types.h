// What the runtime's functions take and return, as far as it matters (cuda_runtime_api.h and driver_types.h of CUDA 12
// and 13; names are CUDA's without the prefix).
#pragma once
#include <cstddef>
#include <cstdint>

namespace prism::cudart {

enum Status : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidResourceHandle = 400,
  kNotSupported = 801,
};

enum MemoryType : int { kUnregistered = 0, kHost = 1, kDevice = 2 };

struct PointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
};

struct FuncAttributes {
  size_t shared_bytes, const_bytes, local_bytes;
  int max_threads_per_block, num_regs, ptx_version, binary_version;
};

struct Dim3 {
  unsigned x, y, z;
};

// cudaDeviceProp. CUDA 13 took some members out; `kLegacy` has them.
template <bool kLegacy>
struct Only {
  int value;
};
template <>
struct Only<false> {};

template <bool kLegacy>
struct DeviceProp {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_mem, shared_mem_per_block;
  int regs_per_block, warp_size;
  size_t mem_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
  [[no_unique_address]] Only<kLegacy> clock_rate;
  size_t total_const_mem;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
  [[no_unique_address]] Only<kLegacy> device_overlap;
  int multi_processor_count;
  [[no_unique_address]] Only<kLegacy> kernel_exec_timeout_enabled;
  int integrated, can_map_host_memory;
  [[no_unique_address]] Only<kLegacy> compute_mode;
  int max_texture_1d, max_texture_1d_mipmap;
  [[no_unique_address]] Only<kLegacy> max_texture_1d_linear;
  int max_texture_and_surface[36];  // from maxTexture2D to maxSurfaceCubemapLayered
  size_t surface_alignment;
  int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver;
  int async_engine_count, unified_addressing;
  [[no_unique_address]] Only<kLegacy> memory_clock_rate;
  int memory_bus_width, l2_cache_size, persisting_l2_cache_max_size, max_threads_per_multi_processor;
  int stream_priorities_supported, global_l1_cache_supported, local_l1_cache_supported;
  size_t shared_mem_per_multiprocessor;
  int regs_per_multiprocessor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id;
  int host_native_atomic_supported;
  [[no_unique_address]] Only<kLegacy> single_to_double_precision_perf_ratio;
  int pageable_memory_access, concurrent_managed_access, compute_preemption_supported;
  int can_use_host_pointer_for_registered_mem, cooperative_launch;
  [[no_unique_address]] Only<kLegacy> cooperative_multi_device_launch;
  size_t shared_mem_per_block_optin;
  int pageable_memory_access_uses_host_page_tables, direct_managed_mem_access_from_host;
  int max_blocks_per_multi_processor, access_policy_max_window_size;
  size_t reserved_shared_mem_per_block;
  int rest[75];  // from hostRegisterSupported on, with what is reserved
};
// Measured with the headers of CUDA 12.9 and 13.0.
static_assert(sizeof(DeviceProp<true>) == 1032 && offsetof(DeviceProp<true>, multi_processor_count) == 388);
static_assert(sizeof(DeviceProp<false>) == 1008 && offsetof(DeviceProp<false>, multi_processor_count) == 384);

// Ids of cudaDeviceAttr, the same in the driver.
enum Attribute : int {
  kMaxThreadsPerBlock = 1, kMaxBlockDimX, kMaxBlockDimY, kMaxBlockDimZ, kMaxGridDimX, kMaxGridDimY, kMaxGridDimZ,
  kMaxSharedMemoryPerBlock, kTotalConstantMemory, kWarpSize, kMaxPitch, kMaxRegistersPerBlock,
  kMultiProcessorCount = 16,
  kL2CacheSize = 38,
  kMaxThreadsPerMultiProcessor = 39,
  kUnifiedAddressing = 41,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kMaxRegistersPerMultiprocessor = 82,
  kCooperativeLaunch = 95,
  kMaxSharedMemoryPerBlockOptin = 97,
};

}  // namespace prism::cudart
