#include "signature.h"

#include <mutex>
#include <cstring>
#include <set>
#include <unordered_map>

#include "attention.h"
#include "host_memory.h"
#include "tensors.h"

namespace prism {
namespace {

using c10::IValue;
using c10::TypeKind;

ArgKind kind_of(c10::TypePtr type) {
  bool optional = false;
  if (auto o = type->cast<c10::OptionalType>()) {
    type = o->getElementType();
    optional = true;
  }
  (void)optional;
  switch (type->kind()) {
    case TypeKind::TensorType: return ArgKind::kTensor;
    case TypeKind::IntType: return ArgKind::kInt;
    case TypeKind::FloatType: return ArgKind::kFloat;
    case TypeKind::NumberType: return ArgKind::kNumber;
    case TypeKind::BoolType: return ArgKind::kBool;
    case TypeKind::StringType: return ArgKind::kString;
    case TypeKind::GeneratorType: return ArgKind::kGenerator;
    case TypeKind::ListType: {
      auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == TypeKind::TensorType) return ArgKind::kTensorList;
      if (element->kind() == TypeKind::OptionalType) {
        auto inner = element->castRaw<c10::OptionalType>()->getElementType();
        if (inner->kind() == TypeKind::TensorType) return ArgKind::kOptionalTensorList;
      }
      return ArgKind::kList;
    }
    default: return ArgKind::kOther;
  }
}

bool writes(const c10::Argument& a) {
  const auto* info = a.alias_info();
  if (!info) return false;
  if (info->isWrite()) return true;
  for (const auto& c : info->containedTypes())
    if (c.isWrite()) return true;
  return false;
}

bool starts_with(const std::string& s, const char* prefix) { return s.rfind(prefix, 0) == 0; }

const std::set<std::string> kGemms = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::_addmm_activation",
    "aten::_scaled_mm", "aten::_scaled_mm_v2", "aten::_int_mm", "aten::addmv_", "aten::addmm_", "aten::baddbmm_", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::dot", "aten::vdot"};
const std::set<std::string> kOverwriting = {
    "aten::zero_", "aten::fill_", "aten::copy_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
    "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_", "aten::_foreach_zero_",
    "aten::_foreach_copy_"};
const std::set<std::string> kValuesMatter = {"aten::arange", "aten::range", "aten::linspace", "aten::logspace"};
const std::set<std::string> kNoKernel = {"aten::is_set_to", "aten::_has_compatible_shallow_copy_type",
                                         "aten::record_stream", "aten::is_pinned"};

}  // namespace

OpPlan::OpPlan(const c10::OperatorHandle& handle) : op(handle) {
  const auto& schema = op.schema();
  const std::string& base = schema.name();
  name = base + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const auto& args = schema.arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    kinds.push_back(kind_of(args[i].type()));
    writes.push_back(prism::writes(args[i]));
    overwrites.push_back(writes.back() && (args[i].is_out() || kOverwriting.count(base)));
    if (kinds.back() == ArgKind::kGenerator) generator = static_cast<int>(i);
  }
  only_writes = true;
  for (const auto& r : schema.returns()) {
    int written = -1, viewed = -1;
    if (const auto* info = r.alias_info()) {
      for (size_t i = 0; i < args.size(); ++i) {
        const auto* a = args[i].alias_info();
        if (!a || a->beforeSets() != info->beforeSets()) continue;
        (info->isWrite() ? written : viewed) = static_cast<int>(i);
        break;
      }
    }
    writes_to.push_back(written);
    views_of.push_back(viewed);
    if (written < 0) only_writes = false;
  }
  fused_attention = is_fused_attention(name);
  host_kernel = host_kernel_of(name);
  policy = policy_of(name);
  sizes_by_values = prism::sizes_by_values(name);
  reads_back = prism::reads_back(name);
  for (ArgKind kind : kinds) masks = masks || kind == ArgKind::kOptionalTensorList;
  gemm = kGemms.count(base) > 0;
  values_matter = kValuesMatter.count(base) > 0;
  launches = !kNoKernel.count(base);
  random = generator >= 0 || base == "aten::native_dropout";
  bool all_views = !schema.returns().empty();
  for (int v : views_of) all_views = all_views && v >= 0;
  only_views = all_views;
  if (all_views) launches = false;
  if (starts_with(base, "prism::")) launches = false;
}

const OpPlan& plan_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const void*, const OpPlan*> mine;
  const void* id = &op.schema();
  auto it = mine.find(id);
  if (it != mine.end()) return *it->second;
  static std::mutex mutex;
  static auto* all = new std::unordered_map<const void*, OpPlan*>();
  std::lock_guard<std::mutex> guard(mutex);
  auto& plan = (*all)[id];
  if (!plan) plan = new OpPlan(op);
  mine[id] = plan;
  return *plan;
}

void Key::add(const at::Tensor& t) {
  if (!t.defined()) return add(uint64_t{1});
  auto* impl = t.unsafeGetTensorImpl();
  uint64_t where = t.is_cuda()              ? (is_shape_only(t) ? 2 : 1)
                   : is_host_shape_only(t)  ? 5
                   : impl->is_wrapped_number() ? 4
                                               : 3;
  uint64_t dim = static_cast<uint64_t>(t.dim());
  add(2 | static_cast<uint64_t>(t.scalar_type()) << 8 | dim << 16 | where << 32);
  for (int64_t s : t.sizes()) add(static_cast<uint64_t>(s));
  for (int64_t s : t.strides()) add(static_cast<uint64_t>(s));
}

uint64_t Key::hash() const {
  uint64_t h = 0x9e3779b97f4a7c15ull;
  for (uint64_t w : words_) {
    h = (h ^ w) * 0xff51afd7ed558ccdull;
    h ^= h >> 32;
  }
  return h;
}

namespace {

// Type of a scalar always; its value only where asked for.
bool add_scalar(Key& key, const IValue& v, bool value) {
  uint64_t bits = 0;
  if (v.isInt()) {
    bits = static_cast<uint64_t>(v.toInt());
    key.add(10);
  } else if (v.isDouble()) {
    double d = v.toDouble();
    memcpy(&bits, &d, 8);
    key.add(11);
  } else if (v.isBool()) {
    bits = v.toBool();
    key.add(12);
  } else if (v.isComplexDouble()) {
    key.add(13);
  } else if (v.isNone()) {
    key.add(14);
  } else {
    return false;
  }
  if (value) key.add(bits);
  return true;
}

}  // namespace

bool build_key(Key& key, const OpPlan& plan, const IValue* args, Inputs& inputs) {
  key.clear();
  key.add(reinterpret_cast<uint64_t>(&plan));
  bool ok = true;
  auto look = [&](const at::Tensor& t, bool read) {
    key.add(t);
    if (is_host_shape_only(t)) {
      inputs.any_shape_only = true;
      if (read) inputs.any_synthesized = true;
      if (!inputs.first_host) inputs.first_host = &t;
    }
    if (!t.defined() || !t.is_cuda()) return;
    if (!inputs.first_virtual) inputs.first_virtual = &t;
    if (is_shape_only(t)) {
      inputs.any_shape_only = true;
      if (read) inputs.any_synthesized = true;
    } else if (read && !inputs.any_synthesized && is_synthesized(t)) {
      inputs.any_synthesized = true;
    }
  };
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    const IValue& v = args[i];
    if (v.isNone()) {
      key.add(0);
      continue;
    }
    bool read = !plan.overwrites[i];
    switch (plan.kinds[i]) {
      case ArgKind::kTensor: look(v.toTensor(), read); break;
      case ArgKind::kTensorList:
      case ArgKind::kOptionalTensorList: {
        auto list = v.toListRef();
        key.add(3 | list.size() << 8);
        for (const IValue& e : list) {
          if (e.isNone()) key.add(0);
          else look(e.toTensor(), read);
        }
        break;
      }
      case ArgKind::kInt:
      case ArgKind::kBool: ok = add_scalar(key, v, true) && ok; break;
      case ArgKind::kFloat:
      case ArgKind::kNumber: ok = add_scalar(key, v, plan.values_matter) && ok; break;
      case ArgKind::kString: {
        const std::string& s = v.toStringRef();
        key.add(4 | s.size() << 8);
        key.add(std::hash<std::string>()(s));
        break;
      }
      case ArgKind::kList: {
        if (!v.isList()) {
          ok = false;
          break;
        }
        auto list = v.toListRef();
        key.add(5 | list.size() << 8);
        for (const IValue& e : list) ok = add_scalar(key, e, e.isInt() || e.isBool()) && ok;
        break;
      }
      case ArgKind::kGenerator: key.add(6); break;
      case ArgKind::kOther:
        if (v.isDevice()) key.add(7);
        else ok = false;
    }
  }
  return ok;
}

namespace {

const char* dtype_name(at::ScalarType t) {
  switch (t) {
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kHalf: return "float16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kBool: return "bool";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat8_e5m2: return "float8_e5m2";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e8m0fnu: return "float8_e8m0fnu";
    case at::kUInt16: return "uint16";
    case at::kUInt32: return "uint32";
    case at::kUInt64: return "uint64";
    default: return c10::toString(t);
  }
}

void append_ints(std::string& out, at::IntArrayRef values) {
  out += '[';
  for (size_t i = 0; i < values.size(); ++i) {
    if (i) out += ',';
    out += std::to_string(values[i]);
  }
  out += ']';
}

void append_tensor(std::string& out, const at::Tensor& t) {
  if (out.back() != '[') out += ',';
  out += "[\"";
  out += dtype_name(t.scalar_type());
  out += "\",";
  append_ints(out, t.sizes());
  out += ',';
  append_ints(out, t.is_contiguous() ? at::IntArrayRef() : t.strides());
  out += ']';
}

void append_string(std::string& out, const std::string& s) {
  out += '"';
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  out += '"';
}

}  // namespace

std::string signature_json(const OpPlan& plan, const IValue* args, at::ArrayRef<at::Tensor> outputs, OpPlace place) {
  const auto& schema = plan.op.schema().arguments();
  std::string out = "{\"op\":";
  append_string(out, place == OpPlace::kHost ? "host" + plan.name.substr(plan.name.find("::")) : plan.name);
  out += ",\"inputs\":[";
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    for_each_tensor(args[i], plan.kinds[i], [&](const at::Tensor& t) {
      if (!(t.is_cpu() && t.dim() == 0)) append_tensor(out, t);  // CPU scalars are kernel arguments, not memory
    });
  }
  out += "],\"outputs\":[";
  for (const auto& t : outputs)
    if (t.defined()) append_tensor(out, t);
  out += "],\"scalars\":[";
  bool first = true;
  auto field = [&](size_t i) -> std::string& {
    if (!first) out += ',';
    first = false;
    out += '[';
    append_string(out, schema[i].name());
    out += ',';
    return out;
  };
  for (size_t i = 0; i < plan.kinds.size(); ++i) {
    const IValue& v = args[i];
    if (v.isNone()) continue;
    switch (plan.kinds[i]) {
      case ArgKind::kInt: if (v.isInt()) field(i) += std::to_string(v.toInt()) + "]"; break;
      case ArgKind::kBool: field(i) += v.toBool() ? "true]" : "false]"; break;
      case ArgKind::kString: append_string(field(i), v.toStringRef()); out += ']'; break;
      case ArgKind::kList:
        if (v.isIntList()) {
          append_ints(field(i), v.toIntVector());
          out += ']';
        } else if (v.isBoolList()) {
          std::vector<int64_t> bits;
          for (bool b : v.toBoolList()) bits.push_back(b);
          append_ints(field(i), bits);
          out += ']';
        }
        break;
      default: break;
    }
  }
  out += ']';
  switch (place) {
    case OpPlace::kFromPinned: out += ",\"attrs\":{\"direction\":\"h2d\",\"host\":\"pinned\"}"; break;
    case OpPlace::kFromPageable: out += ",\"attrs\":{\"direction\":\"h2d\",\"host\":\"pageable\"}"; break;
    case OpPlace::kToPinned: out += ",\"attrs\":{\"direction\":\"d2h\",\"host\":\"pinned\"}"; break;
    case OpPlace::kToPageable: out += ",\"attrs\":{\"direction\":\"d2h\",\"host\":\"pageable\"}"; break;
    default: break;
  }
  out += '}';
  return out;
}

}  // namespace prism
