#include "masks.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/nonzero.h>

#include "tensors.h"

namespace prism {

using at::Tensor;
using c10::IValue;

static bool is_mask(const IValue& v) {
  if (v.isNone()) return false;
  const Tensor& t = v.toTensor();
  return t.defined() && t.is_cuda() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
}

bool as_masked_fill(const OpPlan& plan, const IValue* args, torch::jit::Stack* stack) {
  if (plan.name != "aten::_index_put_impl_" || args[3].toBool()) return false;
  const Tensor& value = args[2].toTensor();
  if (value.numel() != 1 || !value.is_cpu()) return false;
  Tensor self = args[0].toTensor(), mask;
  int64_t dims = 0;
  for (const IValue& e : args[1].toListRef()) {
    if (e.isNone() || !e.toTensor().defined()) {
      ++dims;
      continue;
    }
    if (!is_mask(e) || mask.defined()) return false;
    mask = e.toTensor();
    dims += mask.dim();
  }
  if (!mask.defined()) return false;
  for (; dims < self.dim(); ++dims) mask = mask.unsqueeze(-1);
  at::AutoDispatchBelowADInplaceOrView guard;
  self.masked_fill_(mask, value.item());
  torch::jit::drop(*stack, plan.kinds.size());
  stack->emplace_back(std::move(self));
  return true;
}

void expand_masks(IValue& indices) {
  bool any = false;
  for (const IValue& e : indices.toListRef()) any = any || is_mask(e);
  if (!any) return;
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::List<std::optional<Tensor>> out;
  for (const IValue& e : indices.toListRef()) {
    if (!is_mask(e)) {
      out.push_back(e.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(e.toTensor()));
      continue;
    }
    Tensor where = e.toTensor().nonzero();
    for (int64_t d = 0; d < e.toTensor().dim(); ++d) out.push_back(where.select(1, d));
  }
  indices = std::move(out);
}

}  // namespace prism
