// Units inside re-entrant checkpoints: gradients come from nested backwards,
// in any number, and the forward is recorded without grad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "harness.h"
#include "reentrant.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class ReentrantTest : public testing::TestWithParam<std::int64_t> {
 protected:
  void expect_bits(const Scenario& scenario) {
    for (const std::int64_t budget : {1, 64 << 20}) {
      SCOPED_TRACE(budget);
      expect_naive_bits(scenario, GetParam(), [&](Rank& rank) {
        rank.root->set_gradient_budget(budget);
      });
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, ReentrantTest, testing::Values(1, 2, 3));

TEST_P(ReentrantTest, OneCheckpointPerUnit) {
  expect_bits({.units = model_of(5, odd_shapes()),
               .program = checkpointed({1, 2, 3, 4, 5}),
               .sync = {true, true}});
}

TEST_P(ReentrantTest, WithoutSync) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = checkpointed({1, 2}),
               .sync = {false, true}});
}

TEST_P(ReentrantTest, AUnitInSeveralCheckpoints) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = checkpointed({1, 2, 1}),
               .sync = {true, true}});
}

TEST_P(ReentrantTest, AUnitInsideAndOutsideOfCheckpoints) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program =
                   [](Layers& layers, const at::Tensor& x) {
                     return layers.call(
                         0, x, [&](const auto& parameters, const auto& in) {
                           const at::Tensor y = layers.call(
                               1, in.detach().set_requires_grad(true), layer());
                           const at::Tensor z = reentrant_checkpoint(
                               [&](const at::Tensor& h) {
                                 return layers.call(
                                     2, layers.call(1, h, layer()), layer());
                               },
                               y);
                           return layer()(parameters, z);
                         });
                   },
               .sync = {true, true}});
}

TEST(ReentrantErrorTest, AGradientAfterTheUnitsWereReducedIsRefused) {
  const auto units = model_of(1, dense());
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, units);
    const auto region = [&](const at::Tensor& h) {
      return rank.call(1, h, layer());
    };
    // Forward did not announce these calls: the unit is sealed after the first.
    const auto unannounced = [&](const at::Tensor& x) {
      auto node = base::make_node<ReentrantNode>(region, x.detach());
      node->set_next_edges(torch::autograd::collect_next_edges(x));
      at::Tensor y = x.detach() * 2;
      torch::autograd::set_history(y, node);
      return y;
    };
    const at::Tensor x = input_for(units, r, 1).set_requires_grad(true);
    const at::Tensor y =
        rank.call(0, x, [&](const auto& parameters, const at::Tensor& h) {
          return layer()(parameters, unannounced(unannounced(h)));
        });
    EXPECT_THAT(
        [&] { loss_of(y).backward(); },
        testing::ThrowsMessage<Error>(testing::StrEq(
            "lowtide: parameter 'layers.0.p1': expected every gradient of a "
            "backward before its unit's gradients leave, got another one after "
            "unit 'layers.0' was reduced. Where re-entrant checkpointing runs "
            "a module several times, use torch.utils.checkpoint with "
            "use_reentrant=False; where one backward goes through a later "
            "graph "
            "and one that was kept, run two, or leave LOWTIDE_COMPARE_RANKS "
            "on.")));
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
