#include "shard/parameters/gather_time.h"

#include <algorithm>

namespace lowtide::shard {
namespace {

// What `gather` has waited for.
class Arrived final : public comm::Pending {
 public:
  explicit Arrived(device::Runtime& runtime)
      : runtime_(runtime), point_(runtime.record(device::Stream::gather)) {}

  void wait() override { runtime_.wait(runtime_.current(), point_); }
  void abandon() override { wait(); }

 private:
  device::Runtime& runtime_;
  device::Event point_;
};

}  // namespace

std::unique_ptr<comm::Pending> GatherTime::stamp(
    device::Runtime& runtime, device::Event from,
    std::unique_ptr<comm::Pending> pending) {
  pending->wait();
  samples_.push_back(
      {std::move(from), runtime.record_time(device::Stream::gather)});
  ++timed_;
  return std::make_unique<Arrived>(runtime);
}

// Of a clock that stands still (a phantom without a timeline) it is 0, too.
std::int64_t GatherTime::least_ns(const device::Runtime& runtime) {
  // A capture forbids its thread to ask for events.
  while (!samples_.empty() && !runtime.capturing()) {
    const auto elapsed =
        runtime.elapsed_ns(samples_.front().from, samples_.front().to);
    if (!elapsed) break;
    least_ns_ = std::min(least_ns_, *elapsed);
    samples_.pop_front();
  }
  const auto known = timed_ - static_cast<std::int64_t>(samples_.size());
  return known < kEnough ? 0 : least_ns_;
}

}  // namespace lowtide::shard
