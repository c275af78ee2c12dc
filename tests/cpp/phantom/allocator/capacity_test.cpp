// A device that is full: flush, retry, and the error.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>

#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

using ::testing::StrEq;
using ::testing::ThrowsMessage;

constexpr std::size_t kMiB = std::size_t{1} << 20;

AllocatorSettings limited_to(std::size_t capacity) {
  AllocatorSettings settings;
  settings.capacity = capacity;
  return settings;
}

TEST(CapacityTest, FlushesTheCacheAndTriesAgain) {
  CachingAllocator allocator(limited_to(100 * kMiB));
  allocator.free(allocator.malloc(60 * kMiB, 1));
  allocator.malloc(60 * kMiB, 2);
  EXPECT_EQ(allocator.reserved(), 60 * kMiB);
  EXPECT_EQ(allocator.statistics().num_alloc_retries, 1);
  EXPECT_EQ(allocator.statistics().num_ooms, 0);
  EXPECT_EQ(allocator.statistics().num_device_alloc, 2);
  EXPECT_EQ(allocator.statistics().num_device_free, 1);
}

TEST(CapacityTest, FlushWaitsForTheOtherStreams) {
  CachingAllocator allocator(limited_to(100 * kMiB), at_sync_events());
  const Address block = allocator.malloc(60 * kMiB, 1);
  allocator.record_stream(block, 2);
  allocator.free(block);
  allocator.malloc(60 * kMiB, 1);
  EXPECT_EQ(allocator.reserved(), 60 * kMiB);
  EXPECT_EQ(allocator.statistics().num_sync_all_streams, 1);
}

TEST(CapacityTest, FailsWithFiguresAndNextSteps) {
  CachingAllocator allocator(limited_to(100 * kMiB));
  allocator.malloc(30 * kMiB + 1);
  allocator.malloc(1000);
  EXPECT_THAT(
      [&] { allocator.malloc(70 * kMiB); },
      ThrowsMessage<OutOfMemory>(StrEq(
          "lowtide: phantom device memory: expected room for 70.00 MiB (70.00 "
          "MiB reserved), got 100.00 MiB of which 34.00 MiB are reserved and "
          "30.00 MiB allocated. Run on a larger device, free tensors before "
          "this allocation, or if much is reserved but not allocated, use "
          "expandable segments.")));
  EXPECT_EQ(allocator.statistics().num_ooms, 1);
  // And goes on.
  allocator.malloc(66 * kMiB);
  EXPECT_EQ(allocator.reserved(), 100 * kMiB);
}

TEST(CapacityTest, ErrorCarriesItsFacts) {
  AllocatorSettings settings = limited_to(1000 * kMiB);
  settings.memory_fraction = 0.1;
  CachingAllocator allocator(settings);
  allocator.malloc(1);
  try {
    allocator.malloc(99 * kMiB + 7);
    FAIL() << "expected OutOfMemory";
  } catch (const OutOfMemory& error) {
    EXPECT_EQ(error.facts().requested, 99 * kMiB + 7);
    EXPECT_EQ(error.facts().needed, 100 * kMiB);
    EXPECT_EQ(error.facts().limit, 100 * kMiB);
    EXPECT_EQ(error.facts().allocated, 512u);
    EXPECT_EQ(error.facts().reserved, 2 * kMiB);
  }
}

TEST(CapacityTest, FractionCanChange) {
  CachingAllocator allocator(limited_to(100 * kMiB));
  allocator.set_memory_fraction(0.5);
  EXPECT_THROW(allocator.malloc(60 * kMiB), OutOfMemory);
  allocator.set_memory_fraction(1);
  allocator.malloc(60 * kMiB);
  EXPECT_THROW(allocator.set_memory_fraction(-1), InvalidArgument);
  EXPECT_EQ(allocator.settings().memory_fraction, 1);
}

TEST(CapacityTest, ExpandableSegmentsShareFreedPagesBetweenStreams) {
  AllocatorSettings settings = limited_to(100 * kMiB);
  settings.expandable = true;
  CachingAllocator allocator(settings);
  allocator.free(allocator.malloc(80 * kMiB, 1));
  allocator.malloc(80 * kMiB, 2);
  EXPECT_EQ(allocator.reserved(), 80 * kMiB);
  EXPECT_EQ(allocator.statistics().num_alloc_retries, 1);
}

TEST(CapacityTest, SmallPoolOfAnExpandableSegmentCountsToo) {
  AllocatorSettings settings = limited_to(21 * kMiB);
  settings.expandable = true;
  CachingAllocator allocator(settings);
  allocator.malloc(100);
  EXPECT_THROW(allocator.malloc(2 * kMiB), OutOfMemory);
}

TEST(AddressTest, UnknownAddressIsRefused) {
  CachingAllocator allocator({});
  const Address address = allocator.malloc(100);
  allocator.free(address);
  const char* expected =
      "lowtide: allocator: expected the address of a live allocation, got "
      "0x100000000000. Free what malloc returned, once.";
  for (const std::function<void()>& call : std::vector<std::function<void()>>{
           [&] { allocator.free(address); },
           [&] { allocator.record_stream(address, 1); },
           [&] { allocator.block_size(address); }}) {
    EXPECT_THAT(call, ThrowsMessage<InvalidArgument>(StrEq(expected)));
  }
}

TEST(AddressTest, NoBytesHaveNoAddress) {
  CachingAllocator allocator({});
  EXPECT_EQ(allocator.malloc(0), 0u);
  allocator.record_stream(0, 1);
  allocator.free(0);
  EXPECT_EQ(allocator.reserved(), 0u);
  EXPECT_TRUE(allocator.snapshot().empty());
}

}  // namespace
}  // namespace lowtide::phantom
