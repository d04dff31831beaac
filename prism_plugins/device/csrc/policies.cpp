#include "policies.h"

#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <unordered_map>

#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

int64_t half(int64_t n) { return std::max<int64_t>(1, n / 2); }

Tensor make(at::IntArrayRef sizes, at::ScalarType dtype, bool on_host) {
  return on_host ? new_contiguous_host_tensor(sizes, dtype) : new_contiguous(sizes, dtype);
}

Tensor plausible(at::IntArrayRef sizes, at::ScalarType dtype, bool on_host) {
  Tensor t = make(sizes, dtype, on_host);
  fill_plausible(t);
  set_synthesized(t, true);
  return t;
}

void item(const IValue* args, Stack& results, bool) {
  const Tensor& t = args[0].toTensor();
  if (t.scalar_type() == at::kBool) results.emplace_back(false);
  else if (at::isFloatingType(t.scalar_type())) results.emplace_back(1.0);
  else if (at::isComplexType(t.scalar_type())) results.emplace_back(c10::complex<double>(1.0));
  else results.emplace_back(int64_t{0});
}

void equal(const IValue* args, Stack& results, bool) {
  results.emplace_back(args[0].toTensor().sizes() == args[1].toTensor().sizes());
}

void nonzero(const IValue* args, Stack& results, bool on_host) {
  const Tensor& t = args[0].toTensor();
  int64_t shape[] = {half(t.numel()), t.dim()};
  results.emplace_back(plausible(shape, at::kLong, on_host));
}

void masked_select(const IValue* args, Stack& results, bool on_host) {
  const Tensor& t = args[0].toTensor();
  auto sizes = at::infer_size(t.sizes(), args[1].toTensor().sizes());
  const Tensor& mask = args[1].toTensor();
  int64_t n = is_synthesized(mask) ? half(c10::multiply_integers(sizes))
                                  : cpu_alias(mask).expand(sizes).sum().item<int64_t>();
  results.emplace_back(plausible(n, t.scalar_type(), on_host));
}

// values, inverse (shape of the input, or empty), counts
void unique2(const IValue* args, Stack& results, bool on_host) {
  const Tensor& t = args[0].toTensor();
  int64_t n = half(t.numel());
  bool inverse = args[2].toBool(), counts = args[3].toBool();
  results.emplace_back(plausible(n, t.scalar_type(), on_host));
  results.emplace_back(inverse ? plausible(t.sizes(), at::kLong, on_host) : make({0}, at::kLong, on_host));
  results.emplace_back(counts ? plausible(n, at::kLong, on_host) : make({0}, at::kLong, on_host));
}

void unique_consecutive(const IValue* args, Stack& results, bool on_host) {
  const Tensor& t = args[0].toTensor();
  int64_t n = half(t.numel());
  bool inverse = args[1].toBool(), counts = args[2].toBool();
  results.emplace_back(plausible(n, t.scalar_type(), on_host));
  results.emplace_back(inverse ? plausible(t.sizes(), at::kLong, on_host) : make({0}, at::kLong, on_host));
  results.emplace_back(counts ? plausible(n, at::kLong, on_host) : make({0}, at::kLong, on_host));
}

void unique_dim(const IValue* args, Stack& results, bool on_host) {
  const Tensor& t = args[0].toTensor();
  int64_t dim = args[1].toInt();
  if (dim < 0) dim += t.dim();
  auto sizes = t.sizes().vec();
  int64_t all = sizes[dim];
  sizes[dim] = half(all);
  results.emplace_back(plausible(sizes, t.scalar_type(), on_host));
  results.emplace_back(plausible(all, at::kLong, on_host));
  results.emplace_back(plausible(sizes[dim], at::kLong, on_host));
}

void bincount(const IValue* args, Stack& results, bool on_host) {
  int64_t n = std::max<int64_t>(1, args[2].toInt());
  results.emplace_back(plausible(n, args[1].isNone() ? at::kLong : at::kDouble, on_host));
}

void repeat_interleave(const IValue* args, Stack& results, bool on_host) {
  int64_t n = args[1].isNone() ? args[0].toTensor().numel() : args[1].toInt();
  results.emplace_back(plausible(n, args[0].toTensor().scalar_type(), on_host));
}

const std::unordered_map<std::string, Policy> kPolicies = {
    {"aten::_local_scalar_dense", item},
    {"aten::equal", equal},
    {"aten::nonzero", nonzero},
    {"aten::masked_select", masked_select},
    {"aten::_unique2", unique2},
    {"aten::unique_consecutive", unique_consecutive},
    {"aten::unique_dim", unique_dim},
    {"aten::bincount", bincount},
    {"aten::repeat_interleave.Tensor", repeat_interleave},
};

}  // namespace

Policy policy_of(const std::string& name) {
  auto it = kPolicies.find(name);
  return it == kPolicies.end() ? nullptr : it->second;
}

bool sizes_by_values(const std::string& name) {
  return kPolicies.count(name) && name != "aten::_local_scalar_dense" && name != "aten::equal";
}

bool reads_back(const std::string& name) { return kPolicies.count(name) > 0; }

}  // namespace prism
