// Which attention kernel scaled_dot_product_attention takes, as torch decides on the GPU described.
//
// Follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.11 and newer, for dense tensors, as built
// for CUDA 13 with cuDNN newer than 9.15: on sm90 and sm100 cuDNN comes first.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "config.h"
#include "kernels.h"
#include "registration.h"

namespace prism {
namespace {

using at::SDPBackend;
using at::Tensor;

struct Call {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const std::optional<Tensor>& mask;
  double dropout;
  bool causal;
  bool gqa;
  bool has_mask() const { return mask && mask->defined(); }
};

bool is_half(const Tensor& t) { return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16; }

bool last_dimension_dense(const Tensor& t) { return t.size(-1) == 1 || t.stride(-1) == 1; }

bool common_conditions(const Call& c) {
  if (c.q.dim() != 4 || c.k.dim() != 4 || c.v.dim() != 4) return false;
  if (c.q.size(2) == 0 || c.k.size(2) == 0) return false;
  if (!last_dimension_dense(c.q) || !last_dimension_dense(c.k) || !last_dimension_dense(c.v)) return false;
  if (c.q.size(0) != c.k.size(0) || c.q.size(0) != c.v.size(0)) return false;
  bool same_heads = c.q.size(1) == c.k.size(1) && c.q.size(1) == c.v.size(1);
  return same_heads || (c.gqa && c.q.size(1) % c.k.size(1) == 0 && c.q.size(1) % c.v.size(1) == 0);
}

bool can_use_cudnn(const Call& c) {
  const auto& context = at::globalContext();
  if (!context.userEnabledCuDNNSDP() || config().capability_major < 8 || !is_half(c.q)) return false;
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) return false;
  if (c.dropout * 16 != std::floor(c.dropout * 16)) return false;
  int64_t d = c.q.size(-1), dv = c.v.size(-1);
  bool mla = config().capability_major >= 9 && d == 192 && dv == 128;
  if (!mla && (d > 128 || dv > 128)) return false;
  if (d % 8 || dv % 8) return false;
  return c.k.size(2) != 1 && !(c.dropout != 0 && c.q.size(2) == 1);
}

bool can_use_flash(const Call& c) {
  if (!at::globalContext().userEnabledFlashSDP() || config().capability_major < 8 || !is_half(c.q)) return false;
  if (c.has_mask() || (c.causal && c.q.size(-2) != c.k.size(-2))) return false;
  int64_t d = c.q.size(-1);
  return d <= 256 && d == c.k.size(-1) && d == c.v.size(-1);
}

bool can_use_efficient(const Call& c) {
  if (!at::globalContext().userEnabledMemEfficientSDP() || config().capability_major < 5) return false;
  if (!is_half(c.q) && c.q.scalar_type() != at::kFloat) return false;
  if (c.q.scalar_type() == at::kBFloat16 && config().capability_major < 8) return false;
  int64_t alignment = is_half(c.q) ? 8 : 4;
  for (const Tensor* t : {&c.q, &c.k, &c.v})
    if ((t->storage_offset() % alignment) || t->stride(-1) != 1) return false;
  return c.q.size(-1) == c.k.size(-1) && c.q.size(-1) % alignment == 0 && c.v.size(-1) % alignment == 0;
}

void prefer_cudnn_once() {
  static const bool done = [] {
    const char* off = std::getenv("TORCH_CUDNN_SDPA_DEPRIORITIZED");
    bool newest = config().capability_major == 9 || config().capability_major == 10;
    if (newest && !(off && std::strcmp(off, "1") == 0)) {
      std::vector<int64_t> order;
      for (auto b : {SDPBackend::cudnn_attention, SDPBackend::flash_attention, SDPBackend::efficient_attention,
                     SDPBackend::math})
        order.push_back(static_cast<int64_t>(b));
      at::globalContext().setSDPPriorityOrder(order);
    }
    return true;
  }();
  (void)done;
}

int64_t choose(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout,
               bool causal, std::optional<double>, bool gqa) {
  Call call{q, k, v, mask, dropout, causal, gqa};
  prefer_cudnn_once();
  bool fused = common_conditions(call);
  for (auto backend : at::globalContext().sDPPriorityOrder()) {
    bool taken = backend == SDPBackend::cudnn_attention       ? fused && can_use_cudnn(call)
                 : backend == SDPBackend::flash_attention     ? fused && can_use_flash(call)
                 : backend == SDPBackend::efficient_attention ? fused && can_use_efficient(call)
                 : backend == SDPBackend::math                ? at::globalContext().userEnabledMathSDP()
                                                              : false;
    if (taken) return static_cast<int64_t>(backend);
  }
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}

}  // namespace

void register_attention() {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose);
  register_by_hand("aten::_fused_sdp_choice", choose);
}

}  // namespace prism
