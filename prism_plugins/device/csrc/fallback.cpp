#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "attention.h"
#include "blocks.h"
#include "config.h"
#include "generator.h"
#include "masks.h"
#include "policies.h"
#include "record_times.h"
#include "recorder.h"
#include "streams.h"
#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

constexpr int64_t kNoSignature = -1;

// How to make one return value without running the operator.
struct Result {
  enum Kind : uint8_t { kArgument, kFresh, kFreshList, kConstant };
  struct Geometry {
    bool defined, on_host;
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype;
  };
  Kind kind;
  int argument = -1;
  std::vector<Geometry> tensors;
  IValue constant;
};

// What the shape cache knows about a call.
struct Entry {
  std::vector<uint64_t> key;
  std::vector<Result> results;
  bool launches = true;
  std::atomic<int64_t> signature{kNoSignature};
};

class ShapeCache {
 public:
  Entry* find(const Key& key, uint64_t hash) {
    std::lock_guard<SpinLock> guard(lock_);
    auto [begin, end] = entries_.equal_range(hash);
    for (auto it = begin; it != end; ++it)
      if (it->second->key == key.words()) return it->second;
    return nullptr;
  }
  Entry* insert(std::unique_ptr<Entry> entry, uint64_t hash) {
    std::lock_guard<SpinLock> guard(lock_);
    auto [begin, end] = entries_.equal_range(hash);
    for (auto it = begin; it != end; ++it)
      if (it->second->key == entry->key) return it->second;
    return entries_.emplace(hash, entry.release())->second;
  }
  size_t size() {
    std::lock_guard<SpinLock> guard(lock_);
    return entries_.size();
  }

 private:
  struct Identity {
    size_t operator()(uint64_t h) const { return h; }
  };
  SpinLock lock_;
  std::unordered_multimap<uint64_t, Entry*, Identity> entries_;
};
ShapeCache& cache() {
  static auto* c = new ShapeCache();
  return *c;
}

// Calls on real tensors of which nothing is kept: every result is too large to have values (an expanded tensor is real and
// small, what is computed from it is not). They are computed once, after that only their shapes are told.
class KeepsNothing {
 public:
  bool contains(uint64_t hash) {
    std::lock_guard<SpinLock> guard(lock_);
    return hashes_.count(hash) > 0;
  }
  void insert(uint64_t hash) {
    std::lock_guard<SpinLock> guard(lock_);
    hashes_.insert(hash);
  }

 private:
  SpinLock lock_;
  std::unordered_set<uint64_t> hashes_;
};
KeepsNothing& keeps_nothing() {
  static auto* k = new KeepsNothing();
  return *k;
}

bool is_lost(const OpPlan& plan, const Stack& results) {
  if (plan.random || plan.reads_back || plan.sizes_by_values || results.empty()) return false;
  for (bool writes : plan.writes)
    if (writes) return false;
  for (size_t j = 0; j < results.size(); ++j)
    if (plan.views_of[j] >= 0 || !results[j].isTensor() || !results[j].toTensor().defined() ||
        !is_shape_only(results[j].toTensor()))
      return false;
  return true;
}

// Tensors an operator writes: what it returns, and arguments it mutates without returning them.
std::vector<Tensor> outputs_of(const OpPlan& plan, const IValue* args, at::ArrayRef<IValue> returned) {
  std::vector<Tensor> out;
  std::vector<bool> seen(plan.kinds.size());
  for (size_t j = 0; j < returned.size(); ++j) {
    const IValue& v = returned[j];
    if (plan.writes_to[j] >= 0) seen[plan.writes_to[j]] = true;
    if (v.isTensor()) {
      if (v.toTensor().defined()) out.push_back(v.toTensor());
    } else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector())
        if (t.defined()) out.push_back(t);
    }
  }
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    if (!plan.writes[i] || seen[i]) continue;
    for_each_tensor(args[i], plan.kinds[i], [&](const Tensor& t) { out.push_back(t); });
  }
  return out;
}

bool any_elements(const std::vector<Tensor>& tensors) {
  for (const auto& t : tensors)
    if (t.numel() > 0) return true;
  return tensors.empty();
}

void add_op_event(uint32_t signature, OpPlace place) {
  if (place == OpPlace::kHost) Recorder::get().add(EventKind::kHost, 0, 1 + signature);
  else Recorder::get().add(EventKind::kKernel, current_stream(current_device()), signature);
}

void count_op(const OpPlan& plan) {
  counters().ops++;
  count_launch();
  if (plan.gemm) allocate_workspace(config().cublas_workspace_bytes);
}

class DeviceScope {
 public:
  explicit DeviceScope(const Tensor* t) : old_(current_device()) {
    if (t && t->device().index() != old_) set_current_device(t->device().index());
  }
  ~DeviceScope() { set_current_device(old_); }

 private:
  int old_;
};

std::string describe(const OpPlan& plan, const IValue* args) {
  std::string out = plan.name + "(";
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    if (i) out += ", ";
    out += plan.op.schema().arguments()[i].name() + "=";
    if (plan.kinds[i] == ArgKind::kTensor && !args[i].isNone() && args[i].toTensor().defined()) {
      const Tensor& t = args[i].toTensor();
      out += c10::str(t.scalar_type(), t.sizes());
    } else if (plan.kinds[i] == ArgKind::kTensorList || plan.kinds[i] == ArgKind::kOptionalTensorList) {
      out += "[tensors]";
    } else {
      out += c10::str(args[i]);
    }
  }
  return out + ")";
}

template <class F>
IValue convert(const IValue& v, ArgKind kind, F&& f) {
  if (v.isNone()) return v;
  if (kind == ArgKind::kTensor) return f(v.toTensor());
  if (kind == ArgKind::kTensorList) {
    c10::List<Tensor> out;
    for (const IValue& e : v.toListRef()) out.push_back(f(e.toTensor()));
    return out;
  }
  if (kind == ArgKind::kOptionalTensorList) {
    c10::List<std::optional<Tensor>> out;
    for (const IValue& e : v.toListRef())
      out.push_back(e.isNone() ? std::optional<Tensor>() : std::optional<Tensor>(f(e.toTensor())));
    return out;
  }
  return v;
}

std::optional<at::Generator> generator_argument(const OpPlan& plan, const IValue* args) {
  if (plan.generator < 0 || args[plan.generator].isNone()) return std::nullopt;
  return args[plan.generator].toGenerator();
}

// ---------------------------------------------------------------- computed on the CPU

void set_geometry(const Tensor& t, const Tensor& like) {
  if (t.sizes() != like.sizes()) resize_tensor(t, like.sizes(), like.strides());
}

// False when the CPU has no kernel for this.
bool compute(const OpPlan& plan, const IValue* args, const Inputs& inputs, Stack& results) {
  size_t n = plan.kinds.size();
  Stack stack;
  stack.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<int>(i) == plan.generator) stack.emplace_back(cpu_generator(generator_argument(plan, args)));
    else if (args[i].isDevice()) stack.emplace_back(c10::Device(c10::DeviceType::CPU));
    else
      stack.push_back(convert(args[i], plan.kinds[i], [&](const Tensor& t) -> Tensor {
        // An empty output is going to be resized, which an alias cannot be.
        if (t.defined() && t.is_cuda() && plan.writes[i] && t.storage().nbytes() == 0)
          return at::empty(t.sizes(), at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
        return cpu_alias(t);
      }));
  }
  Stack given = stack;
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    try {
      if (plan.host_kernel) plan.host_kernel(stack);
      else plan.op.callBoxed(&stack);
    } catch (const c10::NotImplementedError&) {
      return false;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    if (!plan.writes[i] || args[i].isNone()) continue;
    if (plan.kinds[i] == ArgKind::kTensor) {
      const Tensor& t = args[i].toTensor();
      const Tensor& cpu = given[i].toTensor();
      if (t.is_cuda() && t.storage().nbytes() == 0 && cpu.numel() > 0) {
        resize_tensor(t, cpu.sizes(), cpu.strides());
        if (!is_shape_only(t)) cpu_alias(t).copy_(cpu);
      } else if (t.sizes() != cpu.sizes()) {
        t.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
      }
    }
    for_each_tensor(args[i], plan.kinds[i], [&](const Tensor& t) {
      auto* a = allocation_of(t);
      if (!a) return;
      bool whole = static_cast<size_t>(t.numel()) * t.itemsize() == a->nbytes;
      bool keep = a->synthesized && !(plan.overwrites[i] && whole);
      set_synthesized(t, keep || inputs.any_synthesized);
    });
  }
  for (size_t j = 0; j < stack.size(); ++j) {
    const IValue& v = stack[j];
    if (plan.writes_to[j] >= 0) results.push_back(args[plan.writes_to[j]]);
    else if (plan.views_of[j] >= 0 && v.isTensor()) results.emplace_back(view_on(args[plan.views_of[j]].toTensor(), v.toTensor()));
    else if (v.isTensor())
      results.emplace_back(v.toTensor().defined() ? from_cpu(v.toTensor(), inputs.any_synthesized) : Tensor());
    else if (v.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) {
        list.push_back(plan.views_of[j] >= 0 ? view_on(args[plan.views_of[j]].toTensor(), t)
                                             : from_cpu(t, inputs.any_synthesized));
      }
      results.emplace_back(std::move(list));
    } else {
      results.push_back(v);
    }
  }
  counters().computed++;
  return true;
}

// ---------------------------------------------------------------- shapes only

Tensor make(const Result::Geometry& g) {
  if (!g.defined) return Tensor();
  if (g.on_host) {
    Tensor t = new_host_tensor(g.sizes, g.strides, g.dtype);
    fill_plausible(t);
    return t;
  }
  Tensor t = new_tensor(g.sizes, g.strides, g.dtype);
  auto* a = allocation_of(t);
  if (a && a->real) {
    fill_plausible_raw(a->ptr, a->nbytes, g.dtype);
    a->synthesized = true;
  }
  return t;
}

Result::Geometry geometry_of(const Tensor& t, bool on_host) {
  if (!t.defined()) return {false, on_host, {}, {}, at::kFloat};
  return {true, on_host, t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}

IValue make_result(const Result& r, const IValue* args) {
  switch (r.kind) {
    case Result::kArgument: return args[r.argument];
    case Result::kFresh: return make(r.tensors[0]);
    case Result::kFreshList: {
      std::vector<Tensor> list;
      list.reserve(r.tensors.size());
      for (const auto& g : r.tensors) list.push_back(make(g));
      return list;
    }
    case Result::kConstant: return r.constant;
  }
  return {};
}

// Arguments with real memory that shape-only values were written into.
void taint_written(const OpPlan& plan, const IValue* args) {
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    if (!plan.writes[i]) continue;
    for_each_tensor(args[i], plan.kinds[i], [&](const Tensor& t) {
      if (!t.is_cpu()) {
        auto* a = allocation_of(t);
        if (!a || !a->real) return;
        a->synthesized = true;
      }
      if (plan.overwrites[i]) fill_plausible(t);
    });
  }
}

Stack call_meta(const OpPlan& plan, const IValue* args, Stack& given) {
  size_t n = plan.kinds.size();
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<int>(i) == plan.generator) given.emplace_back();
    else if (args[i].isDevice()) given.emplace_back(c10::Device(c10::DeviceType::Meta));
    else given.push_back(convert(args[i], plan.kinds[i], [&](const Tensor& t) { return meta_alias(t, plan.writes[i]); }));
  }
  Stack stack = given;
  at::AutoDispatchBelowADInplaceOrView guard;
  try {
    plan.op.callBoxed(&stack);
  } catch (const c10::NotImplementedError& e) {
    if (!plan.only_writes)
      TORCH_CHECK_NOT_IMPLEMENTED(false, "prism's virtual CUDA cannot tell the result shapes of ", describe(plan, args),
                                  ": the operator has no Meta kernel. Register one with torch.library.register_fake.");
    counters().no_meta_kernel.count(plan.name);
    stack.clear();
    for (int i : plan.writes_to) stack.push_back(given[i]);
  }
  return stack;
}

// Runs the Meta kernel, pushes the results and tells how to make them again.
std::unique_ptr<Entry> infer(const OpPlan& plan, const IValue* args, bool on_host, Stack& results, bool& cacheable) {
  Stack given;
  Stack metas = call_meta(plan, args, given);
  auto entry = std::make_unique<Entry>();
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    if (!plan.writes[i] || plan.kinds[i] != ArgKind::kTensor || args[i].isNone()) continue;
    const Tensor& t = args[i].toTensor();
    if (t.sizes() == given[i].toTensor().sizes()) continue;
    if (t.is_cpu()) resize_host_tensor(t, given[i].toTensor().sizes());
    else set_geometry(t, given[i].toTensor());
    cacheable = false;
  }
  for (size_t j = 0; j < metas.size(); ++j) {
    const IValue& v = metas[j];
    Result r{Result::kConstant};
    if (plan.writes_to[j] >= 0) {
      r.kind = Result::kArgument;
      r.argument = plan.writes_to[j];
    } else if (plan.views_of[j] >= 0) {
      const Tensor& base = args[plan.views_of[j]].toTensor();
      cacheable = false;
      if (v.isTensor()) {
        results.emplace_back(view_on(base, v.toTensor()));
      } else {
        std::vector<Tensor> list;
        for (const Tensor& t : v.toTensorVector()) list.push_back(view_on(base, t));
        results.emplace_back(std::move(list));
      }
      continue;
    } else if (v.isTensor()) {
      r.kind = Result::kFresh;
      r.tensors.push_back(geometry_of(v.toTensor(), on_host));
    } else if (v.isTensorList()) {
      r.kind = Result::kFreshList;
      for (const Tensor& t : v.toTensorVector()) r.tensors.push_back(geometry_of(t, on_host));
    } else {
      r.constant = v;
    }
    results.push_back(make_result(r, args));
    entry->results.push_back(std::move(r));
  }
  return entry;
}

void finish(const OpPlan& plan, const IValue* args, const Stack& results, OpPlace place = OpPlace::kDevice) {
  auto outputs = outputs_of(plan, args, results);
  if (plan.launches && any_elements(outputs)) {
    if (place == OpPlace::kDevice) count_op(plan);
    record_kernel(plan, args, outputs, place);
  }
}

void count_host_read(const OpPlan& plan, at::ScalarType dtype) {
  counters().synthesized_reads.count(plan.name + " " + c10::toString(dtype) + " on the host");
}

// Small host tensors that stand for values nobody computed: from here on the script takes them for real.
void count_host_reads(const OpPlan& plan, const IValue* args, const Stack& results) {
  for (const Tensor& t : outputs_of(plan, args, results))
    if (!is_host_shape_only(t) && t.numel() > 0) return count_host_read(plan, t.scalar_type());
}

void replace_arguments(Stack* stack, size_t num_args, Stack&& results) {
  torch::jit::drop(*stack, num_args);
  for (auto& r : results) stack->push_back(std::move(r));
}

}  // namespace

void record_kernel(const OpPlan& plan, const IValue* args, at::ArrayRef<Tensor> outputs, OpPlace place) {
  if (!Recorder::get().on()) return;
  SampledTimer timer;
  thread_local Key key;
  Inputs inputs;
  // The identity of a call whose outputs depend on values includes the outputs.
  bool keyed = build_key(key, plan, args, inputs);
  key.add(~static_cast<uint64_t>(place));
  for (const auto& t : outputs) key.add(t);
  uint64_t hash = key.hash();
  Entry* entry = keyed ? cache().find(key, hash) : nullptr;
  if (!entry) {
    auto fresh = std::make_unique<Entry>();
    fresh->signature = Recorder::get().intern(signature_json(plan, args, outputs, place));
    if (!keyed) return add_op_event(static_cast<uint32_t>(fresh->signature), place);
    fresh->key = key.words();
    entry = cache().insert(std::move(fresh), hash);
  }
  add_op_event(static_cast<uint32_t>(entry->signature), place);
}

void record_read_back(const std::string& op, const Tensor& source, bool synthesized) {
  if (synthesized) counters().synthesized_reads.count(op + " " + c10::toString(source.scalar_type()));
  synchronize_stream(current_stream(current_device()), synthesized);
}

void resize_tensor(const Tensor& t, at::IntArrayRef sizes, at::OptionalIntArrayRef strides) {
  auto* impl = t.unsafeGetTensorImpl();
  if (strides) impl->set_sizes_and_strides(sizes, *strides);
  else impl->set_sizes_contiguous(sizes);
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  size_t need = t.numel() == 0 ? 0 : static_cast<size_t>((t.storage_offset() + last + 1) * t.itemsize());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (need > storage->nbytes()) resize_storage(storage, need);
}

void run_op(const OpPlan& plan, Stack* stack) {
  size_t n = plan.kinds.size();
  IValue* args = stack->data() + (stack->size() - n);
  for (size_t i = 0; plan.masks && i < n; ++i) {
    if (plan.kinds[i] != ArgKind::kOptionalTensorList || args[i].isNone()) continue;
    if (as_masked_fill(plan, args, stack)) return;
    expand_masks(args[i]);
  }
  thread_local Key t_key;
  Key& key = t_key;
  Inputs inputs;
  bool keyed = build_key(key, plan, args, inputs);
  DeviceScope device(inputs.first_virtual);
  bool on_host = !inputs.first_virtual && inputs.first_host;
  OpPlace place = on_host ? OpPlace::kHost : OpPlace::kDevice;
  Stack results;

  bool real = !inputs.any_shape_only && inputs.first_virtual;
  uint64_t call = real && keyed ? key.hash() : 0;
  if (real && keyed && keeps_nothing().contains(call)) real = false;
  if (real && !plan.fused_attention && !plan.no_cpu_kernel && !(inputs.any_synthesized && plan.sizes_by_values)) {
    RealHostScope real_host;
    if (compute(plan, args, inputs, results)) {
      finish(plan, args, results);
      if (keyed && is_lost(plan, results)) keeps_nothing().insert(call);
      if (plan.reads_back) record_read_back(plan.name, *inputs.first_virtual, inputs.any_synthesized);
      return replace_arguments(stack, n, std::move(results));
    }
    if (!plan.op.hasKernelForDispatchKey(DispatchKey::CPU)) plan.no_cpu_kernel = true;
    counters().no_cpu_kernel.count(plan.name);
    keyed = build_key(key, plan, args, inputs);
  }

  if (plan.policy) {
    plan.policy(args, results, on_host);
    finish(plan, args, results, place);
    if (on_host) count_host_read(plan, inputs.first_host->scalar_type());
    else record_read_back(plan.name, *inputs.first_virtual, true);
    return replace_arguments(stack, n, std::move(results));
  }

  if (plan.random && !on_host) advance_generator(generator_argument(plan, args));
  uint64_t hash = key.hash();
  Entry* entry = keyed ? cache().find(key, hash) : nullptr;
  if (entry) {
    counters().cache_hits++;
    for (const Result& r : entry->results) results.push_back(make_result(r, args));
    taint_written(plan, args);
  } else {
    counters().cache_misses++;
    std::vector<uint64_t> words = key.words();  // the Meta kernel may come back here and reuse the buffer
    bool cacheable = keyed;
    auto fresh = infer(plan, args, on_host, results, cacheable);
    taint_written(plan, args);
    if (!cacheable) {
      finish(plan, args, results, place);
      return replace_arguments(stack, n, std::move(results));
    }
    fresh->key = std::move(words);
    fresh->launches = plan.launches && any_elements(outputs_of(plan, args, results));
    entry = cache().insert(std::move(fresh), hash);
  }
  if (real && plan.fused_attention) {
    RealHostScope real_host;
    if (compute_attention(plan, args, results)) counters().computed++;
    else counters().no_cpu_kernel.count(plan.name);
  }
  if (on_host) count_host_reads(plan, args, results);
  if (entry->launches) {
    if (!on_host) count_op(plan);
    if (Recorder::get().on()) {
      SampledTimer timer;
      int64_t signature = entry->signature.load(std::memory_order_relaxed);
      if (signature == kNoSignature) {
        signature = Recorder::get().intern(signature_json(plan, args, outputs_of(plan, args, results), place));
        entry->signature = signature;
      }
      add_op_event(static_cast<uint32_t>(signature), place);
    }
  }
  replace_arguments(stack, n, std::move(results));
}

size_t shape_cache_size() { return cache().size(); }

}  // namespace prism
