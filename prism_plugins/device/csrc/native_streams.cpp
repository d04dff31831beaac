// Devices, streams and generators in a CUDA build of torch: its own, over the virtual runtime (cudart_*.cpp), whose
// calls go into the recording.
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

#include "cudart_api.h"
#include "generator.h"
#include "host_memory.h"
#include "native_mode.h"
#include "streams.h"

namespace prism {
namespace {

using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const c10::impl::DeviceGuardImplInterface& guard() {
  static const auto* impl = c10::impl::getDeviceGuardImpl(DeviceType::CUDA);
  return *impl;
}

c10::Device cuda(int index) { return {DeviceType::CUDA, static_cast<DeviceIndex>(index)}; }

// torch's names of the streams that exchange_stream took away, to give them back.
std::mutex g_mutex;
std::map<std::pair<int, uint32_t>, c10::StreamId> g_names;

template <auto kFunction>
struct Heard;
template <class... A, void (*kFunction)(A...)>
struct Heard<kFunction> {
  static void call(A... arguments) {
    if (!Unheard::here()) kFunction(arguments...);
  }
};

void event_recorded(DeviceEvent* event, uint32_t stream) { record_event(*event, stream); }
void event_waited_for(const DeviceEvent* event, uint32_t stream) { wait_event(*event, stream); }
void event_synchronized(const DeviceEvent* event) { synchronize_event(*event); }
void stream_synchronized(uint32_t stream) { synchronize_stream(stream); }
int is_pinned(const void* p) { return is_pinned_pointer(p); }

}  // namespace

int& Unheard::depth() {
  thread_local int depth = 0;
  return depth;
}

void listen_to_runtime() {
  static const prism_cudart_listener listener{
      Heard<&event_recorded>::call,      Heard<&event_waited_for>::call, Heard<&event_synchronized>::call,
      Heard<&stream_synchronized>::call, Heard<&synchronize_device>::call, is_pinned};
  prism_cudart_listen(&listener);
}

int current_device() { return guard().getDevice().index(); }
void set_current_device(int device) { guard().uncheckedSetDevice(cuda(device)); }

uint32_t stream_number(Stream stream) { return prism_cudart_stream_id(guard().getStreamNativeHandle(stream)); }
uint32_t current_stream(int device) { return stream_number(guard().getStream(cuda(device))); }

uint32_t external_stream(uint64_t pointer) { return prism_cudart_stream_id(reinterpret_cast<void*>(pointer)); }

uint32_t exchange_stream(int device, uint32_t stream) {
  Stream old = guard().getStream(cuda(device));
  uint32_t old_number = stream_number(old);
  c10::StreamId name = 0;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    g_names[{device, old_number}] = old.id();
    auto it = g_names.find({device, stream});
    // Streams that are not torch's are named by their handle.
    name = it != g_names.end() ? it->second
                               : reinterpret_cast<c10::StreamId>(prism_cudart_stream_of(device, stream));
  }
  guard().exchangeStream(Stream(Stream::UNSAFE, cuda(device), name));
  return old_number;
}

const at::Generator& default_generator(int device) {
  return at::globalContext().defaultGenerator(cuda(device < 0 ? current_device() : device));
}

}  // namespace prism
