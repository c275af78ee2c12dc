#include "shard/neighbours.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shard/storage.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class NeighboursTest : public testing::Test {
 protected:
  // Elements [begin, begin + numel) in a storage of their own, as shards are.
  at::Tensor within(std::int64_t begin, std::int64_t numel) const {
    return tensor_over(sub_storage(all_.storage(), begin * 4, numel * 4),
                       at::kFloat, {numel}, {1}, 0);
  }
  static at::Tensor one(const std::vector<at::Tensor>& tensors) {
    return neighbours_as_one(tensors, tensors);
  }

  at::Tensor all_ = at::arange(12, at::kFloat);
};

TEST_F(NeighboursTest, ViewsOfAStorageAreOne) {
  const auto whole =
      one({all_.narrow(0, 2, 4).view({2, 2}), all_.narrow(0, 6, 1)});
  EXPECT_TRUE(whole.equal(all_.narrow(0, 2, 5)));
  whole.fill_(-1);
  EXPECT_EQ(all_.sum().item<float>(), 0 + 1 + 7 + 8 + 9 + 10 + 11 - 5);
}

TEST_F(NeighboursTest, StoragesWithinAnotherAreOne) {
  EXPECT_TRUE(one({within(1, 3), within(4, 2)}).equal(all_.narrow(0, 1, 5)));
  EXPECT_TRUE(one({within(1, 3).narrow(0, 1, 2), within(4, 2)})
                  .equal(all_.narrow(0, 2, 4)));
}

TEST_F(NeighboursTest, AGapAnotherOrderAndAnotherAllocationAreNone) {
  EXPECT_FALSE(one({within(1, 3), within(5, 2)}).defined());
  EXPECT_FALSE(one({within(4, 2), within(1, 3)}).defined());
  EXPECT_FALSE(one({within(1, 3), within(1, 3)}).defined());
  EXPECT_FALSE(one({within(1, 3), all_.clone().narrow(0, 4, 2)}).defined());
}

// Two allocations may be neighbours by chance.
TEST_F(NeighboursTest, AllocationsSideBySideAreNotOne) {
  const auto over = [&](std::int64_t begin, std::int64_t numel) {
    return at::from_blob(all_.data_ptr<float>() + begin, {numel});
  };
  EXPECT_FALSE(one({over(0, 4), over(4, 4)}).defined());
}

TEST_F(NeighboursTest, OtherDtypesSizesAndStridesAreNone) {
  const auto other = within(4, 2).view(at::kInt);
  EXPECT_FALSE(one({within(1, 3), other}).defined());
  EXPECT_FALSE(neighbours_as_one({within(1, 3), within(4, 2)},
                                 {within(1, 2), within(4, 3)})
                   .defined());
  EXPECT_FALSE(one({all_.view({4, 3}).t(), all_.narrow(0, 11, 1)}).defined());
  EXPECT_FALSE(one({within(0, 3)._neg_view(), within(3, 2)}).defined());
}

TEST_F(NeighboursTest, WhatHasNoBytesIsNone) {
  const auto asleep = within(1, 3);
  hide_bytes(asleep.storage());
  EXPECT_FALSE(one({asleep, within(4, 2)}).defined());
  EXPECT_FALSE(one({within(4, 2), asleep}).defined());
}

TEST_F(NeighboursTest, PartsHaveStoragesOfTheirOwn) {
  const auto whole = all_.narrow(0, 2, 8);
  const auto parts = parts_of(whole, {at::empty({2, 3}), at::empty({2})});
  EXPECT_TRUE(parts[0].equal(whole.narrow(0, 0, 6).view({2, 3})));
  EXPECT_TRUE(parts[1].equal(whole.narrow(0, 6, 2)));
  EXPECT_EQ(parts[0].storage().nbytes(), 6 * 4);
  EXPECT_EQ(parts[1].storage_offset(), 0);
  EXPECT_TRUE(one(parts).equal(whole));
  parts[1].zero_();
  EXPECT_EQ(all_[8].item<float>(), 0);
}

TEST_F(NeighboursTest, PartsKeepTheWhole) {
  std::vector<at::Tensor> parts;
  {
    const auto whole = at::ones({4});
    parts = parts_of(whole, {at::empty({2}), at::empty({2})});
  }
  parts.pop_back();
  EXPECT_TRUE(parts[0].equal(at::ones({2})));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
