// Taking over a CUDA build of torch: its device layer is started on the virtual runtime, then its kernels are replaced.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <set>

#include "cudart_api.h"
#include "kernels.h"
#include "native_mode.h"
#include "registration.h"

namespace prism {

// Its kernels for recurrent networks size their buffers by asking cuDNN itself, which needs a GPU: torch then takes its
// own kernels, as in a CPU build.
static bool cudnn_is_acceptable(const at::Tensor&) { return false; }

void take_over_device() {
  listen_to_runtime();
  Unheard unheard;
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  adopt_caching_allocator();
  register_by_hand("aten::cudnn_is_acceptable", cudnn_is_acceptable);
}

// Collectives have a process group of ours under them, and keep torch's own dispatch.
static bool is_collective(const std::string& name) {
  for (const char* space : {"c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::"})
    if (name.rfind(space, 0) == 0) return true;
  return false;
}

std::vector<std::string> further_cuda_ops() {
  static const std::vector<std::string> ops = [] {
    std::set<std::string> names;
    for (const auto& op : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA))
      if (!is_collective(op.name)) names.insert(op.overload_name.empty() ? op.name : op.name + "." + op.overload_name);
    return std::vector<std::string>(names.begin(), names.end());
  }();
  return ops;
}

}  // namespace prism

extern "C" {

void prism_configure_gpu(int count, size_t memory_bytes, int major, int minor, int num_sms, size_t l2_bytes,
                         const char* name) {
  prism_cudart_gpu gpu{count, memory_bytes, major, minor, num_sms, l2_bytes, {}};
  std::snprintf(gpu.name, sizeof gpu.name, "%s", name);
  prism_cudart_configure(&gpu);
}

// Lines "name\tcount" of what reached the CUDA runtime and was not carried out.
size_t prism_native_tally(char* out, size_t capacity) { return prism_cudart_tally(out, capacity); }

}
