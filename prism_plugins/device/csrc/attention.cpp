// Which attention kernel scaled_dot_product_attention takes, as torch decides on the GPU described.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include "config.h"
#include "kernels.h"
#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;

bool is_half(const Tensor& t) { return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16; }

bool last_dimension_dense(const Tensor& q, const Tensor& k, const Tensor& v) {
  return q.stride(-1) == 1 && k.stride(-1) == 1 && v.stride(-1) == 1;
}

// sdp_utils.cpp (CUDA): dense 4-d tensors, half precision, no mask, head dimension up to 256 and equal, sm80 or newer.
bool can_use_flash(const Tensor& q, const Tensor& k, const Tensor& v, bool has_mask, bool causal) {
  if (!at::globalContext().userEnabledFlashSDP() || config().capability_major < 8) return false;
  if (q.dim() != 4 || !is_half(q) || has_mask || !last_dimension_dense(q, k, v)) return false;
  if (q.size(-1) > 256 || q.size(-1) != k.size(-1) || q.size(-1) != v.size(-1)) return false;
  (void)causal;
  return q.size(2) > 0 && k.size(2) > 0;
}

// Any head dimension that is a multiple of the load alignment; float32 too.
bool can_use_efficient(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (!at::globalContext().userEnabledMemEfficientSDP() || config().capability_major < 5) return false;
  if (q.dim() != 4 || !(is_half(q) || q.scalar_type() == at::kFloat) || !last_dimension_dense(q, k, v)) return false;
  if (q.scalar_type() == at::kBFloat16 && config().capability_major < 8) return false;
  int64_t alignment = is_half(q) ? 8 : 4;
  if (q.size(-1) % alignment || v.size(-1) % alignment) return false;
  return q.size(2) > 0 && k.size(2) > 0 && q.size(1) == k.size(1) && k.size(1) == v.size(1);
}

int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double, bool causal,
               std::optional<double>, bool) {
  bool has_mask = mask && mask->defined();
  // Tensors with real memory are computed, which the CPU can do only step by step.
  if (!is_shape_only(q) && !is_shape_only(k) && !is_shape_only(v)) return static_cast<int64_t>(sdp::SDPBackend::math);
  if (can_use_flash(q, k, v, has_mask, causal)) return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  if (can_use_efficient(q, k, v)) return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

void register_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose); }

}  // namespace prism
