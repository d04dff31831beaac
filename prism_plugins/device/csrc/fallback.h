// The one kernel behind nearly every operator of the virtual device.
#pragma once
#include <ATen/core/stack.h>

#include "signature.h"

namespace prism {

// Runs an operator whose arguments are the top of the stack: on the CPU when all of them have real memory, else
// for shapes only (Meta, through the shape cache). Records one KERNEL.
void run_op(const OpPlan& plan, torch::jit::Stack* stack);

// Records work that a hand-written kernel stands for.
void record_kernel(const OpPlan& plan, const c10::IValue* args, at::ArrayRef<at::Tensor> outputs,
                   OpPlace place = OpPlace::kDevice);

// The host reads a result of the device: STREAM_SYNC, counted when the value is synthesized.
void record_read_back(const std::string& op, const at::Tensor& source, bool synthesized);

// Changes geometry, and the storage where it is too small, as resize_ does.
void resize_tensor(const at::Tensor& t, at::IntArrayRef sizes, at::OptionalIntArrayRef strides);

size_t shape_cache_size();

}  // namespace prism
