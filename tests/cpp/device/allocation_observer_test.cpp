#include "device/allocation_observer.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/check.h"

namespace lowtide::device {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

class AllocationObserverTest : public testing::Test {
 protected:
  AllocationCallback callback() {
    return [this](void*, std::int64_t bytes, c10::Device) {
      seen_.push_back(bytes);
    };
  }
  std::vector<std::int64_t> seen_;
};

TEST_F(AllocationObserverTest, SeesAllocationsAndReleasesWhileItLives) {
  at::empty({100}).reset();
  {
    const AllocationObserver observer("test", callback());
    at::Tensor tensor = at::empty({100});
    tensor.reset();
  }
  at::empty({100}).reset();
  EXPECT_THAT(seen_, ElementsAre(400, -400));
}

TEST_F(AllocationObserverTest, FollowsTheWorkOntoOtherThreads) {
  const AllocationObserver observer("test", callback());
  std::thread([] { at::empty({7}).reset(); }).join();
  EXPECT_THAT(seen_, IsEmpty());
  // This is how autograd and c10d run a thread's work on theirs.
  const at::ThreadLocalState state;
  std::thread([&state] {
    const at::ThreadLocalStateGuard guard(state);
    at::empty({7}).reset();
  }).join();
  EXPECT_THAT(seen_, ElementsAre(28, -28));
}

TEST_F(AllocationObserverTest, DoesNotSeeWhatIsMarkedUnobserved) {
  const AllocationObserver observer("test", callback());
  {
    const UnobservedAllocations outer;
    { const UnobservedAllocations inner; }
    at::empty({7}).reset();
  }
  EXPECT_THAT(seen_, IsEmpty());
  at::empty({7}).reset();
  EXPECT_EQ(seen_.size(), 2u);
}

TEST_F(AllocationObserverTest, TorchsProfilerQueriesStayDefined) {
  const AllocationObserver observer("test", callback());
  EXPECT_FALSE(torch::profiler::impl::profilerEnabled());
  EXPECT_EQ(torch::profiler::impl::profilerType(),
            torch::profiler::impl::ActiveProfilerType::NONE);
}

TEST_F(AllocationObserverTest, ASecondObserverOfTheThreadIsRefused) {
  const AllocationObserver observer("test", callback());
  EXPECT_THAT([&] { AllocationObserver("timeline", callback()); },
              ThrowsMessage<Error>(StrEq(
                  "lowtide: timeline: expected no other memory profiler on "
                  "this thread, got another observer of allocations. Stop "
                  "that one first.")));
}

TEST_F(AllocationObserverTest, AnActiveTorchProfilerIsRefused) {
  class Profiler : public c10::MemoryReportingInfoBase {
   public:
    void reportMemoryUsage(void*, std::int64_t, std::size_t, std::size_t,
                           c10::Device) override {}
    bool memoryProfilingEnabled() const override { return true; }
  };
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE,
                                  std::make_shared<Profiler>());
  EXPECT_THAT([&] { AllocationObserver("timeline", callback()); },
              ThrowsMessage<Error>(StrEq(
                  "lowtide: timeline: expected no other memory profiler on "
                  "this thread, got an active torch profiler. Stop that one "
                  "first.")));
}

TEST_F(AllocationObserverTest, StopsWhenDestroyedOnAnotherThread) {
  auto observer = std::make_unique<AllocationObserver>("test", callback());
  EXPECT_TRUE(observer->started_here());
  std::thread([&] {
    EXPECT_FALSE(observer->started_here());
    observer.reset();
  }).join();
  at::empty({7}).reset();
  EXPECT_THAT(seen_, IsEmpty());
  // The thread is free for the next one.
  const AllocationObserver next("test", callback());
  at::empty({7}).reset();
  EXPECT_EQ(seen_.size(), 2u);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::device
