// Models that are not a chain of layers each used once: the bits stay those of
// the naive rule, and chunks leave in the plan's order on every rank.
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class StructureTest : public testing::TestWithParam<std::int64_t> {
 protected:
  // With chunks of the smallest size and with one chunk a unit.
  void expect_bits(const Scenario& scenario) {
    for (const std::int64_t budget : {1, 64 << 20}) {
      SCOPED_TRACE(budget);
      expect_naive_bits(scenario, GetParam(), [&](Rank& rank) {
        rank.root->set_gradient_budget(budget);
      });
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Worlds, StructureTest, testing::Values(1, 2, 3));

// The model's own layer around `body`.
Program around(std::function<at::Tensor(Layers&, const at::Tensor&)> body) {
  return [body](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      return layer()(parameters, body(layers, input));
    });
  };
}

TEST_P(StructureTest, AParameterUnusedOnOneRankOnly) {
  expect_bits(
      {.units = model_of(2, odd_shapes()),
       .program = around([](Layers& layers, const at::Tensor& x) {
         const bool last = layers.rank() > 0;
         const at::Tensor y = layers.call(1, x, last ? layer({0, 3}) : layer());
         return layers.call(2, y, last ? layer() : layer({1, 6}));
       }),
       .sync = {true, true}});
}

TEST_P(StructureTest, AParameterUnusedOnAllRanks) {
  expect_bits(
      {.units = model_of(2, odd_shapes()),
       .program = around([](Layers& layers, const at::Tensor& x) {
         return layers.call(2, layers.call(1, x, layer({0, 6})), layer({1, 2}));
       }),
       .sync = {true, true}});
}

TEST_P(StructureTest, AParameterUnusedWithoutSync) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 const bool last = layers.rank() > 0;
                 const at::Tensor y =
                     layers.call(1, x, last ? layer({3}) : layer({4, 5}));
                 return layers.call(2, y, layer({1}));
               }),
               .sync = {false, true}});
}

TEST_P(StructureTest, AUnitWhoseParametersAreNotUsed) {
  expect_bits(
      {.units = model_of(2, dense()),
       .program = around([](Layers& layers, const at::Tensor& x) {
         return layers.call(2, layers.call(1, x, layer({0, 1})), layer());
       })});
}

TEST_P(StructureTest, AUnitThatIsNotCalled) {
  expect_bits({.units = model_of(3, dense()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 return layers.call(3, layers.call(1, x, layer()), layer());
               }),
               .sync = {true, true}});
}

TEST_P(StructureTest, AUnitCalledTwiceInARow) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 at::Tensor y = layers.call(1, x, layer());
                 y = layers.call(2, y, layer());
                 return layers.call(2, y, layer());
               }),
               .sync = {true, true}});
}

TEST_P(StructureTest, AUnitCalledAgainLater) {
  expect_bits({.units = model_of(3, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 at::Tensor y = x;
                 for (const std::size_t unit : {1, 2, 1, 3}) {
                   y = layers.call(unit, y, layer());
                 }
                 return y;
               }),
               .sync = {true, true}});
}

TEST_P(StructureTest, UnitsCalledInAnotherOrderThanRegistered) {
  expect_bits({.units = model_of(3, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 at::Tensor y = x;
                 for (const std::size_t unit : {3, 1, 2}) {
                   y = layers.call(unit, y, layer());
                 }
                 return y;
               })});
}

TEST_P(StructureTest, NestedUnits) {
  std::vector<UnitSpec> units = model_of(4, odd_shapes());
  units[2].encloses_units = true;
  expect_bits(
      {.units = units,
       .program = around([](Layers& layers, const at::Tensor& x) {
         at::Tensor y = layers.call(1, x, layer());
         return layers.call(2, y, [&](const auto& parameters, const auto& h) {
           const at::Tensor inner = layers.call(3, h, layer());
           return layer()(parameters, layers.call(4, inner, layer()));
         });
       }),
       .sync = {true, true}});
}

TEST_P(StructureTest, GradientsThatCompleteInAnotherOrderOnEachRank) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 const at::Tensor y = layers.call(
                     1, x, [&](const auto& parameters, const auto& input) {
                       at::Tensor sum = input;
                       for (std::size_t k = 2; k < parameters.size(); ++k) {
                         const std::size_t p =
                             layers.rank() == 1 ? parameters.size() + 1 - k : k;
                         sum = sum + (parameters[p] * parameters[p]).sum();
                       }
                       return layer({2, 3, 4, 5, 6})(parameters, sum);
                     });
                 return layers.call(2, y, layer());
               }),
               .sync = {true, true}});
}

// Unit 1's input needs no gradient, so it is sealed at the end of backward,
// though its turn is before unit 2's.
TEST_P(StructureTest, UnitsThatAreSealedInAnotherOrderThanPlanned) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program = around([](Layers& layers, const at::Tensor& x) {
                 const at::Tensor needs_grad =
                     x.detach().set_requires_grad(true);
                 const at::Tensor a = layers.call(2, needs_grad, layer());
                 return a + layers.call(1, x, layer());
               }),
               .sync = {true, true}});
}

TEST_P(StructureTest, FrozenAndTrainableParametersInAUnit) {
  auto parameters = odd_shapes();
  parameters[1].trainable = parameters[3].trainable = false;
  std::vector<UnitSpec> units = model_of(3, parameters);
  for (auto& parameter : units[2].parameters) parameter.trainable = false;
  expect_bits({.units = units, .program = chain(3), .sync = {true, true}});
  expect_bits({.units = units, .program = chain(3), .sync = {false, true}});
}

TEST_P(StructureTest, ParametersOfSeveralDtypesInAUnit) {
  auto parameters = odd_shapes();
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    if (p % 2 == 1) parameters[p].compute = at::kBFloat16;
    if (p % 3 == 1) parameters[p].reduce = at::kBFloat16;
    if (p == 3 || p == 5) parameters[p].storage = at::kBFloat16;
    if (p == 6) parameters[p] = {{300}, at::kDouble, at::kDouble, at::kDouble};
  }
  const auto units = model_of(2, parameters);
  expect_bits({.units = units, .program = chain(2), .sync = {true, true}});
  expect_bits({.units = units, .program = chain(2), .sync = {false, true}});
}

TEST_P(StructureTest, AUnitWithoutParameters) {
  expect_bits({.units = model_of(2, {}), .program = chain(2)});
}

// Gradients that are expanded, transposed and sparse.
TEST_P(StructureTest, GradientsOfAnyLayout) {
  expect_bits(
      {.units = model_of(
           1,
           {{{kWidth, kWidth}}, {{5, 3}}, {{kWidth, kWidth}}, {{7, kWidth}}}),
       .program = around([](Layers& layers, const at::Tensor& x) {
         return layers.call(
             1, x, [](const auto& parameters, const auto& input) {
               const at::Tensor rows = at::embedding(
                   parameters[3], at::tensor({1, 4, 4}, at::kLong),
                   /*padding_idx=*/-1, /*scale_grad_by_freq=*/false,
                   /*sparse=*/true);
               return (input * parameters[0].sum() + parameters[1].sum() +
                       rows.mm(parameters[2].t().contiguous()))
                   .tanh();
             });
       }),
       .sync = {true, false, true}});
}

TEST_P(StructureTest, TwoForwardsBeforeOneBackward) {
  expect_bits({.units = model_of(2, odd_shapes()),
               .program =
                   [](Layers& layers, const at::Tensor& x) {
                     const at::Tensor y = chain(2)(layers, x);
                     return y + chain(2)(layers, x * 2);
                   },
               .sync = {true, true},
               .num_steps = 3});
}

TEST_P(StructureTest, UnitsThatStayUnsharded) {
  const Scenario scenario{.units = model_of(2, odd_shapes()),
                          .program = chain(2),
                          .sync = {true, true}};
  expect_naive_bits(scenario, GetParam(), [](Rank& rank) {
    for (std::size_t u = 0; u < rank.size(); ++u) {
      rank.unit(u).settings().reshard_after_forward = false;
    }
  });
}

TEST_P(StructureTest, PrefetchChosenByTheUser) {
  const Scenario scenario{
      .units = model_of(3, dense()), .program = chain(3), .sync = {true, true}};
  expect_naive_bits(scenario, GetParam(), [](Rank& rank) {
    const auto unit = [&](std::size_t u) {
      return rank.unit(u).weak_from_this();
    };
    rank.unit(0).settings().forward_prefetch = {unit(1), unit(2), unit(3)};
    rank.unit(0).settings().backward_prefetch = {unit(3), unit(1)};
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
