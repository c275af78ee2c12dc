// A unit that is called by itself on what was cut off from the model, as the
// head in a loss by chunks of tokens: its backward is its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "steps.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;

constexpr std::size_t kHead = 3;

// "model" around "layers.0" and "layers.1"; "layers.2" is the head.
std::vector<UnitSpec> with_head() { return model_of(3, dense()); }

void set_sync_of_head(Layers& layers, bool sync) {
  if (auto* const rank = dynamic_cast<Rank*>(&layers)) {
    rank->unit(kHead).settings().gradient_sync = sync;
  }
}

at::Tensor cut_off(const at::Tensor& y) {
  return y.detach().set_requires_grad(true);
}

// The head's gradients leave with those of the last chunk; `wants`: what this
// rank gives the head wants a gradient.
Program by_chunks(std::int64_t num_chunks,
                  std::function<bool(std::int64_t rank)> wants = {}) {
  return [=](Layers& layers, const at::Tensor& x) {
    const auto y = chain(2)(layers, x);
    auto hidden = y.detach();
    if (!wants || wants(layers.rank())) hidden.set_requires_grad(true);
    // Of one tensor, so that not every input is a leaf.
    const auto chunks = hidden.tensor_split(num_chunks);
    set_sync_of_head(layers, false);
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      if (i + 1 == chunks.size()) set_sync_of_head(layers, true);
      loss_of(layers.call(kHead, chunks[i], layer())).backward();
    }
    // A loss whose gradient is what they left.
    return y * (hidden.grad().defined() ? hidden.grad() : at::ones_like(y));
  };
}

// As torchtitan has it of the head of a model with experts.
void gather_last_layer_behind_head(Rank& rank) {
  rank.unit(kHead).settings().backward_prefetch = {
      rank.unit(kHead - 1).weak_from_this()};
}

Scenario compared(Program program) {
  return {
      .units = with_head(), .program = std::move(program), .compared = true};
}

std::vector<std::string> reductions(const Step& step) {
  return order_of(step, {"reduce-scatter model", "reduce-scatter layers.0",
                         "reduce-scatter layers.1", "reduce-scatter layers.2"});
}

// What was called by itself meets the model in one backward, ahead of which
// `again` goes through the former alone.
Program in_one_backward(bool again) {
  return [again](Layers& layers, const at::Tensor& x) {
    const auto y = chain(2)(layers, x);
    const auto cut = cut_off(y);
    const auto aside = layers.call(kHead, cut, layer());
    if (again) {
      set_sync_of_head(layers, false);
      loss_of(layers.call(kHead, cut, layer())).backward();
      set_sync_of_head(layers, true);
    }
    return y + aside;
  };
}

TEST(DetachedForwardsTest, AnswersOfChunksAreTheNaiveRules) {
  expect_naive_bits(compared(by_chunks(2)), 2);
  auto scenario = compared(by_chunks(3));
  scenario.sync = {true, true};
  scenario.num_steps = 3;
  expect_naive_bits(scenario, 3);
}

TEST(DetachedForwardsTest, OneBackwardThroughSeveralForwards) {
  for (const bool again : {false, true}) {
    expect_naive_bits(compared(in_one_backward(again)), 2);
  }
}

TEST(DetachedForwardsTest, OtherUnitsTakeNoPart) {
  std::atomic<int> steps = 0;  // of ranks, each a thread
  for_each_step(compared(by_chunks(3)), [&](const Step& step) {
    EXPECT_THAT(
        reductions(step),
        ElementsAre("reduce-scatter layers.2", "reduce-scatter layers.1",
                    "reduce-scatter layers.0", "reduce-scatter model"));
    // Neither gathered ahead for a chunk nor let go of behind it.
    for (const std::string unit : {"model", "layers.0", "layers.1"}) {
      EXPECT_EQ(step.all("all-gather " + unit).size(), 2u) << unit;
    }
    ++steps;
  });
  EXPECT_EQ(steps, 4);
}

TEST(DetachedForwardsTest, AChunkGathersNothingAheadThatIsListedOfTheModel) {
  const auto scenario = compared(by_chunks(3));
  expect_naive_bits(scenario, 2, gather_last_layer_behind_head);
  for_each_step(
      scenario,
      [](const Step& step) {
        EXPECT_EQ(step.all("all-gather layers.1").size(), 2u);
      },
      gather_last_layer_behind_head);
}

// The exchange throws where ranks bring other calls.
TEST(DetachedForwardsTest, AllTakePartWhereRanksDifferInTheirInputs) {
  const auto first_alone = [](std::int64_t rank) { return rank == 0; };
  for (const bool told : {true, false}) {
    auto scenario = compared(by_chunks(2, first_alone));
    scenario.compared = told;
    expect_naive_bits(scenario, 2);
    for_each_step(scenario, [](const Step& step) {
      EXPECT_EQ(step.all("reduce-scatter layers.1").size(), 3u);
    });
  }
}

// The head, or the layers, on a mesh of `ranks`.
Scenario on_meshes(Program program, std::int64_t of_head,
                   std::int64_t of_layers) {
  auto scenario = compared(std::move(program));
  scenario.units[kHead].hosts = of_head;
  for (const std::size_t layer : {1, 2}) {
    scenario.units[layer].hosts = of_layers;
  }
  return scenario;
}

TEST(DetachedForwardsTest, OtherUnitsOnMoreRanksTakeNoPart) {
  for (const auto& [of_head, of_layers] : {std::pair(1, 0), {0, 1}, {1, 2}}) {
    SCOPED_TRACE(base::concat(of_head, " and ", of_layers));
    const auto scenario = on_meshes(by_chunks(3), of_head, of_layers);
    expect_naive_bits(scenario, 2);
    for_each_step(scenario, [&](const Step& step) {
      EXPECT_THAT(
          reductions(step),
          ElementsAre("reduce-scatter layers.2", "reduce-scatter layers.1",
                      "reduce-scatter layers.0", "reduce-scatter model"));
    });
  }
}

// The head is on pairs of ranks, and those of the other pair call it otherwise.
// The exchange throws where ranks bring other calls.
TEST(DetachedForwardsTest, AllTakePartWhereRanksOfAnotherMeshDiffer) {
  const auto first_two = [](std::int64_t rank) { return rank < 2; };
  expect_naive_bits(on_meshes(by_chunks(2, first_two), 2, 0), 4);
}

// What differs is noted of the unit that the forward began with.
TEST(DetachedForwardsTest, ABackwardThatComesToAUnitInsideFirst) {
  for (const bool alike : {true, false}) {
    auto scenario = compared([=](Layers& layers, const at::Tensor& x) {
      const auto y = chain(2)(layers, x);
      auto cut = y.detach();
      if (alike || layers.rank() == 0) cut.set_requires_grad(true);
      at::Tensor inside;
      layers.call(kHead, cut, [&](const auto& parameters, const auto&) {
        inside = layers.call(kHead + 1, cut, layer());
        return layer()(parameters, inside);
      });
      loss_of(inside).backward();
      return y;
    });
    scenario.units = model_of(4, dense());
    scenario.units[kHead].encloses_units = true;
    expect_naive_bits(scenario, 2);
    for_each_step(scenario, [&](const Step& step) {
      EXPECT_EQ(step.all("reduce-scatter layers.1").size(), alike ? 1u : 2u);
    });
  }
}

TEST(DetachedForwardsTest, AllTakePartWhereRanksAreNotCompared) {
  auto scenario = compared(by_chunks(2));
  scenario.compared = false;
  expect_naive_bits(scenario, 2);
  for_each_step(scenario, [](const Step& step) {
    EXPECT_EQ(step.all("reduce-scatter layers.1").size(), 3u);
  });
}

TEST(DetachedForwardsTest, TheModelsUnitsAreStillGatheredAhead) {
  for_each_step(compared(by_chunks(2)), [](const Step& step) {
    EXPECT_FALSE(step.leads(step.at("forward layers.0"),
                            step.at("all-gather layers.1")));
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
