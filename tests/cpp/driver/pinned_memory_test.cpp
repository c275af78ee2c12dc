// Page-locked memory of the host: what is there, and what takes the machine's.
#include "phantom/driver/pinned_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lowtide::dry {
namespace LOWTIDE_FILE {

constexpr std::size_t kBytes = std::size_t{1} << 20;

std::size_t page() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Of the range's pages, how many the machine holds.
long resident(void* begin, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / page());
  EXPECT_EQ(mincore(begin, bytes, pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(),
                       [](unsigned char one) { return (one & 1) != 0; });
}

class PinnedMemoryTest : public ::testing::Test {
 protected:
  PinnedMemory memory;
  std::uint8_t* const own = static_cast<std::uint8_t*>(memory.allocate(kBytes));

  ~PinnedMemoryTest() override { memory.remove(own); }
};

TEST_F(PinnedMemoryTest, KnowsItsRangesUntilTheyAreRemoved) {
  std::vector<std::uint8_t> registered(100);
  EXPECT_TRUE(memory.add(registered.data(), 100));
  EXPECT_FALSE(memory.add(registered.data() + 99, 1));
  EXPECT_TRUE(memory.has(own + kBytes - 1));
  EXPECT_FALSE(memory.has(own + kBytes));
  EXPECT_EQ(memory.remove(registered.data() + 1), 0U);
  EXPECT_EQ(memory.remove(registered.data()), 100U);
  EXPECT_FALSE(memory.has(registered.data()));
  registered[0] = 1;  // still the program's
}

TEST_F(PinnedMemoryTest, WhatIsClearedTakesNoMemory) {
  memory.clear(own, kBytes);
  EXPECT_EQ(resident(own, kBytes), 0);
  std::fill_n(own, kBytes, std::uint8_t{7});
  memory.clear(own, kBytes);
  EXPECT_EQ(resident(own, kBytes), 0);
  EXPECT_TRUE(
      std::all_of(own, own + kBytes, [](auto one) { return one == 0; }));
}

TEST_F(PinnedMemoryTest, ClearsBytesNotPages) {
  std::fill_n(own, kBytes, std::uint8_t{7});
  memory.clear(own + 5, kBytes - 10);
  EXPECT_EQ(resident(own, kBytes), 2);
  EXPECT_EQ(own[4], 7);
  EXPECT_EQ(own[kBytes - 5], 7);
  EXPECT_TRUE(std::all_of(own + 5, own + kBytes - 5,
                          [](auto one) { return one == 0; }));
}

TEST_F(PinnedMemoryTest, ClearsWhatTheProgramAllocated) {
  std::vector<std::uint8_t> registered(kBytes, 7);
  memory.add(registered.data(), kBytes);
  memory.clear(registered.data(), kBytes);
  EXPECT_THAT(registered, ::testing::Each(0));
  memory.remove(registered.data());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
