// The functions of the driver that torch calls: virtual memory (expandable segments) and contexts. Whoever looks for a
// GPU through libcuda itself (cuBLAS, NCCL, Triton) finds none: this library goes by its name.
#include <cstring>
#include <map>
#include <mutex>

#include "cudart_state.h"

using namespace prism::cudart;

PRISM_CUDART cudaDriverGetVersion(int*);

namespace {

constexpr size_t kGranularity = 2u << 20;

// Physical memory by handle: bytes, device.
struct Physical {
  std::mutex mutex;
  std::map<uint64_t, std::pair<size_t, int>> all;
  uint64_t next = 1;
};
Physical& physical() {
  static auto* p = new Physical();
  return *p;
}

// CUmemAllocationProp up to the location.
struct AllocationProp {
  int type, handle_types, location_type, location_id;
};

int get_device(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
int get_attribute(int* value, int which, int) {
  *value = attribute(which);
  return kSuccess;
}
int primary_context_state(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return kSuccess;
}
int get_context(void** context) {
  *context = reinterpret_cast<void*>(0x1000);
  return kSuccess;
}
int set_context(void*) { return kSuccess; }
int accept_nothing() { return kSuccess; }
int error_string(int, const char** text) {
  *text = "not supported on prism's virtual CUDA device";
  return kSuccess;
}
int reserve(uint64_t* address, size_t n, size_t, uint64_t, unsigned long long) {
  *address = reinterpret_cast<uint64_t>(reserve_addresses(n));
  return kSuccess;
}
int create(uint64_t* handle, size_t n, const AllocationProp* prop, unsigned long long) {
  if (!take_memory(n, prop->location_id)) return kMemoryAllocation;
  auto& p = physical();
  std::lock_guard<std::mutex> guard(p.mutex);
  *handle = p.next++;
  p.all[*handle] = {n, prop->location_id};
  return kSuccess;
}
int release(uint64_t handle) {
  auto& p = physical();
  std::lock_guard<std::mutex> guard(p.mutex);
  auto it = p.all.find(handle);
  if (it == p.all.end()) return kInvalidValue;
  give_back_memory(it->second.first, it->second.second);
  p.all.erase(it);
  return kSuccess;
}
int map(uint64_t, size_t, size_t, uint64_t, unsigned long long) { return kSuccess; }
int unmap(uint64_t, size_t) { return kSuccess; }
int set_access(uint64_t, size_t, const void*, size_t) { return kSuccess; }
int granularity(size_t* out, const void*, int) {
  *out = kGranularity;
  return kSuccess;
}
int init(unsigned) { return kNoDevice; }
int driver_version(int* version) { return cudaDriverGetVersion(version); }
int device_count(int* count) {
  *count = 0;
  return kNoDevice;
}
int refuse() {
  count("a function of the CUDA driver (not supported)");
  return kNotSupported;
}

struct Entry {
  const char* name;
  void* function;
};
const Entry kEntries[] = {
    {"cuInit", reinterpret_cast<void*>(init)},
    {"cuDriverGetVersion", reinterpret_cast<void*>(driver_version)},
    {"cuDeviceGetCount", reinterpret_cast<void*>(device_count)},
    {"cuDeviceGet", reinterpret_cast<void*>(get_device)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(get_attribute)},
    {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(primary_context_state)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(get_context)},
    {"cuCtxSetCurrent", reinterpret_cast<void*>(set_context)},
    {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
    {"cuLogsRegisterCallback", reinterpret_cast<void*>(accept_nothing)},
    {"cuLogsUnregisterCallback", reinterpret_cast<void*>(accept_nothing)},
    {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
    {"cuMemAddressFree", reinterpret_cast<void*>(unmap)},
    {"cuMemCreate", reinterpret_cast<void*>(create)},
    {"cuMemRelease", reinterpret_cast<void*>(release)},
    {"cuMemMap", reinterpret_cast<void*>(map)},
    {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
    {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
    {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
};

}  // namespace

// Every other function exists too and refuses: torch stops where one of those it lists is missing.
PRISM_CUDART cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                              int* result) {
  *function = reinterpret_cast<void*>(refuse);
  for (const Entry& e : kEntries)
    if (std::strcmp(e.name, name) == 0) *function = e.function;
  if (result) *result = kSuccess;
  return kSuccess;
}
PRISM_CUDART cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, result);
}

// By name, as libcaffe2_nvrtc and others link to them.
#define PRISM_DRIVER(name, function, parameters, arguments) \
  PRISM_CUDART name parameters { return function arguments; }
PRISM_DRIVER(cuInit, init, (unsigned flags), (flags))
PRISM_DRIVER(cuDriverGetVersion, driver_version, (int* version), (version))
PRISM_DRIVER(cuDeviceGetCount, device_count, (int* count), (count))
PRISM_DRIVER(cuDeviceGet, get_device, (int* device, int ordinal), (device, ordinal))
PRISM_DRIVER(cuDeviceGetAttribute, get_attribute, (int* value, int which, int device), (value, which, device))
PRISM_DRIVER(cuDevicePrimaryCtxGetState, primary_context_state, (int device, unsigned* flags, int* active),
             (device, flags, active))
PRISM_DRIVER(cuCtxGetCurrent, get_context, (void** context), (context))
PRISM_DRIVER(cuCtxSetCurrent, set_context, (void* context), (context))
PRISM_DRIVER(cuGetErrorString, error_string, (int status, const char** text), (status, text))

#define PRISM_REFUSED(name)           \
  PRISM_CUDART name() {               \
    count(#name " (not supported)");  \
    return kNotSupported;             \
  }
PRISM_REFUSED(cuDevicePrimaryCtxRetain)
PRISM_REFUSED(cuFuncGetAttribute)
PRISM_REFUSED(cuFuncSetAttribute)
PRISM_REFUSED(cuFuncSetCacheConfig)
PRISM_REFUSED(cuLaunchCooperativeKernel)
PRISM_REFUSED(cuLaunchKernel)
PRISM_REFUSED(cuLaunchKernelEx)
PRISM_REFUSED(cuLinkAddData)
PRISM_REFUSED(cuLinkComplete)
PRISM_REFUSED(cuLinkCreate)
PRISM_REFUSED(cuLinkDestroy)
PRISM_REFUSED(cuModuleGetFunction)
PRISM_REFUSED(cuModuleGetGlobal)
PRISM_REFUSED(cuModuleLoad)
PRISM_REFUSED(cuModuleLoadData)
PRISM_REFUSED(cuModuleLoadDataEx)
PRISM_REFUSED(cuModuleUnload)
PRISM_REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
PRISM_REFUSED(cuTensorMapEncodeTiled)
