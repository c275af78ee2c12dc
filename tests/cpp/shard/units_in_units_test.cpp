// A unit around others, as a block around its experts: gathered ahead with the
// first of them, and gone with its gradients when its own backward is over.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "harness.h"
#include "steps.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;

Scenario three_blocks() {
  return {.units = blocks_around_experts(3, dense(), dense()),
          .program = chain_of_blocks(3)};
}

TEST(UnitsInUnitsTest, ABlockAroundExpertsLeavesWhenItsBackwardIsOver) {
  for_each_step(three_blocks(), [](const Step& step) {
    EXPECT_THAT(
        order_of(step, {"backward blocks.1", "backward blocks.0",
                        "reduce-scatter blocks.2.experts",
                        "reduce-scatter blocks.2", "reduce-scatter blocks.1"}),
        ElementsAre("reduce-scatter blocks.2.experts",
                    "reduce-scatter blocks.2", "backward blocks.1",
                    "reduce-scatter blocks.1", "backward blocks.0"));
    // Nobody waits for that, and what it read goes to the next but one.
    EXPECT_FALSE(step.leads(step.at("reduce-scatter blocks.2"),
                            step.at("backward blocks.1")));
    EXPECT_TRUE(step.leads(step.at("backward end blocks.2"),
                           step.at("all-gather blocks.0.experts", 1)));
  });
}

TEST(UnitsInUnitsTest, ABlockAndItsExpertsAreGatheredAheadTogether) {
  int steps = 0;
  const auto check = [&](const Step& step) {
    EXPECT_EQ(step.all("all-gather blocks.0.experts").size(), 2u);
    for (const std::size_t i : {0, 1}) {
      const std::string block = base::concat("blocks.", i);
      const std::string next = base::concat("blocks.", i + 1);
      EXPECT_FALSE(step.leads(step.at("backward " + next + ".experts"),
                              step.at("all-gather " + block + ".experts", 1)));
      if (steps == 0) continue;  // which unit is in which is not known
      EXPECT_FALSE(step.leads(step.at("forward " + block + ".experts"),
                              step.at("all-gather " + next + ".experts")));
    }
    ++steps;
  };
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    const Scenario scenario = three_blocks();
    Rank rank(exchange, r, scenario.units);
    for (int step = 0; step < 2; ++step) {
      const std::size_t from = rank.runtime->log().size();
      run_step(rank, scenario, step);
      check(Step(*rank.runtime, from));
      rank.optimize();
      rank.zero_grad();
    }
  });
  EXPECT_EQ(steps, 2);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
