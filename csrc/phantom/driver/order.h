// Which work of other streams a stream comes after: vector clocks over events,
// captured or not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <thread>

namespace lowtide::dry {

// How much work of each stream.
using Clock = std::map<cudaStream_t, std::uint64_t>;

// Thread-safe.
class Order {
 public:
  void enqueue_collective(cudaStream_t stream);
  Clock record(cudaStream_t stream) const;
  void wait(cudaStream_t stream, const Clock& event);
  // The calling thread has found the event done: what it enqueues from now on,
  // on any stream, comes after.
  void host_sees(const Clock& event);

  // Collectives so far that what the calling thread enqueues on `stream` does
  // not come after.
  std::int64_t unseen(cudaStream_t stream) const;

 private:
  mutable std::mutex mutex_;
  std::map<cudaStream_t, Clock> clocks_;  // work counted: collectives
  std::map<std::thread::id, Clock> hosts_;
};

Order& order();

}  // namespace lowtide::dry
