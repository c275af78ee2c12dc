#include "memory/allocation_timeline.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "base/check.h"
#include "device/cpu_runtime.h"
#include "memory/device_memory.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StrEq;
using testing::ThrowsMessage;

using Sample = AllocationTimeline::Sample;

std::vector<std::int64_t> totals(const AllocationTimeline& timeline) {
  std::vector<std::int64_t> result;
  for (const Sample& sample : timeline.samples()) {
    result.push_back(sample.total);
  }
  return result;
}

at::Tensor bytes(std::int64_t n) { return at::empty({n}, at::kByte); }

class AllocationTimelineTest : public testing::Test {
 protected:
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  DeviceMemory memory_{std::make_shared<device::CpuRuntime>(), ledger_};
  AllocationTimeline timeline_{c10::DeviceType::CPU, ledger_};
};

TEST_F(AllocationTimelineTest, AddsTorchsBytesAndTheLedgers) {
  const c10::DataPtr before = memory_.lease(Category::parameters, "a", 1000);
  timeline_.start();
  at::Tensor activation = bytes(64);
  c10::DataPtr gathered = memory_.lease(Category::gathered, "a", 500);
  activation.reset();
  gathered.clear();
  timeline_.stop();
  bytes(1 << 20).reset();

  EXPECT_THAT(totals(timeline_), ElementsAre(1000, 1064, 1564, 1500, 1000));
  const Sample peak = timeline_.peak();
  EXPECT_EQ(peak.total, 1564);
  EXPECT_EQ(peak.event, 2);
  EXPECT_EQ(peak.other(), 64);
  EXPECT_EQ(peak.lowtide[static_cast<std::size_t>(Category::gathered)], 500);
  const std::vector<Sample> samples = timeline_.samples();
  EXPECT_TRUE(std::is_sorted(samples.begin(), samples.end(),
                             [](const Sample& a, const Sample& b) {
                               return a.nanoseconds < b.nanoseconds;
                             }));
}

TEST_F(AllocationTimelineTest, IgnoresReleasesOfOlderMemory) {
  at::Tensor older = bytes(4096);
  timeline_.start();
  older.reset();
  bytes(16).reset();
  EXPECT_THAT(totals(timeline_), ElementsAre(0, 16, 0));
}

TEST_F(AllocationTimelineTest, SeesLeasesReleasedOnUnobservedThreads) {
  timeline_.start();
  c10::DataPtr lease = memory_.lease(Category::gathered, "a", 500);
  std::thread([&] { lease.clear(); }).join();
  EXPECT_THAT(totals(timeline_), ElementsAre(0, 500, 0));
}

TEST_F(AllocationTimelineTest, FindsOutWhenAnUnseenReleaseLeftAnAddressFree) {
  timeline_.start();
  // Unseen releases until the allocator hands out an address twice.
  std::int64_t distinct = 0;
  std::vector<void*> seen;
  for (int i = 0; i < 100; ++i) {
    at::Tensor tensor = bytes(64);
    if (std::find(seen.begin(), seen.end(), tensor.data_ptr()) == seen.end()) {
      seen.push_back(tensor.data_ptr());
      ++distinct;
    }
    std::thread([&] { tensor.reset(); }).join();
  }
// Sanitizers keep what is freed from being handed out.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  ASSERT_LT(distinct, 100);
#endif
  EXPECT_EQ(timeline_.samples().back().total, 64 * distinct);
}

TEST_F(AllocationTimelineTest, WithoutALedgerEverythingIsOther) {
  AllocationTimeline timeline(c10::DeviceType::CPU, nullptr);
  timeline.start();
  const at::Tensor tensor = bytes(64);
  EXPECT_EQ(timeline.peak().other(), 64);
}

TEST_F(AllocationTimelineTest, CountsOneDeviceType) {
  AllocationTimeline timeline(c10::DeviceType::CUDA, nullptr);
  timeline.start();
  const at::Tensor tensor = bytes(64);
  EXPECT_THAT(totals(timeline), ElementsAre(0));
}

TEST_F(AllocationTimelineTest, StartsAnew) {
  EXPECT_THAT(timeline_.samples(), IsEmpty());
  timeline_.start();
  bytes(64).reset();
  timeline_.stop();
  timeline_.stop();  // does not run: nothing happens
  timeline_.start();
  EXPECT_THAT(totals(timeline_), ElementsAre(0));
  EXPECT_EQ(timeline_.peak().total, 0);
}

TEST_F(AllocationTimelineTest, ALongRunKeepsThePeakInBoundedMemory) {
  for (const std::size_t capacity : {4, 5, 16, 33}) {
    AllocationTimeline timeline(c10::DeviceType::CPU, nullptr, capacity);
    for (const int peak_at : {0, 1, 333, 699}) {
      timeline.start();
      std::vector<at::Tensor> alive;
      for (int i = 0; i < 700; ++i) {
        alive.push_back(bytes(i == peak_at ? 10000 : 64));
        if (i % 3 != 0) alive.pop_back();
        if (alive.size() > 5) alive.clear();
      }
      timeline.stop();
      const std::vector<Sample> samples = timeline.samples();
      ASSERT_LE(samples.size(), capacity);
      EXPECT_GE(samples.size(), capacity / 2);
      const Sample peak = timeline.peak();
      EXPECT_GE(peak.total, 10000);
      const auto kept = std::find_if(
          samples.begin(), samples.end(),
          [&](const Sample& sample) { return sample.event == peak.event; });
      ASSERT_NE(kept, samples.end());
      EXPECT_EQ(kept->total, peak.total);
      EXPECT_TRUE(std::is_sorted(
          samples.begin(), samples.end(),
          [](const Sample& a, const Sample& b) { return a.event <= b.event; }));
    }
  }
}

TEST_F(AllocationTimelineTest, RefusesATinyCapacity) {
  EXPECT_THAT(
      [] { AllocationTimeline(c10::DeviceType::CPU, nullptr, 3); },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: allocation timeline: expected a capacity of at least 4 "
          "samples, got 3. Leave it out for the default.")));
}

TEST_F(AllocationTimelineTest, RefusesToStartTwice) {
  timeline_.start();
  EXPECT_THAT([&] { timeline_.start(); },
              ThrowsMessage<Error>(
                  StrEq("lowtide: allocation timeline: expected start() once, "
                        "got start() while it runs. Call stop() first.")));
}

TEST_F(AllocationTimelineTest, ARefusedStartLeavesNothingBehind) {
  AllocationTimeline second(c10::DeviceType::CPU, ledger_);
  timeline_.start();
  EXPECT_THROW(second.start(), Error);  // this thread is observed
  std::thread([&] {
    EXPECT_THROW(second.start(), Error);  // the ledger is
    AllocationTimeline third(c10::DeviceType::CPU, nullptr);
    EXPECT_NO_THROW(third.start());
  }).join();
  timeline_.stop();
  EXPECT_NO_THROW(second.start());
}

TEST_F(AllocationTimelineTest, RefusesToStopOnAnotherThread) {
  timeline_.start();
  std::thread([&] {
    EXPECT_THAT(
        [&] { timeline_.stop(); },
        ThrowsMessage<Error>(StrEq(
            "lowtide: allocation timeline: expected stop() on the thread that "
            "called start(), got another thread. Stop it where it was "
            "started.")));
  }).join();
  bytes(64).reset();
  EXPECT_THAT(timeline_.samples(), SizeIs(3));  // it still runs
}

TEST_F(AllocationTimelineTest, ItsEndFreesTheLedgerForOthers) {
  {
    AllocationTimeline timeline(c10::DeviceType::CPU, ledger_);
    timeline.start();
  }
  EXPECT_NO_THROW(timeline_.start());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
