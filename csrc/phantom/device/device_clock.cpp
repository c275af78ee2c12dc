#include "phantom/device/device_clock.h"

#include <utility>

#include "base/check.h"
#include "phantom/device/operator_work.h"
#include "phantom/device/stream_table.h"

namespace lowtide::phantom {

DeviceClock::Access DeviceClock::timeline() {
  if (!runs()) return {};
  std::unique_lock lock(mutex_);
  return {std::move(lock), timeline_.get(), number_};
}

void DeviceClock::start(Machine machine) {
  const std::lock_guard lock(mutex_);
  if (timeline_) {
    throw Error(base::error_text("phantom timeline", "one at a time",
                                 "another one that still runs",
                                 "Leave the `with` block of the first."));
  }
  timeline_ = std::make_unique<Timeline>(std::move(machine));
  ++number_;
  runs_ = true;
}

std::unique_ptr<Timeline> DeviceClock::stop() {
  const std::lock_guard lock(mutex_);
  if (!timeline_) {
    throw Error(base::error_text("phantom timeline", "one that runs", "none",
                                 "Start it before it is stopped."));
  }
  runs_ = false;
  return std::move(timeline_);
}

DeviceClock& device_clock() {
  // Tensors and events die until the process ends.
  static auto* clock = std::make_unique<DeviceClock>().release();
  return *clock;
}

void time_kernel(std::string_view name,
                 std::initializer_list<at::Tensor> tensors, double flops,
                 bool is_attention) {
  const auto timeline = device_clock().timeline();
  if (!timeline) return;
  Work work;
  for (const at::Tensor& tensor : tensors) work.bytes += bytes_touched(tensor);
  if (work.bytes == 0) return;
  work.flops = flops;
  work.rate = rate_of(tensors.begin()->scalar_type());
  work.is_attention = is_attention;
  timeline->issue();
  timeline->run(current_stream(), name, work);
}

void time_transfer(std::string_view name, std::size_t bytes) {
  const auto timeline = device_clock().timeline();
  if (!timeline || bytes == 0) return;
  timeline->issue();
  timeline->transfer(current_stream(), name, static_cast<double>(bytes));
}

}  // namespace lowtide::phantom
