// Bytes of the host on a device without bytes.
#include "phantom/driver/kept_bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace lowtide::dry {
namespace LOWTIDE_FILE {

using ::testing::ElementsAre;

constexpr Address kHere = kFirstAddress;
constexpr Address kThere = kFirstAddress + (std::size_t{1} << 30);

using Bytes = std::vector<std::uint8_t>;

void write(KeptBytes& kept, Address to, const Bytes& bytes) {
  kept.write(to, bytes.data(), bytes.size());
}

Bytes read(const KeptBytes& kept, Address from, std::size_t count) {
  Bytes bytes(count);
  kept.read(bytes.data(), from, count);
  return bytes;
}

TEST(KeptBytesTest, ReadsWhatTheHostWroteAndNothingElse) {
  KeptBytes kept;
  write(kept, kHere + 2, {1, 2, 3});
  EXPECT_THAT(read(kept, kHere, 7), ElementsAre(0, 0, 1, 2, 3, 0, 0));
  EXPECT_THAT(read(kept, kHere + 3, 1), ElementsAre(2));
  EXPECT_TRUE(kept.known(kHere + 2, 3));
  EXPECT_FALSE(kept.known(kHere + 1, 3));
  EXPECT_FALSE(kept.known(kHere + 3, 3));
}

TEST(KeptBytesTest, LaterBytesTakeThePlaceOfEarlierOnes) {
  KeptBytes kept;
  write(kept, kHere, {1, 1, 1, 1, 1, 1});
  write(kept, kHere + 2, {2, 2});
  EXPECT_THAT(read(kept, kHere, 6), ElementsAre(1, 1, 2, 2, 1, 1));
  EXPECT_TRUE(kept.known(kHere, 6));
  kept.forget(kHere + 1, 2);
  EXPECT_THAT(read(kept, kHere, 6), ElementsAre(1, 0, 0, 2, 1, 1));
  EXPECT_EQ(kept.total(), 4U);
}

TEST(KeptBytesTest, KnownAsAWholeIsWhatNoOtherCopyReachesInto) {
  KeptBytes kept;
  write(kept, kHere, {1, 2, 3, 4});
  write(kept, kHere + 4, {5, 6});
  EXPECT_TRUE(kept.known_as_whole(kHere, 4));
  EXPECT_TRUE(kept.known_as_whole(kHere, 6));
  EXPECT_FALSE(kept.known_as_whole(kHere, 2));
  EXPECT_FALSE(kept.known_as_whole(kHere + 2, 2));
  EXPECT_FALSE(kept.known_as_whole(kHere + 4, 3));
}

TEST(KeptBytesTest, CopiesTravelAndWhatIsUnknownTravelsToo) {
  KeptBytes kept;
  write(kept, kHere + 1, {7, 8});
  write(kept, kThere, {9, 9, 9, 9});
  kept.copy(kThere, kHere, 4);
  EXPECT_THAT(read(kept, kThere, 4), ElementsAre(0, 7, 8, 0));
  EXPECT_FALSE(kept.known(kThere, 4));
  EXPECT_TRUE(kept.known(kThere + 1, 2));
}

TEST(KeptBytesTest, ACopyIntoItselfMoves) {
  KeptBytes kept;
  write(kept, kHere, {1, 2, 3, 4});
  kept.copy(kHere + 1, kHere, 3);
  EXPECT_THAT(read(kept, kHere, 4), ElementsAre(1, 1, 2, 3));
}

TEST(KeptBytesTest, LargeCopiesAreNotKept) {
  KeptBytes kept;
  write(kept, kHere, {1});
  write(kept, kHere, Bytes(KeptBytes::kMostOfCopy + 1, 5));
  EXPECT_THAT(read(kept, kHere, 1), ElementsAre(0));
  EXPECT_EQ(kept.total(), 0U);
  kept.fill(kHere, 3, 2);
  EXPECT_THAT(read(kept, kHere, 3), ElementsAre(3, 3, 0));
}

TEST(KeptBytesTest, TheOldestIsGivenUpWhenThereIsTooMuch) {
  KeptBytes kept;
  const Bytes most(KeptBytes::kMostOfCopy, 1);
  const auto count = KeptBytes::kMost / KeptBytes::kMostOfCopy;
  for (std::size_t i = 0; i <= count; ++i) {
    write(kept, kHere + i * KeptBytes::kMostOfCopy, most);
  }
  EXPECT_EQ(kept.total(), KeptBytes::kMost);
  EXPECT_FALSE(kept.known(kHere, 1));
  EXPECT_TRUE(kept.known(kHere + KeptBytes::kMostOfCopy, 1));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::dry
