// Registration of the backend with torch's dispatcher.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace prism {

// Overrides DispatchKey::CUDA for every operator that has a CUDA kernel in a CUDA build of this torch, so that
// composite operators decompose here as they do there. Call once, before torch is used.
void register_kernels();
void register_attention();

// Of the mode: what comes before the kernels, and operators beyond torch's own list that have a CUDA kernel here.
void take_over_device();
std::vector<std::string> further_cuda_ops();

// Operators that run_op stands for.
std::vector<std::string> planned_ops();

// Copies to, from and on the device.
at::Tensor& copy_to_or_from_device(at::Tensor& self, const at::Tensor& source, bool non_blocking);

}  // namespace prism
