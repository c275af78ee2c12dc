// Graph captures, as far as a library beside them must know.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>

namespace lowtide::device {

// Whether a graph capture records what is enqueued on `stream`.  False on
// devices without captures.
bool is_capturing(const c10::Stream& stream);

// While it lives, this thread may ask for events of `device` that no capture
// recorded, whatever another thread captures; and it asks in that device's
// context instead of making one on device 0.
class AsksForEvents {
 public:
  explicit AsksForEvents(c10::Device device);
  ~AsksForEvents();
  AsksForEvents(const AsksForEvents&) = delete;
  AsksForEvents& operator=(const AsksForEvents&) = delete;

 private:
  c10::DeviceGuard device_;
  int mode_ = 0;
};

}  // namespace lowtide::device
