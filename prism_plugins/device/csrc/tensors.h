// Virtual tensors: what they are made of, aliases of them on other devices, and provenance of their values.
#pragma once
#include <ATen/core/Tensor.h>

#include "allocator.h"
#include "host_memory.h"

namespace prism {

inline bool is_virtual(const at::Tensor& t) { return t.defined() && t.is_cuda(); }
inline bool is_fake_pointer(const void* p) { return (reinterpret_cast<uintptr_t>(p) & kFakeBit) != 0; }
// Nobody computes its values: on the virtual device without memory behind it, or large on the host.
inline bool is_shape_only(const at::Tensor& t) {
  return is_virtual(t) ? is_fake_pointer(t.unsafeGetTensorImpl()->unsafe_storage().data_ptr().get())
                       : is_host_shape_only(t);
}

Allocation* allocation_of(const at::Tensor& t);
bool is_synthesized(const at::Tensor& t);
// No-op for what is not ours; shape-only storages stay synthesized.
void set_synthesized(const at::Tensor& t, bool synthesized);

// Same geometry on the Meta device. CPU scalars that are only read pass through, as the kernels take them.
at::Tensor meta_alias(const at::Tensor& t, bool written = false);
// A CPU tensor over the real memory of `t`; it keeps the storage alive. CPU tensors pass through.
at::Tensor cpu_alias(const at::Tensor& t);
at::Tensor view_on(const at::Tensor& base, const at::Tensor& geometry);

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
at::Tensor new_contiguous(at::IntArrayRef sizes, at::ScalarType dtype);
// A virtual tensor with the values of a CPU tensor (as far as its memory is real).
at::Tensor from_cpu(const at::Tensor& cpu, bool synthesized);

// Changes the bytes behind a storage, keeping the values that fit.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

// The policy for values nobody computed: ones for floating point and complex, zero (false) for the rest. Finite,
// and neither divides by zero nor stops a loop that waits for a norm. Large host tensors are left as they are.
void fill_plausible(const at::Tensor& t);
void fill_plausible_raw(void* p, size_t nbytes, at::ScalarType dtype);

}  // namespace prism
