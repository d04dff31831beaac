// The identity of an op call: which operator, on arguments of which geometry.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <string>
#include <vector>

#include "host_kernels.h"
#include "policies.h"

namespace prism {

enum class ArgKind : uint8_t { kTensor, kTensorList, kOptionalTensorList, kInt, kFloat, kNumber, kBool, kString, kList,
                               kGenerator, kOther };

// Where an op's work is done; copies tell between what.
enum class OpPlace : uint8_t { kDevice, kHost, kFromPinned, kFromPageable, kToPinned, kToPageable };

// What is known of an operator before any call.
struct OpPlan {
  explicit OpPlan(const c10::OperatorHandle& op);

  c10::OperatorHandle op;
  std::string name;  // qualified, with overload
  std::vector<ArgKind> kinds;
  std::vector<bool> writes;      // argument is mutated
  std::vector<bool> overwrites;  // ... and its old values do not matter
  std::vector<int> writes_to;    // per return: the argument it is, -1: none
  std::vector<int> views_of;     // per return: the argument it is a view of, -1: none
  int generator = -1;
  bool random = false;           // the CPU kernel would use the CPU's random numbers
  bool values_matter = false;    // output shapes depend on floating-point arguments
  bool gemm = false;             // runs in cuBLAS
  bool launches = true;          // runs a kernel at all
  bool only_writes = false;      // no fresh outputs
  bool only_views = false;       // all it returns are views of arguments
  Policy policy = nullptr;       // makes the results where values decide and nobody knows them
  bool sizes_by_values = false;
  bool reads_back = false;       // the host waits for the result
  bool fused_attention = false;
  HostKernel host_kernel = nullptr;  // computes on the CPU in place of torch's kernel
  mutable std::atomic<bool> no_cpu_kernel{false};  // found out by trying
  bool masks = false;            // takes indices that may be masks
};

// The plan of an operator; plans live for ever.
const OpPlan& plan_of(const c10::OperatorHandle& op);

// Words that identify a call. Floating-point arguments are left out (a learning rate changes every step and no
// kernel's cost): only operators whose shapes depend on them keep the values.
class Key {
 public:
  void clear() { words_.clear(); }
  void add(uint64_t w) { words_.push_back(w); }
  void add(const at::Tensor& t);
  const std::vector<uint64_t>& words() const { return words_; }
  uint64_t hash() const;

 private:
  std::vector<uint64_t> words_;
};

struct Inputs {
  bool any_shape_only = false;
  bool any_synthesized = false;  // among those whose values are read
  const at::Tensor* first_host = nullptr;  // shape only, on the host
  const at::Tensor* first_virtual = nullptr;
};

// False when an argument is of a kind the key cannot hold.
bool build_key(Key& key, const OpPlan& plan, const c10::IValue* args, Inputs& inputs);

// JSON of program.model.OpSignature.
std::string signature_json(const OpPlan& plan, const c10::IValue* args, at::ArrayRef<at::Tensor> outputs,
                           OpPlace place);

template <class F>
void for_each_tensor(const c10::IValue& v, ArgKind kind, F&& f) {
  if (v.isNone()) return;
  if (kind == ArgKind::kTensor) {
    const at::Tensor& t = v.toTensor();
    if (t.defined()) f(t);
  } else if (kind == ArgKind::kTensorList || kind == ArgKind::kOptionalTensorList) {
    for (const c10::IValue& e : v.toListRef())
      if (!e.isNone() && e.toTensor().defined()) f(e.toTensor());
  }
}

}  // namespace prism
