#include "shard/graph/written_gradients.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

// What a unit's backward would tell.
class Unit final : public BackwardReceiver {
 public:
  void on_output_gradient(std::int64_t /*call*/) override {}
  void on_parameter_gradient(std::int32_t, at::Tensor) override {}
  void on_inputs_done(const torch::autograd::Node*) override {
    written.inputs_done();
  }
  void on_gradient_returned(std::int32_t i) override { written.returned(i); }

  WrittenGradients written;
};

class WrittenGradientsTest : public testing::Test {
 protected:
  WrittenGradientsTest() { unit_->written.watch(weights_, nodes_); }

  at::Tensor forward() {
    const auto watched = watch_inputs({x_}, unit_);
    return (watched.tensors[0] * weights_[0] * weights_[1]).sum();
  }
  // The backward of the input, and that of these weights.
  void input(const at::Tensor& y) {
    torch::autograd::grad({y}, {x_}, {}, /*retain_graph=*/true);
  }
  void weight(const at::Tensor& y, std::size_t i) {
    torch::autograd::grad({y}, {weights_[i]}, {}, /*retain_graph=*/true);
  }
  std::int32_t missing() { return unit_->written.take_missing(); }

  std::shared_ptr<Unit> unit_ = std::make_shared<Unit>();
  const at::Tensor x_ = at::ones({2}).set_requires_grad(true);
  const std::vector<at::Tensor> weights_ = {
      at::ones({2}).set_requires_grad(true),
      at::ones({2}).set_requires_grad(true)};
  const std::vector<NodePtr> nodes_ = {
      install_gradient_node(weights_[0], unit_, 0),
      install_gradient_node(weights_[1], unit_, 1)};
};

TEST_F(WrittenGradientsTest, TakesWhatOthersWrite) {
  EXPECT_FALSE(unit_->written.take(1).defined());
  weights_[1].mutable_grad() = at::full({2}, 4.f);
  EXPECT_TRUE(unit_->written.any(1));
  EXPECT_TRUE(unit_->written.take(1).equal(at::full({2}, 4.f)));
  EXPECT_FALSE(weights_[1].grad().defined());
  EXPECT_FALSE(unit_->written.any(1));
}

TEST_F(WrittenGradientsTest, AWholeBackwardLeavesNothingOut) {
  forward().backward();
  EXPECT_EQ(missing(), -1);
}

TEST_F(WrittenGradientsTest, WhatIsLeftOutHasToBeReturned) {
  const auto first = forward();
  const auto second = forward();
  input(first);
  input(second);
  weight(first, 0);
  weight(first, 1);
  weight(second, 0);
  EXPECT_EQ(missing(), 1);
  EXPECT_EQ(missing(), -1);
}

TEST_F(WrittenGradientsTest, InAnyOrder) {
  const auto first = forward();
  const auto second = forward();
  input(first);
  weight(first, 1);
  input(second);
  weight(first, 0);
  weight(second, 0);
  weight(second, 1);
  EXPECT_EQ(missing(), -1);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
