#include "activation/exposed_wait.h"

#include <utility>

namespace lowtide::activation {

using device::Stream;

void ExposedWait::wait(device::Runtime& runtime, const device::Event& event) {
  device::Event before = runtime.record_time(Stream::compute);
  runtime.wait(Stream::compute, event);
  if (before.empty()) return;
  const std::lock_guard lock(mutex_);
  timed_ = true;
  pending_.push_back({std::move(before), runtime.record_time(Stream::compute)});
  collect(runtime);
}

void ExposedWait::collect(const device::Runtime& runtime) {
  while (!pending_.empty()) {
    const Stamps& oldest = pending_.front();
    const auto passed = runtime.elapsed_ns(oldest.before, oldest.after);
    if (!passed) return;
    total_ns_ += *passed;
    pending_.pop_front();
  }
}

std::optional<std::int64_t> ExposedWait::total_ns(
    const device::Runtime& runtime) {
  const std::lock_guard lock(mutex_);
  if (!timed_) return std::nullopt;
  collect(runtime);
  return total_ns_;
}

void ExposedWait::reset() {
  const std::lock_guard lock(mutex_);
  pending_.clear();
  timed_ = false;
  total_ns_ = 0;
}

}  // namespace lowtide::activation
