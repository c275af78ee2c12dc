#include "phantom/driver/order.h"

#include <algorithm>
#include <chrono>

#include "phantom/driver/settings.h"

namespace lowtide::dry {
namespace {

using Lock = std::lock_guard<std::mutex>;

void merge(Clock& clock, const Clock& event) {
  for (const auto& [stream, number] : event) {
    clock[stream] = std::max(clock[stream], number);
  }
}

}  // namespace

void Order::enqueue_collective(cudaStream_t stream) {
  const Lock lock(mutex_);
  const auto number = ++clocks_[stream][stream];
  if (++collectives_ == hang_) {
    stuck_ = stream;
    stuck_at_ = number;
  }
}

Clock Order::record(cudaStream_t stream) const {
  const Lock lock(mutex_);
  const auto found = clocks_.find(stream);
  Clock clock = found == clocks_.end() ? Clock{} : found->second;
  const auto host = hosts_.find(std::this_thread::get_id());
  if (host != hosts_.end()) merge(clock, host->second);
  return clock;
}

void Order::wait(cudaStream_t stream, const Clock& event) {
  const Lock lock(mutex_);
  merge(clocks_[stream], event);
}

void Order::host_sees(const Clock& event) {
  const Lock lock(mutex_);
  merge(hosts_[std::this_thread::get_id()], event);
}

std::int64_t Order::unseen(cudaStream_t stream) const {
  const Clock known = record(stream);
  const Lock lock(mutex_);
  std::uint64_t unseen = 0;
  for (const auto& [other, clock] : clocks_) {
    const auto own = clock.find(other);
    if (own == clock.end()) continue;
    const auto found = known.find(other);
    const auto seen = found == known.end() ? 0 : found->second;
    unseen += own->second - std::min(seen, own->second);
  }
  return static_cast<std::int64_t>(unseen);
}

bool Order::is_stuck(const Clock& event) const {
  if (hang_ == 0) return false;
  const Lock lock(mutex_);
  const auto found = event.find(stuck_);
  return stuck_at_ != 0 && found != event.end() && found->second >= stuck_at_;
}

bool Order::is_stuck(cudaStream_t stream) const {
  return hang_ != 0 && is_stuck(record(stream));
}

bool Order::is_stuck() const {
  const Lock lock(mutex_);
  return stuck_at_ != 0;
}

Order& order() {
  static Order order(settings().hang);
  return order;
}

void wait_for_ever_if(bool stuck) {
  while (stuck) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace lowtide::dry
