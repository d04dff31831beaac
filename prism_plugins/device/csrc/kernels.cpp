// Kernels written by hand (memory, views, copies), and registration of all kernels.
#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "blocks.h"
#include "fallback.h"
#include "host_memory.h"
#include "recorder.h"
#include "registration.h"
#include "streams.h"
#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

// Operators with a CUDA kernel, from torch's own native_functions.yaml.
const char* const kCudaOps[] = {
#include "cuda_ops.inc"
};

// Composite operators that pick a cuDNN kernel on a GPU: recorded as themselves.
const char* const kKeptWhole[] = {"aten::convolution", "aten::convolution_backward"};

class OnDevice {
 public:
  explicit OnDevice(std::optional<c10::Device> d) : old_(current_device()) {
    if (d && d->has_index()) set_current_device(d->index());
  }
  ~OnDevice() { set_current_device(old_); }

 private:
  int old_;
};

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device);
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return new_tensor(size, stride, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  OnDevice guard(self.device());
  resize_tensor(self, size, std::nullopt);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) resize_tensor(self, size, std::nullopt);
  else resize_tensor(self, size, stride);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, n, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(none), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (auto* a = allocation_of(self)) use_on_stream(a, stream);
}

// ---------------------------------------------------------------- copies

const OpPlan& copy_plan() {
  static const OpPlan& plan = plan_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  return plan;
}

void copy_values(const Tensor& to, const Tensor& from) {
  bool lost = is_shape_only(from);
  if (!is_shape_only(to)) {
    if (lost) fill_plausible(to);
    else cpu_alias(to).copy_(cpu_alias(from));
  }
  if (auto* a = allocation_of(to)) {
    bool whole = static_cast<size_t>(to.numel()) * to.itemsize() == a->nbytes;
    bool keep = a->synthesized && !whole;
    set_synthesized(to, keep || lost || is_synthesized(from));
  }
}

void launch_copy(const Tensor& to, const Tensor& from, bool non_blocking, OpPlace place) {
  IValue args[] = {to, from, non_blocking};
  counters().ops++;
  count_launch();
  record_kernel(copy_plan(), args, to, place);
}

bool same_dense_layout(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

// Up to this size the driver copies pageable memory to the device without making the host wait (CUDA programming
// guide, asynchronous concurrent execution).
constexpr size_t kStagedAtOnce = 64 * 1024;

}  // namespace

// Follows copy_kernel_cuda (aten/src/ATen/native/cuda/Copy.cu): a transfer between host and device needs equal dtypes
// and dense layouts, else temporaries: on the host when the copy blocks, on the device when it does not. Pageable
// memory goes through a staging buffer of the driver: the host waits, whatever was asked for.
Tensor& copy_to_or_from_device(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  OnDevice guard(self.is_cuda() ? self.device() : source.device());
  Tensor from = source.sizes() == self.sizes() ? source : source.expand(self.sizes());
  if (self.is_cuda() && source.is_cuda()) {
    copy_values(self, from);
    launch_copy(self, source, non_blocking, OpPlace::kDevice);
    counters().computed += !is_shape_only(self) && !is_shape_only(source);
    return self;
  }
  bool same_dtype = self.scalar_type() == source.scalar_type();
  if (!(same_dtype && same_dense_layout(self, from))) {
    Tensor to, packed;
    bool convert_source = source.is_cuda() == non_blocking;
    if (convert_source) {
      to = self.is_contiguous() ? self : at::empty_like(self, at::MemoryFormat::Contiguous);
      packed = source.to(self.scalar_type()).expand(self.sizes()).contiguous();
    } else {
      to = self.is_contiguous() && same_dtype
               ? self
               : at::empty_like(self, self.options().dtype(source.scalar_type()), at::MemoryFormat::Contiguous);
      packed = from.contiguous();
    }
    to.copy_(packed, non_blocking);
    if (!to.is_same(self)) self.copy_(to, non_blocking);
    return self;
  }
  copy_values(self, from);
  bool to_host = !self.is_cuda();
  bool pinned = is_pinned_pointer((to_host ? self : source).storage().data());
  launch_copy(self, from, non_blocking,
              to_host ? (pinned ? OpPlace::kToPinned : OpPlace::kToPageable)
                      : (pinned ? OpPlace::kFromPinned : OpPlace::kFromPageable));
  bool staged = !pinned && (to_host || self.numel() * self.itemsize() > kStagedAtOnce);
  bool waits = !non_blocking || staged;
  if (to_host && !is_host_shape_only(self)) {
    bool synthesized = is_synthesized(source);
    if (waits) record_read_back("aten::copy_", source, synthesized);
    else if (synthesized) counters().synthesized_reads.count(std::string("aten::copy_ ") + c10::toString(source.scalar_type()));
  } else if (waits) {
    synchronize_stream(current_stream(current_device()));
  }
  return self;
}

namespace {

// ---------------------------------------------------------------- registration

class PlannedKernel final : public c10::OperatorKernel {
 public:
  explicit PlannedKernel(const OpPlan& plan) : plan_(plan) {}
  void operator()(const c10::OperatorHandle&, DispatchKeySet, torch::jit::Stack* stack) { run_op(plan_, stack); }

 private:
  const OpPlan& plan_;
};

void any_op(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) { run_op(plan_of(op), stack); }

void register_planned(const std::string& full) {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto op = dispatcher.findSchema(parse_name(full));
  if (!op) return;  // declared in the yaml, but not built into this torch
  keep(dispatcher.registerImpl(op->operator_name(), DispatchKey::CUDA,
                               c10::KernelFunction::makeFromBoxedFunctor<PlannedKernel>(
                                   std::make_unique<PlannedKernel>(plan_of(*op))),
                               std::nullopt, nullptr, "prism"));
}

const std::vector<std::string> kByHand = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::copy_", "aten::record_stream",
    "aten::set_", "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor",
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::_fused_sdp_choice"};

}  // namespace

std::vector<std::string> planned_ops() {
  std::vector<std::string> ops;
  auto has = [](const auto& names, const std::string& op) {
    return std::find(std::begin(names), std::end(names), op) != std::end(names);
  };
  for (const char* op : kCudaOps)
    if (!has(kByHand, op)) ops.push_back(op);
  for (const char* op : kKeptWhole)
    if (!has(kCudaOps, op)) ops.push_back(op);
  for (std::string& op : further_cuda_ops())
    if (!has(kCudaOps, op) && !has(kByHand, op) && !has(kKeptWhole, op)) ops.push_back(std::move(op));
  return ops;
}

void register_kernels() {
  take_over_device();
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 255);
  // Where torch has kernels of its own, each registration would warn that it replaces one.
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto& dispatcher = c10::Dispatcher::singleton();
  keep(dispatcher.registerFallback(DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&any_op>(), "prism"));
  for (const std::string& op : planned_ops()) register_planned(op);
  register_by_hand("aten::empty.memory_format", empty);
  register_by_hand("aten::empty_strided", empty_strided);
  register_by_hand("aten::resize_", resize_);
  register_by_hand("aten::copy_", copy_to_or_from_device);
  register_by_hand("aten::record_stream", record_stream);
  register_by_hand("aten::set_", set_nothing);
  register_by_hand("aten::set_.source_Storage", set_whole_storage);
  register_by_hand("aten::set_.source_Storage_storage_offset", set_storage);
  register_by_hand("aten::set_.source_Tensor", set_tensor);
  register_by_hand("aten::as_strided", at::native::as_strided_tensorimpl);
  register_by_hand("aten::view", at::native::view);
  register_by_hand("aten::_reshape_alias", at::native::_reshape_alias);
  register_by_hand("aten::unfold", at::native::unfold);
  register_attention();
  register_host_kernels();
}

}  // namespace prism
