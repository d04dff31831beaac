#include "host_memory.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <ATen/ops/set_native.h>
#include <c10/util/llvmMathExtras.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "config.h"
#include "fallback.h"
#include "kernels.h"
#include "registration.h"
#include "tensors.h"

namespace prism {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

// The context behind a DataPtr of host memory.
struct HostBlock {
  void* ptr;
  size_t nbytes;
  bool mapped;      // reserved pages, else malloc
  bool pinned;
  bool shape_only;  // made for a tensor nobody computes
};

// Pinned blocks as torch's CachingHostAllocator takes them from the system: powers of two, kept when freed.
class PinnedBlocks {
 public:
  void take(size_t n, HostStats& stats) {
    size_t size = c10::llvm::PowerOf2Ceil(n);
    auto& free = free_[size];
    if (free > 0) --free;
    else stats.page_locked += static_cast<int64_t>(size);
  }
  void give_back(size_t n) { ++free_[c10::llvm::PowerOf2Ceil(n)]; }

 private:
  std::map<size_t, int> free_;
};

struct State {
  std::mutex mutex;
  HostStats stats;
  PinnedBlocks pinned_blocks;
  std::map<uintptr_t, size_t> pinned_ranges;
};
State& state() {
  static auto* s = new State();  // leaked: tensors may die after static destruction
  return *s;
}

void count(const HostBlock& b, int sign) {
  auto& stats = state().stats;
  auto change = [&](int64_t& now, int64_t& peak) {
    now += sign * static_cast<int64_t>(b.nbytes);
    peak = std::max(peak, now);
  };
  if (b.mapped && b.shape_only) change(stats.untouched, stats.untouched_peak);
  if (b.pinned) change(stats.pinned, stats.pinned_peak);
  else if (b.mapped) change(stats.pageable, stats.pageable_peak);
}

void release(void* context) {
  auto* b = static_cast<HostBlock*>(context);
  {
    auto& s = state();
    std::lock_guard<std::mutex> guard(s.mutex);
    count(*b, -1);
    if (b->pinned) {
      s.pinned_ranges.erase(reinterpret_cast<uintptr_t>(b->ptr));
      s.pinned_blocks.give_back(b->nbytes);
    }
  }
  if (b->mapped) munmap(b->ptr, b->nbytes);
  else std::free(b->ptr);
  delete b;
}

void release_nothing(void*) {}

// Pages that stay unused until somebody writes to them; a stray write costs a page, not a huge page.
void* reserve(size_t nbytes) {
  void* p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(p != MAP_FAILED, "prism: the host cannot reserve ", nbytes, " bytes of address space");
  madvise(p, nbytes, MADV_NOHUGEPAGE);
  return p;
}

c10::DataPtr allocate_host(size_t n, bool pinned, bool shape_only) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (n == 0) return {nullptr, nullptr, &release_nothing, cpu};
  bool mapped = n >= config().host_limit;
  void* p = mapped ? reserve(n) : std::aligned_alloc(64, (n + 63) / 64 * 64);
  TORCH_CHECK(p, "prism: the host has no ", n, " bytes left");
  auto* b = new HostBlock{p, n, mapped, pinned, shape_only};
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  count(*b, 1);
  if (pinned) {
    s.pinned_ranges[reinterpret_cast<uintptr_t>(p)] = n;
    s.pinned_blocks.take(n, s.stats);
  }
  s.stats.total_peak = std::max(s.stats.total_peak, s.stats.pageable + s.stats.page_locked);
  return {p, b, &release, cpu};
}

template <bool kPinned, bool kShapeOnly>
struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return allocate_host(n, kPinned, kShapeOnly); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    if (!kShapeOnly) std::memcpy(to, from, n);
  }
};

c10::Allocator* shape_only_allocator(bool pinned) {
  static auto* pageable = new HostAllocator<false, true>();
  static auto* locked = new HostAllocator<true, true>();
  if (pinned) at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);  // before, nothing counts as pinned
  return pinned ? static_cast<c10::Allocator*>(locked) : pageable;
}

c10::Allocator* real_pinned_allocator() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  return pinned_allocator();
}

const DispatchKeySet kShapeOnlyKeys({DispatchKey::CPU, kHostShapeOnlyKey});

bool has_value_semantics(at::ScalarType t) { return at::isFloatingType(t) || at::isComplexType(t); }

// torch.tensor and its kin fill what they allocate through a pointer; they hide it from modes while they do.
bool filled_by_pointer() {
  return c10::impl::tls_is_dispatch_key_excluded(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         c10::impl::tls_is_dispatch_key_excluded(DispatchKey::Python);
}

bool is_large(size_t nbytes) { return nbytes >= config().host_limit && RealHostScope::depth() == 0; }

size_t bytes_of(at::IntArrayRef size, at::ScalarType dtype) {
  size_t n = c10::elementSize(dtype);
  for (int64_t s : size) n *= static_cast<size_t>(std::max<int64_t>(s, 0));
  return n;
}

bool wants_shape_only(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout) {
  auto type = c10::dtype_or_default(dtype);
  return has_value_semantics(type) && c10::layout_or_default(layout) == at::kStrided &&
         is_large(bytes_of(size, type)) && !filled_by_pointer();
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<c10::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  if (!wants_shape_only(size, dtype, layout)) {
    if (!pin.value_or(false)) return at::native::empty_cpu(size, dtype, layout, device, pin, format);
    return at::detail::empty_generic(size, real_pinned_allocator(), DispatchKeySet(DispatchKey::CPU),
                                     c10::dtype_or_default(dtype), format);
  }
  return at::detail::empty_generic(size, shape_only_allocator(pin.value_or(false)), kShapeOnlyKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<c10::Device> device, std::optional<bool> pin) {
  if (!wants_shape_only(size, dtype, layout)) {
    if (!pin.value_or(false)) return at::native::empty_strided_cpu(size, stride, dtype, layout, device, pin);
    return at::detail::empty_strided_generic(size, stride, real_pinned_allocator(), DispatchKeySet(DispatchKey::CPU),
                                             c10::dtype_or_default(dtype));
  }
  return at::detail::empty_strided_generic(size, stride, shape_only_allocator(pin.value_or(false)), kShapeOnlyKeys,
                                           c10::dtype_or_default(dtype));
}

// ---------------------------------------------------------------- storages of tensors

struct KeyAccess : c10::TensorImpl {
  static constexpr DispatchKeySet c10::TensorImpl::*keys = &KeyAccess::key_set_;
};

const HostBlock* block_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& p = storage->data_ptr();
  return p.get_deleter() == &release ? static_cast<const HostBlock*>(p.get_context()) : nullptr;
}

Tensor& set_storage_at(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
  follow_storage(self);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(source), 0, n, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  at::native::set_cpu_(self);
  follow_storage(self);
  return self;
}

// ---------------------------------------------------------------- ops on shape-only host tensors

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  resize_host_tensor(self, size);
  if (format && *format != at::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor pin_memory(const Tensor& self, std::optional<c10::Device>) {
  Tensor pinned = new_pinned_host_tensor(self);
  pinned.copy_(self);
  return pinned;
}

Tensor pin_real_memory(const Tensor& self, std::optional<c10::Device>) {
  Tensor pinned = at::detail::empty_strided_generic(self.sizes(), self.strides(), real_pinned_allocator(),
                                                    DispatchKeySet(DispatchKey::CPU), self.scalar_type());
  pinned.copy_(self);
  return pinned;
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_meta() || source.is_meta()) return self;
  if (self.is_cuda() || source.is_cuda()) return copy_to_or_from_device(self, source, non_blocking);
  if (self.numel() == 0) return self;
  at::AutoDispatchBelowADInplaceOrView guard;
  Tensor from = source.expand(self.sizes());
  if (is_host_shape_only(source)) fill_plausible(self);
  static const OpPlan& plan = plan_of(c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", ""));
  c10::IValue args[] = {self, from, non_blocking};
  record_kernel(plan, args, self, OpPlace::kHost);
  return self;
}

// Where other tensors of the call are virtual, the device's kernel does the work.
void any_op(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  auto on = [&](DispatchKey key) { op.redispatchBoxed(DispatchKeySet(key), stack); };
  if (keys.has_backend(c10::BackendComponent::CUDABit)) return on(DispatchKey::CUDA);
  if (keys.has_backend(c10::BackendComponent::MetaBit)) return on(DispatchKey::Meta);
  const OpPlan& plan = plan_of(op);
  if (plan.only_views && plan.op.hasKernelForDispatchKey(DispatchKey::CPU)) return on(DispatchKey::CPU);
  run_op(plan, stack);
}

}  // namespace

int& RealHostScope::depth() {
  thread_local int depth = 0;
  return depth;
}

bool is_host_shape_only(const c10::StorageImpl* storage) {
  const HostBlock* b = block_of(storage);
  return b && b->shape_only;
}

Tensor new_host_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  if (is_large(bytes_of(sizes, dtype)))
    return at::detail::empty_strided_generic(sizes, strides, shape_only_allocator(false), kShapeOnlyKeys, dtype);
  return at::native::empty_strided_cpu(sizes, strides, dtype, at::kStrided, at::kCPU, false);
}

Tensor new_contiguous_host_tensor(at::IntArrayRef sizes, at::ScalarType dtype) {
  if (is_large(bytes_of(sizes, dtype)))
    return at::detail::empty_generic(sizes, shape_only_allocator(false), kShapeOnlyKeys, dtype, std::nullopt);
  return at::native::empty_cpu(sizes, dtype, at::kStrided, at::kCPU, false, std::nullopt);
}

Tensor new_pinned_host_tensor(const Tensor& t) {
  return at::detail::empty_strided_generic(t.sizes(), t.strides(), shape_only_allocator(true), kShapeOnlyKeys,
                                           t.scalar_type());
}

Tensor new_host_bytes(int64_t nbytes) {
  return at::detail::empty_generic({nbytes}, shape_only_allocator(false), kShapeOnlyKeys, at::kByte, std::nullopt);
}

void resize_host_tensor(const Tensor& t, at::IntArrayRef sizes) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  size_t need = static_cast<size_t>(t.storage_offset()) * t.itemsize() + bytes_of(sizes, t.scalar_type());
  if (t.numel() == 0 || need <= storage->nbytes()) return;
  const HostBlock* old = block_of(storage);
  storage->set_data_ptr_noswap(allocate_host(need, old && old->pinned, old || is_large(need)));
  storage->set_nbytes(need);
  follow_storage(t);
}

void follow_storage(const Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  DispatchKeySet& keys = impl->*KeyAccess::keys;
  bool shape_only = is_host_shape_only(impl->unsafe_storage().unsafeGetStorageImpl());
  keys = shape_only ? keys.add(kHostShapeOnlyKey) : keys.remove(kHostShapeOnlyKey);
}

c10::Allocator* pinned_allocator() {
  static auto* a = new HostAllocator<true, false>();
  return a;
}

bool is_pinned_pointer(const void* p) {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  auto it = s.pinned_ranges.upper_bound(reinterpret_cast<uintptr_t>(p));
  if (it == s.pinned_ranges.begin()) return false;
  --it;
  return reinterpret_cast<uintptr_t>(p) < it->first + it->second;
}

HostStats host_stats() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  return s.stats;
}

void reset_host_peaks() {
  auto& s = state();
  std::lock_guard<std::mutex> guard(s.mutex);
  s.stats.pageable_peak = s.stats.pageable;
  s.stats.pinned_peak = s.stats.pinned;
}

void register_host_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  auto boxed = c10::KernelFunction::makeFromBoxedFunction<&any_op>();
  keep(dispatcher.registerFallback(kHostShapeOnlyKey, boxed, "prism"));
  auto ops = planned_ops();
  for (const char* view : {"aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold"}) ops.push_back(view);
  for (const std::string& op : ops)
    if (auto handle = dispatcher.findSchema(parse_name(op)))
      keep(dispatcher.registerImpl(handle->operator_name(), kHostShapeOnlyKey, boxed, std::nullopt, nullptr, "prism"));
  register_by_hand("aten::resize_", resize_, kHostShapeOnlyKey);
  register_by_hand("aten::copy_", copy_, kHostShapeOnlyKey);
  register_by_hand("aten::_pin_memory", pin_memory, kHostShapeOnlyKey);
  // In place of torch's own, which they call.
  register_by_hand("aten::empty.memory_format", empty, DispatchKey::CPU);
  register_by_hand("aten::empty_strided", empty_strided, DispatchKey::CPU);
  register_by_hand("aten::_pin_memory", pin_real_memory, DispatchKey::CPU);
  for (DispatchKey key : {DispatchKey::CPU, kHostShapeOnlyKey}) {
    register_by_hand("aten::set_", set_nothing, key);
    register_by_hand("aten::set_.source_Storage", set_storage, key);
    register_by_hand("aten::set_.source_Storage_storage_offset", set_storage_at, key);
    register_by_hand("aten::set_.source_Tensor", set_tensor, key);
  }
}

}  // namespace prism
