// Weight gradients that are summed where they are sent from: bits, bytes,
// order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <torch/csrc/autograd/autograd.h>

#include <algorithm>

#include "harness.h"
#include "shard/graph/linear_node.h"
#include "steps.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using memory::Category;

constexpr std::int64_t kHidden = 256;

// Two linear layers in a unit; the second has no bias.  At N = 2 the first
// weight is one slice, at N = 3 its ranks' rows lie apart.
std::vector<ParameterSpec> layers_of_a_unit() {
  return {{{kHidden, kWidth}}, {{kHidden}}, {{kWidth, kHidden}}, {{kWidth}}};
}

// On a rank, by the node under test; on plain tensors, by autograd.
at::Tensor linear(Layers& layers, std::size_t unit, std::int32_t index,
                  const at::Tensor& x, const at::Tensor& weight,
                  const at::Tensor& bias = {}) {
  if (auto* rank = dynamic_cast<Rank*>(&layers)) {
    return fused_linear(rank->unit(unit).weak_from_this(), index, x, weight,
                        bias);
  }
  return bias.defined() ? at::addmm(bias, x, weight.t()) : x.mm(weight.t());
}

// The same by the node that compiled code has.
at::Tensor compiled_linear(Layers& layers, std::size_t unit, std::int32_t index,
                           const at::Tensor& x, const at::Tensor& weight,
                           const at::Tensor& bias = {}) {
  return dynamic_cast<Rank*>(&layers) != nullptr
             ? traced_linear(x, weight, bias)
             : linear(layers, unit, index, x, weight, bias);
}

using Linear = decltype(&linear);

// Unit 0 is the model; `calls` says in which order the others run.
Program stack(std::vector<std::size_t> calls, Linear linear) {
  return [calls, linear](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      at::Tensor y = input;
      for (const std::size_t unit : calls) {
        y = layers.call(unit, y, [&](const auto& p, const auto& z) {
          const auto h = linear(layers, unit, 0, z, p[0], p[1]).tanh();
          return linear(layers, unit, 2, h, p[2], {}) * p[3];
        });
      }
      return linear(layers, 0, 0, y, parameters[0], parameters[1]);
    });
  };
}

Scenario scenario_of(std::vector<bool> sync,
                     std::vector<std::size_t> calls = {1, 2},
                     Linear layer = &linear) {
  return {.units = model_of(2, layers_of_a_unit()),
          .program = stack(std::move(calls), layer),
          .sync = std::move(sync)};
}

// The harness watches gradients through hooks, which need autograd's.
void unhook(Rank& rank) {
  for (std::size_t u = 0; u < rank.size(); ++u) {
    for (const std::size_t p : {0, 2}) {
      if (u == 0 && p == 2) continue;
      torch::autograd::impl::clear_hooks(rank.leaf(u, p));
    }
  }
}

void fuse_hooked(Rank& rank) {
  rank.unit(0).fuse_gradients({true, false});
  for (std::size_t u = 1; u < rank.size(); ++u) {
    rank.unit(u).fuse_gradients({true, false, true, false});
  }
}

void fuse(Rank& rank) {
  unhook(rank);
  fuse_hooked(rank);
}

std::int64_t total(Rank& rank, std::int64_t FusedUses::*count) {
  std::int64_t sum = 0;
  for (std::size_t u = 0; u < rank.size(); ++u) {
    for (const auto& uses : rank.unit(u).fused().uses()) sum += uses.*count;
  }
  return sum;
}

class FusedTest : public testing::TestWithParam<std::int64_t> {};
INSTANTIATE_TEST_SUITE_P(Worlds, FusedTest, testing::Values(1, 2, 3, 4));

// fp32 gradients of one product have the bits of the exact mode.
TEST_P(FusedTest, HasExactBitsWhicheverMicrobatchReduces) {
  for (const std::vector<bool>& sync : {std::vector<bool>{true},
                                        {true, true},
                                        {false, false, true},
                                        {true, false, true, true}}) {
    SCOPED_TRACE(testing::PrintToString(sync));
    expect_naive_bits(scenario_of(sync), GetParam(), fuse);
  }
}

TEST_P(FusedTest, HasExactBitsWithEveryBudget) {
  for (const std::int64_t budget : {1, 20'000}) {
    expect_naive_bits(scenario_of({true, true}), GetParam(), [&](Rank& rank) {
      fuse(rank);
      rank.root->set_gradient_budget(budget);
    });
  }
}

TEST_P(FusedTest, SecondUseInABackwardIsAutograds) {
  expect_naive_bits(scenario_of({true}, {1, 2, 1}), GetParam(), fuse);
  run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true, false}, {1, 2, 1});
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    run_step(rank, scenario, 0);
    EXPECT_EQ(total(rank, &FusedUses::hooks), 0);
    EXPECT_EQ(total(rank, &FusedUses::asked_for), 0);
    EXPECT_EQ(total(rank, &FusedUses::recorded), 0);
    EXPECT_EQ(total(rank, &FusedUses::added), 2 * 5);
    EXPECT_EQ(total(rank, &FusedUses::repeated), 2 * 2);
  });
}

TEST_P(FusedTest, WeightThatOneRankSkipsStillTakesPart) {
  auto scenario = scenario_of({true, false, true});
  scenario.units.pop_back();
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      const auto y = layers.call(1, input, [&](const auto& p, const auto& z) {
        if (layers.rank() == 0) return z * p[3];
        const auto h = linear(layers, 1, 0, z, p[0], p[1]).tanh();
        return linear(layers, 1, 2, h, p[2]) * p[3];
      });
      return linear(layers, 0, 0, y, parameters[0], parameters[1]);
    });
  };
  expect_naive_bits(scenario, GetParam(), fuse);
}

TEST_P(FusedTest, UnitThatNobodyUsesHasNoGradient) {
  expect_naive_bits(scenario_of({true, false, true}, {2}), GetParam(), fuse);
}

// Only what was offered as a product is added in place; what autograd brings
// joins it.
TEST_P(FusedTest, AutogradsGradientJoinsTheProduct) {
  auto scenario = scenario_of({true});
  scenario.num_steps = 1;
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& input) {
      const auto y = linear(layers, 0, 0, input, parameters[0], parameters[1]);
      return y * parameters[0].sum();
    });
  };
  scenario.units.resize(1);
  expect_naive_bits(scenario, GetParam(), fuse);
}

TEST(FusedUsesTest, RefusedForwardsExplainUnseenGradients) {
  FusedUses uses;
  uses.unseen = 3;
  EXPECT_EQ(uses.unexplained(), 3);
  uses.refused = {{"autocast", 1}, {"torch.func", 1}};
  EXPECT_EQ(uses.unexplained(), 1);
  uses.refused["autocast"] = 5;  // their backwards have not come
  EXPECT_EQ(uses.unexplained(), 0);
}

TEST_P(FusedTest, HooksSeeTheGradient) {
  expect_naive_bits(scenario_of({true, false, true}), GetParam(), fuse_hooked);
  run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true, false});
    Rank rank(exchange, r, scenario.units);
    fuse_hooked(rank);
    run_step(rank, scenario, 0);
    EXPECT_EQ(total(rank, &FusedUses::hooks), 2 * 5);
    EXPECT_EQ(total(rank, &FusedUses::added), 0);
  });
}

TEST_P(FusedTest, CompiledLayersHaveExactBits) {
  for (const std::vector<bool>& sync :
       {std::vector<bool>{true}, {true, true}, {false, false, true}}) {
    SCOPED_TRACE(testing::PrintToString(sync));
    expect_naive_bits(scenario_of(sync, {1, 2}, &compiled_linear), GetParam(),
                      fuse);
  }
}

TEST_P(FusedTest, CompiledLayersAddASecondUseToo) {
  const auto scenario = scenario_of({true}, {1, 2, 1}, &compiled_linear);
  expect_naive_bits(scenario, GetParam(), fuse);
  run_ranks(GetParam(), [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    run_step(rank, scenario, 0);
    EXPECT_EQ(total(rank, &FusedUses::added), 7);
    EXPECT_EQ(total(rank, &FusedUses::repeated), 0);
  });
}

TEST(FusedFallback, CompiledLayersRefuseHooks) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true}, {1, 2}, &compiled_linear);
    Rank rank(exchange, r, scenario.units);
    fuse_hooked(rank);
    EXPECT_THAT([&] { run_step(rank, scenario, 0); },
                testing::ThrowsMessage<Error>(
                    testing::HasSubstr("got hooks on the full parameter")));
  });
}

// CUDA graph trees record the compiled backward, not what calls it.
TEST(FusedFallback, CompiledLayersRefuseAGraphOfTheirOwn) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    auto scenario = scenario_of({true}, {1, 2}, &compiled_linear);
    scenario.units.pop_back();
    device::ScriptedRuntime* runtime = nullptr;
    scenario.program = [&](Layers& layers, const at::Tensor& x) {
      return layers.call(0, x, [&](const auto& parameters, const auto& input) {
        const auto y = layers.call(1, input, [&](const auto& p, const auto& z) {
          const auto h = compiled_linear(layers, 1, 0, z, p[0], p[1]);
          h.register_hook([&](const at::Tensor&) { runtime->set_capture(1); });
          return compiled_linear(layers, 1, 2, h.tanh(), p[2]) * p[3];
        });
        return compiled_linear(layers, 0, 0, y, parameters[0], parameters[1]);
      });
    };
    Rank rank(exchange, r, scenario.units);
    runtime = rank.runtime.get();
    fuse(rank);
    EXPECT_THAT([&] { run_step(rank, scenario, 0); },
                testing::ThrowsMessage<Error>(testing::HasSubstr(
                    "got a CUDA graph of the compiled backward")));
  });
}

TEST(FusedFallback, CompiledLayersMayBeInAGraphOfTheWholeStep) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true}, {1, 2}, &compiled_linear);
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    rank.runtime->set_capture(1);
    run_step(rank, scenario, 0);
    EXPECT_EQ(total(rank, &FusedUses::added), 5);
  });
}

// A backward for other inputs wants no gradient of the weights.
TEST(FusedFallback, CompiledLayersAddNothingThatIsNotAskedFor) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true}, {1, 2}, &compiled_linear);
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    const auto x = input_of(scenario, r, 0, 0).requires_grad_();
    const auto loss = loss_of(scenario.program(rank, x));
    EXPECT_TRUE(torch::autograd::grad({loss}, {x})[0].defined());
    EXPECT_EQ(total(rank, &FusedUses::added), 0);
  });
}

TEST(FusedFallback, GradientThatIsAskedForIsReturned) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true});
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    const auto loss =
        loss_of(scenario.program(rank, input_of(scenario, r, 0, 0)));
    const auto returned = torch::autograd::grad({loss}, {rank.leaf(1, 0)});
    EXPECT_EQ(returned[0].sizes(), at::IntArrayRef({kHidden, kWidth}));
    EXPECT_GT(returned[0].abs().sum().item<float>(), 0);
    EXPECT_EQ(total(rank, &FusedUses::asked_for), 1);
    EXPECT_EQ(total(rank, &FusedUses::added), 0);
  });
}

std::int64_t wire_bytes(std::int64_t numel) { return numel * 4; }

// One slab at a time beyond the budget of a unit's gradients, and no copy of a
// gradient anywhere: the exact mode keeps them until they are copied.
TEST(FusedMemory, HoldsNoMoreThanAUnitsGradients) {
  constexpr std::int64_t kWorldSize = 2;
  run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true});
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    run_step(rank, scenario, 0);
    const std::int64_t weight = wire_bytes(kHidden * kWidth);
    const std::int64_t flags = kWorldSize * 128 * 4;
    // Everything is fp32 here, so that a unit's gradients are two slabs.
    EXPECT_LE(rank.peak(Category::gradient_slab), 2 * (weight + flags));
    EXPECT_GE(rank.peak(Category::gradient_slab), weight + flags);
    EXPECT_EQ(rank.live(Category::gradient_slab), 0);
  });
}

TEST(FusedMemory, KeepsOneSlabAMicrobatchWithoutSync) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({false, false});
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    run_step(rank, scenario, 0);
    const auto held = rank.live(Category::gradient_slab);
    EXPECT_EQ(held, rank.peak(Category::gradient_slab));
    std::int64_t planned = 0;
    for (std::size_t u = 0; u < rank.size(); ++u) {
      planned += rank.unit(u).gradients().slab_bytes();
    }
    EXPECT_EQ(held, planned);
  });
}

TEST(FusedOrder, EveryWeightLeavesOnItsOwn) {
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    const auto scenario = scenario_of({true});
    Rank rank(exchange, r, scenario.units);
    fuse(rank);
    run_step(rank, scenario, 0);
    const auto& calls = rank.collectives->recording().calls();
    const auto reductions = [&](bool coalesced) {
      return std::count_if(calls.begin(), calls.end(), [&](const auto& call) {
        return call.kind == comm::Kind::reduce_scatter &&
               call.coalesced == coalesced;
      });
    };
    // A weight and its flags, for five weights; a chunk for a unit's biases.
    EXPECT_EQ(reductions(true), 5);
    EXPECT_EQ(reductions(false), 3);
  });
}

// A unit's second gradient leaves while its first is on its way, whether the
// ring, which neither needs, has two slots or one.
TEST(FusedOrderTest, ComputeDoesNotWaitForTheGradientBefore) {
  auto scenario = scenario_of({true});
  // Room for both ([Note: Room for a gradient in place]).
  scenario.units[2].parameters.push_back({{2048}});
  for (const bool one_slot : {false, true}) {
    for_each_step(
        one_slot ? with_bystander(scenario) : scenario,
        [](const Step& step) {
          const auto end = step.at("backward end layers.1");
          EXPECT_EQ(step.all("reduce-scatter layers.1").size(), 3u);
          EXPECT_LT(step.at("reduce-scatter layers.1", 1), end);
          EXPECT_FALSE(step.leads(step.at("reduce-scatter layers.1"), end));
        },
        [](Rank& rank) {
          for (const std::size_t p : {0, 2}) {
            torch::autograd::impl::clear_hooks(rank.leaf(2, p));
          }
          rank.unit(2).fuse_gradients({true, false, true, false, false});
        });
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
