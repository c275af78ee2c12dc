#include "activation/exposed_wait.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "device/cpu_runtime.h"
#include "harness.h"

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using device::Event;
using device::Stream;
using testing::Optional;

// A device whose compute stream comes to a point when the test says so, and
// needs `cost` for every wait.
class TimedRuntime final : public device::CpuRuntime {
 public:
  Event record_time(Stream stream) override {
    stamped_on.push_back(stream);
    return Event(std::make_shared<std::int64_t>(time));
  }
  std::optional<std::int64_t> elapsed_ns(const Event& from,
                                         const Event& to) const override {
    const auto first = *static_cast<std::int64_t*>(from.get());
    const auto second = *static_cast<std::int64_t*>(to.get());
    if (second > reached) return std::nullopt;
    return second - first;
  }
  void wait(Stream stream, const Event& /*event*/) override {
    waited_on.push_back(stream);
    time += cost;
  }

  std::int64_t time = 0;
  std::int64_t cost = 0;
  std::int64_t reached = 0;
  std::vector<Stream> stamped_on;
  std::vector<Stream> waited_on;
};

TEST(ExposedWaitTest, IsTheTimeBetweenStampsAroundTheWaits) {
  TimedRuntime runtime;
  ExposedWait waits;
  for (const std::int64_t cost : {0, 20, 300}) {
    runtime.cost = cost;
    waits.wait(runtime, {});
    runtime.time += 1000;  // a kernel: not counted
  }
  runtime.reached = runtime.time;
  EXPECT_THAT(waits.total_ns(runtime), Optional(320));
  EXPECT_THAT(runtime.waited_on, testing::Each(Stream::compute));
  EXPECT_THAT(runtime.stamped_on, testing::Each(Stream::compute));
  EXPECT_EQ(runtime.stamped_on.size(), 6u);
}

TEST(ExposedWaitTest, CountsWhatTheDeviceHasComeTo) {
  TimedRuntime runtime;
  ExposedWait waits;
  runtime.cost = 10;
  waits.wait(runtime, {});
  waits.wait(runtime, {});
  EXPECT_THAT(waits.total_ns(runtime), Optional(0));
  runtime.reached = 10;
  EXPECT_THAT(waits.total_ns(runtime), Optional(10));
  runtime.reached = 20;
  EXPECT_THAT(waits.total_ns(runtime), Optional(20));
  EXPECT_THAT(waits.total_ns(runtime), Optional(20));
}

TEST(ExposedWaitTest, ADeviceWithoutAClockGivesNothing) {
  device::CpuRuntime runtime;
  ExposedWait waits;
  waits.wait(runtime, {});
  EXPECT_EQ(waits.total_ns(runtime), std::nullopt);
}

TEST(ExposedWaitTest, AResetStartsAgain) {
  TimedRuntime runtime;
  ExposedWait waits;
  runtime.cost = 10;
  waits.wait(runtime, {});
  waits.reset();
  runtime.reached = 100;
  EXPECT_EQ(waits.total_ns(runtime), std::nullopt);
  waits.wait(runtime, {});
  EXPECT_THAT(waits.total_ns(runtime), Optional(10));
}

// Compute waits for the copy out before it lets go, and for the copy back.
TEST(ExposedWaitTest, StashesWaitThroughIt) {
  auto runtime = std::make_shared<TimedRuntime>();
  const Memories memories{
      std::make_shared<memory::DeviceMemory>(
          runtime, std::make_shared<memory::Ledger>()),
      std::make_shared<memory::PinnedPool>(
          runtime, std::make_shared<memory::Ledger>(), 1 << 20)};
  const auto transfers = std::make_shared<Transfers>(memories);
  at::Tensor value = at::ones({kNumel});
  const auto stash = transfers->stash(value, "residual");
  stash->copy_out({});
  value.reset();
  runtime->cost = 5;
  stash->let_go();
  runtime->cost = 70;
  stash->on_device();
  runtime->reached = runtime->time;
  EXPECT_THAT(transfers->figures().exposed_ns, Optional(75));
  transfers->reset_figures();
  EXPECT_EQ(transfers->figures().exposed_ns, std::nullopt);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
