#include "phantom/allocator/segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "phantom/allocator/caching_allocator.h"

namespace lowtide::phantom {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

unsigned char* bytes_at(Address address) {
  return reinterpret_cast<unsigned char*>(address);
}

TEST(NumberedSegmentsTest, HandsOutTheLowestAddressThatIsFree) {
  const auto segments = numbered_segments();
  const Address first = segments->allocate(3 * kMiB);
  EXPECT_EQ(first, Address{1} << 44);
  EXPECT_EQ(segments->allocate(2 * kMiB), first + 4 * kMiB);
  EXPECT_EQ(segments->allocate(2 * kMiB), first + 6 * kMiB);
  segments->release(first + 4 * kMiB, 2 * kMiB);
  EXPECT_EQ(segments->allocate(4 * kMiB), first + 8 * kMiB);
  EXPECT_EQ(segments->allocate(kMiB), first + 4 * kMiB);
}

TEST(NumberedSegmentsTest, JoinsReturnedRanges) {
  const auto segments = numbered_segments();
  const Address first = segments->allocate(2 * kMiB);
  for (int i = 1; i < 4; ++i) segments->allocate(2 * kMiB);
  for (const std::size_t place : {0, 2, 1}) {
    segments->release(first + 2 * place * kMiB, 2 * kMiB);
  }
  EXPECT_EQ(segments->allocate(6 * kMiB), first);
}

TEST(FaultingSegmentsTest, NothingIsThere) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto segments = faulting_segments();
  const Address address = segments->allocate(2 * kMiB);
  EXPECT_DEATH(*bytes_at(address) = 1, "");
}

TEST(FaultingSegmentsTest, AddressesDifferByAConstantFromTheNumbers) {
  const auto numbered = numbered_segments();
  const auto faulting = faulting_segments();
  const Address base = faulting->allocate(kMiB) - numbered->allocate(kMiB);
  EXPECT_EQ(faulting->reserve(90 * kMiB) - numbered->reserve(90 * kMiB), base);
  EXPECT_EQ(faulting->allocate(7) - numbered->allocate(7), base);
}

TEST(FaultingSegmentsTest, SaysWhenTheAddressesAreUsedUp) {
  const auto segments = faulting_segments(8 * kMiB);
  EXPECT_THAT(
      [&] { segments->allocate(16 * kMiB); },
      ::testing::ThrowsMessage<Error>(
          "lowtide: phantom address range: expected a gap of 16777216 bytes, "
          "got none left. Use fewer streams, or set a device capacity."));
}

TEST(HostSegmentsTest, SaysWhyTheProcessHasNoAddresses) {
  EXPECT_THAT(
      [] { host_segments(std::size_t{1} << 60); },
      ::testing::ThrowsMessage<Error>(
          "lowtide: phantom segments: expected a reservation of "
          "1152921504606846976 bytes, got Cannot allocate memory. Raise the "
          "limits `ulimit -v` and memory."));
}

TEST(HostSegmentsTest, BlocksAreMemory) {
  CachingAllocator allocator({}, immediate_events(), host_segments());
  const Address small = allocator.malloc(1000);
  const Address large = allocator.malloc(30 * kMiB);
  std::memset(bytes_at(small), 1, 1000);
  std::memset(bytes_at(large), 2, 30 * kMiB);
  EXPECT_EQ(bytes_at(small)[999], 1);
  EXPECT_EQ(bytes_at(large)[30 * kMiB - 1], 2);
}

TEST(HostSegmentsTest, NewSegmentsAreZero) {
  CachingAllocator allocator({}, immediate_events(), host_segments());
  const Address block = allocator.malloc(30 * kMiB);
  std::memset(bytes_at(block), 1, 30 * kMiB);
  allocator.free(block);
  allocator.empty_cache();
  ASSERT_EQ(allocator.malloc(30 * kMiB), block);
  EXPECT_EQ(bytes_at(block)[0], 0);
  EXPECT_EQ(bytes_at(block)[30 * kMiB - 1], 0);
}

TEST(HostSegmentsTest, ExpandableBlocksKeepTheirBytesWhileTheSegmentGrows) {
  AllocatorSettings settings;
  settings.expandable = true;
  CachingAllocator allocator(settings, immediate_events(), host_segments());
  const Address first = allocator.malloc(15 * kMiB);
  std::memset(bytes_at(first), 1, 15 * kMiB);
  const Address second = allocator.malloc(15 * kMiB);
  EXPECT_EQ(second, first + 15 * kMiB);
  std::memset(bytes_at(second), 2, 15 * kMiB);
  EXPECT_EQ(bytes_at(first)[15 * kMiB - 1], 1);
}

TEST(HostSegmentsTest, UnmappedPagesFault) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  AllocatorSettings settings;
  settings.expandable = true;
  CachingAllocator allocator(settings, immediate_events(), host_segments());
  const Address block = allocator.malloc(20 * kMiB);
  allocator.malloc(20 * kMiB);
  allocator.free(block);
  allocator.empty_cache();
  EXPECT_DEATH(*bytes_at(block) = 1, "");
}

}  // namespace
}  // namespace lowtide::phantom
