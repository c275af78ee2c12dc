#include "cuda_stub_order.h"

#include <algorithm>

namespace cuda_stub {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

Order& Order::instance() {
  static Order order;
  return order;
}

void Order::enqueue_collective(cudaStream_t stream) {
  const Lock lock(mutex_);
  collectives_.push_back({stream, ++clocks_[stream][stream]});
}

Clock Order::record(cudaStream_t stream) {
  const Lock lock(mutex_);
  return clocks_[stream];
}

void Order::wait(cudaStream_t stream, const Clock& event) {
  const Lock lock(mutex_);
  auto& clock = clocks_[stream];
  for (const auto& [other, number] : event) {
    clock[other] = std::max(clock[other], number);
  }
}

std::int64_t Order::unseen(cudaStream_t stream) {
  const Lock lock(mutex_);
  auto& clock = clocks_[stream];
  return std::count_if(
      collectives_.begin(), collectives_.end(),
      [&](const Collective& one) { return clock[one.stream] < one.number; });
}

}  // namespace cuda_stub

extern "C" {

// For programs that count them.
std::int64_t cuda_stub_unseen_collectives(cudaStream_t stream) {
  return cuda_stub::Order::instance().unseen(stream);
}

}  // extern "C"
