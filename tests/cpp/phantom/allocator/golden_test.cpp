// Figures that CUDACachingAllocator is known to give, in MiB.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>

#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

class Golden : public ::testing::Test {
 protected:
  explicit Golden(bool expandable = false)
      : allocator(settings(expandable), at_sync_events()) {}

  static AllocatorSettings settings(bool expandable) {
    AllocatorSettings settings;
    settings.expandable = expandable;
    return settings;
  }

  Address take(std::size_t bytes, StreamId stream = 0) {
    return allocator.malloc(bytes, stream);
  }
  double reserved() const {
    return static_cast<double>(allocator.reserved()) / kMiB;
  }
  double allocated() const {
    return static_cast<double>(allocator.allocated()) / kMiB;
  }

  CachingAllocator allocator;
};

class ExpandableGolden : public Golden {
 protected:
  ExpandableGolden() : Golden(true) {}
};

TEST_F(Golden, PacksSmallRequestsIntoSegmentsOf2) {
  take(1);
  EXPECT_EQ(reserved(), 2);
  take(kMiB);
  EXPECT_EQ(reserved(), 2);
  take(kMiB);
  EXPECT_EQ(reserved(), 4);
}

TEST_F(Golden, PacksRequestsFrom1To10IntoSegmentsOf20) {
  take(kMiB + 1);
  EXPECT_EQ(reserved(), 20);
  take(9 * kMiB);
  EXPECT_EQ(reserved(), 20);
  take(10 * kMiB - 1);  // rounded to 512 bytes, which makes it 10 MiB
  EXPECT_EQ(reserved(), 30);
  take(10 * kMiB);
  EXPECT_EQ(reserved(), 40);
}

TEST_F(Golden, RoundsSegmentsOfLargerRequestsTo2) {
  take(10 * kMiB + 1);
  EXPECT_EQ(reserved(), 12);
}

TEST_F(Golden, RoundsRequestsTo512Bytes) {
  take(1);
  EXPECT_EQ(allocator.allocated(), 512u);
  take(513);
  EXPECT_EQ(allocator.allocated(), 512u + 1024u);
}

TEST_F(Golden, DoesNotSplitOffUpTo1) {
  const Address block = take(12 * kMiB);
  allocator.free(block);
  EXPECT_EQ(take(23 * kMiB / 2), block);
  EXPECT_EQ(reserved(), 12);
  EXPECT_EQ(allocated(), 12);
  allocator.free(block);
  take(11 * kMiB);
  EXPECT_EQ(allocated(), 12);
}

TEST_F(Golden, SplitsOffMoreThan1) {
  allocator.free(take(12 * kMiB));
  take(11 * kMiB - 512);
  EXPECT_EQ(reserved(), 12);
  EXPECT_EQ(allocator.allocated(), 11 * kMiB - 512);
}

TEST_F(Golden, SplitsWhatItReusesAndTakesMoreForTheRest) {
  allocator.free(take(64 * kMiB));
  take(40 * kMiB);
  take(30 * kMiB);
  EXPECT_EQ(reserved(), 94);
}

TEST_F(Golden, GivesEachStreamItsOwnMemory) {
  allocator.free(take(64 * kMiB, 1));
  take(64 * kMiB, 2);
  EXPECT_EQ(reserved(), 128);
}

TEST_F(Golden, KeepsABlockUntilTheOtherStreamIsDone) {
  const Address block = take(100 * kMiB, 1);
  allocator.record_stream(block, 2);
  allocator.free(block);
  take(100 * kMiB, 1);
  EXPECT_EQ(reserved(), 200);
}

TEST_F(Golden, MergesNeighboursWhicheverIsFreedFirst) {
  const Address first = take(2 * kMiB);
  const Address second = take(3 * kMiB);
  const Address third = take(4 * kMiB);
  EXPECT_EQ(reserved(), 20);
  allocator.free(second);
  allocator.free(third);
  allocator.free(first);
  EXPECT_EQ(take(20 * kMiB), first);
  EXPECT_EQ(reserved(), 20);
}

TEST_F(Golden, TakesTheSmallestBlockThatFits) {
  const Address large = take(40 * kMiB);
  const Address small = take(30 * kMiB);
  allocator.free(large);
  allocator.free(small);
  EXPECT_EQ(take(29 * kMiB), small);
}

TEST_F(Golden, TakesTheLowerOfTwoEqualBlocks) {
  const Address lower = take(30 * kMiB);
  const Address upper = take(30 * kMiB);
  allocator.free(upper);
  allocator.free(lower);
  EXPECT_EQ(take(30 * kMiB), lower);
}

TEST_F(ExpandableGolden, GrowsByPagesOf20) {
  const Address first = take(kMiB + 1);
  EXPECT_EQ(reserved(), 20);
  const Address second = take(25 * kMiB);
  EXPECT_EQ(reserved(), 40);
  allocator.free(first);
  allocator.free(second);
  EXPECT_EQ(take(38 * kMiB), first);
  EXPECT_EQ(reserved(), 40);
  take(5 * kMiB);
  EXPECT_EQ(reserved(), 60);
}

TEST_F(ExpandableGolden, GivesEachStreamAndPoolARangeOfItsOwn) {
  take(100, 1);
  take(3 * kMiB, 2);
  EXPECT_EQ(reserved(), 22);
}

TEST_F(ExpandableGolden, GivesBackFreePagesInTheMiddle) {
  const Address first = take(20 * kMiB);
  const Address middle = take(40 * kMiB);
  take(20 * kMiB);
  allocator.free(middle);
  allocator.empty_cache();
  EXPECT_EQ(reserved(), 40);
  ASSERT_EQ(allocator.snapshot().size(), 2u);
  // And fills the gap before it grows at the end.
  EXPECT_EQ(take(30 * kMiB), first + 20 * kMiB);
  EXPECT_EQ(reserved(), 80);
}

TEST_F(ExpandableGolden, KeepsPagesThatAreUsedInPart) {
  const Address first = take(30 * kMiB);
  take(5 * kMiB);
  allocator.free(first);
  allocator.empty_cache();
  EXPECT_EQ(reserved(), 20);  // of two pages, the one with 5 MiB in use
}

}  // namespace
}  // namespace lowtide::phantom
