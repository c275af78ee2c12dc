#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>

#include "base/check.h"
#include "phantom/allocator/caching_allocator.h"
#include "phantom/allocator/rounding.h"

namespace lowtide::phantom {
namespace {

using ::testing::StrEq;
using ::testing::ThrowsMessage;

AllocatorSettings with_divisions(std::size_t divisions) {
  AllocatorSettings settings;
  settings.roundup_power2_divisions.fill(divisions);
  return settings;
}

TEST(RoundingTest, DividesThePowersOfTwo) {
  const AllocatorSettings settings = with_divisions(4);
  EXPECT_EQ(rounded_size(settings, 1200 * kMiB), 1280 * kMiB);
  EXPECT_EQ(rounded_size(settings, 1280 * kMiB), 1280 * kMiB);
  EXPECT_EQ(rounded_size(settings, 1024 * kMiB), 1024 * kMiB);
  EXPECT_EQ(rounded_size(settings, 1793 * kMiB), 2048 * kMiB);
  // At most `divisions` minimal blocks: as without.
  EXPECT_EQ(rounded_size(settings, 2048), 2048u);
  EXPECT_EQ(rounded_size(settings, 1500), 1536u);
  EXPECT_EQ(rounded_size(settings, 2049), 2560u);
}

TEST(RoundingTest, OneDivisionIsNone) {
  EXPECT_EQ(rounded_size(with_divisions(1), 1200 * kMiB + 1),
            1200 * kMiB + 512);
  EXPECT_EQ(rounded_size(with_divisions(0), 1), 512u);
}

TEST(RoundingTest, EachIntervalHasItsOwnDivisions) {
  AllocatorSettings settings;
  settings.roundup_power2_divisions[0] = 2;   // below 2 MiB
  settings.roundup_power2_divisions[15] = 4;  // from 32 GiB on
  EXPECT_EQ(rounded_size(settings, 5000), 6144u);
  EXPECT_EQ(rounded_size(settings, 3 * kMiB + 1), 3 * kMiB + 512);
  EXPECT_EQ(rounded_size(settings, 65 * 1024 * kMiB), 80 * 1024 * kMiB);
}

TEST(MaxSplitTest, LargerBlocksAreNeitherSplitNorGivenToSmallerRequests) {
  AllocatorSettings settings;
  settings.max_split = 32 * kMiB;
  CachingAllocator allocator(settings);
  const Address block = allocator.malloc(64 * kMiB);
  allocator.free(block);
  EXPECT_EQ(allocator.statistics().max_split_size, 32 << 20);
  EXPECT_NE(allocator.malloc(20 * kMiB), block);
  EXPECT_EQ(allocator.reserved(), 84 * kMiB);
  // Up to large_segment more than asked for is accepted, exclusively.
  EXPECT_NE(allocator.malloc(44 * kMiB), block);
  EXPECT_EQ(allocator.malloc(46 * kMiB), block);
  EXPECT_EQ(allocator.allocated(), (20 + 44 + 64) * kMiB);
}

TEST(MaxSplitTest, GivesBackOneLargeBlockBeforeItFlushes) {
  AllocatorSettings settings;
  settings.max_split = 32 * kMiB;
  settings.capacity = 120 * kMiB;
  CachingAllocator allocator(settings);
  const Address large = allocator.malloc(64 * kMiB);
  const Address small = allocator.malloc(30 * kMiB);
  allocator.free(large);
  allocator.free(small);
  allocator.malloc(40 * kMiB);
  // 64 went, 30 stayed cached; no flush, so no retry is counted.
  EXPECT_EQ(allocator.reserved(), 70 * kMiB);
  EXPECT_EQ(allocator.statistics().num_alloc_retries, 0);
}

TEST(GarbageCollectionTest, GivesBackWhatWasNotUsedForLong) {
  AllocatorSettings settings;
  settings.capacity = 1000 * kMiB;
  settings.memory_fraction = 0.9;
  settings.garbage_collection_threshold = 0.5;  // 450 MiB
  CachingAllocator allocator(settings);
  const Address old = allocator.malloc(100 * kMiB, 1);
  allocator.free(old);
  for (int i = 0; i < 10; ++i) allocator.free(allocator.malloc(200 * kMiB, 2));
  allocator.malloc(160 * kMiB, 3);
  EXPECT_EQ(allocator.reserved(), 460 * kMiB);  // not yet above it
  allocator.malloc(50 * kMiB, 3);
  EXPECT_EQ(allocator.reserved(), 410 * kMiB);  // the 100 went, the 200 stayed
}

TEST(ExpandableTest, CanBeSwitchedOffAndOn) {
  AllocatorSettings settings;
  settings.expandable = true;
  CachingAllocator allocator(settings);
  allocator.free(allocator.malloc(30 * kMiB));
  allocator.set_expandable(false);
  const Address ordinary = allocator.malloc(30 * kMiB);
  EXPECT_EQ(allocator.reserved(), 70 * kMiB);
  allocator.set_expandable(true);
  allocator.malloc(35 * kMiB);
  EXPECT_EQ(allocator.reserved(), 70 * kMiB);
  allocator.free(ordinary);
  allocator.empty_cache();
  EXPECT_EQ(allocator.reserved(), 40 * kMiB);
}

struct Refusal {
  const char* name;
  void (*change)(AllocatorSettings&);
  const char* message;
};

class RefusedSettings : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusedSettings, SayWhatIsExpected) {
  AllocatorSettings settings;
  GetParam().change(settings);
  EXPECT_THAT([&] { CachingAllocator allocator(settings); },
              ThrowsMessage<InvalidArgument>(StrEq(GetParam().message)));
}

constexpr Refusal kRefusals[] = {
    {"large_segment", [](AllocatorSettings& s) { s.large_segment = 10 * kMiB; },
     "lowtide: allocator large_segment: expected more than 10 MiB, got "
     "10485760 bytes (10 MiB). Leave it at 20 MiB, or raise it."},
    {"max_split", [](AllocatorSettings& s) { s.max_split = 19 * kMiB; },
     "lowtide: allocator max_split: expected at least large_segment, 20971520 "
     "bytes (20 MiB), got 19922944 bytes (19 MiB). Raise it, or leave it out "
     "for no limit."},
    {"max_non_split_rounding",
     [](AllocatorSettings& s) { s.max_non_split_rounding = kMiB; },
     "lowtide: allocator max_non_split_rounding: expected at least "
     "large_segment, 20971520 bytes (20 MiB), got 1048576 bytes (1 MiB). "
     "Raise it, or leave it out."},
    {"roundup_power2_divisions",
     [](AllocatorSettings& s) { s.roundup_power2_divisions[3] = 3; },
     "lowtide: allocator roundup_power2_divisions: expected 0 or a power of "
     "two, got 3. Use 1, 2, 4 or 8, for example."},
    {"garbage_collection_threshold",
     [](AllocatorSettings& s) { s.garbage_collection_threshold = 1; },
     "lowtide: allocator garbage_collection_threshold: expected 0 or a value "
     "below 1, got 1. Give the share of memory above which blocks are given "
     "back."},
    {"memory_fraction", [](AllocatorSettings& s) { s.memory_fraction = 1.5; },
     "lowtide: allocator memory_fraction: expected a value from 0 to 1, got "
     "1.5. Use 1 for no limit."},
    {"fraction_of_unlimited",
     [](AllocatorSettings& s) { s.memory_fraction = 0.5; },
     "lowtide: allocator memory_fraction: expected 1 on a device of unlimited "
     "memory, got 0.5. Give a capacity too."},
};

INSTANTIATE_TEST_SUITE_P(Settings, RefusedSettings,
                         ::testing::ValuesIn(kRefusals),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lowtide::phantom
