#include "phantom/driver/order.h"

#include <algorithm>

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

void Order::enqueue_collective(cudaStream_t stream) {
  const Lock lock(mutex_);
  ++clocks_[stream][stream];
}

Clock Order::record(cudaStream_t stream) const {
  const Lock lock(mutex_);
  const auto found = clocks_.find(stream);
  return found == clocks_.end() ? Clock{} : found->second;
}

void Order::wait(cudaStream_t stream, const Clock& event) {
  const Lock lock(mutex_);
  auto& clock = clocks_[stream];
  for (const auto& [other, number] : event) {
    clock[other] = std::max(clock[other], number);
  }
}

std::int64_t Order::unseen(cudaStream_t stream) const {
  const Lock lock(mutex_);
  const auto found = clocks_.find(stream);
  std::uint64_t unseen = 0;
  for (const auto& [other, clock] : clocks_) {
    const auto own = clock.find(other);
    if (own == clock.end()) continue;
    std::uint64_t seen = 0;
    if (found != clocks_.end()) {
      const auto known = found->second.find(other);
      if (known != found->second.end()) seen = known->second;
    }
    unseen += own->second - std::min(seen, own->second);
  }
  return static_cast<std::int64_t>(unseen);
}

Order& order() {
  static Order order;
  return order;
}

}  // namespace lowtide::dry
