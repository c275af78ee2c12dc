#include "shard/graph/held_graphs.h"

#include <gtest/gtest.h>

#include <torch/csrc/autograd/functions/basic_ops.h>
#include <algorithm>
#include <memory>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

NodePtr node() { return base::make_node<torch::autograd::Identity>(); }

// Compares over two ranks.
void compare(HeldGraphs& one, HeldGraphs& other) {
  const auto a = one.own();
  const auto b = other.own();
  const HeldGraphs::Kinds greatest{std::max(a.kept, b.kept),
                                   std::max(a.recorded, b.recorded)};
  one.agree_on(greatest);
  other.agree_on(greatest);
}

TEST(HeldGraphsTest, AGraphIsThereUntilNoRankHoldsIt) {
  HeldGraphs one;
  HeldGraphs other;
  auto on_one = node();
  {
    const auto on_other = node();
    one.record(on_one);
    other.record(on_other);
    one.keep({on_one});
    other.keep({on_other});
  }
  other.forget_expired();
  compare(one, other);
  EXPECT_TRUE(other.recorded());
  EXPECT_TRUE(other.kept());
  on_one.reset();
  EXPECT_TRUE(one.recorded());  // until the ranks have compared
  compare(one, other);
  for (const auto* rank : {&one, &other}) {
    EXPECT_FALSE(rank->recorded());
    EXPECT_FALSE(rank->kept());
  }
}

TEST(HeldGraphsTest, WhatIsRecordedDuringAComparisonIsNotLost) {
  HeldGraphs graphs;
  const auto held = graphs.own();
  const auto result = node();
  graphs.record(result);
  graphs.agree_on(held);
  EXPECT_TRUE(graphs.recorded());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
