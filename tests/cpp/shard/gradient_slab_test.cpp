#include "shard/gradients/gradient_slab.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "shard/gradients/gradient_plan.h"
#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using memory::Category;
using testing::ElementsAre;
using testing::IsEmpty;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.view(at::kByte).equal(b.view(at::kByte));
}

// Over 2 ranks: [3, 5] (padded to 4 rows), a frozen one, [0, 4] and [1].
class GradientSlabTest : public testing::Test {
 protected:
  GradientSlab slab(at::ScalarType dtype = at::kFloat) {
    return {std::make_shared<const std::string>("layers.0"),
            dtype,
            2,
            {10, 4, 0, 1},
            {15, 8, 0, 1},
            members_,
            memory_};
  }

  std::int64_t live() const {
    return ledger_->live()[static_cast<std::size_t>(Category::gradient_slab)];
  }

  const std::vector<std::int32_t> members_ = {3, 2, 0};
  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  // The gradients a test makes.
  std::unique_ptr<device::AllocationObserver> watch_ =
      runtime_->watch_torch_allocations();
};

TEST_F(GradientSlabTest, WhatIsReadIsAddedAsItWas) {
  GradientSlab from = slab();
  GradientSlab to = slab();
  const auto gradient = at::arange(1, 16, at::kFloat).view({3, 5});
  from.add({{0, gradient}});
  from.add({{0, gradient}});
  const auto read = from.read(0);
  EXPECT_TRUE(read.equal(2 * gradient.view(-1)));
  to.add({{0, read}});
  EXPECT_TRUE(to.read(0).equal(read));
  from.add({{0, gradient}});
  EXPECT_TRUE(read.equal(2 * gradient.view(-1))) << "a copy";
}

TEST_F(GradientSlabTest, TakesBytesAtFirstTouchAndGivesThemBack) {
  GradientSlab slab = this->slab();
  const std::int64_t bytes = 4 * 2 * (128 + 128 + 128);  // 0, 3 and flags
  EXPECT_EQ(slab.bytes(), bytes);
  EXPECT_FALSE(slab.allocated());
  EXPECT_EQ(live(), 0);
  slab.add({{0, at::ones({3, 5})}});
  EXPECT_TRUE(slab.allocated());
  EXPECT_EQ(live(), bytes);
  slab.release_bytes();
  EXPECT_EQ(live(), 0);
  EXPECT_TRUE(slab.touched(0));  // still known: the flags depend on it
  slab.reset();
  EXPECT_FALSE(slab.touched(0));
  EXPECT_EQ(ledger_->num_leases(Category::gradient_slab), 1);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(GradientSlabTest, ASumIsRoundedAsIfAddedInANarrowerDtype) {
  GradientSlab slab = this->slab();
  const auto a = at::randn({3, 5}).to(at::kBFloat16);
  const auto b = at::randn({3, 5}).to(at::kBFloat16);
  slab.add({{0, a}});
  slab.add({{0, b}});
  EXPECT_FALSE(slab.read(0).equal((a + b).to(at::kFloat).view(-1)));
  slab.round_sum(0, at::kBFloat16);
  EXPECT_TRUE(slab.read(0).equal((a + b).to(at::kFloat).view(-1)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(GradientSlabTest, ColumnsAreMultiplesOf128) {
  const GradientSlab slab = this->slab();
  EXPECT_EQ(slab.columns(0), kChunkColumnMultiple);
  EXPECT_EQ(slab.columns(1), 0);  // frozen
  EXPECT_EQ(slab.columns(2), 0);  // no elements
  EXPECT_EQ(slab.columns(3), kChunkColumnMultiple);
  EXPECT_EQ(slab.flag_columns(), kChunkColumnMultiple);
}

TEST_F(GradientSlabTest, FirstTouchCopiesLaterOnesAddInTheWiresDtype) {
  GradientSlab slab = this->slab();
  at::Tensor expected;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor gradient = at::randn({3, 5}).to(at::kBFloat16);
    slab.add({{0, gradient}});
    const at::Tensor as_float = gradient.to(at::kFloat);
    expected = i == 0 ? as_float : expected + as_float;
  }
  slab.complete(members_);
  const auto inputs = slab.inputs(members_);
  ASSERT_EQ(inputs.size(), 3u);  // 3, 0, flags: 2 has no columns
  const at::Tensor rows = inputs[1].view({2, 128});
  EXPECT_TRUE(same_bits(rows[0].narrow(0, 0, 10),
                        expected.view({-1}).narrow(0, 0, 10)));
  EXPECT_TRUE(
      same_bits(rows[1].narrow(0, 0, 5), expected.view({-1}).narrow(0, 10, 5)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(GradientSlabTest, KeepsWhatAWideSumRoundsAwayAndNegativeZero) {
  GradientSlab slab = this->slab();
  // bf16 has 8 bits: 256 + 1 is 256 there.
  for (const float value : {256.f, 1.f, -256.f}) {
    slab.add({{3, at::full({1}, value, at::kBFloat16)}});
  }
  slab.add({{0, at::full({3, 5}, -0.0)}});
  slab.add({{0, at::full({3, 5}, -0.0)}});
  slab.complete(members_);
  const auto inputs = slab.inputs(members_);
  EXPECT_EQ(inputs[0][0].item<float>(), 1);
  EXPECT_TRUE(std::signbit(inputs[1][0].item<float>()));
}

TEST_F(GradientSlabTest, WhatNobodyTouchedLeavesAsNeutralAndFlagged) {
  GradientSlab slab = this->slab();
  slab.add({{3, at::full({1}, 7.f)}});
  slab.complete(members_);
  const auto inputs = slab.inputs(members_);
  EXPECT_TRUE(same_bits(inputs[1], at::full({2 * 128}, -0.0)));
  const at::Tensor flags = inputs[2].view({2, 128});
  for (int row = 0; row < 2; ++row) {
    EXPECT_EQ(flags[row][0].item<float>(), 0);
    EXPECT_EQ(flags[row][2].item<float>(), 0);
    EXPECT_EQ(flags[row][3].item<float>(), 1);
  }
}

TEST_F(GradientSlabTest, CompletesWithoutAnyTouch) {
  GradientSlab slab = this->slab();
  slab.complete(members_);
  EXPECT_EQ(live(), slab.bytes());
  const auto inputs = slab.inputs(members_);
  EXPECT_TRUE(same_bits(inputs[0], at::full({2 * 128}, -0.0)));
  EXPECT_TRUE(same_bits(inputs[1], at::full({2 * 128}, -0.0)));
  for (const auto i : members_) {
    EXPECT_EQ(inputs[2][i].item<float>(), 0);
  }
}

TEST_F(GradientSlabTest, ASecondRoundStartsFromNothing) {
  GradientSlab slab = this->slab();
  slab.add({{3, at::full({1}, 5.f)}});
  slab.reset();
  slab.add({{3, at::full({1}, 2.f)}});
  slab.complete(members_);
  EXPECT_EQ(slab.inputs(members_)[0][0].item<float>(), 2);
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(GradientSlabTest, CanSumInTheComputeDtype) {
  GradientSlab slab = this->slab(at::kBFloat16);
  EXPECT_EQ(slab.bytes(), 2 * 2 * (128 + 128 + 128));
  for (const float value : {256.f, 1.f, -256.f}) {
    slab.add({{3, at::full({1}, value, at::kBFloat16)}});
  }
  slab.complete(members_);
  EXPECT_EQ(slab.inputs(members_)[0][0].item<float>(), 0);
}

TEST_F(GradientSlabTest, ADroppedParameterBeginsAgain) {
  auto slab = this->slab();
  slab.add({{0, at::full({3, 5}, 2.f)}});
  slab.add({{3, at::full({1}, 3.f)}});
  slab.drop(0);
  EXPECT_FALSE(slab.touched(0));
  EXPECT_TRUE(slab.touched(3));
  EXPECT_TRUE(slab.allocated());
  slab.add({{0, at::full({3, 5}, 7.f)}});
  slab.complete(members_);
  EXPECT_TRUE(slab.whole(0, 5).narrow(0, 0, 2).equal(at::full({2, 5}, 7.f)));
  slab.drop(0);
  slab.drop(3);
  EXPECT_EQ(live(), 0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
