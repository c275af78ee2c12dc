// What waits for what, and what must not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "harness.h"
#include "steps.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::EntryId;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::size_t kLayers = 5;

std::string layer_name(std::size_t i) { return base::concat("layers.", i); }

Scenario chain_of_layers() {
  return {.units = with_dtypes(model_of(kLayers, dense()), at::kFloat,
                               at::kBFloat16, at::kFloat),
          .program = chain(kLayers)};
}

TEST(StreamOrderTest, NoGatherInForwardWaitsForTheUnitBefore) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    for (std::size_t i = 0; i + 1 < kLayers; ++i) {
      const EntryId compute = step.at("forward " + layer_name(i));
      const EntryId gather = step.at("all-gather " + layer_name(i + 1));
      EXPECT_FALSE(step.leads(compute, gather)) << i;
      EXPECT_TRUE(step.leads(gather, step.at("forward " + layer_name(i + 1))));
    }
  });
}

TEST(StreamOrderTest, AGatherInForwardWaitsForTheUnitWhoseBytesItMayReuse) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    for (std::size_t i = 0; i + 2 < kLayers; ++i) {
      EXPECT_TRUE(step.leads(step.at("forward " + layer_name(i)),
                             step.at("all-gather " + layer_name(i + 2))))
          << i;
    }
  });
}

TEST(StreamOrderTest, NoGatherInBackwardWaitsForTheUnitBefore) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    for (std::size_t i = kLayers - 1; i > 0; --i) {
      const EntryId compute = step.at("backward " + layer_name(i));
      const EntryId gather = step.at("all-gather " + layer_name(i - 1), 1);
      EXPECT_FALSE(step.leads(compute, gather)) << i;
      EXPECT_TRUE(step.leads(gather, step.at("backward " + layer_name(i - 1))));
    }
  });
}

// 4 FLOPs for each element and each of 20000 tokens cover more than a gather.
Scenario chain_of_many_tokens() {
  Scenario scenario = chain_of_layers();
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    return chain(kLayers)(layers, x.repeat({20000 / x.size(0), 1}));
  };
  return scenario;
}

TEST(StreamOrderTest, AGatherInBackwardLeavesWhileTheRestCoversIt) {
  for_each_step(chain_of_many_tokens(), [](const Step& step) {
    for (std::size_t i = kLayers - 1; i > 0; --i) {
      const EntryId gather = step.at("all-gather " + layer_name(i - 1), 1);
      EXPECT_TRUE(step.leads(step.at("backward " + layer_name(i)), gather));
      EXPECT_FALSE(
          step.leads(step.at("backward end " + layer_name(i)), gather));
      EXPECT_TRUE(step.leads(gather, step.at("backward " + layer_name(i - 1))));
    }
    EXPECT_EQ(step.all("all-gather layers.0").size(), 2u);
  });
}

// How many tokens those have that take part nobody here knows.
TEST(StreamOrderTest, AGatherOverOtherRanksWaitsForNoGradients) {
  const Scenario scenario = chain_of_many_tokens();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    const auto others =
        std::make_shared<RankCollectives>(exchange, r, rank.runtime);
    rank.unit(2).use_groups({others, others});
    run_step(rank, scenario, 0);
    const Step step(*rank.runtime, 0);
    EXPECT_FALSE(step.leads(step.at("backward layers.2"),
                            step.at("all-gather layers.1", 1)));
    EXPECT_FALSE(step.leads(step.at("backward layers.1"),
                            step.at("all-gather layers.0", 1)));
    EXPECT_TRUE(step.leads(step.at("backward layers.3"),
                           step.at("all-gather layers.2", 1)));
  });
}

TEST(StreamOrderTest, WhoIsCalledAgainDoesNotPutOffTheGather) {
  Scenario scenario = chain_of_many_tokens();
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    at::Tensor y = x.repeat({20000 / x.size(0), 1});
    return layers.call(0, y, [&](const auto& parameters, const auto& in) {
      y = in;
      for (const std::size_t unit : {1, 2, 3, 2}) {
        y = layers.call(unit, y, layer());
      }
      return layer()(parameters, y);
    });
  };
  for_each_step(scenario, [](const Step& step) {
    // Its gradients come only with its first call.
    EXPECT_FALSE(step.leads(step.at("backward layers.1"),
                            step.all("all-gather layers.2").back()));
  });
}

TEST(StreamOrderTest, AGatherInBackwardWaitsForTheUnitWhoseBytesItMayReuse) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    for (std::size_t i = kLayers - 1; i > 1; --i) {
      EXPECT_TRUE(step.leads(step.at("backward end " + layer_name(i)),
                             step.at("all-gather " + layer_name(i - 2), 1)))
          << i;
    }
  });
}

// For its copies into the ring it may, and so for chunks a ring's length ahead.
TEST(StreamOrderTest, NoComputeInBackwardWaitsForTheReductionBeforeIt) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    for (std::size_t i = kLayers - 1; i > 0; --i) {
      const auto chunks = step.all("reduce-scatter " + layer_name(i));
      const EntryId reduction = chunks.back();
      EXPECT_TRUE(
          step.leads(step.at("backward " + layer_name(i)), chunks.front()));
      EXPECT_FALSE(
          step.leads(reduction, step.at("backward " + layer_name(i - 1))))
          << i;
    }
  });
}

TEST(StreamOrderTest, OnlyTheFirstUnitsOfAStepWaitForTheirGather) {
  for_each_step(chain_of_layers(), [](const Step& step) {
    // Every unit is gathered twice: nothing in vain, nothing again.
    EXPECT_EQ(step.all("all-gather model").size(), 2u);
    for (std::size_t i = 0; i < kLayers; ++i) {
      EXPECT_EQ(step.all("all-gather " + layer_name(i)).size(), 2u) << i;
      EXPECT_EQ(step.all("reduce-scatter " + layer_name(i)).size(), 1u) << i;
    }
  });
}

TEST(StreamOrderTest, TheOptimizerComesAfterTheReductionsAndBeforeGathers) {
  const Scenario scenario = chain_of_layers();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    run_step(rank, scenario, 0);
    const EntryId optimizer =
        rank.runtime->mark(device::Stream::compute, "optimizer step");
    rank.optimize();
    for (const EntryId id : rank.runtime->entries("reduce-scatter layers.0")) {
      EXPECT_TRUE(rank.runtime->happens_before(id, optimizer));
    }
    rank.zero_grad();
    const std::size_t from = rank.runtime->log().size();
    run_step(rank, scenario, 1);
    const Step second(*rank.runtime, from);
    for (std::size_t i = 0; i < kLayers; ++i) {
      EXPECT_TRUE(rank.runtime->happens_before(
          optimizer, second.at("all-gather " + layer_name(i))));
    }
  });
}

TEST(StreamOrderTest, AUnitCalledTwiceIsPrefetchedForEachCall) {
  const Scenario scenario{
      .units = model_of(3, dense()),
      .program = [](Layers& layers, const at::Tensor& x) {
        return layers.call(0, x, [&](const auto& parameters, const auto& in) {
          at::Tensor y = in;
          for (const std::size_t unit : {1, 2, 3, 2}) {
            y = layers.call(unit, y, layer());
          }
          return layer()(parameters, y);
        });
      }};
  int steps = 0;
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    for (int s = 0; s < 2; ++s) {
      const std::size_t from = rank.runtime->log().size();
      run_step(rank, scenario, s);
      if (s == 0) continue;  // recorded
      const Step step(*rank.runtime, from);
      EXPECT_THAT(
          order_of(step, {"forward layers.0", "forward layers.1",
                          "forward layers.2", "all-gather layers.0",
                          "all-gather layers.1", "all-gather layers.2"}),
          testing::ElementsAreArray(std::vector<std::string>{
              "all-gather layers.0", "all-gather layers.1", "forward layers.0",
              "all-gather layers.2", "forward layers.1",
              // Still unsharded while it is expected next.
              "all-gather layers.1", "forward layers.2", "forward layers.1",
              // Backward.
              "all-gather layers.1", "all-gather layers.2",
              "all-gather layers.0"}));
      EXPECT_THAT(order_of(step, {"backward layers.0", "backward layers.1",
                                  "backward layers.2", "all-gather layers.0"}),
                  ElementsAre("all-gather layers.0", "backward layers.1",
                              "backward layers.2", "all-gather layers.0",
                              "backward layers.1", "backward layers.0"));
      ++steps;
    }
  });
  EXPECT_EQ(steps, 1);
}

TEST(StreamOrderTest, NestedUnitsLeaveBehindWhatTheyEnclose) {
  std::vector<UnitSpec> units = model_of(4, dense());
  units[2].encloses_units = true;
  const Scenario scenario{
      .units = units, .program = [](Layers& layers, const at::Tensor& x) {
        return layers.call(0, x, [&](const auto& outer, const auto& in) {
          const at::Tensor y = layers.call(1, in, layer());
          return layer()(
              outer, layers.call(2, y, [&](const auto& inner, const auto& h) {
                return layer()(
                    inner, layers.call(4, layers.call(3, h, layer()), layer()));
              }));
        });
      }};
  for_each_step(scenario, [](const Step& step) {
    EXPECT_THAT(
        order_of(step, {"reduce-scatter model", "reduce-scatter layers.0",
                        "reduce-scatter layers.1", "reduce-scatter layers.2",
                        "reduce-scatter layers.3"}),
        ElementsAre("reduce-scatter layers.3", "reduce-scatter layers.2",
                    "reduce-scatter layers.1", "reduce-scatter layers.0",
                    "reduce-scatter model"));
  });
}

Scenario chain_of_pairs() {
  return {.units = model_of(6, dense()),
          .program = [](Layers& layers, const at::Tensor& x) {
            return layers.call(
                0, x, [&](const auto& parameters, const auto& in) {
                  at::Tensor y = in;
                  for (const std::size_t unit : {1, 3, 5}) {
                    y = call_pair(layers, unit, y, layer()) * 1.0;
                    y.register_hook([&layers](const at::Tensor& gradient) {
                      dynamic_cast<Rank&>(layers).runtime->mark(
                          device::Stream::compute, "between");
                      return gradient;
                    });
                  }
                  return layer()(parameters, y);
                });
          }};
}

TEST(StreamOrderTest, UnitsBesideEachOtherAreGatheredAheadTogether) {
  for_each_step(
      chain_of_pairs(),
      [](const Step& step) {
        for (const std::size_t i : {2, 3, 4, 5}) {
          const std::string before = layer_name(i / 2 * 2 - 1);
          const EntryId gather = step.at("all-gather " + layer_name(i));
          EXPECT_FALSE(step.leads(step.at("forward " + before), gather)) << i;
        }
        for (const std::size_t i : {0, 1, 2, 3}) {
          const std::string after = layer_name(i / 2 * 2 + 3);
          const EntryId gather = step.at("all-gather " + layer_name(i), 1);
          EXPECT_FALSE(step.leads(step.at("backward " + after), gather)) << i;
        }
      },
      stand_in_pairs);
}

TEST(StreamOrderTest, UnitsBesideEachOtherLeaveWhenTheNextBackwardBegins) {
  for_each_step(
      chain_of_pairs(),
      [](const Step& step) {
        EXPECT_THAT(
            order_of(step,
                     {"between", "backward end layers.3", "backward layers.1",
                      "reduce-scatter layers.2", "reduce-scatter layers.3"}),
            ElementsAre("between", "between", "backward end layers.3",
                        "between", "reduce-scatter layers.3",
                        "reduce-scatter layers.2", "backward layers.1"));
        for (const std::size_t i : {4, 5}) {
          const EntryId reduced = step.at("reduce-scatter " + layer_name(i));
          EXPECT_FALSE(step.leads(reduced, step.at("backward end layers.2")));
        }
      },
      stand_in_pairs);
}

TEST(StreamOrderTest, PrefetchChosenByTheUserReplacesTheRecordedOne) {
  for_each_step(
      chain_of_layers(),
      [](const Step& step) {
        for (const std::size_t i : {1, 2, 3}) {
          EXPECT_FALSE(step.leads(step.at("forward layers.0"),
                                  step.at("all-gather " + layer_name(i))));
        }
        EXPECT_TRUE(step.leads(step.at("forward layers.1"),
                               step.at("all-gather layers.4")));
        for (const std::size_t i : {1, 2}) {
          EXPECT_FALSE(step.leads(step.at("backward layers.3"),
                                  step.at("all-gather " + layer_name(i), 1)));
        }
      },
      [](Rank& rank) {
        const auto unit = [&](std::size_t u) {
          return rank.unit(u).weak_from_this();
        };
        rank.unit(1).settings().forward_prefetch = {unit(2), unit(3), unit(4)};
        rank.unit(4).settings().backward_prefetch = {unit(3), unit(2)};
      });
}

TEST(StreamOrderTest,
     AForwardWithoutGradGathersEveryUnitOnceAndReducesNothing) {
  const Scenario scenario = chain_of_layers();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    const at::NoGradGuard no_grad;
    scenario.program(rank, input_of(scenario, r, 0, 0));
    const Step step(*rank.runtime, 0);
    for (std::size_t i = 0; i < kLayers; ++i) {
      EXPECT_EQ(step.all("all-gather " + layer_name(i)).size(), 1u);
      EXPECT_THAT(step.all("reduce-scatter " + layer_name(i)), IsEmpty());
    }
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
