// Blocks that other streams use: when they are free again.
#include "phantom/allocator/events.h"

#include <gtest/gtest.h>

#include <cstddef>

#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

// A block of stream 1, freed while the streams given still use it.
Address free_while_used(CachingAllocator& allocator,
                        std::initializer_list<StreamId> streams) {
  const Address block = allocator.malloc(100 * kMiB, 1);
  for (const StreamId stream : streams) allocator.record_stream(block, stream);
  allocator.free(block);
  return block;
}

TEST(EventsTest, ImmediateAndAtSyncAreTheBounds) {
  CachingAllocator lower({}, immediate_events());
  CachingAllocator upper({}, at_sync_events());
  for (CachingAllocator* allocator : {&lower, &upper}) {
    free_while_used(*allocator, {2});
    allocator->malloc(100 * kMiB, 1);
  }
  EXPECT_EQ(lower.reserved(), 100 * kMiB);
  EXPECT_EQ(upper.reserved(), 200 * kMiB);
}

TEST(EventsTest, PendingBlockIsActiveButNotAllocated) {
  CachingAllocator allocator({}, at_sync_events());
  free_while_used(allocator, {2, 3});
  const Statistics statistics = allocator.statistics();
  EXPECT_EQ(statistics.allocated_bytes[kAll].current, 0);
  EXPECT_EQ(statistics.active_bytes[kAll].current, 100 << 20);
  EXPECT_EQ(statistics.active[kLargePool].current, 1);
  const auto segments = allocator.snapshot();
  ASSERT_EQ(segments.size(), 1u);
  EXPECT_EQ(segments[0].blocks[0].state, BlockState::pending_free);
  EXPECT_EQ(segments[0].active_size, 100 * kMiB);
  EXPECT_EQ(segments[0].allocated_size, 0u);
}

TEST(EventsTest, BlockWaitsForEveryStreamThatUsedIt) {
  CachingAllocator allocator({}, at_sync_events());
  const Address block = free_while_used(allocator, {2, 3});
  allocator.synchronize(2);
  EXPECT_NE(allocator.malloc(100 * kMiB, 1), block);
  allocator.synchronize(3);
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
}

TEST(EventsTest, WaitingForTheDeviceCompletesAll) {
  CachingAllocator allocator({}, at_sync_events());
  const Address block = free_while_used(allocator, {2, 3});
  allocator.synchronize();
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
}

TEST(EventsTest, WaitingEarlierDoesNotHelp) {
  CachingAllocator allocator({}, at_sync_events());
  allocator.synchronize();
  const Address block = free_while_used(allocator, {2});
  EXPECT_NE(allocator.malloc(100 * kMiB, 1), block);
}

TEST(EventsTest, OwnStreamNeedsNoEvent) {
  CachingAllocator allocator({}, at_sync_events());
  const Address block = free_while_used(allocator, {1});
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
}

TEST(EventsTest, RecordedAgainIsRecordedOnce) {
  CachingAllocator allocator({}, at_sync_events());
  const Address block = free_while_used(allocator, {2, 2, 2});
  allocator.synchronize(2);
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
  EXPECT_EQ(allocator.statistics().active[kAll].current, 1);
}

TEST(EventsTest, NextUserOfABlockStartsWithoutOtherStreams) {
  CachingAllocator allocator({}, at_sync_events());
  const Address block = free_while_used(allocator, {2});
  allocator.synchronize();
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
  allocator.free(block);
  EXPECT_EQ(allocator.malloc(100 * kMiB, 1), block);
}

TEST(EventsTest, EmptyCacheWaits) {
  CachingAllocator allocator({}, at_sync_events());
  free_while_used(allocator, {2, 3});
  allocator.empty_cache();
  EXPECT_EQ(allocator.reserved(), 0u);
}

TEST(EventsTest, ReturningASegmentWaitsForTheDevice) {
  AllocatorSettings settings;
  settings.max_split = 32 * kMiB;
  settings.capacity = 200 * kMiB;
  CachingAllocator allocator(settings, at_sync_events());
  const Address pending = free_while_used(allocator, {2});
  const Address cached = allocator.malloc(90 * kMiB, 1);
  allocator.free(cached);
  // Does not fit beside the two: the cached one goes, and cudaFree waits.
  allocator.malloc(50 * kMiB, 1);
  EXPECT_EQ(allocator.malloc(95 * kMiB, 1), pending);
  EXPECT_EQ(allocator.statistics().num_alloc_retries, 0);
}

TEST(EventsTest, NeighboursThatCompleteTogetherMerge) {
  CachingAllocator allocator({}, at_sync_events());
  const Address first = allocator.malloc(5 * kMiB, 1);
  const Address second = allocator.malloc(5 * kMiB, 1);
  for (const Address block : {first, second}) {
    allocator.record_stream(block, 2);
    allocator.record_stream(block, 3);
    allocator.free(block);
  }
  allocator.synchronize();
  EXPECT_EQ(allocator.malloc(20 * kMiB, 1), first);
}

TEST(AtSyncEventsTest, WaitingForAnEventCompletesThoseBeforeIt) {
  const auto events = at_sync_events();
  const EventId first = events->record(1);
  const EventId other = events->record(2);
  const EventId second = events->record(1);
  const EventId third = events->record(1);
  events->wait(second);
  EXPECT_TRUE(events->done(first));
  EXPECT_TRUE(events->done(second));
  EXPECT_FALSE(events->done(third));
  EXPECT_FALSE(events->done(other));
}

}  // namespace
}  // namespace lowtide::phantom
