// Statistics, history and snapshot, as torch shows them.
#include "phantom/allocator/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

using ::testing::ElementsAre;

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr Address kFirst = Address{1} << 44;

std::vector<std::string> lines(const std::vector<TraceEntry>& entries) {
  std::vector<std::string> result;
  for (const TraceEntry& entry : entries) {
    result.push_back(base::concat(
        name_of(entry.action), " ",
        entry.address >= kFirst ? entry.address - kFirst : entry.address, " ",
        entry.size, " on ", entry.stream));
  }
  return result;
}

TEST(HistoryTest, HasTorchsEntriesAndTheCallsTorchDoesNotLog) {
  AllocatorSettings settings;
  settings.capacity = 30 * kMiB;
  CachingAllocator allocator(settings, at_sync_events());
  allocator.record_history(100);
  const Address block = allocator.malloc(100, 1);
  allocator.record_stream(block, 2);
  allocator.free(block);
  allocator.synchronize(2);
  allocator.free(allocator.malloc(3 * kMiB));
  allocator.snapshot();
  EXPECT_THROW(allocator.malloc(40 * kMiB), OutOfMemory);
  allocator.synchronize();
  allocator.empty_cache();
  EXPECT_THAT(
      lines(allocator.history()),
      ElementsAre("segment_alloc 0 2097152 on 1", "alloc 0 100 on 1",
                  "record_stream 0 100 on 2", "free_requested 0 100 on 1",
                  "synchronize_stream 0 0 on 2", "free_completed 0 100 on 1",
                  "segment_alloc 2097152 20971520 on 0",
                  "alloc 2097152 3145728 on 0",
                  "free_requested 2097152 3145728 on 0",
                  "free_completed 2097152 3145728 on 0", "snapshot 0 0 on 0",
                  "segment_free 2097152 20971520 on 0",
                  "segment_free 0 2097152 on 1", "oom 31457280 41943040 on 0",
                  "synchronize_device 0 0 on 0", "empty_cache 0 0 on 0"));
}

TEST(HistoryTest, ExpandableSegmentsAreMappedAndUnmapped) {
  AllocatorSettings settings;
  settings.expandable = true;
  CachingAllocator allocator(settings);
  allocator.record_history(100);
  allocator.free(allocator.malloc(30 * kMiB));
  allocator.empty_cache();
  EXPECT_THAT(
      lines(allocator.history()),
      ElementsAre("segment_map 0 41943040 on 0", "alloc 0 31457280 on 0",
                  "free_requested 0 31457280 on 0",
                  "free_completed 0 31457280 on 0", "empty_cache 0 0 on 0",
                  "segment_unmap 0 41943040 on 0"));
}

TEST(HistoryTest, KeepsTheLastEntriesOnly) {
  CachingAllocator allocator({});
  EXPECT_TRUE(allocator.history().empty());
  allocator.record_history(2);
  allocator.free(allocator.malloc(1));
  EXPECT_THAT(
      lines(allocator.history()),
      ElementsAre("free_requested 0 1 on 0", "free_completed 0 1 on 0"));
  allocator.record_history(0);
  allocator.malloc(1);
  EXPECT_TRUE(allocator.history().empty());
}

TEST(HistoryTest, ObserverSeesEveryEntryUntilItIsRemoved) {
  CachingAllocator allocator({});
  std::vector<TraceEntry> seen;
  allocator.observe([&](const TraceEntry& entry) { seen.push_back(entry); });
  allocator.malloc(7, 3);
  allocator.observe({});
  allocator.malloc(7, 3);
  EXPECT_THAT(lines(seen),
              ElementsAre("segment_alloc 0 2097152 on 3", "alloc 0 7 on 3"));
}

TEST(StatisticsTest, PeaksAndSumsCanBeReset) {
  CachingAllocator allocator({});
  allocator.free(allocator.malloc(30 * kMiB));
  allocator.malloc(100);
  Stat stat = allocator.statistics().allocated_bytes[kAll];
  EXPECT_EQ(stat.current, 512);
  EXPECT_EQ(stat.peak, 30 << 20);
  EXPECT_EQ(stat.allocated, (30 << 20) + 512);
  EXPECT_EQ(stat.freed, 30 << 20);
  allocator.reset_peak_statistics();
  allocator.reset_accumulated_statistics();
  stat = allocator.statistics().allocated_bytes[kAll];
  EXPECT_EQ(stat.current, 512);
  EXPECT_EQ(stat.peak, 512);
  EXPECT_EQ(stat.allocated, 0);
  EXPECT_EQ(stat.freed, 0);
  EXPECT_EQ(allocator.statistics().num_device_alloc, 0);
}

TEST(StatisticsTest, CountsFreeBlocksBesideUsedOnes) {
  CachingAllocator allocator({});
  const Address first = allocator.malloc(5 * kMiB);
  allocator.malloc(5 * kMiB);
  allocator.free(first);
  const Statistics statistics = allocator.statistics();
  EXPECT_EQ(statistics.inactive_split[kLargePool].current, 2);
  EXPECT_EQ(statistics.inactive_split_bytes[kLargePool].current, 15 << 20);
  EXPECT_EQ(statistics.inactive_split[kSmallPool].current, 0);
  EXPECT_EQ(statistics.segment[kAll].current, 1);
}

TEST(SnapshotTest, ShowsSegmentsAndBlocksByAddress) {
  CachingAllocator allocator({});
  allocator.malloc(3 * kMiB, 1);
  const Address second = allocator.malloc(700, 2);
  const auto segments = allocator.snapshot();
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_TRUE(segments[0].is_large);
  EXPECT_FALSE(segments[1].is_large);
  EXPECT_EQ(segments[1].stream, 2);
  EXPECT_EQ(segments[1].address, second);
  EXPECT_EQ(segments[1].total_size, 2 * kMiB);
  EXPECT_EQ(segments[1].allocated_size, 1024u);
  EXPECT_EQ(segments[1].requested_size, 700u);
  ASSERT_EQ(segments[1].blocks.size(), 2u);
  EXPECT_EQ(segments[1].blocks[0].requested_size, 700u);
  EXPECT_EQ(segments[1].blocks[1].state, BlockState::inactive);
  EXPECT_EQ(segments[1].blocks[1].size, 2 * kMiB - 1024);
}

TEST(SnapshotTest, StatesHaveTorchsNames) {
  EXPECT_EQ(name_of(BlockState::allocated), "active_allocated");
  EXPECT_EQ(name_of(BlockState::pending_free), "active_pending_free");
  EXPECT_EQ(name_of(BlockState::inactive), "inactive");
}

TEST(BlockSizeTest, IsWhatTheBlockReallyHas) {
  CachingAllocator allocator({});
  EXPECT_EQ(allocator.block_size(allocator.malloc(1)), 512u);
  EXPECT_EQ(allocator.block_size(allocator.malloc(12 * kMiB - 1)), 12 * kMiB);
}

}  // namespace
}  // namespace lowtide::phantom
