#include "shard/gradients/sharded_gradients.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <stdexcept>

#include "testing/scripted_runtime.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using memory::Category;
using testing::ElementsAre;
using testing::IsEmpty;

// Three parameters on the rank that holds the last rows: [2, 3] of [3, 3]
// padded rows, one without rows here, and [1].
class ShardedGradientsTest : public testing::Test {
 protected:
  ShardedGradientsTest() {
    add({2, 3}, 9, at::kFloat);
    add({0, 4}, 4, at::kFloat);
    add({1}, 1, at::kBFloat16);
    gradients_.set_parameters(parameters_);
  }

  void add(std::vector<std::int64_t> sizes, std::int64_t shard_numel,
           at::ScalarType dtype) {
    const at::Tensor shard = at::zeros(sizes, dtype).set_requires_grad(true);
    const auto numel = shard.numel();
    parameters_.push_back({.shard = shard,
                           .local_sizes = std::move(sizes),
                           .local_numel = numel,
                           .shard_numel = shard_numel,
                           .shard_offset = shard_offset_,
                           .dtype = dtype});
    shard_offset_ += shard_numel * shard.element_size();
  }

  const at::Tensor& grad(std::size_t i) const {
    return parameters_[i].shard.grad();
  }

  // A row of a chunk with the pieces of parameter 0 and 2.
  void land(float zero, float two) {
    at::Tensor row = at::full({128}, NAN);
    row.narrow(0, 0, 9).fill_(zero);
    row.narrow(0, 64, 1).fill_(two);
    runtime_->adopt(row.const_data_ptr(), row.nbytes(), "row");
    gradients_.land({{0, 0, 9, 0}, {2, 0, 1, 64}}, row);
    runtime_->forget(row.const_data_ptr());
  }

  void publish(const std::vector<std::int32_t>& used) {
    gradients_.publish(used,
                       [](const auto&, const auto& locals) { return locals; });
  }

  std::int64_t live() const {
    return ledger_
        ->live()[static_cast<std::size_t>(Category::sharded_gradients)];
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  std::int64_t shard_offset_ = 0;
  std::vector<ShardedGradients::Parameter> parameters_;
  ShardedGradients gradients_{std::make_shared<const std::string>("layers.0"),
                              memory_};
  const std::vector<std::int32_t> all_ = {0, 1, 2};
  // 9, 4 and 1 elements, each rounded up to 16.
  static constexpr std::int64_t kGeneration = 16 * 4 + 16 * 4 + 16 * 2;
};

TEST_F(ShardedGradientsTest, ResultsBecomeGradOfTheShardsShape) {
  gradients_.prepare(all_);
  EXPECT_TRUE(gradients_.prepared());
  EXPECT_EQ(live(), kGeneration);
  EXPECT_EQ(gradients_.generation_bytes(all_), kGeneration);
  land(3, 5);
  EXPECT_FALSE(grad(0).defined());  // not before publish
  publish(all_);
  EXPECT_FALSE(gradients_.prepared());
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 3.f)));
  EXPECT_EQ(grad(1).sizes(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_TRUE(grad(2).equal(at::full({1}, 5.f, at::kBFloat16)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

// Whatever the order in which they are expected and come.
TEST_F(ShardedGradientsTest, GradientsFollowEachOtherAsShardsDo) {
  const auto addresses = [&](const std::vector<std::int32_t>& expected) {
    gradients_.prepare(expected);
    publish(all_);
    std::vector<std::ptrdiff_t> from_first;
    for (const auto i : {0U, 2U}) {  // 1 has no rows here
      from_first.push_back(static_cast<const char*>(grad(i).const_data_ptr()) -
                           static_cast<const char*>(grad(0).const_data_ptr()));
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      parameters_[i].shard.mutable_grad().reset();
    }
    return from_first;
  };
  const auto as_shards = ElementsAre(0, 16 * 4 + 16 * 4);
  EXPECT_THAT(addresses({0, 1, 2}), as_shards);
  EXPECT_THAT(addresses({2, 0, 1}), as_shards);
}

TEST_F(ShardedGradientsTest, AStripLandsWhereItBelongsWithoutItsPadding) {
  gradients_.prepare(all_);
  land(0, 0);
  at::Tensor row = at::arange(128, at::kFloat);
  runtime_->adopt(row.const_data_ptr(), row.nbytes(), "row");
  gradients_.land({{0, 4, 9, 64}}, row);  // columns 6, 7, 8 are padding
  publish({0});
  EXPECT_TRUE(
      grad(0).view({-1}).equal(at::tensor({0.f, 0.f, 0.f, 0.f, 64.f, 65.f})));
}

// A sum over replicas has a piece of it all the same.
TEST_F(ShardedGradientsTest, WithoutElementsThereIsNothingToLandIn) {
  add({0, 4}, 0, at::kFloat);
  gradients_.set_parameters(parameters_);
  gradients_.prepare({3});
  EXPECT_EQ(live(), 0);
  const at::Tensor row = at::zeros({128});
  runtime_->adopt(row.const_data_ptr(), row.nbytes(), "row");
  gradients_.land({{3, 0, 0, 0}}, row);
  publish({3});
  EXPECT_EQ(grad(3).sizes(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(ShardedGradientsTest, ALaterBackwardAddsInPlace) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  const at::Tensor first = grad(0);
  gradients_.prepare(all_);
  EXPECT_EQ(live(), kGeneration);  // nothing new
  land(1, 2);
  publish(all_);
  EXPECT_TRUE(grad(0).is_same(first));
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 4.f)));
  EXPECT_TRUE(grad(2).equal(at::full({1}, 7.f, at::kBFloat16)));
}

// Half a unit in the last place of 1 and a little: rounded by itself it is half
// a unit, and the sum goes to the even neighbour.
TEST_F(ShardedGradientsTest, AResultIsRoundedBeforeItIsAdded) {
  for (const float two : {1.0F, 0x1.004p-8F}) {
    gradients_.prepare({0, 2});
    land(0, two);
    publish({0, 2});
  }
  EXPECT_EQ(grad(2).item<float>(), 1.0F);
}

TEST_F(ShardedGradientsTest, OnlyTheMissingOnesGetANewGeneration) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  parameters_[2].shard.mutable_grad().reset();
  gradients_.prepare(all_);
  EXPECT_EQ(live(), kGeneration + 16 * 2);
  land(1, 2);
  publish(all_);
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 4.f)));
  EXPECT_TRUE(grad(2).equal(at::full({1}, 2.f, at::kBFloat16)));
}

TEST_F(ShardedGradientsTest, BytesGoWithTheLastGradient) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  parameters_[0].shard.mutable_grad().reset();
  parameters_[1].shard.mutable_grad().reset();
  EXPECT_EQ(live(), kGeneration);
  parameters_[2].shard.mutable_grad().reset();
  EXPECT_EQ(live(), 0);
}

TEST_F(ShardedGradientsTest, WhatAUserKeptIsNeverWrittenAgain) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  const at::Tensor kept = grad(0);
  parameters_[0].shard.mutable_grad().reset();
  gradients_.prepare(all_);
  land(1, 2);
  publish(all_);
  EXPECT_TRUE(kept.equal(at::full({2, 3}, 3.f)));
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 1.f)));
}

TEST_F(ShardedGradientsTest, AGradientTheUserAssignedIsAddedTo) {
  const at::Tensor own = at::full({2, 3}, 10.f);
  parameters_[0].shard.mutable_grad() = own;
  gradients_.prepare(all_);
  land(3, 5);
  EXPECT_TRUE(own.equal(at::full({2, 3}, 10.f)));
  publish(all_);
  EXPECT_TRUE(grad(0).is_same(own));
  EXPECT_TRUE(own.equal(at::full({2, 3}, 13.f)));
}

TEST_F(ShardedGradientsTest, AGradientThatWasSwappedOutIsNotOurs) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  // As after unpickling or an optimizer that replaces gradients.
  parameters_[0].shard.mutable_grad() = grad(0) * 2;
  gradients_.prepare(all_);
  land(1, 2);
  publish(all_);
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 7.f)));
}

TEST_F(ShardedGradientsTest, WhatNoRankUsedStaysWithoutGradient) {
  gradients_.prepare(all_);
  land(3, 5);
  publish({2});
  EXPECT_FALSE(grad(0).defined());
  EXPECT_FALSE(grad(1).defined());
  EXPECT_TRUE(grad(2).defined());
}

TEST_F(ShardedGradientsTest, NegativeZeroAddedToAGradientChangesNothing) {
  gradients_.prepare(all_);
  land(-0.0f, 5);
  publish(all_);
  gradients_.prepare(all_);
  land(-0.0f, -0.0f);
  publish(all_);
  EXPECT_TRUE(std::signbit(grad(0)[0][0].item<float>()));
  EXPECT_EQ(grad(2).item<float>(), 5);
}

TEST_F(ShardedGradientsTest, WrapMakesWhatBecomesGrad) {
  gradients_.prepare(all_);
  land(3, 5);
  std::vector<std::int32_t> wrapped;
  at::Tensor made;
  gradients_.publish({0, 2}, [&](const auto& parameters, const auto& locals) {
    wrapped = parameters;
    auto tensors = locals;
    made = tensors[0] = locals[0].view_as(locals[0]);
    return tensors;
  });
  EXPECT_THAT(wrapped, ElementsAre(0, 2));
  EXPECT_TRUE(grad(0).is_same(made));
}

class RecordHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit RecordHook(std::vector<float>& seen) : seen_(seen) {}
  void operator()(const at::Tensor& shard) override {
    seen_.push_back(shard.grad().defined() ? shard.grad().max().item<float>()
                                           : -1);
  }

 private:
  std::vector<float>& seen_;
};

TEST_F(ShardedGradientsTest, HooksOfUsedParametersRunOnceAllGradsAreSet) {
  std::vector<float> seen;
  for (const auto i : {0, 2}) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameters_[i].shard, std::make_unique<RecordHook>(seen));
  }
  gradients_.prepare(all_);
  land(3, 5);
  publish({2});
  EXPECT_THAT(seen, ElementsAre(5));
  gradients_.prepare(all_);
  land(3, 1);
  publish({0, 2});
  EXPECT_THAT(seen, ElementsAre(5, 3, 6));
}

TEST_F(ShardedGradientsTest, AbortDropsEveryGradient) {
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  gradients_.prepare({0});
  gradients_.abort();
  EXPECT_FALSE(gradients_.prepared());
  EXPECT_FALSE(grad(0).defined());
  EXPECT_EQ(live(), 0);
  gradients_.prepare(all_);
  land(1, 2);
  publish(all_);
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 1.f)));
}

TEST_F(ShardedGradientsTest, AFailingLeaseIsPreparedForAgain) {
  memory_->fail_next_lease(Category::sharded_gradients, "layers.0");
  EXPECT_THROW(gradients_.prepare(all_), c10::OutOfMemoryError);
  EXPECT_FALSE(gradients_.prepared());
  gradients_.prepare(all_);
  land(3, 5);
  publish(all_);
  EXPECT_TRUE(grad(0).equal(at::full({2, 3}, 3.f)));
}

TEST_F(ShardedGradientsTest, AFailingWrapLeavesNoGradient) {
  gradients_.prepare(all_);
  land(3, 5);
  EXPECT_THROW(gradients_.publish(
                   all_,
                   [](const auto&, const auto&) -> std::vector<at::Tensor> {
                     throw std::runtime_error("no DTensor");
                   }),
               std::runtime_error);
  EXPECT_FALSE(grad(0).defined());
  gradients_.abort();
  EXPECT_EQ(live(), 0);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
