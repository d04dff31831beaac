#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <cstring>

#include "config.h"

namespace prism {

using at::Tensor;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;

Allocation* allocation_of(const Tensor& t) {
  return t.defined() && t.has_storage() ? allocation_of(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl())
                                        : nullptr;
}

bool is_synthesized(const Tensor& t) {
  if (!is_virtual(t)) return is_host_shape_only(t);
  auto* a = allocation_of(t);
  return a && a->synthesized.load(std::memory_order_relaxed);
}

void set_synthesized(const Tensor& t, bool synthesized) {
  if (!is_virtual(t)) return;
  if (auto* a = allocation_of(t)) a->synthesized = synthesized || !a->real;
}

static Tensor with_geometry_of(const Tensor& t, c10::Storage storage, DispatchKey key) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return r;
}

Tensor meta_alias(const Tensor& t, bool written) {
  if (!t.defined() || t.is_meta()) return t;
  if (t.is_cpu() && t.dim() == 0 && !written) return is_host_shape_only(t) ? at::ones({}, t.scalar_type()) : t;
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::Device(DeviceType::Meta)), c10::GetAllocator(DeviceType::Meta), true);
  return with_geometry_of(t, std::move(storage), DispatchKey::Meta);
}

Tensor cpu_alias(const Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto* keep = new c10::Storage(t.storage());
  void* p = const_cast<void*>(keep->data());
  TORCH_CHECK(!is_fake_pointer(p), "prism: a shape-only tensor has no memory to look at");
  c10::DataPtr data(p, keep, [](void* s) { delete static_cast<c10::Storage*>(s); }, c10::Device(DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), keep->nbytes(), std::move(data), nullptr, false);
  return with_geometry_of(t, std::move(storage), DispatchKey::CPU);
}

Tensor view_on(const Tensor& base, const Tensor& geometry) {
  auto r = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(),
                                                    geometry.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  return r;
}

Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(), DispatchKeySet(DispatchKey::CUDA), dtype);
}

Tensor new_contiguous(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, device_allocator(), DispatchKeySet(DispatchKey::CUDA), dtype, std::nullopt);
}

Tensor from_cpu(const Tensor& cpu, bool synthesized) {
  Tensor r = new_tensor(cpu.sizes(), cpu.strides(), cpu.scalar_type());
  size_t nbytes = r.storage().nbytes();
  if (nbytes > 0 && !is_shape_only(r)) {
    const void* from = static_cast<const char*>(cpu.storage().data()) + cpu.storage_offset() * cpu.itemsize();
    std::memcpy(const_cast<void*>(r.storage().data()), from, nbytes);  // same sizes and strides, offset 0
  }
  set_synthesized(r, synthesized);
  return r;
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  auto* old = allocation_of(storage);
  auto data = device_allocator()->allocate(nbytes);
  if (old && old->real && nbytes > 0 && !is_fake_pointer(data.get())) {
    std::memcpy(data.get(), old->ptr, std::min(nbytes, old->nbytes));
    static_cast<Allocation*>(data.get_context())->synthesized = old->synthesized.load();
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
}

void fill_plausible_raw(void* p, size_t nbytes, at::ScalarType dtype) {
  auto fill = [&](auto one) {
    auto* begin = static_cast<decltype(one)*>(p);
    std::fill(begin, begin + nbytes / sizeof(one), one);
  };
  switch (dtype) {
    case at::kFloat: return fill(1.0f);
    case at::kDouble: return fill(1.0);
    case at::kHalf: return fill(c10::Half(1.0f).x);
    case at::kBFloat16: return fill(c10::BFloat16(1.0f).x);
    case at::kFloat8_e4m3fn: return fill(c10::Float8_e4m3fn(1.0f).x);
    case at::kFloat8_e5m2: return fill(c10::Float8_e5m2(1.0f).x);
    case at::kComplexFloat: return fill(c10::complex<float>(1.0f));
    case at::kComplexDouble: return fill(c10::complex<double>(1.0));
    default: std::memset(p, 0, nbytes);
  }
}

void fill_plausible(const Tensor& t) {
  if (!t.defined() || t.numel() == 0 || is_shape_only(t)) return;
  if (t.is_cpu() && static_cast<size_t>(t.numel()) * t.itemsize() >= config().host_limit) return;
  if (t.is_non_overlapping_and_dense()) {
    auto* p = static_cast<char*>(const_cast<void*>(t.storage().data())) + t.storage_offset() * t.itemsize();
    return fill_plausible_raw(p, t.numel() * t.itemsize(), t.scalar_type());
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  bool ones = at::isFloatingType(t.scalar_type()) || at::isComplexType(t.scalar_type());
  cpu_alias(t).fill_(ones ? 1 : 0);
}

}  // namespace prism
