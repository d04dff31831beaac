// What torch asks NVML for (c10/cuda/driver_api.h: expandable segments, messages when memory runs out). A library of its
// own that goes by NVML's name: a real one would tell of the GPUs of this machine, or be missing. Everything else is
// missing here, so that pynvml's nvmlInit fails as on a machine without GPU.
#define PRISM_NVML extern "C" __attribute__((visibility("default"))) int

namespace {
constexpr int kSuccess = 0, kNotSupported = 3;
}

PRISM_NVML nvmlInit_v2() { return kSuccess; }
PRISM_NVML nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13090;
  return kSuccess;
}
PRISM_NVML nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) {
  *device = nullptr;
  return kSuccess;
}
PRISM_NVML nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}
PRISM_NVML nvmlDeviceGetNvLinkRemoteDeviceType() { return kNotSupported; }
PRISM_NVML nvmlDeviceGetNvLinkRemotePciInfo_v2() { return kNotSupported; }
PRISM_NVML nvmlDeviceGetGpuFabricInfoV() { return kNotSupported; }
