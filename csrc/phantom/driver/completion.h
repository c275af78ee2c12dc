// When the work of streams is known to be done: the two bounds.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>

namespace lowtide::dry {

// Events of one device.  `immediate`: complete when recorded.  Otherwise when
// the host waits for them, for a later event of their stream, for their stream
// or for the device.  Thread-safe.
class Completion {
 public:
  explicit Completion(bool immediate) : immediate_(immediate) {}

  // Before anything was recorded.
  void set_immediate(bool immediate) { immediate_ = immediate; }
  struct Ticket {
    cudaStream_t stream = nullptr;
    std::uint64_t number = 0;  // 0: never recorded, which is complete
  };

  Ticket record(cudaStream_t stream);
  bool done(const Ticket& ticket) const;
  // The host has waited for it, whatever is said of others.
  bool waited_for(const Ticket& ticket) const;
  void wait(const Ticket& ticket);
  void wait_for_stream(cudaStream_t stream);
  void wait_for_device();

 private:
  bool immediate_;
  mutable std::mutex mutex_;
  std::uint64_t last_ = 0;
  std::uint64_t device_done_ = 0;
  std::map<cudaStream_t, std::uint64_t> stream_done_;
};

}  // namespace lowtide::dry
