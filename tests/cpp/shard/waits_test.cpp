// Every wait of the engine's matters: without it a step breaks a rule of the
// stream order or gives other bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>

#include "base/check.h"
#include "harness.h"
#include "reentrant.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::AnyOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kWorldSize = 2;
constexpr int kNever = -1;

// One way to use the engine; trains and says what differs from `expected`.
struct Usage {
  Scenario scenario;
  std::function<void(Rank&)> prepare = [](Rank&) {};
  std::function<std::string(Rank&, const std::vector<NaiveStep>&)> run;
};

std::string train(Rank& rank, const Scenario& scenario,
                  const std::vector<NaiveStep>& expected) {
  std::string wrong;
  for (int step = 0; step < scenario.num_steps; ++step) {
    const auto losses = run_step(rank, scenario, step);
    for (std::size_t m = 0; m < losses.size(); ++m) {
      if (!same_bits(losses[m], expected[step].losses[rank.rank()][m])) {
        wrong += base::concat("another loss in step ", step, "; ");
      }
    }
    wrong += rank.gradient_difference(expected[step].gradients);
    rank.optimize();
    rank.zero_grad();
    wrong += rank.parameter_difference(expected[step].parameters);
  }
  return wrong;
}

Usage training(
    Scenario scenario, std::function<void(Rank&)> prepare = [](Rank&) {}) {
  return {scenario, std::move(prepare),
          [scenario](Rank& rank, const auto& expected) {
            return train(rank, scenario, expected);
          }};
}

// What `usage` breaks when rank 0 skips something; `skip` arms it, `waits` says
// afterwards what it could have been.
struct Outcome {
  std::string broken;
  std::vector<std::string> waits;
};

template <typename Skip, typename Waits>
Outcome run_with(const Usage& usage, const std::vector<NaiveStep>& expected,
                 Skip skip, Waits waits) {
  std::mutex mutex;
  Outcome outcome;
  run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, usage.scenario.units, usage.scenario.offloaded);
    usage.prepare(rank);
    rank.collectives->checks_values = false;  // a missing wait shows in them
    if (r == 0) skip(rank);
    std::string wrong = usage.run(rank, expected);
    for (const auto& violation : rank.runtime->violations()) wrong += violation;
    const std::lock_guard lock(mutex);
    outcome.broken += wrong;
    if (r == 0) outcome.waits = waits(rank);
  });
  return outcome;
}

// Skips each wait in turn; lists those that nobody misses.
template <typename Skip, typename Waits>
std::vector<std::string> superfluous(const Usage& usage, Skip skip,
                                     Waits waits) {
  const auto expected = train_naively(usage.scenario, kWorldSize);
  const auto run = [&](int k) {
    return run_with(
        usage, expected, [&](Rank& rank) { skip(rank, k); }, waits);
  };
  const Outcome complete = run(kNever);
  EXPECT_EQ(complete.broken, "");
  EXPECT_GT(complete.waits.size(), 0u);
  std::vector<std::string> found;
  for (std::size_t k = 0; k < complete.waits.size(); ++k) {
    if (run(static_cast<int>(k)).broken.empty()) {
      found.push_back(base::concat(k, ": ", complete.waits[k]));
    }
  }
  return found;
}

std::vector<std::string> superfluous_waits(const Usage& usage) {
  return superfluous(
      usage, [](Rank& rank, int k) { rank.waits->skip(k); },
      [](Rank& rank) { return rank.waits->waits(); });
}

std::vector<std::string> superfluous_pending_waits(const Usage& usage) {
  return superfluous(
      usage, [](Rank& rank, int k) { rank.collectives->skip_wait(k); },
      [](Rank& rank) {
        return std::vector<std::string>(rank.collectives->num_waits(),
                                        "of a collective");
      });
}

Scenario chain_of_layers(std::vector<bool> sync) {
  return {.units = with_dtypes(model_of(3, odd_shapes()), at::kFloat,
                               at::kBFloat16, at::kFloat),
          .program = chain(3),
          .sync = std::move(sync)};
}

void expect_all_matter(const Usage& usage) {
  EXPECT_THAT(superfluous_waits(usage), IsEmpty());
  EXPECT_THAT(superfluous_pending_waits(usage), IsEmpty());
}

TEST(WaitsTest, AllMatterWithOneChunkPerUnit) {
  expect_all_matter(training(chain_of_layers({true})));
}

TEST(WaitsTest, AllMatterWithManyChunksPerUnit) {
  expect_all_matter(training(chain_of_layers({true}), [](Rank& rank) {
    rank.root->set_gradient_budget(1);
  }));
}

TEST(WaitsTest, AllMatterWithOneSlot) {
  expect_all_matter(
      training(with_bystander(chain_of_layers({true})),
               [](Rank& rank) { rank.root->set_gradient_budget(1); }));
}

TEST(WaitsTest, AllMatterWhenGradientsAreAddedToOlderOnes) {
  expect_all_matter(training(chain_of_layers({true, true})));
}

TEST(WaitsTest, AllMatterWhenGradientsAccumulateWithoutSync) {
  expect_all_matter(training(chain_of_layers({false, true})));
}

TEST(WaitsTest, AllMatterWithoutACast) {
  Scenario scenario = chain_of_layers({true});
  scenario.units = model_of(3, dense());
  expect_all_matter(training(scenario));
}

TEST(WaitsTest, AllMatterWhenAUnitGetsNoGradient) {
  Scenario scenario = chain_of_layers({true});
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& in) {
      const at::Tensor y = layers.call(1, in, layer({0, 1, 2, 3, 4, 5, 6}));
      return layer()(parameters,
                     layers.call(3, layers.call(2, y, layer()), layer()));
    });
  };
  // Its gather in backward is in vain, and the reductions behind it on the
  // wire are waited for before it is: only the engine's own events count.
  EXPECT_THAT(superfluous_waits(training(scenario)), IsEmpty());
}

TEST(WaitsTest, AllMatterWhenAPrefetchWasInVain) {
  const Scenario scenario = chain_of_layers({true});
  expect_all_matter({scenario, [](Rank&) {},
                     [scenario](Rank& rank, const auto& expected) {
                       {
                         // Expects unit 2 next, but it does not come.
                         const at::NoGradGuard no_grad;
                         rank.call(1, input_of(scenario, rank.rank(), 0, 0),
                                   layer());
                       }
                       return train(rank, scenario, expected);
                     }});
}

// One replica, so that sums over replicas change no bit.  The first
// microbatch's results stay with the shards, the second's are added to them.
Usage keeping_results(Scenario scenario) {
  const auto keep = [](Rank& rank, bool keeps) {
    for (std::size_t u = 0; u < rank.size(); ++u) {
      auto& reduction = rank.unit(u).settings().reduction;
      reduction.all_reduce = !keeps;
      reduction.replicas =
          std::make_shared<comm::RecordingCollectives>(0, 1, rank.runtime);
    }
  };
  scenario.program = [program = scenario.program, keep, sync = scenario.sync](
                         Layers& layers, const auto& x) {
    thread_local std::size_t forwards = 0;
    const auto microbatch = forwards++ % sync.size();
    if (auto* rank = dynamic_cast<Rank*>(&layers)) {
      keep(*rank, microbatch + 1 < sync.size());
    }
    return program(layers, x);
  };
  return training(scenario);
}

TEST(WaitsTest, AllMatterWhenResultsStayWithTheShards) {
  expect_all_matter(keeping_results(chain_of_layers({true, true})));
}

// Gradients are held until their unit is sealed, at the end.
TEST(WaitsTest, AllMatterInReentrantCheckpoints) {
  Scenario scenario = chain_of_layers({true});
  scenario.units[0].parameters = scenario.units[1].parameters;
  scenario.program = checkpointed({1, 2, 3});
  const Usage usage =
      training(scenario, [](Rank& rank) { rank.root->set_gradient_budget(1); });
  // Compute has waited for gathers that came behind the model's own reductions
  // on the wire before it gives the model's sources back.
  EXPECT_THAT(superfluous_waits(usage),
              Each(HasSubstr("compute after reduce")));
  EXPECT_THAT(superfluous_pending_waits(usage), IsEmpty());
}

// `gather` waits for the copy of what it reads, which is behind compute, and
// compute in the end for that of gradients, which is behind `reduce`.
void expect_all_matter_offloaded(Usage usage) {
  usage.scenario.offloaded = true;
  EXPECT_THAT(superfluous_waits(usage),
              Each(AnyOf(HasSubstr("gather after compute"),
                         HasSubstr("compute after reduce"))));
  EXPECT_THAT(superfluous_pending_waits(usage), IsEmpty());
}

TEST(WaitsTest, AllMatterWhenParametersAreOffloaded) {
  expect_all_matter_offloaded(training(chain_of_layers({true})));
}

TEST(WaitsTest, AllMatterWhenOffloadedGradientsAreAddedToOlderOnes) {
  expect_all_matter_offloaded(training(chain_of_layers({true, true})));
}

TEST(WaitsTest, AllMatterWhenSumsOverReplicasAreOffloaded) {
  expect_all_matter_offloaded(keeping_results(chain_of_layers({true, true})));
}

// In forward, in backward before and after something is on its way.
TEST(WaitsTest, AllMatterWhenAStepFails) {
  const Scenario scenario = chain_of_layers({true});
  for (const std::string kernel :
       {"forward layers.1", "backward model", "backward layers.1"}) {
    SCOPED_TRACE(kernel);
    expect_all_matter({scenario, [](Rank&) {},
                       [scenario, kernel](Rank& rank, const auto& expected) {
                         rank.on_kernel = [&](const std::string& name) {
                           if (name == kernel) {
                             rank.on_kernel = nullptr;
                             throw std::runtime_error("thrown by a kernel");
                           }
                         };
                         EXPECT_THROW(run_step(rank, scenario, 0),
                                      std::runtime_error);
                         return train(rank, scenario, expected);
                       }});
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
