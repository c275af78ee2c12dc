// Which work of other streams a stream comes after: vector clocks over events,
// captured or not; and what never finishes, because it comes after a collective
// that does not.
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
  // `hang`: which collective never finishes, counted from 1; 0: none.
  explicit Order(std::uint64_t hang = 0) : hang_(hang) {}

  void enqueue_collective(cudaStream_t stream);
  Clock record(cudaStream_t stream) const;
  void wait(cudaStream_t stream, const Clock& event);
  // The calling thread has found the event done: what it enqueues from now on,
  // on any stream, comes after.
  void host_sees(const Clock& event);

  // Collectives so far that what the calling thread enqueues on `stream` does
  // not come after.
  std::int64_t unseen(cudaStream_t stream) const;

  // Whether it comes after the collective that never finishes.
  bool is_stuck(const Clock& event) const;
  bool is_stuck(cudaStream_t stream) const;
  bool is_stuck() const;  // anything

 private:
  mutable std::mutex mutex_;
  std::map<cudaStream_t, Clock> clocks_;  // work counted: collectives
  std::map<std::thread::id, Clock> hosts_;

  const std::uint64_t hang_;
  std::uint64_t collectives_ = 0;
  cudaStream_t stuck_ = nullptr;  // where it is, as so many
  std::uint64_t stuck_at_ = 0;    // of that stream's; 0: not yet
};

Order& order();

// Does not return where the host would wait for ever.
void wait_for_ever_if(bool stuck);

}  // namespace lowtide::dry
