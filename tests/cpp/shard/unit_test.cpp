// What a unit and its root do besides streaming gradients.
#include "shard/unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "harness.h"
#include "shard/policy.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

class UnitTest : public testing::Test {
 protected:
  static void on_two_ranks(const Scenario& scenario,
                           const std::function<void(Rank&)>& run) {
    on_ranks(2, scenario, run);
  }

  // One rank knows what all know.
  static void on_one_rank(const Scenario& scenario,
                          const std::function<void(Rank&)>& run) {
    on_ranks(1, scenario, run);
  }

  static void on_ranks(std::int64_t world_size, const Scenario& scenario,
                       const std::function<void(Rank&)>& run) {
    run_ranks(world_size, [&](Exchange& exchange, std::int64_t r) {
      Rank rank(exchange, r, scenario.units);
      run(rank);
      EXPECT_THAT(rank.runtime->violations(), IsEmpty());
    });
  }

  static std::int64_t num_calls(Rank& rank, comm::Kind kind,
                                const std::string& label) {
    const auto& calls = rank.collectives->recording().calls();
    return std::count_if(calls.begin(), calls.end(), [&](const auto& call) {
      return call.kind == kind && call.label == label;
    });
  }

  const Scenario chain_{.units = model_of(3, odd_shapes()),
                        .program = chain(3)};
};

// --- what backward gathers
// ----------------------------------------------------

// The model around one leaf module that computes `body`.
Scenario around_leaf(const Layers::Body& body) {
  Scenario scenario{
      .units = model_of(1, {{{kWidth}}}),
      .program = [body](Layers& layers, const at::Tensor& x) {
        return layers.call(0, x, [&](const auto& parameters, const auto& in) {
          return layer()(parameters, layers.call(1, in, body));
        });
      }};
  scenario.units[1].leaf_module = true;
  return scenario;
}

TEST_F(UnitTest, ALeafModuleThatAutogradSavedNothingOfIsGatheredOnce) {
  const Scenario scenario =
      around_leaf([](const auto& parameters, const auto& x) {
        return x + parameters[0];  // saves nothing
      });
  expect_naive_bits(scenario, 2);
  on_one_rank(scenario, [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"), step + 1);
    }
  });
  // Without a comparison what another rank saved is not known.
  on_two_ranks(scenario, [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"),
                2 * (step + 1));
    }
  });
}

TEST_F(UnitTest, ALeafModuleWhoseParameterAutogradSavedIsGatheredAgain) {
  const std::vector<Layers::Body> bodies = {
      // The leaf itself, and a view of it.
      [](const auto& parameters, const auto& x) { return x * parameters[0]; },
      [](const auto& parameters, const auto& x) {
        return x * parameters[0].view({1, kWidth});
      }};
  for (const auto& body : bodies) {
    // Only a gradient of the input needs the parameter.
    Scenario scenario = around_leaf(body);
    const Program inner = scenario.program;
    scenario.program = [inner](Layers& layers, const at::Tensor& x) {
      return inner(layers, x.detach().set_requires_grad(true));
    };
    expect_naive_bits(scenario, 2);
    on_one_rank(scenario, [&](Rank& rank) {
      run_step(rank, scenario, 0);
      EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"), 2);
    });
  }
}

// A graph of an earlier forward that nobody ran backward, as a caught exception
// leaves one behind, dies while the leaf runs: what it gives back hides what
// this forward saves.
TEST_F(UnitTest, AGraphThatDiesInsideALeafsForwardHidesNothing) {
  const Scenario scenario = around_leaf(
      [](const auto& parameters, const auto& x) { return x * parameters[0]; });
  on_one_rank(scenario, [&](Rank& rank) {
    const auto forward = [&](const Layers::Body& leaf) {
      const auto x = input_of(scenario, rank.rank(), 0, 0);
      return around_leaf(leaf).program(rank, x.set_requires_grad(true));
    };
    const auto times = [](const auto& parameters, const auto& x) {
      return x * parameters[0];
    };
    at::Tensor abandoned = forward(times);
    rank.root->abort();
    const at::Tensor y = forward([&](const auto& parameters, const auto& x) {
      abandoned.reset();
      return times(parameters, x);
    });
    loss_of(y).backward();
    EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"), 3);
  });
}

TEST_F(UnitTest, WhatTheUserUnshardedIsNotGatheredAgain) {
  on_two_ranks(chain_, [&](Rank& rank) {
    rank.unit(1).unshard();
    EXPECT_EQ(rank.unit(1).parameters().state(), UnitState::unsharded);
    EXPECT_TRUE(rank.shown(1));
    run_step(rank, chain_, 0);
    EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"), 2);
    rank.unit(1).unshard();
    rank.unit(1).reshard();
    EXPECT_EQ(rank.unrest(), "");
  });
}

TEST_F(UnitTest, AGatherTheUserIssuedIsWaitedForByForward) {
  on_two_ranks(chain_, [&](Rank& rank) {
    rank.unit(3).gather();
    EXPECT_EQ(rank.unit(3).parameters().state(), UnitState::gathering);
    EXPECT_FALSE(rank.shown(3));
    run_step(rank, chain_, 0);
    EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.2"), 2);
    EXPECT_EQ(rank.unrest(), "");
  });
}

TEST_F(UnitTest, ParametersKeptAfterBackwardAreReshardedByTheUser) {
  const auto expected = train_naively(chain_, 2);
  on_two_ranks(chain_, [&](Rank& rank) {
    for (std::size_t u = 0; u < rank.size(); ++u) {
      rank.unit(u).settings().reshard_after_backward = false;
    }
    run_step(rank, chain_, 0);
    for (std::size_t u = 0; u < rank.size(); ++u) {
      EXPECT_EQ(rank.unit(u).parameters().state(), UnitState::unsharded);
      rank.unit(u).reshard();
    }
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_EQ(rank.gradient_difference(expected[0].gradients), "");
    rank.optimize();
    rank.zero_grad();
    run_step(rank, chain_, 1);
    EXPECT_EQ(rank.gradient_difference(expected[1].gradients), "");
  });
}

// Else a graph of before the write would be gone through with other values.
TEST_F(UnitTest, AWriteToAShardCountsAsOneToItsFullParameter) {
  on_two_ranks(chain_, [&](Rank& rank) {
    const auto version = [&](std::size_t p) {
      return rank.leaf(1, p)._version();
    };
    run_step(rank, chain_, 0);
    const auto first = version(0);
    const auto second = version(1);
    run_step(rank, chain_, 0);
    EXPECT_EQ(version(0), first) << "gathered again, the same";
    {
      const at::NoGradGuard guard;
      at::Tensor(rank.shard(1, 0)).mul_(2);
    }
    run_step(rank, chain_, 0);
    EXPECT_EQ(version(0), first + 1);
    EXPECT_EQ(version(1), second);
  });
}

// --- the plan
// -------------------------------------------------------------------

TEST_F(UnitTest, SendsWhatThePlanSaysAndNothingElse) {
  for (const std::int64_t budget : {1, 20'000, 64 << 20}) {
    on_two_ranks(chain_, [&](Rank& rank) {
      rank.root->set_gradient_budget(budget);
      for (int step = 0; step < 2; ++step) {
        const std::size_t before = rank.collectives->recording().calls().size();
        run_step(rank, chain_, step);
        std::vector<std::pair<std::string, std::int64_t>> sent;
        const auto& calls = rank.collectives->recording().calls();
        for (std::size_t c = before; c < calls.size(); ++c) {
          if (calls[c].kind != comm::Kind::reduce_scatter) continue;
          EXPECT_FALSE(calls[c].coalesced);
          EXPECT_EQ(calls[c].reduction, comm::Reduction::average);
          sent.emplace_back(calls[c].label, calls[c].full_bytes.at(0));
        }
        // After the first step the plan is refined.
        std::vector<std::pair<std::string, std::int64_t>> planned;
        for (const std::size_t u : {3, 2, 1, 0}) {
          const auto& unit = rank.unit(u);
          for (const auto& chunk : unit.gradients().lanes()[0].plan.chunks) {
            planned.emplace_back(unit.name(), 2 * chunk.columns * 4);
          }
        }
        if (step > 0) {
          EXPECT_EQ(sent, planned);
        }
      }
    });
  }
}

TEST_F(UnitTest, TheOrderOfRankZeroIsAgreedAfterTheFirstBackward) {
  // Parameters 2 and 3 complete in another order on rank 1.
  const Scenario scenario{
      .units = model_of(1, odd_shapes()),
      .program = [](Layers& layers, const at::Tensor& x) {
        return layers.call(0, x, [&](const auto& outer, const auto& in) {
          return layer()(
              outer,
              layers.call(1, in, [&](const auto& parameters, const auto& h) {
                const at::Tensor a = (parameters[2] * parameters[2]).sum();
                const at::Tensor b = (parameters[3] * parameters[3]).sum();
                const at::Tensor sum =
                    layers.rank() == 0 ? (h + a) + b : (h + b) + a;
                return layer({2, 3, 4})(parameters, sum);
              }));
        });
      }};
  std::vector<std::vector<std::int32_t>> first(2);
  std::vector<std::vector<std::int32_t>> later(2);
  on_two_ranks(scenario, [&](Rank& rank) {
    run_step(rank, scenario, 0);
    first[rank.rank()] = rank.unit(1).gradients().trainable();
    run_step(rank, scenario, 1);
    later[rank.rank()] = rank.unit(1).gradients().trainable();
    run_step(rank, scenario, 2);
    EXPECT_EQ(rank.unit(1).gradients().trainable(), later[rank.rank()]);
  });
  EXPECT_THAT(first, Each(ElementsAre(6, 5, 4, 3, 2, 1, 0)));
  EXPECT_EQ(later[0], later[1]);
  const auto position = [&](std::int32_t p) {
    return std::find(later[0].begin(), later[0].end(), p) - later[0].begin();
  };
  // As in rank 0's backward; 4 was not used and comes last.
  EXPECT_LT(position(1), position(3));
  EXPECT_LT(position(3), position(2));
  EXPECT_EQ(position(4), 6);
}

TEST_F(UnitTest, ABudgetCanChangeBetweenSteps) {
  const auto expected = train_naively(chain_, 2);
  on_two_ranks(chain_, [&](Rank& rank) {
    rank.root->set_gradient_budget(1);
    run_step(rank, chain_, 0);
    const auto small = num_calls(rank, comm::Kind::reduce_scatter, "layers.0");
    EXPECT_EQ(rank.gradient_difference(expected[0].gradients), "");
    rank.optimize();
    rank.zero_grad();
    rank.root->set_gradient_budget(64 << 20);
    EXPECT_EQ(rank.root->gradient_budget(), 64 << 20);
    run_step(rank, chain_, 1);
    EXPECT_GT(small, 1);
    EXPECT_EQ(num_calls(rank, comm::Kind::reduce_scatter, "layers.0"),
              small + 1);
    EXPECT_EQ(rank.gradient_difference(expected[1].gradients), "");
  });
}

TEST_F(UnitTest, ABudgetIsAPositiveNumberOfBytes) {
  on_two_ranks(chain_, [](Rank& rank) {
    EXPECT_THAT([&] { rank.root->set_gradient_budget(0); },
                ThrowsMessage<InvalidArgument>(StrEq(
                    "lowtide: gradient budget of 'model': expected a positive "
                    "number of bytes, got 0. The default for its units is "
                    "201326592 bytes.")));
    EXPECT_EQ(rank.root->gradient_budget(), kDefaultRingBudget);
  });
}

// --- what changes between steps
// -----------------------------------------------------

TEST_F(UnitTest, ParametersCanBeFrozenAndThawed) {
  const auto expected = train_naively(chain_, 2);
  on_two_ranks(chain_, [&](Rank& rank) {
    Parameters gradients = expected[0].gradients;
    for (const bool frozen : {false, true, false}) {
      for (const std::size_t p : {0, 6}) {
        rank.shard(1, p).set_requires_grad(!frozen);
      }
      for (std::size_t p = 0; p < 7; ++p) {
        rank.shard(2, p).set_requires_grad(!frozen);
      }
      run_step(rank, chain_, 0);
      auto now = gradients;
      if (frozen) {
        now[1][0] = now[1][6] = at::Tensor();
        for (auto& gradient : now[2]) gradient = at::Tensor();
      }
      EXPECT_EQ(rank.gradient_difference(now), "") << frozen;
      rank.zero_grad();
    }
  });
}

TEST_F(UnitTest, AParameterFrozenAfterItsForwardGetsNoGradient) {
  const auto expected = train_naively(chain_, 2);
  for (const bool sync : {true, false}) {
    on_two_ranks(chain_, [&](Rank& rank) {
      rank.set_sync(sync);
      const at::Tensor loss =
          loss_of(chain_.program(rank, input_of(chain_, rank.rank(), 0, 0)));
      rank.shard(1, 0).set_requires_grad(false);
      // Plans anew, without it.
      chain_.program(rank, input_of(chain_, rank.rank(), 0, 0));
      loss.backward();
      auto gradients = expected[0].gradients;
      if (sync) {
        gradients[1][0] = at::Tensor();
        EXPECT_EQ(rank.gradient_difference(gradients), "");
      }
      EXPECT_FALSE(rank.shard(1, 0).grad().defined());
    });
  }
}

TEST_F(UnitTest, AUnitOfARootMayDie) {
  const Scenario without{.units = model_of(3, odd_shapes()),
                         .program = [](Layers& layers, const at::Tensor& x) {
                           return layers.call(
                               0, x, [&](const auto& p, const auto& in) {
                                 return layer()(p, layers.call(1, in, layer()));
                               });
                         }};
  const auto expected = train_naively(without, 2);
  on_two_ranks(chain_, [&](Rank& rank) {
    run_step(rank, chain_, 0);
    rank.zero_grad();
    rank.drop(3);
    rank.drop(2);
    for (int step = 0; step < 2; ++step) {
      run_step(rank, without, 0);
      EXPECT_EQ(rank.gradient_difference(expected[0].gradients), "");
      rank.zero_grad();
      EXPECT_EQ(rank.unrest(), "");
    }
    rank.root->abort();
  });
}

TEST_F(UnitTest, ANewNameIsInErrorsAndLabels) {
  on_two_ranks(chain_, [&](Rank& rank) {
    rank.unit(1).rename("blocks.0", std::vector<std::string>(7, "w"));
    EXPECT_EQ(rank.unit(1).parameters().infos()[0].name, "w");
    run_step(rank, chain_, 0);
    EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "blocks.0"), 2);
    EXPECT_EQ(num_calls(rank, comm::Kind::reduce_scatter, "blocks.0"), 1);
    EXPECT_EQ(num_calls(rank, comm::Kind::all_gather, "layers.0"), 0);
  });
}

// --- what lowtide itself must not do
// ------------------------------------------------

TEST_F(UnitTest, InvariantsAreChecked) {
  on_two_ranks(chain_, [&](Rank& rank) {
    EXPECT_THAT(
        [&] { rank.root->adopt({}); },
        ThrowsMessage<Error>(HasSubstr("a root adopts its units once")));
    EXPECT_THAT(
        [&] {
          static_cast<BackwardReceiver&>(rank.unit(1)).on_output_gradient(1);
        },
        ThrowsMessage<Error>(HasSubstr("autograd runs on this thread")));
    rank.root->abort();
  });
  on_two_ranks(chain_, [&](Rank& rank) {
    rank.set_sync(false);
    loss_of(chain_.program(rank, input_of(chain_, rank.rank(), 0, 0)))
        .backward();
    EXPECT_THAT([&] { rank.unit(1).gradients().plan({true}, 1 << 20); },
                ThrowsMessage<Error>(
                    HasSubstr("a plan changes only between reductions")));
  });
  on_two_ranks(chain_, [&](Rank& rank) {
    auto& stream = rank.root->stream();
    stream.begin();
    stream.append(rank.unit(1).gradients());
    EXPECT_THAT([&] { stream.begin(); },
                ThrowsMessage<Error>(HasSubstr("one backward at a time")));
    rank.root->abort();
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
