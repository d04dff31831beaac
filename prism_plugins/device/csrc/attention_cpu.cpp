#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "attention.h"
#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;
using c10::IValue;

const IValue& argument(const OpPlan& plan, const IValue* args, const char* name) {
  static const IValue none;
  int i = plan.op.schema().argumentIndexWithName(name).value_or(-1);
  return i < 0 ? none : args[i];
}

void give(IValue& result, const Tensor& cpu, bool synthesized) {
  if (!result.isTensor() || !result.toTensor().defined() || !cpu.defined()) return;
  const Tensor& t = result.toTensor();
  if (t.numel() != cpu.numel() || is_shape_only(t)) return;  // a padded log-sum-exp: backward computes it again
  cpu_alias(t).copy_(cpu.reshape(t.sizes()));
  set_synthesized(t, synthesized);
}

}  // namespace

bool is_fused_attention(const std::string& name) {
  return name.rfind("aten::_scaled_dot_product_flash_attention", 0) == 0 ||
         name.rfind("aten::_scaled_dot_product_efficient_attention", 0) == 0 ||
         name.rfind("aten::_scaled_dot_product_cudnn_attention", 0) == 0;
}

bool compute_attention(const OpPlan& plan, const IValue* args, torch::jit::Stack& results) {
  bool synthesized = false;  // as the inputs that are read here; log-sum-exp and random state are not
  auto tensor = [&](const char* name) {
    const IValue& v = argument(plan, args, name);
    if (!v.isTensor() || !v.toTensor().defined()) return Tensor();
    synthesized = synthesized || is_synthesized(v.toTensor());
    return cpu_alias(v.toTensor());
  };
  Tensor q = tensor("query"), k = tensor("key"), v = tensor("value"), bias = tensor("attn_bias");
  double dropout = argument(plan, args, "dropout_p").toDouble();
  bool causal = argument(plan, args, "is_causal").toBool();
  auto scale = argument(plan, args, "scale").toOptional<double>();
  if (dropout != 0 || q.size(1) != k.size(1) || q.size(1) != v.size(1)) return false;
  std::optional<Tensor> mask = bias.defined() ? std::optional<Tensor>(bias) : std::nullopt;
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask, scale);
  Tensor grad = tensor("grad_out");
  if (!grad.defined()) grad = tensor("grad_out_");
  if (!grad.defined()) {
    give(results[0], out, synthesized);
    give(results[1], lse, synthesized);
    return true;
  }
  if (results.size() == 4 && results[3].isTensor() && results[3].toTensor().defined()) return false;
  auto [gq, gk, gv] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, dropout, causal, mask, scale);
  give(results[0], gq, synthesized);
  give(results[1], gk, synthesized);
  give(results[2], gv, synthesized);
  return true;
}

}  // namespace prism
