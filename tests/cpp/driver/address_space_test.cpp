// Addresses of devices that have no memory.
#include "phantom/driver/address_space.h"

#include <gtest/gtest.h>

namespace lowtide::dry {
namespace LOWTIDE_FILE {

constexpr std::size_t kMiB = std::size_t{1} << 20;

constexpr Address kEnd = kFirstAddress + kAddressesOfDevice;
constexpr Address kReserved = kEnd - 512 * kMiB;  // at first

TEST(AddressSpaceTest, TheLowestRangeThatFitsIsTaken) {
  AddressSpace space(0);
  const auto first = space.place(3 * kMiB);
  const auto second = space.place(2 * kMiB);
  const auto third = space.place(1);
  EXPECT_EQ(first, kReserved);
  EXPECT_EQ(second, kReserved + 4 * kMiB);
  EXPECT_EQ(third, kReserved + 6 * kMiB);
  EXPECT_EQ(space.forget(*first), 3 * kMiB);
  EXPECT_EQ(space.place(5 * kMiB), kReserved + 8 * kMiB);
  EXPECT_EQ(space.place(4 * kMiB), first);
}

// The calls of benchmarks/programs/addresses.py and what an H200 answered.
TEST(AddressSpaceTest, WhatDoesNotFitIsReservedBelow) {
  AddressSpace space(0);
  space.place(510 * kMiB);
  const auto large = space.place(1002 * kMiB);
  EXPECT_EQ(large, kReserved - 1024 * kMiB);
  EXPECT_EQ(space.place(20 * kMiB), *large + 1002 * kMiB);
  EXPECT_EQ(space.place(2 * kMiB), *large + 1022 * kMiB);
  EXPECT_EQ(space.place(500 * kMiB), *large - 512 * kMiB);
  EXPECT_EQ(space.place(2 * kMiB), *large - 12 * kMiB);
  EXPECT_EQ(space.forget(*large), 1002 * kMiB);
  EXPECT_EQ(space.place(500 * kMiB), large);
  EXPECT_EQ(space.place(502 * kMiB), *large + 500 * kMiB);
  EXPECT_EQ(space.place(130 * kMiB), *large - (512 + 160) * kMiB);
}

TEST(AddressSpaceTest, UnknownAddressesAndFullSpacesAreNone) {
  AddressSpace space(1);
  EXPECT_EQ(space.forget(kFirstAddress), std::nullopt);
  EXPECT_EQ(space.place(kAddressesOfDevice + 1), std::nullopt);
  const auto whole = space.place(kAddressesOfDevice);
  EXPECT_EQ(whole, kEnd);
  EXPECT_EQ(space.place(1), std::nullopt);
}

TEST(AddressSpaceTest, AnAddressTellsItsDeviceAndItsRange) {
  AddressSpace space(2);
  const auto address = *space.place(5 * kMiB);
  EXPECT_EQ(device_of(address + kMiB), 2);
  EXPECT_EQ(device_of(Address{4096}), std::nullopt);
  EXPECT_EQ(device_of(kFirstSymbol), 0);
  EXPECT_EQ(space.around(address + 4 * kMiB)->first, address);
  EXPECT_EQ(space.around(address + 4 * kMiB)->bytes, 5 * kMiB);
  EXPECT_FALSE(space.around(address + 5 * kMiB));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
