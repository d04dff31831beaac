// What device/bindings.py calls to be torch.cuda. CPU builds of torch only.
#include "generator.h"
#include "streams.h"

using namespace prism;

extern "C" {

void prism_set_device(int device) { set_current_device(device); }
uint32_t prism_stream_from_pool(int high_priority) { return stream_from_pool(high_priority != 0); }
void prism_synchronize() { synchronize_device(); }
void prism_hand_out_default_generator(int device) { hand_out_default_generator(device); }
// Host time between the records of two events (torch.Event.event_id), ms.
double prism_elapsed_ms(const void* from, const void* to) {
  return static_cast<double>(static_cast<const DeviceEvent*>(to)->time_ns -
                             static_cast<const DeviceEvent*>(from)->time_ns) *
         1e-6;
}

}  // extern "C"
