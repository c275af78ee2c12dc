// How long compute stood still for copies.
//
// Where the device keeps time, every wait lies between two time stamps on
// compute: what passes between them is the wait, because nothing else is
// enqueued there.  A device without a clock gives nothing.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

#include "device/runtime.h"

namespace lowtide::activation {

class ExposedWait {
 public:
  // Compute waits for `event`.
  void wait(device::Runtime& runtime, const device::Event& event);

  // Of the waits that compute has come to, since the last reset; nothing if
  // none was timed.
  std::optional<std::int64_t> total_ns(const device::Runtime& runtime);
  void reset();

 private:
  struct Stamps {
    device::Event before;
    device::Event after;
  };
  // Under the lock.
  void collect(const device::Runtime& runtime);

  std::mutex mutex_;
  std::deque<Stamps> pending_;  // in compute's order
  bool timed_ = false;
  std::int64_t total_ns_ = 0;
};

}  // namespace lowtide::activation
