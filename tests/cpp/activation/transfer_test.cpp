#include "activation/transfer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::activation {
namespace LOWTIDE_FILE {

using device::Stream;
using testing::IsEmpty;

constexpr int kRegions = 8;

struct Case {
  std::int64_t prefetch;
  std::int64_t keep_last;
};

class WindowTest : public testing::TestWithParam<Case> {};

TEST_P(WindowTest, TheDeviceHoldsOneValueMoreThanThePrefetchPlusThoseKept) {
  const auto [prefetch, keep_last] = GetParam();
  Device device;
  Stack stack(device, {prefetch, keep_last});
  for (int step = 1; step <= 3; ++step) {
    stack.step(kRegions);
    EXPECT_EQ(stack.num_sent, step * (kRegions - keep_last));
    EXPECT_EQ(stack.num_kept, step * keep_last);
  }
  EXPECT_EQ(stack.num_wrong, 0);
  EXPECT_EQ(stack.device_peak, (1 + prefetch + keep_last) * kBytes);
  EXPECT_EQ(device.device_bytes(), 0);
  EXPECT_EQ(device.host_bytes(), 0);
  const auto peak = device.host_ledger->total_peak();
  EXPECT_EQ(peak, (kRegions - keep_last) * kBytes);
  // Registered once, in the first step.
  EXPECT_EQ(device.memories.host->figures().num_registrations,
            kRegions - keep_last);
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, WindowTest,
                         testing::Values(Case{0, 0}, Case{1, 0}, Case{2, 0},
                                         Case{1, 1}, Case{0, 2}, Case{3, 3}),
                         [](const auto& info) {
                           return base::concat("Prefetch", info.param.prefetch,
                                               "KeepLast",
                                               info.param.keep_last);
                         });

TEST(TransfersTest, OnlyTheFirstValueToComeBackWasNotPrefetched) {
  Device device;
  Stack stack(device, {.prefetch = 1});
  stack.step(kRegions);
  // The last two values never left; from the third on, each was ahead.
  EXPECT_EQ(stack.transfers().figures().fetched_inline, 0);
  EXPECT_EQ(stack.transfers().figures().fetched_ahead, kRegions - 2);

  Device slow;
  Stack inline_only(slow, {.prefetch = 0});
  inline_only.step(kRegions);
  EXPECT_EQ(inline_only.transfers().figures().fetched_inline, kRegions - 1);
  EXPECT_EQ(inline_only.transfers().figures().fetched_ahead, 0);
}

// What is on its way out while compute runs is bounded in bytes.
TEST(TransfersTest, BytesOnTheirWayOutAreBounded) {
  for (const std::int64_t prefetch : {0, 1, 2}) {
    Device device;
    Stack stack(device, {prefetch, 0});
    stack.step(kRegions);
    const auto figures = stack.transfers().figures();
    EXPECT_EQ(figures.leaving_peak, (1 + prefetch) * kBytes);
    EXPECT_EQ(figures.device_peak, (1 + prefetch) * kBytes);
    EXPECT_EQ(figures.peak_moment,
              base::concat("forward of layers.", prefetch + 1));
  }
}

// The copy back for region i is not behind the kernels of region i + 1.
TEST(TransfersTest, APrefetchOverlapsWithTheRegionBeforeIt) {
  for (const std::int64_t prefetch : {0, 1}) {
    Device device;
    Stack stack(device, {prefetch, 0});
    stack.step(5);
    const auto kernel = device.scripted->entries("backward 2").at(0);
    device::EntryId copy = 0;
    const std::string issued_for = prefetch ? "copies for 2" : "copies for 1";
    for (const auto id : device.scripted->entries(issued_for)) {
      const auto entry = device.scripted->log()[id];
      if (entry.stream == Stream::reload &&
          entry.kind == device::Entry::Kind::write) {
        copy = id;
      }
    }
    ASSERT_NE(copy, 0u);
    EXPECT_EQ(device.scripted->happens_before(kernel, copy), prefetch == 0);
  }
}

TEST(TransfersTest, TheSameBytesAreStashedOnce) {
  Device device;
  Transfers transfers(device.memories);
  at::Tensor value = device.produce(1);
  const auto first = transfers.stash(value, "a");
  EXPECT_EQ(transfers.stash(value.view({2, kNumel / 2}), "b"), first);
  EXPECT_NE(transfers.stash(device.produce(1), "a"), first);
  value.add_(1);
  EXPECT_NE(transfers.stash(value, "a"), first);
}

TEST(TransfersTest, ABatchCountsEveryNameOfAValueAndCopiesItOnce) {
  Device device;
  const auto transfers = std::make_shared<Transfers>(device.memories);
  const at::Tensor value = device.produce(1);
  const auto batch = transfers->open({}, "layers.0");
  int sent = 0;
  for (const char* name : {"a", "b"}) {
    transfers->add(*batch, transfers->stash(value, name), device.now(),
                   [&](bool) { ++sent; });
  }
  EXPECT_EQ(sent, 2);
  EXPECT_EQ(device.host_bytes(), kBytes);
}

TEST(TransfersTest, WhatWasPrefetchedInVainGoesAtTheEndOfBackward) {
  Device device;
  Stack stack(device, {.prefetch = 2});
  for (int i = 0; i < kRegions; ++i) stack.forward(static_cast<float>(i));
  for (int i = 0; i < 4; ++i) stack.backward();
  EXPECT_EQ(device.device_bytes(), 2 * kBytes);
  stack.transfers().end_backward();
  EXPECT_EQ(device.device_bytes(), 0);
  stack.backward();
  EXPECT_EQ(stack.num_wrong, 0);
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

// Backward takes another way than forward: prefetches do not pile up.
TEST(TransfersTest, AnUnexpectedOrderKeepsTheBound) {
  Device device;
  Stack stack(device, {.prefetch = 1});
  for (int i = 0; i < kRegions; ++i) stack.forward(static_cast<float>(i));
  stack.device_peak = 0;
  for (const std::size_t i : {5u, 1u, 4u, 0u, 3u, 2u}) {
    stack.recompute(stack.regions[i]);
  }
  // The two that never left, the one in use, one prefetched.
  EXPECT_EQ(stack.device_peak, 4 * kBytes);
  EXPECT_EQ(stack.num_wrong, 0);
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

TEST(TransfersTest, ARetainedGraphIsFetchedAgain) {
  Device device;
  Stack stack(device, {.prefetch = 1});
  for (int i = 0; i < 4; ++i) stack.forward(static_cast<float>(i));
  for (int backward = 0; backward < 2; ++backward) {
    for (int i = 3; i >= 0; --i) {
      stack.recompute(stack.regions[static_cast<std::size_t>(i)]);
    }
    stack.transfers().end_backward();
  }
  EXPECT_EQ(stack.num_wrong, 0);
  EXPECT_EQ(stack.num_sent, 4);
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

TEST(TransfersTest, ForwardsWithoutBackwardLeaveNothing) {
  Device device;
  Stack stack(device, {.prefetch = 1, .keep_last = 1});
  for (int i = 0; i < 4; ++i) stack.forward(static_cast<float>(i));
  stack.regions.clear();
  stack.step(3);
  EXPECT_EQ(device.device_bytes(), 0);
  EXPECT_EQ(device.host_bytes(), 0);
  EXPECT_THAT(device.scripted->violations(), IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::activation
