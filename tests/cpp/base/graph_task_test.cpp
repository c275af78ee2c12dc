#include "base/graph_task.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace lowtide::base {
namespace LOWTIDE_FILE {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class GraphTaskTest : public ::testing::Test {
 protected:
  // Runs `action` in a backward, between its two nodes.
  void backward_with(const std::function<void()>& action) {
    y_ = x_ * 2;
    y_.register_hook([&](const at::Tensor& gradient) {
      action();
      return gradient;
    });
    y_.sum().backward();
  }

  const at::Tensor x_ = at::ones({2}).set_requires_grad(true);
  at::Tensor y_;
  std::vector<std::string> events_;
};

TEST_F(GraphTaskTest, TellsWhetherABackwardRuns) {
  EXPECT_FALSE(in_backward());
  EXPECT_EQ(current_graph_task(), -1);
  backward_with([&] {
    EXPECT_TRUE(in_backward());
    EXPECT_TRUE(in_graph_task(y_.grad_fn().get()));
    EXPECT_FALSE(in_graph_task((x_ * 3).grad_fn().get()));
    EXPECT_FALSE(graph_task_keeps_graph());
  });
  EXPECT_FALSE(in_backward());
  EXPECT_FALSE(in_graph_task(y_.grad_fn().get()));
}

TEST_F(GraphTaskTest, TellsWhatIsAskedOfANode) {
  const auto a = at::ones({2}).set_requires_grad(true);
  const auto of_a = a * 1;
  const auto y = (of_a * x_).sum();
  std::vector<NodeUse> seen;
  y.register_hook([&](const at::Tensor& gradient) {
    seen.push_back(use_in_graph_task(of_a.grad_fn().get()));
    return gradient;
  });
  y.backward({}, /*retain_graph=*/true);
  torch::autograd::grad({y}, {x_}, {}, /*retain_graph=*/true);
  torch::autograd::grad({y}, {of_a}, {}, /*retain_graph=*/true);
  torch::autograd::grad({y}, {a});
  EXPECT_THAT(seen, ElementsAre(NodeUse::runs, NodeUse::unwanted,
                                NodeUse::returned, NodeUse::runs));
}

TEST_F(GraphTaskTest, CallsAtTheEndAndWhenTheTaskIsGone) {
  backward_with([&] {
    at_end_of_graph_task([&] { events_.emplace_back("end"); },
                         [&] { events_.emplace_back("raised"); });
    when_graph_task_is_gone([&] { events_.emplace_back("gone"); });
    EXPECT_THAT(events_, IsEmpty());
  });
  EXPECT_THAT(events_, ElementsAre("end", "gone"));
}

TEST_F(GraphTaskTest, ABackwardThatRaisesHasNoEndButIsGone) {
  EXPECT_THROW(backward_with([&] {
                 at_end_of_graph_task([&] { events_.emplace_back("end"); },
                                      [&] { events_.emplace_back("raised"); });
                 when_graph_task_is_gone([&] { events_.emplace_back("gone"); });
                 throw std::runtime_error("a node");
               }),
               std::runtime_error);
  EXPECT_THAT(events_, ElementsAre("raised", "gone"));
}

TEST_F(GraphTaskTest, AnEndThatRaisesFailsTheBackward) {
  EXPECT_THROW(backward_with([&] {
                 at_end_of_graph_task(
                     [] { throw std::runtime_error("the end"); },
                     [&] { events_.emplace_back("raised"); });
               }),
               std::runtime_error);
  EXPECT_THAT(events_, ElementsAre("raised"));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::base
