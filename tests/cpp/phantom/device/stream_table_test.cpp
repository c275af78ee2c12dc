#include "phantom/device/stream_table.h"

#include <gtest/gtest.h>

#include <thread>

namespace lowtide::phantom {
namespace {

TEST(StreamTableTest, HandsOutThirtyTwoStreamsPerPriorityInTurn) {
  StreamTable streams(Progress::immediate);
  const StreamId first = streams.next_stream(0);
  const StreamId urgent = streams.next_stream(-1);
  EXPECT_EQ(first, 1);
  EXPECT_EQ(urgent, 33);
  for (int i = 1; i < kStreamsPerPriority; ++i) {
    EXPECT_EQ(streams.next_stream(0), first + i);
  }
  EXPECT_EQ(streams.next_stream(0), first);
  EXPECT_EQ(streams.next_stream(-5), urgent + 1);
}

TEST(StreamTableTest, ImmediateWorkIsDoneWhenItIsIssued) {
  StreamTable streams(Progress::immediate);
  EXPECT_TRUE(streams.done(streams.record(3)));
  EXPECT_TRUE(streams.done(StreamId{3}));
}

TEST(StreamTableTest, AtSyncWorkIsDoneOnceTheHostWaitedForItsStream) {
  StreamTable streams(Progress::at_sync);
  const auto before = streams.record(3);
  EXPECT_FALSE(streams.done(before));
  EXPECT_FALSE(streams.done(StreamId{3}));
  streams.synchronize(StreamId{4});
  EXPECT_FALSE(streams.done(before));
  streams.synchronize(StreamId{3});
  EXPECT_TRUE(streams.done(before));
  EXPECT_TRUE(streams.done(StreamId{3}));
  EXPECT_FALSE(streams.done(streams.record(3)));
}

TEST(StreamTableTest, WaitingForAStreamCoversWhatItWaitedFor) {
  StreamTable streams(Progress::at_sync);
  const auto gather = streams.record(1);
  streams.wait(2, gather);
  const auto later = streams.record(1);
  streams.synchronize(StreamId{2});
  EXPECT_TRUE(streams.done(gather));
  EXPECT_FALSE(streams.done(later));
}

TEST(StreamTableTest, WaitingForAPointCoversWhatCameBeforeIt) {
  StreamTable streams(Progress::at_sync);
  const auto first = streams.record(1);
  const auto second = streams.record(1);
  const auto third = streams.record(1);
  streams.synchronize(second);
  EXPECT_TRUE(streams.done(first));
  EXPECT_TRUE(streams.done(second));
  EXPECT_FALSE(streams.done(third));
  streams.synchronize();
  EXPECT_TRUE(streams.done(third));
}

TEST(StreamTableTest, TheAllocatorsEventsFollowTheStreams) {
  StreamTable streams(Progress::at_sync);
  const auto events = stream_events(streams);
  const EventId first = events->record(1);
  const EventId second = events->record(2);
  EXPECT_FALSE(events->done(first));
  events->wait(first);
  EXPECT_TRUE(events->done(first));
  EXPECT_FALSE(events->done(second));
  events->synchronized(StreamId{2});
  EXPECT_TRUE(events->done(second));
  const EventId third = events->record(1);
  events->synchronized(std::nullopt);
  EXPECT_TRUE(events->done(third));
}

TEST(StreamTableTest, TheCurrentStreamIsOfTheThread) {
  EXPECT_EQ(exchange_current_stream(7), kDefaultStream);
  StreamId elsewhere = -1;
  std::thread([&] { elsewhere = current_stream(); }).join();
  EXPECT_EQ(elsewhere, kDefaultStream);
  EXPECT_EQ(exchange_current_stream(kDefaultStream), 7);
}

}  // namespace
}  // namespace lowtide::phantom
