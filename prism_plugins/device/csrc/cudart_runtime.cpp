// Devices, memory, streams and events of a CUDA runtime without driver and GPU: stands in front of libcudart, which
// never gets to see a call that would look for a GPU.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cudart_state.h"

namespace prism::cudart {
namespace {

constexpr int kMaxGpus = 64;
constexpr size_t kSegment = 2u << 20;
constexpr int kGreatestPriority = -5;  // as an H100 reports it

prism_cudart_gpu g_gpu{8, 80ull << 30, 9, 0, 132, 50u << 20, "virtual GPU"};
prism_cudart_listener g_listener{};

thread_local int t_device = 0;
thread_local int t_error = kSuccess;
thread_local int t_beyond_limit = 0;

struct State {
  std::mutex mutex;
  std::map<uintptr_t, std::pair<size_t, int>> blocks;  // address -> bytes, device
  size_t used[kMaxGpus] = {};
  uint64_t refusals = 0;
  int pool_streams[kMaxGpus][2] = {};
  std::unordered_map<uint64_t, uint32_t> other_streams;
  std::vector<uint64_t> other_stream_handles;
  std::map<std::string, int64_t> tally;
};
State& state() {
  static auto* s = new State();  // leaked: torch frees memory after static destruction
  return *s;
}

// Handles of streams that this runtime made: tag, device, number.
constexpr uint64_t kStreamTag = 0x5052ull << 48;
void* handle_of(int device, uint32_t id) {
  return reinterpret_cast<void*>(kStreamTag | static_cast<uint64_t>(device) << 32 | static_cast<uint64_t>(id) << 8);
}
bool is_ours(uint64_t handle) { return handle >> 48 == kStreamTag >> 48; }

uint32_t number_of_other(State& s, uint64_t handle) {
  auto [it, fresh] = s.other_streams.emplace(handle, 2 * kStreamsPerPool + 1 + s.other_streams.size());
  if (fresh) s.other_stream_handles.push_back(handle);
  return it->second;
}

int make_stream(void** out, int priority, bool of_a_pool) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  int& made = s.pool_streams[t_device][priority < 0];
  if (of_a_pool && priority >= -1 && made < static_cast<int>(kStreamsPerPool)) {
    *out = handle_of(t_device, 1 + made++ + (priority < 0 ? kStreamsPerPool : 0));
    return kSuccess;
  }
  uint64_t id = 2 * kStreamsPerPool + 1 + s.other_streams.size();
  *out = handle_of(t_device, static_cast<uint32_t>(id));
  number_of_other(s, reinterpret_cast<uint64_t>(*out));
  return kSuccess;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool valid(int device) { return device >= 0 && device < g_gpu.count; }

bool hopper() { return g_gpu.major >= 9; }
size_t shared_optin() { return (hopper() ? 227 : 163) * 1024; }
size_t shared_per_sm() { return (hopper() ? 228 : 164) * 1024; }

template <bool kLegacy>
int properties(DeviceProp<kLegacy>* p, int device) {
  if (!valid(device)) return fail(kInvalidDevice);
  std::memset(static_cast<void*>(p), 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s", g_gpu.name);
  p->total_global_mem = g_gpu.memory_bytes;
  p->shared_mem_per_block = 48 * 1024;
  p->regs_per_block = p->regs_per_multiprocessor = 65536;
  p->warp_size = 32;
  p->mem_pitch = 0x7fffffff;
  p->max_threads_per_block = 1024;
  p->max_threads_dim[0] = p->max_threads_dim[1] = 1024;
  p->max_threads_dim[2] = 64;
  p->max_grid_size[0] = 0x7fffffff;
  p->max_grid_size[1] = p->max_grid_size[2] = 65535;
  p->total_const_mem = 65536;
  p->major = g_gpu.major;
  p->minor = g_gpu.minor;
  p->texture_alignment = 512;
  p->multi_processor_count = g_gpu.num_sms;
  p->can_map_host_memory = p->concurrent_kernels = p->unified_addressing = p->cooperative_launch = 1;
  p->async_engine_count = 3;
  p->l2_cache_size = static_cast<int>(g_gpu.l2_bytes);
  p->max_threads_per_multi_processor = 2048;
  p->stream_priorities_supported = p->managed_memory = 1;
  p->shared_mem_per_multiprocessor = shared_per_sm();
  p->shared_mem_per_block_optin = shared_optin();
  p->max_blocks_per_multi_processor = 32;
  p->pci_bus_id = device;
  return kSuccess;
}

int copy(void* to, const void* from, size_t n) {
  if (n == 0) return kSuccess;
  count("cudaMemcpy");
  if (to && from && !is_fake(to) && !is_fake(from)) std::memmove(to, from, n);
  return kSuccess;
}

int set(void* p, int value, size_t n) {
  if (n == 0) return kSuccess;
  count("cudaMemset");
  if (!is_fake(p)) std::memset(p, value, n);
  return kSuccess;
}

}  // namespace

const prism_cudart_gpu& gpu() { return g_gpu; }
int current_device() { return t_device; }

int fail(int status) {
  t_error = status;
  return status;
}

void count(const char* what) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  ++s.tally[what];
}

void* reserve_addresses(size_t nbytes) {
  static std::atomic<uintptr_t> next{kFakeBit | 1ull << 40};
  return reinterpret_cast<void*>(next.fetch_add((nbytes + kSegment - 1) / kSegment * kSegment));
}

bool take_memory(size_t nbytes, int device) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  if (s.used[device] + nbytes > g_gpu.memory_bytes && t_beyond_limit == 0) {
    ++s.refusals;
    return false;
  }
  s.used[device] += nbytes;
  return true;
}

void give_back_memory(size_t nbytes, int device) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.used[device] -= nbytes;
}

int attribute(int which) {
  switch (which) {
    case kMaxThreadsPerBlock:
    case kMaxBlockDimX:
    case kMaxBlockDimY: return 1024;
    case kMaxBlockDimZ: return 64;
    case kMaxGridDimX: return 0x7fffffff;
    case kMaxGridDimY:
    case kMaxGridDimZ: return 65535;
    case kMaxSharedMemoryPerBlock: return 48 * 1024;
    case kTotalConstantMemory:
    case kMaxRegistersPerBlock:
    case kMaxRegistersPerMultiprocessor: return 65536;
    case kWarpSize: return 32;
    case kMaxPitch: return 0x7fffffff;
    case kMultiProcessorCount: return g_gpu.num_sms;
    case kL2CacheSize: return static_cast<int>(g_gpu.l2_bytes);
    case kMaxThreadsPerMultiProcessor: return 2048;
    case kComputeCapabilityMajor: return g_gpu.major;
    case kComputeCapabilityMinor: return g_gpu.minor;
    case kMaxSharedMemoryPerMultiprocessor: return static_cast<int>(shared_per_sm());
    case kMaxSharedMemoryPerBlockOptin: return static_cast<int>(shared_optin());
    case kUnifiedAddressing:
    case kCooperativeLaunch: return 1;
    default: return 0;
  }
}

}  // namespace prism::cudart

using namespace prism::cudart;
using prism::DeviceEvent;

// ---------------------------------------------------------------- to prism

PRISM_EXPORT void prism_cudart_configure(const prism_cudart_gpu* gpu) {
  g_gpu = *gpu;
  if (g_gpu.count > kMaxGpus) g_gpu.count = kMaxGpus;
}
PRISM_EXPORT void prism_cudart_listen(const prism_cudart_listener* listener) { g_listener = *listener; }

PRISM_EXPORT uint32_t prism_cudart_stream_id(const void* stream) {
  auto handle = reinterpret_cast<uint64_t>(stream);
  if (handle <= 2) return 0;  // null, cudaStreamLegacy, cudaStreamPerThread
  if (is_ours(handle)) return static_cast<uint32_t>(handle >> 8 & 0xffffff);
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return number_of_other(s, handle);
}

PRISM_EXPORT void* prism_cudart_stream_of(int device, uint32_t id) {
  if (id == 0) return nullptr;
  if (id <= 2 * prism::kStreamsPerPool) return handle_of(device, id);
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return reinterpret_cast<void*>(s.other_stream_handles.at(id - 2 * prism::kStreamsPerPool - 1));
}

PRISM_EXPORT size_t prism_cudart_memory_used(int device) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.used[device];
}
PRISM_EXPORT uint64_t prism_cudart_refusals() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.refusals;
}
PRISM_EXPORT void prism_cudart_beyond_limit(int more) { t_beyond_limit += more; }

PRISM_EXPORT size_t prism_cudart_tally(char* out, size_t capacity) {
  auto& s = state();
  std::string text;
  {
    std::lock_guard<std::mutex> guard(s.mutex);
    for (const auto& [name, n] : s.tally) text += name + "\t" + std::to_string(n) + "\n";
  }
  std::memcpy(out, text.data(), std::min(capacity, text.size()));
  return text.size();
}

// ---------------------------------------------------------------- devices

PRISM_CUDART cudaGetDeviceCount(int* n) {
  *n = g_gpu.count;
  return kSuccess;
}
PRISM_CUDART cudaGetDevice(int* device) {
  *device = t_device;
  return kSuccess;
}
PRISM_CUDART cudaSetDevice(int device) {
  if (!valid(device)) return fail(kInvalidDevice);
  t_device = device;
  return kSuccess;
}
PRISM_CUDART cudaInitDevice(int device, unsigned, unsigned) { return valid(device) ? kSuccess : fail(kInvalidDevice); }
PRISM_CUDART cudaDeviceSynchronize() {
  if (g_listener.device_synchronized) g_listener.device_synchronized();
  return kSuccess;
}
PRISM_CUDART cudaGetLastError() {
  int status = t_error;
  t_error = kSuccess;
  return status;
}
PRISM_CUDART cudaPeekAtLastError() { return t_error; }
// A driver as new as the runtime: the version that torch was built with is not known here, any later one will do.
PRISM_CUDART cudaDriverGetVersion(int* version) {
  *version = 13090;
  return kSuccess;
}
PRISM_CUDART cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return kSuccess;
}
PRISM_CUDART cudaDeviceEnablePeerAccess(int, unsigned) { return kSuccess; }
PRISM_CUDART cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = kGreatestPriority;
  return kSuccess;
}
PRISM_CUDART cudaGetDeviceProperties(DeviceProp<false>* p, int device) { return properties(p, device); }
PRISM_CUDART cudaGetDeviceProperties_v2(DeviceProp<true>* p, int device) { return properties(p, device); }
PRISM_CUDART cudaDeviceGetAttribute(int* value, int which, int device) {
  if (!valid(device)) return fail(kInvalidDevice);
  *value = attribute(which);
  return kSuccess;
}
PRISM_CUDART cudaDeviceGetPCIBusId(char* out, int size, int device) {
  std::snprintf(out, static_cast<size_t>(size), "0000:%02x:00.0", device);
  return kSuccess;
}

// ---------------------------------------------------------------- memory

PRISM_CUDART cudaMemGetInfo(size_t* free, size_t* total) {
  size_t used = prism_cudart_memory_used(t_device);
  *free = used < g_gpu.memory_bytes ? g_gpu.memory_bytes - used : 0;
  *total = g_gpu.memory_bytes;
  return kSuccess;
}
PRISM_CUDART cudaMalloc(void** p, size_t n) {
  *p = nullptr;
  if (n == 0) return kSuccess;
  if (!take_memory(n, t_device)) return fail(kMemoryAllocation);
  *p = reserve_addresses(n);
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.blocks[reinterpret_cast<uintptr_t>(*p)] = {n, t_device};
  return kSuccess;
}
PRISM_CUDART cudaFree(void* p) {
  if (!p) return kSuccess;
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto it = s.blocks.find(reinterpret_cast<uintptr_t>(p));
  if (it == s.blocks.end()) return fail(kInvalidValue);
  s.used[it->second.second] -= it->second.first;
  s.blocks.erase(it);
  return kSuccess;
}
PRISM_CUDART cudaMallocAsync(void** p, size_t n, void*) { return cudaMalloc(p, n); }
PRISM_CUDART cudaFreeAsync(void* p, void*) { return cudaFree(p); }
PRISM_CUDART cudaHostAlloc(void** p, size_t n, unsigned) {
  *p = std::aligned_alloc(64, (n + 63) / 64 * 64);
  return *p ? kSuccess : fail(kMemoryAllocation);
}
PRISM_CUDART cudaFreeHost(void* p) {
  std::free(p);
  return kSuccess;
}
PRISM_CUDART cudaHostRegister(void*, size_t, unsigned) { return kSuccess; }
PRISM_CUDART cudaHostUnregister(void*) { return kSuccess; }
PRISM_CUDART cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  *device = host;
  return kSuccess;
}
PRISM_CUDART cudaPointerGetAttributes(PointerAttributes* a, const void* p) {
  *a = {kUnregistered, -2 /* cudaInvalidDeviceId */, nullptr, nullptr};
  void* same = const_cast<void*>(p);
  if (is_fake(p)) {
    auto& s = state();
    std::lock_guard<std::mutex> guard(s.mutex);
    auto it = s.blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
    *a = {kDevice, it == s.blocks.begin() ? t_device : std::prev(it)->second.second, same, nullptr};
  } else if (g_listener.is_pinned && g_listener.is_pinned(p)) {
    *a = {kHost, t_device, same, same};
  }
  return kSuccess;
}
PRISM_CUDART cudaMemcpy(void* to, const void* from, size_t n, int) { return copy(to, from, n); }
PRISM_CUDART cudaMemcpyAsync(void* to, const void* from, size_t n, int, void*) { return copy(to, from, n); }
PRISM_CUDART cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, void*) { return copy(to, from, n); }
PRISM_CUDART cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                               size_t height, int, void*) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
  return kSuccess;
}
PRISM_CUDART cudaMemset(void* p, int value, size_t n) { return set(p, value, n); }
PRISM_CUDART cudaMemsetAsync(void* p, int value, size_t n, void*) { return set(p, value, n); }

// ---------------------------------------------------------------- streams

PRISM_CUDART cudaStreamCreate(void** stream) { return make_stream(stream, 0, false); }
PRISM_CUDART cudaStreamCreateWithFlags(void** stream, unsigned) { return make_stream(stream, 0, false); }
// torch makes the 32 streams of each of its pools at once and in order.
PRISM_CUDART cudaStreamCreateWithPriority(void** stream, unsigned, int priority) {
  return make_stream(stream, priority, true);
}
PRISM_CUDART cudaStreamDestroy(void*) { return kSuccess; }
PRISM_CUDART cudaStreamGetPriority(void* stream, int* priority) {
  uint32_t id = prism_cudart_stream_id(stream);
  *priority = id > prism::kStreamsPerPool && id <= 2 * prism::kStreamsPerPool ? -1 : 0;
  return kSuccess;
}
PRISM_CUDART cudaStreamQuery(void*) { return kSuccess; }
PRISM_CUDART cudaStreamSynchronize(void* stream) {
  if (g_listener.stream_synchronized) g_listener.stream_synchronized(prism_cudart_stream_id(stream));
  return kSuccess;
}
PRISM_CUDART cudaStreamWaitEvent(void* stream, DeviceEvent* event, unsigned) {
  if (g_listener.event_waited_for) g_listener.event_waited_for(event, prism_cudart_stream_id(stream));
  return kSuccess;
}
PRISM_CUDART cudaStreamIsCapturing(void*, int* status) {
  *status = 0;
  return kSuccess;
}
// Of CUDA 12 and 13: what comes after the first three arguments describes a capture.
PRISM_CUDART cudaStreamGetCaptureInfo(void*, int* status, unsigned long long* id) {
  if (status) *status = 0;
  if (id) *id = 0;
  return kSuccess;
}
PRISM_CUDART cudaStreamGetCaptureInfo_v2(void* stream, int* status, unsigned long long* id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
PRISM_CUDART cudaStreamGetCaptureInfo_v3(void* stream, int* status, unsigned long long* id) {
  return cudaStreamGetCaptureInfo(stream, status, id);
}
PRISM_CUDART cudaThreadExchangeStreamCaptureMode(int*) { return kSuccess; }
PRISM_CUDART cudaStreamAddCallback(void* stream, void (*callback)(void*, int, void*), void* data, unsigned) {
  callback(stream, kSuccess, data);
  return kSuccess;
}
PRISM_CUDART cudaLaunchHostFunc(void*, void (*function)(void*), void* data) {
  function(data);
  return kSuccess;
}

// ---------------------------------------------------------------- events

PRISM_CUDART cudaEventCreateWithFlags(DeviceEvent** event, unsigned) {
  *event = new DeviceEvent();
  return kSuccess;
}
PRISM_CUDART cudaEventCreate(DeviceEvent** event) { return cudaEventCreateWithFlags(event, 0); }
PRISM_CUDART cudaEventDestroy(DeviceEvent* event) {
  delete event;
  return kSuccess;
}
PRISM_CUDART cudaEventRecord(DeviceEvent* event, void* stream) {
  event->recorded = true;
  event->time_ns = now_ns();
  if (g_listener.event_recorded) g_listener.event_recorded(event, prism_cudart_stream_id(stream));
  return kSuccess;
}
PRISM_CUDART cudaEventRecordWithFlags(DeviceEvent* event, void* stream, unsigned) {
  return cudaEventRecord(event, stream);
}
PRISM_CUDART cudaEventQuery(DeviceEvent*) { return kSuccess; }
PRISM_CUDART cudaEventSynchronize(DeviceEvent* event) {
  if (g_listener.event_synchronized) g_listener.event_synchronized(event);
  return kSuccess;
}
PRISM_CUDART cudaEventElapsedTime(float* ms, DeviceEvent* from, DeviceEvent* to) {
  if (!from || !to || !from->recorded || !to->recorded) return fail(kInvalidResourceHandle);
  *ms = static_cast<float>(static_cast<double>(to->time_ns - from->time_ns) * 1e-6);
  return kSuccess;
}
PRISM_CUDART cudaEventElapsedTime_v2(float* ms, DeviceEvent* from, DeviceEvent* to) {
  return cudaEventElapsedTime(ms, from, to);
}
