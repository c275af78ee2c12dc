#include "shard/parameters/gather_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "device/cpu_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Event;
using device::Stream;
using testing::ElementsAre;

// Gathers take as long as the test says, and the device has come to `reached`.
class ClockedRuntime final : public device::CpuRuntime {
 public:
  Event record_time(Stream stream) override {
    if (capturing_now) return {};
    stamped_on.push_back(stream);
    return Event(std::make_shared<std::int64_t>(time));
  }
  std::optional<std::int64_t> elapsed_ns(const Event& from,
                                         const Event& to) const override {
    EXPECT_FALSE(capturing());
    const auto first = *static_cast<std::int64_t*>(from.get());
    const auto second = *static_cast<std::int64_t*>(to.get());
    if (second > reached) return std::nullopt;
    return second - first;
  }
  std::uint64_t capture() const override { return capturing_now ? 1 : 0; }
  Event record(Stream stream) override {
    recorded_on.push_back(stream);
    return Event(std::make_shared<std::int64_t>(time));
  }
  void wait(Stream stream, const Event& event) override {
    EXPECT_FALSE(event.empty());
    waited_on.push_back(stream);
  }

  std::int64_t time = 0;
  std::int64_t reached = 1'000'000;
  bool capturing_now = false;
  std::vector<Stream> stamped_on;
  std::vector<Stream> recorded_on;
  std::vector<Stream> waited_on;
};

class Gather final : public comm::Pending {
 public:
  Gather(ClockedRuntime& runtime, std::int64_t ns)
      : runtime_(runtime), ns_(ns) {}
  void wait() override {
    runtime_.time += std::exchange(ns_, 0);
    ++waits;
  }
  static int waits;

 private:
  ClockedRuntime& runtime_;
  std::int64_t ns_;
};
int Gather::waits = 0;

class GatherTimeTest : public testing::Test {
 protected:
  std::unique_ptr<comm::Pending> gather(std::int64_t ns) {
    const device::StreamScope scope(runtime_, Stream::gather);
    return time_.time(runtime_,
                      [&] { return std::make_unique<Gather>(runtime_, ns); });
  }

  ClockedRuntime runtime_;
  GatherTime time_;
};

TEST_F(GatherTimeTest, IsTheLeastOfThoseThatTheDeviceHasComeTo) {
  gather(5000);
  EXPECT_EQ(time_.least_ns(runtime_), 0) << "one may have made connections";
  runtime_.reached = 5000;
  gather(80);
  EXPECT_EQ(time_.least_ns(runtime_), 0) << "the device is not there yet";
  runtime_.reached = 5080;
  EXPECT_EQ(time_.least_ns(runtime_), 80);
}

TEST_F(GatherTimeTest, TwoAreTimedAndThenOneInEightAFewTimes) {
  std::vector<int> timed;
  for (int k = 0; k < 100; ++k) {
    const auto stamps = runtime_.stamped_on.size();
    gather(200 - k);
    if (runtime_.stamped_on.size() > stamps) timed.push_back(k);
  }
  EXPECT_THAT(timed, ElementsAre(0, 1, 8, 16, 24, 32, 40, 48));
  EXPECT_EQ(time_.least_ns(runtime_), 200 - 48);
}

// The gather was waited for on its own stream; compute waits for a point there.
TEST_F(GatherTimeTest, ComputeWaitsForWhatIsTimed) {
  Gather::waits = 0;
  const auto pending = gather(5);
  EXPECT_EQ(Gather::waits, 1);
  EXPECT_THAT(runtime_.stamped_on, ElementsAre(Stream::gather, Stream::gather));
  EXPECT_THAT(runtime_.recorded_on, ElementsAre(Stream::gather));
  pending->wait();
  EXPECT_THAT(runtime_.waited_on, ElementsAre(Stream::compute));
}

TEST_F(GatherTimeTest, ACaptureAndACallWithoutBytesAreNotTimed) {
  Gather::waits = 0;
  runtime_.capturing_now = true;
  gather(5)->wait();
  EXPECT_EQ(Gather::waits, 1) << "by compute alone";
  runtime_.capturing_now = false;
  EXPECT_EQ(
      time_.time(runtime_, [] { return std::unique_ptr<comm::Pending>(); }),
      nullptr);
  for (int k = 0; k < GatherTime::kEnough; ++k) {
    EXPECT_EQ(time_.least_ns(runtime_), 0);
    gather(30);
  }
  EXPECT_EQ(time_.least_ns(runtime_), 30);
}

TEST_F(GatherTimeTest, NothingIsAskedForWhileAGraphIsCaptured) {
  for (int k = 0; k < GatherTime::kEnough; ++k) gather(30);
  runtime_.capturing_now = true;
  EXPECT_EQ(time_.least_ns(runtime_), 0);
  runtime_.capturing_now = false;
  EXPECT_EQ(time_.least_ns(runtime_), 30);
}

TEST(GatherTimeOnACpuTest, ADeviceWithoutAClockTimesNothing) {
  device::CpuRuntime cpu;
  ClockedRuntime unused;
  GatherTime time;
  for (int k = 0; k < 5; ++k) {
    time.time(cpu, [&] { return std::make_unique<Gather>(unused, 5); });
  }
  EXPECT_EQ(time.least_ns(cpu), 0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
