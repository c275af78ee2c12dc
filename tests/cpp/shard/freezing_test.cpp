// Parameters that are frozen, or not any more, while gradients wait for a
// reduction.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class FreezingTest : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FreezingTest, testing::Values(1, 2, 3));

constexpr std::size_t kUnit = 1;

Scenario scenario_of(std::vector<bool> sync) {
  return {.units = model_of(2, odd_shapes()),
          .program = chain(2),
          .sync = std::move(sync)};
}

void set_trainable(Rank& rank, std::vector<std::size_t> parameters,
                   bool trainable) {
  for (const auto p : parameters) {
    at::Tensor shard = rank.shard(kUnit, p);
    shard.set_requires_grad(trainable);
  }
}

// Those of the unit that `steps` leave.
std::vector<at::Tensor> gradients_of(Exchange& exchange, std::int64_t r,
                                     const std::function<void(Rank&)>& steps) {
  Rank rank(exchange, r, scenario_of({}).units);
  steps(rank);
  EXPECT_EQ(rank.unrest(), "");
  EXPECT_THAT(rank.runtime->violations(), testing::IsEmpty());
  std::vector<at::Tensor> gradients;
  for (std::size_t p = 0; p < odd_shapes().size(); ++p) {
    gradients.push_back(rank.shard(kUnit, p).grad());
  }
  return gradients;
}

void step(Rank& rank, bool sync, int number) {
  run_step(rank, scenario_of({sync}), number);
}

// Of step `only` where the parameter is one of `changed`, of both elsewhere.
void expect_gradients(Exchange& exchange, std::int64_t r,
                      const std::vector<std::size_t>& changed, int only,
                      const std::function<void(Rank&)>& steps) {
  const auto one =
      gradients_of(exchange, r, [&](Rank& rank) { step(rank, true, only); });
  const auto both = gradients_of(exchange, r, [](Rank& rank) {
    step(rank, false, 0);
    step(rank, true, 1);
  });
  const auto found = gradients_of(exchange, r, steps);
  for (std::size_t p = 0; p < found.size(); ++p) {
    const bool is_one = testing::Value(changed, testing::Contains(p));
    EXPECT_TRUE(same_bits(found[p], (is_one ? one : both)[p])) << p;
  }
}

TEST_P(FreezingTest, WhatIsFrozenKeepsItsGradient) {
  for (const std::vector<std::size_t>& changed :
       {std::vector<std::size_t>{0}, {1, 3, 6}}) {
    run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
      expect_gradients(exchange, r, changed, 0, [&](Rank& rank) {
        step(rank, false, 0);
        set_trainable(rank, changed, false);
        step(rank, true, 1);
      });
    });
  }
}

TEST_P(FreezingTest, WhatIsNotFrozenAnyMoreHasASlabOfItsOwn) {
  for (const std::vector<std::size_t>& changed :
       {std::vector<std::size_t>{0}, {1, 3, 6}}) {
    run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
      expect_gradients(exchange, r, changed, 1, [&](Rank& rank) {
        set_trainable(rank, changed, false);
        step(rank, false, 0);
        EXPECT_EQ(rank.unit(kUnit).gradients().lanes().size(), 1);
        set_trainable(rank, changed, true);
        step(rank, true, 1);
        EXPECT_EQ(rank.unit(kUnit).gradients().lanes().size(), 2);
      });
    });
  }
}

TEST_P(FreezingTest, TheNextStepIsPlannedAnew) {
  run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
    gradients_of(exchange, r, [&](Rank& rank) {
      const auto& gradients = rank.unit(kUnit).gradients();
      set_trainable(rank, {0}, false);
      step(rank, false, 0);
      set_trainable(rank, {0}, true);
      set_trainable(rank, {1}, false);
      step(rank, true, 1);
      EXPECT_EQ(gradients.trainable().size(), odd_shapes().size());
      step(rank, true, 2);
      EXPECT_EQ(gradients.lanes().size(), 1);
      EXPECT_EQ(gradients.trainable().size(), odd_shapes().size() - 1);
    });
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
