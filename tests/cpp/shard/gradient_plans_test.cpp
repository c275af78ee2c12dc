#include "shard/gradient_plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::ThrowsMessage;

// One rank of a root around three units of two parameters each, of which the
// first one needs several chunks of the smallest size.
void with_plans(const std::function<void(GradientPlans&, Rank&)>& body) {
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    const std::vector<ParameterSpec> parameters = {{.sizes = {64, kWidth}},
                                                   {.sizes = {kWidth}}};
    Rank rank(exchange, r, model_of(3, parameters));
    StepLog log("model", [](std::int32_t) { return std::string("unit"); });
    GradientPlans plans("model", rank.root->units(), log);
    plans.forget();
    body(plans, rank);
  });
}

TEST(GradientPlansTest, ABudgetIsWhatWasSet) {
  with_plans([](GradientPlans& plans, Rank& /*rank*/) {
    EXPECT_EQ(plans.budget(), kDefaultRingBudget);
    plans.set_budget(1'000);
    EXPECT_EQ(plans.budget(), 1'000);
    EXPECT_THAT([&] { plans.set_budget(0); },
                ThrowsMessage<InvalidArgument>(HasSubstr(
                    "gradient budget of 'model': expected a positive number of "
                    "bytes, got 0. The default for its units is 201326592 "
                    "bytes.")));
  });
}

TEST(GradientPlansTest, UnitsAreExpectedInReverseAndThenAsTheyLeft) {
  with_plans([](GradientPlans& plans, Rank& /*rank*/) {
    EXPECT_THAT(plans.order(), ElementsAre(3, 2, 1, 0));
    plans.expect({2, 1, 3, 0});
    plans.expect({});
    EXPECT_THAT(plans.order(), ElementsAre(2, 1, 3, 0));
    plans.forget();
    EXPECT_THAT(plans.order(), ElementsAre(3, 2, 1, 0));
  });
}

// What a frozen parameter has no place in a plan for, an unfrozen one gets: in
// front of the next forward, or of the backward of an earlier one.
TEST(GradientPlansTest, FollowsWhatIsTrainable) {
  with_plans([](GradientPlans& plans, Rank& rank) {
    auto& gradients = rank.unit(1).gradients();
    const auto shard = rank.shard(1, 0);
    plans.plan();
    EXPECT_THAT(gradients.trainable(), ElementsAre(1, 0));
    shard.set_requires_grad(false);
    plans.plan();
    EXPECT_THAT(gradients.trainable(), ElementsAre(1));
    shard.set_requires_grad(true);
    plans.extend();
    EXPECT_TRUE(gradients.plans_all({true, true}));
    plans.plan();
    EXPECT_THAT(gradients.trainable(), ElementsAre(1, 0));
  });
}

TEST(GradientPlansTest, ABudgetThatChangesIsPlannedAnew) {
  with_plans([](GradientPlans& plans, Rank& rank) {
    plans.plan();
    const auto chunks = rank.unit(1).gradients().num_chunks();
    plans.set_budget(1);
    plans.plan();
    EXPECT_GT(rank.unit(1).gradients().num_chunks(), chunks);
  });
}

// [Note: Refining the order]
TEST(GradientPlansTest, TheFirstBackwardThatReducesRefinesTheOrderOnce) {
  with_plans([](GradientPlans& plans, Rank& rank) {
    auto& gradients = rank.unit(1).gradients();
    const auto backward = [&](bool sync, std::vector<std::int32_t> order) {
      gradients.begin(sync);
      for (const auto i : order) gradients.arrives(i, /*hold=*/false);
      plans.refine_order({&rank.unit(1)});
      plans.plan();
    };
    plans.plan();
    backward(/*sync=*/false, {0, 1});
    EXPECT_THAT(gradients.trainable(), ElementsAre(1, 0));
    backward(/*sync=*/true, {0, 1});
    EXPECT_THAT(gradients.trainable(), ElementsAre(0, 1));
    backward(/*sync=*/true, {1, 0});
    EXPECT_THAT(gradients.trainable(), ElementsAre(0, 1));
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
