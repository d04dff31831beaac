// Operators that the CPU computes with code of ours: torch has no CPU kernel, or one that will not do.
#pragma once
#include <ATen/core/stack.h>

#include <string>

namespace prism {

// Replaces the arguments on the stack (CPU tensors) by the results.
using HostKernel = void (*)(torch::jit::Stack&);

// Null where torch's own CPU kernel is taken.
HostKernel host_kernel_of(const std::string& name);

}  // namespace prism
