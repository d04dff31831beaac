// Host memory of a slice: reserved but never touched where it is large.
//
// A floating-point CPU tensor of at least config().host_limit bytes that torch allocates (factories, results of ops on
// such tensors, pinned copies of them) is shape only, as large CUDA tensors are: an ordinary CPU tensor over reserved
// pages, with one more dispatch key that leads its ops to run_op instead of the CPU's kernels. Tensors without the key
// never come here. The key travels with views, detach(), .data and Parameter. Memory that torch did not allocate for a
// tensor (numpy arrays, files, torch.tensor of a list) stays real.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>

namespace prism {

// Above the CPU's key, below autograd; no build of torch has kernels for it.
constexpr c10::DispatchKey kHostShapeOnlyKey = c10::DispatchKey::FPGA;

inline bool is_host_shape_only(const at::Tensor& t) {
  return t.defined() && t.unsafeGetTensorImpl()->key_set().has(kHostShapeOnlyKey);
}
// Whether the storage was made for shape-only tensors.
bool is_host_shape_only(const c10::StorageImpl* storage);

// A CPU tensor: shape only when large, real otherwise.
at::Tensor new_host_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
at::Tensor new_contiguous_host_tensor(at::IntArrayRef sizes, at::ScalarType dtype);
at::Tensor new_pinned_host_tensor(const at::Tensor& geometry);

// A shape-only tensor of bytes, whatever its size, for copies of shape-only storages.
at::Tensor new_host_bytes(int64_t nbytes);
// Geometry, and storage where it is too small, of a host tensor whose values nobody computes.
void resize_host_tensor(const at::Tensor& t, at::IntArrayRef sizes);
// Gives the tensor the key that its storage asks for.
void follow_storage(const at::Tensor& t);

// Memory for any tensor, pinned as far as anyone can tell.
c10::Allocator* pinned_allocator();
bool is_pinned_pointer(const void* p);

// While one lives on this thread, CPU tensors are real: code of ours computes with them.
class RealHostScope {
 public:
  RealHostScope() { ++depth(); }
  ~RealHostScope() { --depth(); }
  static int& depth();
};

struct HostStats {
  int64_t pageable = 0, pageable_peak = 0;  // of shape-only tensors
  int64_t pinned = 0, pinned_peak = 0;      // in use, as requested
  int64_t page_locked = 0;                  // torch rounds up to a power of two and keeps what is freed
  int64_t total_peak = 0;                   // of pageable + page_locked, since the process began
  int64_t untouched = 0, untouched_peak = 0;  // reserved for shape-only tensors; since the process began
};
HostStats host_stats();
void reset_host_peaks();

void register_host_kernels();

}  // namespace prism
