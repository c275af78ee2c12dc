#include "shard/graph/autograd_nodes.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "base/check.h"
#include "base/graph_task.h"
#include "reentrant.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

class Recorder final : public BackwardReceiver {
 public:
  void on_output_gradient(std::int64_t call) override {
    events.emplace_back("output of " + std::to_string(call));
  }
  void on_parameter_gradient(std::int32_t i, at::Tensor gradient) override {
    events.push_back(base::concat("parameter ", i));
    gradients.push_back(std::move(gradient));
  }
  void on_inputs_done(const torch::autograd::Node* node) override {
    events.emplace_back("inputs");
    nodes.push_back(node);
  }
  void on_gradient_returned(std::int32_t i) override {
    events.push_back(base::concat("returned ", i));
  }
  void on_recorded_backward(WeakNodePtr result) override {
    events.emplace_back("recorded");
    results.push_back(std::move(result));
  }

  std::vector<std::string> events;
  std::vector<at::Tensor> gradients;
  std::vector<const torch::autograd::Node*> nodes;
  std::vector<WeakNodePtr> results;
};

class AutogradNodesTest : public testing::Test {
 protected:
  std::shared_ptr<Recorder> recorder_ = std::make_shared<Recorder>();
  at::Tensor weight_ = at::full({2, 2}, 3.f).set_requires_grad(true);
  at::Tensor bias_ = at::full({2}, 1.f).set_requires_grad(true);
  std::vector<NodePtr> nodes_ = {install_gradient_node(weight_, recorder_, 0),
                                 install_gradient_node(bias_, recorder_, 1)};

  at::Tensor forward(const at::Tensor& x) const {
    return x.mm(weight_) + bias_;
  }
};

TEST_F(AutogradNodesTest, GradientsGoToTheReceiverInsteadOfGrad) {
  forward(at::ones({1, 2})).sum().backward();
  EXPECT_THAT(recorder_->events, ElementsAre("parameter 1", "parameter 0"));
  EXPECT_FALSE(weight_.grad().defined());
  EXPECT_TRUE(recorder_->gradients[0].equal(at::ones({2})));
  EXPECT_TRUE(recorder_->gradients[1].equal(at::ones({2, 2})));
}

TEST_F(AutogradNodesTest, SeveralUsesGiveOneGradient) {
  const at::Tensor x = at::ones({1, 2});
  forward(forward(x)).sum().backward();
  EXPECT_EQ(recorder_->events.size(), 2u);
}

TEST_F(AutogradNodesTest, HooksOfTheParameterRunFirst) {
  weight_.register_hook(
      [](const at::Tensor& gradient) { return gradient * 7; });
  forward(at::ones({1, 2})).sum().backward();
  EXPECT_TRUE(recorder_->gradients[1].equal(at::full({2, 2}, 7.f)));
}

TEST_F(AutogradNodesTest, AGradientRunsBeforeOtherReadyNodes) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const auto watched = watch_inputs({x}, recorder_);
  forward(watched.tensors[0]).sum().backward();
  EXPECT_THAT(recorder_->events,
              ElementsAre("parameter 1", "parameter 0", "inputs"));
  EXPECT_EQ(recorder_->nodes[0], watched.node.lock().get());
  EXPECT_TRUE(x.grad().equal(at::full({1, 2}, 6.f)));
}

TEST_F(AutogradNodesTest, AnOutputIsSeenBeforeItsProducer) {
  const at::Tensor y = forward(at::ones({1, 2}));
  watch_output(y, recorder_, 7);
  y.sum().backward();
  EXPECT_THAT(recorder_->events,
              ElementsAre("output of 7", "parameter 1", "parameter 0"));
}

TEST_F(AutogradNodesTest, AnOutputThatIsALeafIsSeenToo) {
  const at::Tensor leaf = at::ones({2}).set_requires_grad(true);
  watch_output(leaf, recorder_, 7);
  (leaf * 2).sum().backward();
  EXPECT_THAT(recorder_->events, ElementsAre("output of 7"));
  EXPECT_TRUE(leaf.grad().defined());
}

TEST_F(AutogradNodesTest, AParameterThatContributesNothingFiresUndefined) {
  // A node that gives the weight no gradient.
  class Silent final : public torch::autograd::Node {
    torch::autograd::variable_list apply(
        torch::autograd::variable_list&&) override {
      return {at::Tensor()};
    }
  };
  auto node = base::make_node<Silent>();
  node->set_next_edges(torch::autograd::collect_next_edges(weight_));
  at::Tensor y = at::ones({1});
  torch::autograd::set_history(y, node);
  y.sum().backward();
  EXPECT_THAT(recorder_->events, ElementsAre("parameter 0"));
  EXPECT_FALSE(recorder_->gradients[0].defined());
}

// The parameter holds the node weakly, the node the parameter.
TEST_F(AutogradNodesTest, AParameterIsFreedWithItsNode) {
  at::Tensor weight = at::ones({2}).set_requires_grad(true);
  const c10::weak_intrusive_ptr<c10::TensorImpl> seen(weight.getIntrusivePtr());
  NodePtr node = install_gradient_node(weight, recorder_, 2);
  weight.reset();
  EXPECT_FALSE(seen.expired());
  node.reset();
  EXPECT_TRUE(seen.expired());
}

TEST_F(AutogradNodesTest, AGraphMayOutliveItsReceiver) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const auto watched = watch_inputs({x}, recorder_);
  const at::Tensor y = forward(watched.tensors[0]);
  watch_output(y, recorder_, 7);
  recorder_.reset();
  y.sum().backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST_F(AutogradNodesTest, WatchedInputsAreViewsThatRefuseInPlaceWrites) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true) * 1;
  const auto watched = watch_inputs({x}, recorder_);
  EXPECT_TRUE(watched.tensors[0].is_view());
  EXPECT_EQ(watched.tensors[0].const_data_ptr(), x.const_data_ptr());
  EXPECT_THROW(watched.tensors[0].add_(1), c10::Error);
}

TEST_F(AutogradNodesTest, HigherOrderDerivativesAreRefused) {
  const at::Tensor y = forward(at::ones({1, 2})).sum();
  EXPECT_THAT(
      [&] { y.backward({}, /*retain_graph=*/true, /*create_graph=*/true); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: backward: expected create_graph=False for parameters "
          "sharded by lowtide, got create_graph=True (or a backward inside an "
          "enable_grad context). Take the inner gradient with "
          "torch.autograd.grad(..., create_graph=True), and call backward() "
          "without it.")));
  EXPECT_THAT(recorder_->events, IsEmpty());
}

TEST_F(AutogradNodesTest, AGradientThatIsReturnedRunsTheHooksAndTellsSo) {
  int hooks = 0;
  weight_.register_hook([&](const at::Tensor& gradient) {
    ++hooks;
    return gradient * 2;
  });
  const at::Tensor y = forward(at::ones({1, 2})).sum();
  const auto returned = torch::autograd::grad({y}, {weight_});
  EXPECT_THAT(recorder_->events, ElementsAre("returned 0"));
  EXPECT_TRUE(returned[0].equal(at::full({2, 2}, 2.f)));
  EXPECT_EQ(hooks, 1);
}

TEST_F(AutogradNodesTest, AnInnerGradientIsWatchedAsAnOutput) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const auto watched = watch_inputs({x}, recorder_);
  const at::Tensor y = forward(watched.tensors[0]).square().sum();
  const auto inner = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true)[0];
  EXPECT_THAT(recorder_->events, ElementsAre("recorded", "inputs"));
  EXPECT_EQ(recorder_->results[0].lock(), inner.grad_fn());
  recorder_->events.clear();
  inner.sum().backward();
  EXPECT_EQ(recorder_->events.front(), "output of -1");
  EXPECT_EQ(recorder_->gradients.size(), 2u);
}

TEST_F(AutogradNodesTest, KnowsWhatABackwardLeavesOut) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const at::Tensor y = forward(x);
  std::vector<Obstacle> seen;
  y.register_hook([&](const at::Tensor& gradient) {
    seen.push_back(obstacle_of_inputs(nodes_[0].get()));
    return gradient;
  });
  y.sum().backward({}, /*retain_graph=*/true);
  torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true);
  torch::autograd::grad({y.sum()}, {weight_});
  EXPECT_THAT(seen, ElementsAre(Obstacle::none, Obstacle::unwanted,
                                Obstacle::asked_for));
}

TEST_F(AutogradNodesTest, KnowsWhichBackwardRuns) {
  EXPECT_FALSE(base::in_backward());
  EXPECT_FALSE(base::in_graph_task(nodes_[0].get()));
  std::vector<std::int64_t> outer;
  std::vector<std::int64_t> inner;
  std::vector<bool> takes_part;
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const at::Tensor y = reentrant_checkpoint(
      [&](const at::Tensor& h) {
        const at::Tensor z = forward(h);
        if (z.requires_grad()) {
          z.register_hook([&](const at::Tensor& gradient) {
            inner.push_back(base::current_graph_task());
            takes_part.push_back(base::in_graph_task(nodes_[0].get()));
            return gradient;
          });
        }
        return z;
      },
      x);
  y.register_hook([&](const at::Tensor& gradient) {
    outer.push_back(base::current_graph_task());
    takes_part.push_back(base::in_graph_task(nodes_[0].get()));
    return gradient;
  });
  y.sum().backward();
  ASSERT_EQ(outer.size(), 1u);
  ASSERT_EQ(inner.size(), 1u);
  EXPECT_NE(outer[0], inner[0]);
  EXPECT_THAT(takes_part, ElementsAre(false, true));
  EXPECT_FALSE(base::in_backward());
}

TEST_F(AutogradNodesTest, CallsBackAtTheEndOfBackward) {
  const at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
  const auto watched = watch_inputs({x}, recorder_);
  const at::Tensor y = forward(watched.tensors[0]);
  y.register_hook([&](const at::Tensor& gradient) {
    base::at_end_of_graph_task([&] { recorder_->events.emplace_back("end"); });
    return gradient;
  });
  y.sum().backward();
  EXPECT_THAT(recorder_->events,
              ElementsAre("parameter 1", "parameter 0", "inputs", "end"));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
