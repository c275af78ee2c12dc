#include "shard/graph/forward_calls.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <set>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

struct InputsNode final : torch::autograd::Node {
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

constexpr std::int64_t kSteps = 3;  // of the optimizer

class ForwardCallsTest : public ::testing::Test {
 protected:
  // A forward of the unit whose inputs require grad.
  NodePtr call() {
    calls_.begin_forward();
    EXPECT_TRUE(calls_.enter(/*grad_mode=*/true, /*inside_recorded=*/true));
    auto node = base::make_node<InputsNode>();
    calls_.watch(node);
    return node;
  }
  // `node` has run in a backward that reaches `reached`.
  bool complete(const NodePtr& node, const std::set<NodePtr>& reached = {},
                bool nested = false) {
    return calls_.complete(node.get(), nested, [&](const auto* other) {
      return std::any_of(
          reached.begin(), reached.end(),
          [&](const NodePtr& one) { return one.get() == other; });
    });
  }

  ForwardCalls calls_;
};

TEST_F(ForwardCallsTest, OneCallIsOverWhenItsInputsAre) {
  const auto node = call();
  calls_.begin_backward();
  EXPECT_TRUE(complete(node));
}

TEST_F(ForwardCallsTest, WaitsForEveryCallThatThisBackwardReaches) {
  const auto first = call();
  const auto second = call();
  calls_.begin_backward();
  EXPECT_FALSE(complete(second, {first, second}));
  EXPECT_TRUE(complete(first, {first, second}));
}

TEST_F(ForwardCallsTest, IgnoresCallsOfAnotherBackwardAndOfDeadGraphs) {
  const auto other = call();
  auto dead = call();
  const auto node = call();
  dead.reset();
  calls_.begin_backward();
  EXPECT_TRUE(complete(node, {node}));
}

// An output's gradient comes once for every output of a call.
TEST_F(ForwardCallsTest, ACallsBackwardBeginsOnce) {
  const auto node = call();
  calls_.begin_backward();
  EXPECT_FALSE(calls_.inside_backward());
  EXPECT_TRUE(calls_.enter_backward(1));
  EXPECT_FALSE(calls_.enter_backward(1));
  EXPECT_TRUE(calls_.enter_backward(2));
  EXPECT_TRUE(calls_.inside_backward());
  EXPECT_TRUE(complete(node));
  EXPECT_FALSE(calls_.inside_backward());
  EXPECT_FALSE(calls_.enter_backward(2));
  calls_.begin_backward();
  EXPECT_TRUE(calls_.enter_backward(2));
}

// What a recorded backward gave has no number: it begins where nothing has.
TEST_F(ForwardCallsTest, ARecordedCallBeginsWhereNoneIsUnderWay) {
  constexpr auto kRecorded = BackwardReceiver::kRecorded;
  const auto node = call();
  calls_.begin_backward();
  EXPECT_TRUE(calls_.enter_backward(kRecorded));
  EXPECT_FALSE(calls_.enter_backward(kRecorded));
  complete(node);
  EXPECT_TRUE(calls_.enter_backward(kRecorded));
  calls_.end_backward(/*more_backwards=*/false, /*graph_kept=*/false, kSteps);
  EXPECT_FALSE(calls_.inside_backward());
}

TEST_F(ForwardCallsTest, OnlyTheFirstModuleOfAForwardIsWatched) {
  calls_.begin_forward();
  EXPECT_TRUE(calls_.enter(true, true));
  EXPECT_FALSE(calls_.enter(true, true));
  calls_.begin_forward();
  EXPECT_TRUE(calls_.enter(true, true));
}

TEST_F(ForwardCallsTest, ACallWithoutInputsToWatchLastsUntilTheEnd) {
  const auto node = call();
  calls_.begin_forward();
  EXPECT_TRUE(calls_.enter(true, true));  // nothing requires grad
  calls_.begin_backward();
  EXPECT_FALSE(complete(node, {node}));
  calls_.end_backward(/*more_backwards=*/false, /*graph_kept=*/false, kSteps);
  const auto next = call();
  EXPECT_TRUE(complete(next, {next}));
}

TEST_F(ForwardCallsTest, ACallWithoutInputsOnAnotherRankLastsUntilTheEndHere) {
  const auto node = call();
  calls_.agree_on_calls_without_inputs(/*on_any=*/true);
  calls_.begin_backward();
  EXPECT_FALSE(complete(node, {node}));
}

TEST_F(ForwardCallsTest, AKeptGraphWithoutInputsCountsUntilTheOptimizerSteps) {
  calls_.begin_forward();
  EXPECT_TRUE(calls_.enter(true, true));  // nothing requires grad
  EXPECT_TRUE(calls_.has_calls_without_inputs(kSteps));
  calls_.end_backward(/*more_backwards=*/false, /*graph_kept=*/true, kSteps);
  EXPECT_TRUE(calls_.has_calls_without_inputs(kSteps));
  EXPECT_FALSE(calls_.has_calls_without_inputs(kSteps + 1));
}

TEST_F(ForwardCallsTest, AReentrantCallIsOverWithItsNestedBackward) {
  calls_.begin_forward();
  EXPECT_FALSE(calls_.enter(/*grad_mode=*/false, /*inside_recorded=*/true));
  calls_.begin_forward();
  EXPECT_FALSE(calls_.enter(false, true));
  calls_.begin_backward();
  const auto recomputed = base::make_node<InputsNode>();
  EXPECT_FALSE(complete(recomputed, {}, /*nested=*/true));
  EXPECT_TRUE(complete(base::make_node<InputsNode>(), {}, /*nested=*/true));
}

TEST_F(ForwardCallsTest, CallsOfAKeptGraphComeAgain) {
  const auto first = call();
  const auto second = call();
  calls_.begin_backward();
  EXPECT_FALSE(complete(second, {first, second}));
  EXPECT_TRUE(complete(first, {first, second}));
  calls_.end_backward(/*more_backwards=*/false, /*graph_kept=*/true, kSteps);
  calls_.begin_backward();
  EXPECT_FALSE(complete(second, {first, second}));
  EXPECT_TRUE(complete(first, {first, second}));
  EXPECT_EQ(calls_.graphs().own().kept, 1);
}

TEST_F(ForwardCallsTest, ARecordedBackwardLastsUntilTheEnd) {
  const auto node = call();
  const auto given = base::make_node<InputsNode>();
  calls_.graphs().record(given);
  calls_.begin_backward();
  EXPECT_FALSE(complete(node, {node}));
}

TEST_F(ForwardCallsTest, NothingWaitsAfterAnAbort) {
  const auto open = call();
  calls_.begin_forward();
  calls_.enter(true, true);
  calls_.clear();
  const auto node = call();
  calls_.begin_backward();
  EXPECT_TRUE(complete(node, {open, node}));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
