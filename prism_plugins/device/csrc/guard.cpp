// What torch asks of a device: the guard (devices, streams, events) and the CUDA hooks. CPU builds of torch only.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "config.h"
#include "generator.h"
#include "host_memory.h"
#include "kernels.h"
#include "recorder.h"
#include "streams.h"

namespace prism {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device cuda(int index) { return {DeviceType::CUDA, static_cast<DeviceIndex>(index)}; }
int index_of(Device d) { return d.has_index() ? d.index() : current_device(); }
Stream stream_of(int device, uint32_t id) {
  return Stream(Stream::UNSAFE, cuda(device), static_cast<c10::StreamId>(id));
}

void check_device(int index) {
  TORCH_CHECK(index >= 0 && index < config().num_devices, "CUDA error: invalid device ordinal (", index, " of ",
              config().num_devices, " virtual GPUs per node)");
}

struct VirtualGuard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    Device old = cuda(current_device());
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return cuda(current_device()); }
  void setDevice(Device d) const override {
    check_device(d.index());
    set_current_device(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override { set_current_device(d.index()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(config().num_devices); }

  Stream getStream(Device d) const override { return stream_of(index_of(d), current_stream(index_of(d))); }
  Stream getDefaultStream(Device d) const override { return stream_of(index_of(d), 0); }
  Stream getNewStream(Device d, int priority = 0) const override {
    return stream_of(index_of(d), stream_from_pool(priority < 0));
  }
  Stream getStreamFromGlobalPool(Device d, bool high_priority = false) const override {
    return stream_of(index_of(d), stream_from_pool(high_priority));
  }
  Stream exchangeStream(Stream s) const override {
    int d = s.device_index();
    return stream_of(d, exchange_stream(d, static_cast<uint32_t>(s.id())));
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { synchronize_stream(static_cast<uint32_t>(s.id())); }
  void synchronizeDevice(DeviceIndex) const override { synchronize_device(); }

  void record(void** event, const Stream& s, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new DeviceEvent();
    record_event(*static_cast<DeviceEvent*>(*event), static_cast<uint32_t>(s.id()));
  }
  void block(void* event, const Stream& s) const override {
    if (event) wait_event(*static_cast<DeviceEvent*>(event), static_cast<uint32_t>(s.id()));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) synchronize_event(*static_cast<DeviceEvent*>(event));
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<DeviceEvent*>(event); }
  double elapsedTime(void* from, void* to, DeviceIndex) const override {
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    return static_cast<double>(static_cast<DeviceEvent*>(to)->time_ns - static_cast<DeviceEvent*>(from)->time_ns) *
           1e-6;
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    if (auto* a = allocation_of(p)) use_on_stream(a, s);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, VirtualGuard)

}  // namespace

void take_over_device() {}
std::vector<std::string> further_cuda_ops() { return {}; }

}  // namespace prism

namespace at {

// Registry.h wants the class in namespace at.
struct PrismCUDAHooks final : CUDAHooksInterface {
  PrismCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(prism::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(prism::config().num_devices); }
  int getNumGPUs() const override { return prism::config().num_devices; }
  void setCurrentDevice(DeviceIndex d) const override { prism::set_current_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    DeviceIndex old = current_device();
    if (d >= 0) prism::set_current_device(d);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  void deviceSynchronize(DeviceIndex) const override { prism::synchronize_device(); }
  const Generator& getDefaultGenerator(DeviceIndex d) const override { return prism::default_generator(d); }
  Generator getNewGenerator(DeviceIndex d) const override { return prism::new_generator(d); }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, current_device()}; }
  bool isPinnedPtr(const void* p) const override { return prism::is_pinned_pointer(p); }
  Allocator* getPinnedMemoryAllocator() const override { return prism::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return prism::device_allocator(); }
  std::string showConfig() const override { return "prism virtual CUDA"; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PrismCUDAHooks)

}  // namespace at
