// Which work of other streams a stream of the CUDA stub (cuda_stub.cpp) comes
// after: vector clocks over events, captured or not.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace cuda_stub {

// How much work of each stream.
using Clock = std::map<cudaStream_t, std::uint64_t>;

// Thread-safe.
class Order {
 public:
  static Order& instance();

  void enqueue_collective(cudaStream_t stream);
  Clock record(cudaStream_t stream);
  void wait(cudaStream_t stream, const Clock& event);

  // Collectives so far that `stream` does not come after.
  std::int64_t unseen(cudaStream_t stream);

 private:
  struct Collective {
    cudaStream_t stream;
    std::uint64_t number;
  };

  std::mutex mutex_;
  std::map<cudaStream_t, Clock> clocks_;
  std::vector<Collective> collectives_;
};

}  // namespace cuda_stub
