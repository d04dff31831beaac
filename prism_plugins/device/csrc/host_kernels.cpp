#include "host_kernels.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <unordered_map>

#include "generator.h"

namespace prism {
namespace {

using at::Tensor;
using torch::jit::Stack;

// The CPU's native_dropout draws from the CPU's generator; ours must not.
void native_dropout(Stack& stack) {
  Tensor input = stack[0].toTensor();
  double p = stack[1].toDouble();
  bool train = stack[2].isNone() || stack[2].toBool();
  auto mask = at::empty_like(input, at::TensorOptions().dtype(at::kBool));
  if (!train || p == 0) {
    stack = {input.clone(), mask.fill_(true)};
    return;
  }
  mask.bernoulli_(1.0 - p, cpu_generator(std::nullopt));
  double scale = p == 1 ? 0 : 1 / (1 - p);
  stack = {input.mul(mask).mul_(scale), mask};
}

// y = x * rstd * w over the last dimensions, rstd = 1 / sqrt(mean(x^2) + eps). In double precision:
// dx = rstd * (g * w - n * mean(g * w * n)) with n = x * rstd, and dw is the sum of g * n over the other dimensions.
void rms_norm_backward(Stack& stack) {
  Tensor grad = stack[0].toTensor(), input = stack[1].toTensor(), rstd = stack[3].toTensor();
  std::optional<Tensor> weight = stack[4].toOptional<Tensor>();
  if (weight && !weight->defined()) weight.reset();
  auto wanted = stack[5].toBoolList();
  int64_t outer = input.dim() - static_cast<int64_t>(stack[2].toIntVector().size());
  std::vector<int64_t> outer_dims, inner_dims;
  for (int64_t d = 0; d < input.dim(); ++d) (d < outer ? outer_dims : inner_dims).push_back(d);

  Tensor g = grad.to(at::kDouble), r = rstd.to(at::kDouble);
  Tensor normal = input.to(at::kDouble).mul(r);
  Tensor dx, dw;
  if (wanted[0]) {
    Tensor gw = weight ? g.mul(weight->to(at::kDouble)) : g;
    dx = gw.sub(normal.mul(gw.mul(normal).mean(inner_dims, true))).mul(r).to(input.scalar_type());
  }
  if (wanted[1] && weight) {
    Tensor product = g.mul(normal);
    dw = (outer_dims.empty() ? product : product.sum(outer_dims)).to(weight->scalar_type());
  }
  stack = {dx, dw};
}

const std::unordered_map<std::string, HostKernel> kKernels = {
    {"aten::native_dropout", native_dropout},
    {"aten::_fused_rms_norm_backward", rms_norm_backward},
};

}  // namespace

HostKernel host_kernel_of(const std::string& name) {
  auto it = kKernels.find(name);
  return it == kKernels.end() ? nullptr : it->second;
}

}  // namespace prism
