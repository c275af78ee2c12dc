#include "shard/gradients/partial_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class PartialGradientsTest : public testing::Test {
 protected:
  std::int64_t live() const {
    return ledger
        ->live()[static_cast<std::size_t>(memory::Category::sharded_gradients)];
  }
  static Piece whole(std::int32_t i, std::int64_t numel, std::int64_t column) {
    return {i, 0, numel, column};
  }

  std::shared_ptr<memory::Ledger> ledger = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory =
      std::make_shared<memory::DeviceMemory>(
          std::make_shared<device::ScriptedRuntime>(), ledger);
  PartialGradients partial{std::make_shared<const std::string>("layers.0"),
                           {{3, at::kFloat}, {70, at::kFloat}, {5, at::kHalf}},
                           memory};
};

TEST_F(PartialGradientsTest, LeasesAFlatTensorForEachDtype) {
  EXPECT_TRUE(partial.prepare({0, 1, 2}));
  ASSERT_EQ(partial.flats().size(), 2);
  const auto& [row, pieces, flags] = partial.flats()[0];
  EXPECT_EQ(pieces.size(), 2);
  EXPECT_EQ(pieces[1].column, 64);
  EXPECT_EQ(flags, 64 + 128);
  EXPECT_EQ(row.numel(), 64 + 128 + 2);
  EXPECT_EQ(live(), 4 * (64 + 128 + 2) + 2 * (64 + 1));
  EXPECT_EQ(partial.bytes_of({0, 1, 2}), live());
  EXPECT_FALSE(partial.prepare({0, 1, 2}));
}

TEST_F(PartialGradientsTest, AddsPartsOfChunksFromNegativeZeroOn) {
  partial.prepare({0, 1});
  const auto row = partial.flats()[0].row;
  EXPECT_TRUE(at::signbit(row).all().item<bool>());
  // Elements [2, 6) of parameter 1, at column 64 of a chunk.
  auto chunk = at::arange(128, at::kFloat);
  partial.add({{1, 2, 6, 64}}, chunk);
  partial.add({{1, 2, 6, 64}}, chunk);
  EXPECT_TRUE(
      row.slice(0, 64 + 2, 64 + 6).equal(2 * at::arange(64, 68, at::kFloat)));
  EXPECT_EQ(at::count_nonzero(row).item<std::int64_t>(), 4);
}

TEST_F(PartialGradientsTest, FlagsFollowTheirParameters) {
  partial.prepare({0, 1});
  partial.add_flags({1}, at::tensor({0.0F, 3.0F}));
  const auto& [row, pieces, flags] = partial.flats()[0];
  EXPECT_EQ(row[flags].item<float>(), 0);
  EXPECT_EQ(row[flags + 1].item<float>(), 3);
}

TEST_F(PartialGradientsTest, WhatIsReadIsThereAgainWhenItIsAdded) {
  partial.prepare({0, 1});
  partial.add({whole(1, 70, 64)}, at::arange(192, at::kFloat));
  partial.add_flags({1}, at::tensor({0.0F, 3.0F}));
  const auto read = partial.read(1);
  EXPECT_EQ(read.numel(), 70 + 1);
  EXPECT_EQ(read[0].item<float>(), 64);
  EXPECT_EQ(read[70].item<float>(), 3);
  partial.drop();
  partial.prepare({0, 1});
  partial.add(1, read);
  EXPECT_TRUE(partial.read(1).equal(read));
  EXPECT_EQ(at::count_nonzero(partial.read(0)).item<std::int64_t>(), 0);
}

TEST_F(PartialGradientsTest, ClearForgetsOneParameterWithItsFlag) {
  partial.prepare({0, 1});
  partial.add({whole(0, 3, 0), whole(1, 70, 64)}, at::ones({192}));
  partial.add_flags({0, 1}, at::ones({2}));
  partial.clear(1);
  const auto& [row, pieces, flags] = partial.flats()[0];
  EXPECT_EQ(row.sum().item<float>(), 3 + 1);
  EXPECT_EQ(row[flags + 1].item<float>(), 0);
}

TEST_F(PartialGradientsTest, WhatIsTakenIsTheCallers) {
  partial.prepare({0});
  auto taken = partial.take();
  EXPECT_FALSE(partial.holds(0));
  EXPECT_TRUE(partial.flats().empty());
  EXPECT_GT(live(), 0);
  taken.clear();
  EXPECT_EQ(live(), 0);
  EXPECT_TRUE(partial.prepare({0}));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
