// What an operator returns when its result depends on values that nobody computed.
//
//   item            1 for floating point, 0 (false) for the rest
//   nonzero, boolean masks, masked_select, unique*   half of the elements, at least one
//   equal           true when the sizes are equal
//   bincount        minlength bins (at least one)
//   repeat_interleave   output_size where given, else one repeat per element
#pragma once
#include <ATen/core/stack.h>

#include <string>

namespace prism {

// Fresh results are host tensors or device tensors.
using Policy = void (*)(const c10::IValue* args, torch::jit::Stack& results, bool on_host);

// The policy of an operator (name with overload), or nullptr.
Policy policy_of(const std::string& name);
// True when the shape of the result depends on values: then the policy holds for synthesized values too, even where
// they could be computed with (a mask of zeros that nobody computed selects nothing).
bool sizes_by_values(const std::string& name);
// True when the host waits for the operator's result on a real GPU.
bool reads_back(const std::string& name);

}  // namespace prism
