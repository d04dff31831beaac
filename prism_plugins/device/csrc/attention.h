// Fused attention on tensors with real memory: the GPU's kernels have no CPU version, torch's CPU kernel stands in.
#pragma once
#include <ATen/core/stack.h>

#include "signature.h"

namespace prism {

bool is_fused_attention(const std::string& name);

// Computes what a fused attention operator (forward or backward) returns into `results`, which have the geometry of
// the GPU's kernel. False when the CPU cannot: dropout, grouped heads, gradients of a bias.
bool compute_attention(const OpPlan& plan, const c10::IValue* args, torch::jit::Stack& results);

}  // namespace prism
