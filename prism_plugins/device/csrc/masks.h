// Boolean indices, as CUDA's indexing kernels take them.
#pragma once
#include <ATen/core/stack.h>

#include "signature.h"

namespace prism {

// index_put_ of one number through one mask is a masked_fill_ on CUDA too (TensorAdvancedIndexing.cpp). True when it
// was one: the stack then holds the result.
bool as_masked_fill(const OpPlan& plan, const c10::IValue* args, torch::jit::Stack* stack);

// CUDA turns a mask into indices with nonzero, for which the host waits.
void expand_masks(c10::IValue& indices);

}  // namespace prism
