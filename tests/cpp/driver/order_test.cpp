// What streams come after, when events are done, what capture refuses.
#include "phantom/driver/order.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <thread>

#include "phantom/driver/capture.h"
#include "phantom/driver/completion.h"

namespace lowtide::dry {
namespace LOWTIDE_FILE {

cudaStream_t stream(std::uintptr_t number) {
  return reinterpret_cast<cudaStream_t>(number);
}
const auto kOne = stream(4096);
const auto kTwo = stream(4112);
const auto kThree = stream(4128);

TEST(OrderTest, EventsCarryWhatTheirStreamHasSeen) {
  Order order;
  order.enqueue_collective(kOne);
  EXPECT_EQ(order.unseen(kOne), 0);
  EXPECT_EQ(order.unseen(kTwo), 1);
  const auto event = order.record(kOne);
  order.enqueue_collective(kOne);
  order.wait(kTwo, event);
  EXPECT_EQ(order.unseen(kTwo), 1);
  order.wait(kThree, order.record(kTwo));
  EXPECT_EQ(order.unseen(kThree), 1);
}

TEST(OrderTest, AThreadKnowsWhatItHasFoundDone) {
  Order order;
  order.enqueue_collective(kOne);
  const auto event = order.record(kOne);
  std::thread([&] {
    order.host_sees(event);
    EXPECT_EQ(order.unseen(kTwo), 0);
    order.wait(kThree, order.record(kTwo));
  }).join();
  EXPECT_EQ(order.unseen(kTwo), 1);
  EXPECT_EQ(order.unseen(kThree), 0);
  order.enqueue_collective(kOne);
  EXPECT_EQ(order.unseen(kThree), 1);
}

TEST(OrderTest, WhatComesAfterACollectiveThatNeverFinishesIsStuck) {
  Order order(/*hang=*/2);
  order.enqueue_collective(kOne);
  const auto before = order.record(kOne);
  EXPECT_FALSE(order.is_stuck());
  order.enqueue_collective(kOne);
  const auto behind = order.record(kOne);
  order.enqueue_collective(kTwo);
  EXPECT_TRUE(order.is_stuck());
  EXPECT_FALSE(order.is_stuck(before));
  EXPECT_TRUE(order.is_stuck(behind));
  EXPECT_TRUE(order.is_stuck(kOne));
  order.wait(kTwo, before);
  EXPECT_FALSE(order.is_stuck(kTwo));
  order.wait(kTwo, behind);
  EXPECT_TRUE(order.is_stuck(kTwo));
  EXPECT_TRUE(order.is_stuck(order.record(kTwo)));
}

TEST(CompletionTest, TheTwoBounds) {
  Completion lower(true);
  Completion upper(false);
  EXPECT_TRUE(lower.done(lower.record(kOne)));
  EXPECT_TRUE(upper.done({}));  // never recorded
  const auto first = upper.record(kOne);
  const auto second = upper.record(kOne);
  const auto other = upper.record(kTwo);
  EXPECT_FALSE(upper.done(first));
  upper.wait(second);
  EXPECT_TRUE(upper.done(first));
  EXPECT_FALSE(upper.done(other));
  upper.wait_for_stream(kTwo);
  EXPECT_TRUE(upper.done(other));
  const auto last = upper.record(kThree);
  upper.wait_for_device();
  EXPECT_TRUE(upper.done(last));
}

TEST(CaptureTest, StreamsJoinByEventsAndMustJoinBack) {
  Capture capture;
  ASSERT_EQ(capture.begin(kOne, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_NE(capture.id(kOne), 0U);
  EXPECT_EQ(capture.wait(kTwo, capture.record(kOne)), cudaSuccess);
  EXPECT_EQ(capture.id(kTwo), capture.id(kOne));
  EXPECT_EQ(capture.wait(kOne, {}), cudaErrorStreamCaptureIsolation);
  capture.enqueue(kThree);
  EXPECT_EQ(capture.stray(), 1);
  capture.enqueue(kTwo);
  EXPECT_EQ(capture.end(kOne), cudaErrorStreamCaptureUnjoined);

  capture.begin(kOne, cudaStreamCaptureModeGlobal);
  capture.wait(kTwo, capture.record(kOne));
  capture.enqueue(kTwo);
  capture.wait(kOne, capture.record(kTwo));
  EXPECT_EQ(capture.end(kOne), cudaSuccess);
}

TEST(CaptureTest, AStreamThatHasOnlyWaitedSinceLeavesNothing) {
  Capture capture;
  capture.begin(kOne, cudaStreamCaptureModeGlobal);
  capture.enqueue(kOne);
  capture.wait(kTwo, capture.record(kOne));
  EXPECT_EQ(capture.end(kOne), cudaSuccess);

  capture.begin(kOne, cudaStreamCaptureModeGlobal);
  capture.wait(kTwo, capture.record(kOne));
  capture.enqueue(kTwo);
  capture.wait(kOne, capture.record(kTwo));
  capture.enqueue(kOne);
  capture.wait(kTwo, capture.record(kOne));
  EXPECT_EQ(capture.end(kOne), cudaSuccess);
}

TEST(CaptureTest, AThreadsModeSaysWhatItMayDoMeanwhile) {
  Capture capture;
  const auto elsewhere = [&](cudaStreamCaptureMode mode) {
    auto result = cudaSuccess;
    std::thread([&] {
      exchange_mode(mode);
      result = capture.unsafe();
    }).join();
    return result;
  };
  EXPECT_EQ(capture.unsafe(), cudaSuccess);
  capture.begin(kOne, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(capture.unsafe(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(capture.host_waits(), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(capture.host_waits_for(kTwo), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeThreadLocal), cudaSuccess);
  capture.end(kOne);
  capture.begin(kOne, cudaStreamCaptureModeThreadLocal);
  EXPECT_EQ(elsewhere(cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(capture.unsafe(), cudaErrorStreamCaptureUnsupported);
  const auto before = exchange_mode(cudaStreamCaptureModeRelaxed);
  EXPECT_EQ(capture.unsafe(), cudaSuccess);
  EXPECT_EQ(capture.host_waits_for(kTwo), cudaSuccess);
  EXPECT_EQ(capture.host_waits_for(kOne), cudaErrorStreamCaptureUnsupported);
  exchange_mode(before);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
