// Kernels: registered at start-up, looked up, and when one is launched all the same, counted and dropped. And what this
// runtime does not do: each such function says so to its caller, and is counted.
#include <cstring>
#include <vector>

#include "cudart_state.h"

using namespace prism::cudart;

namespace {

struct Kernel {
  const void* host_function;
  const char* name;
};
std::vector<Kernel>& kernels() {  // filled while libraries are loaded, by one thread
  static auto* all = new std::vector<Kernel>();
  return *all;
}

int launch(const void* function) {
  const char* name = "a kernel without a name";
  for (const Kernel& k : kernels())
    if (k.host_function == function) name = k.name;
  count(name);
  return kSuccess;
}

}  // namespace

PRISM_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
PRISM_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
PRISM_EXPORT void __cudaUnregisterFatBinary(void**) {}
PRISM_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
PRISM_EXPORT char __cudaInitModule(void**) { return 1; }
PRISM_EXPORT void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name) {
  kernels().push_back({host_function, name});
}
PRISM_EXPORT unsigned __cudaPushCallConfiguration(Dim3, Dim3, size_t, void*) { return 0; }
PRISM_CUDART __cudaPopCallConfiguration(Dim3* grid, Dim3* block, size_t* shared, void** stream) {
  *grid = *block = {1, 1, 1};
  *shared = 0;
  *stream = nullptr;
  return kSuccess;
}
PRISM_CUDART __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return kSuccess;
}
PRISM_CUDART __cudaLaunchKernel(const void* kernel, Dim3, Dim3, void**, size_t, void*) { return launch(kernel); }
PRISM_CUDART cudaLaunchKernel(const void* function, Dim3, Dim3, void**, size_t, void*) { return launch(function); }
PRISM_CUDART cudaLaunchKernelExC(const void*, const void* function, void**) { return launch(function); }
PRISM_CUDART cudaLaunchCooperativeKernel(const void* function, Dim3, Dim3, void**, size_t, void*) {
  return launch(function);
}

PRISM_CUDART cudaFuncGetAttributes(FuncAttributes* a, const void*) {
  *a = {0, 0, 0, 1024, 32, 10 * (10 * gpu().major + gpu().minor) / 10, 10 * gpu().major + gpu().minor};
  return kSuccess;
}
PRISM_CUDART cudaFuncSetAttribute(const void*, int, int) { return kSuccess; }
PRISM_CUDART cudaFuncSetCacheConfig(const void*, int) { return kSuccess; }
PRISM_CUDART cudaKernelSetAttributeForDevice(void*, int, int, int) { return kSuccess; }
PRISM_CUDART cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return kSuccess;
}
PRISM_CUDART cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return kSuccess;
}
PRISM_CUDART cudaGetSymbolAddress(void** p, const void*) {
  *p = reserve_addresses(1);
  return kSuccess;
}
PRISM_CUDART cudaProfilerStart() { return kSuccess; }
PRISM_CUDART cudaProfilerStop() { return kSuccess; }

#define PRISM_REFUSED(name)             \
  PRISM_CUDART name() {                 \
    count(#name " (not supported)");    \
    return fail(kNotSupported);         \
  }

// Graphs.
PRISM_REFUSED(cudaStreamBeginCapture)
PRISM_REFUSED(cudaStreamBeginCaptureToGraph)
PRISM_REFUSED(cudaStreamEndCapture)
PRISM_REFUSED(cudaStreamUpdateCaptureDependencies)
PRISM_REFUSED(cudaStreamUpdateCaptureDependencies_v2)
PRISM_REFUSED(cudaGraphAddNode)
PRISM_REFUSED(cudaGraphAddNode_v2)
PRISM_REFUSED(cudaGraphConditionalHandleCreate)
PRISM_REFUSED(cudaGraphDestroy)
PRISM_REFUSED(cudaGraphExecDestroy)
PRISM_REFUSED(cudaGraphGetNodes)
PRISM_REFUSED(cudaGraphInstantiate)
PRISM_REFUSED(cudaGraphInstantiateWithFlags)
PRISM_REFUSED(cudaGraphLaunch)
PRISM_REFUSED(cudaGraphNodeGetDependencies)
PRISM_REFUSED(cudaGraphNodeGetDependencies_v2)
PRISM_REFUSED(cudaGraphRetainUserObject)
PRISM_REFUSED(cudaGraphDebugDotPrint)
PRISM_REFUSED(cudaUserObjectCreate)
PRISM_REFUSED(cudaUserObjectRelease)
PRISM_REFUSED(cudaDeviceGetGraphMemAttribute)
PRISM_REFUSED(cudaDeviceSetGraphMemAttribute)
PRISM_REFUSED(cudaDeviceGraphMemTrim)
// Memory pools of the driver.
PRISM_REFUSED(cudaDeviceGetDefaultMemPool)
PRISM_REFUSED(cudaMemPoolGetAttribute)
PRISM_REFUSED(cudaMemPoolSetAttribute)
PRISM_REFUSED(cudaMemPoolSetAccess)
PRISM_REFUSED(cudaMemPoolTrimTo)
// Other processes.
PRISM_REFUSED(cudaIpcGetMemHandle)
PRISM_REFUSED(cudaIpcOpenMemHandle)
PRISM_REFUSED(cudaIpcCloseMemHandle)
PRISM_REFUSED(cudaIpcGetEventHandle)
PRISM_REFUSED(cudaIpcOpenEventHandle)
// Code at run time.
PRISM_REFUSED(cudaLibraryLoadData)
PRISM_REFUSED(cudaLibraryUnload)
PRISM_REFUSED(cudaLibraryGetKernel)
PRISM_REFUSED(cudaMemcpyToSymbol)
PRISM_REFUSED(cudaMemcpyFromSymbol)
