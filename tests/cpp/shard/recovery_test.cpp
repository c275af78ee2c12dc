// A step that fails, at whatever point, is skipped: the next one runs, and the
// bits are those of a run that never tried it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

#include "base/check.h"
#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using memory::Category;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::ThrowsMessage;

constexpr std::int64_t kWorldSize = 2;

// What goes wrong in the last microbatch of a step, on all ranks alike.
struct Fault {
  std::string name;
  std::function<void(Rank&)> before_forward = [](Rank&) {};
  std::function<void(Rank&)> before_backward = [](Rank&) {};
};

Scenario scenario_with(std::vector<bool> sync) {
  return {.units = with_dtypes(model_of(3, odd_shapes()), at::kFloat,
                               at::kBFloat16, at::kFloat),
          .program = chain(3),
          .sync = std::move(sync)};
}

std::vector<std::string> names(const Scenario& scenario) {
  std::vector<std::string> names;
  for (const auto& unit : scenario.units) names.push_back(unit.name);
  return names;
}

// What the step threw, empty if nothing.
std::string failure_of_step(Rank& rank, const Scenario& scenario, int step,
                            const Fault& fault) {
  try {
    for (std::size_t m = 0; m < scenario.sync.size(); ++m) {
      const bool last = m + 1 == scenario.sync.size();
      rank.set_sync(scenario.sync[m]);
      if (last) fault.before_forward(rank);
      const at::Tensor loss = loss_of(
          scenario.program(rank, input_of(scenario, rank.rank(), step, m)));
      if (last) fault.before_backward(rank);
      loss.backward();
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Fails every step once before it is run; recovers from the first failure by
// itself, from the second when told to.
void expect_recovery(const Scenario& scenario, const Fault& fault) {
  SCOPED_TRACE(fault.name);
  const auto expected = train_naively(scenario, kWorldSize);
  run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    for (int step = 0; step < scenario.num_steps; ++step) {
      EXPECT_THAT(failure_of_step(rank, scenario, step, fault), Not(IsEmpty()));
      rank.on_kernel = nullptr;
      rank.on_wrap = nullptr;
      if (step > 0) {
        rank.root->abort();
        EXPECT_EQ(rank.unrest(), "");
        EXPECT_EQ(rank.live(Category::gradient_slab), 0);
        EXPECT_EQ(rank.live(Category::sharded_gradients), 0);
      }
      const auto losses = run_step(rank, scenario, step);
      for (std::size_t m = 0; m < losses.size(); ++m) {
        EXPECT_TRUE(same_bits(losses[m], expected[step].losses[r][m]));
      }
      EXPECT_EQ(rank.gradient_difference(expected[step].gradients), "");
      rank.optimize();
      rank.zero_grad();
      EXPECT_EQ(rank.parameter_difference(expected[step].parameters), "");
      EXPECT_EQ(rank.unrest(), "");
    }
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

Fault kernel_fault(const std::string& kernel) {
  return {.name = kernel, .before_forward = [kernel](Rank& rank) {
            rank.on_kernel = [kernel](const std::string& name) {
              if (name == kernel) throw std::runtime_error("a kernel failed");
            };
          }};
}

Fault lease_fault(Category category, const std::string& unit, bool backward) {
  const auto arm = [=](Rank& rank) {
    rank.memory->fail_next_lease(category, unit);
  };
  Fault fault{base::concat(memory::category_name(category), " of ", unit,
                           backward ? " in backward" : "")};
  (backward ? fault.before_backward : fault.before_forward) = arm;
  return fault;
}

Fault collective_fault(comm::Kind kind, const std::string& unit,
                       bool backward) {
  const auto arm = [=](Rank& rank) {
    rank.collectives->recording().fail_next(kind, unit, "connection reset");
  };
  Fault fault{base::concat(comm::kind_name(kind), " of ", unit,
                           backward ? " in backward" : "")};
  (backward ? fault.before_backward : fault.before_forward) = arm;
  return fault;
}

class RecoveryTest : public testing::TestWithParam<std::vector<bool>> {
 protected:
  Scenario scenario_ = scenario_with(GetParam());
};

INSTANTIATE_TEST_SUITE_P(Sync, RecoveryTest,
                         testing::Values(std::vector<bool>{true},
                                         std::vector<bool>{true, true},
                                         std::vector<bool>{false, true},
                                         std::vector<bool>{true, false}));

TEST_P(RecoveryTest, FromAnExceptionInForwardOfAnyUnit) {
  for (const std::string& unit : names(scenario_)) {
    expect_recovery(scenario_, kernel_fault("forward " + unit));
  }
}

TEST_P(RecoveryTest, FromAnExceptionInBackwardOfAnyUnit) {
  for (const std::string& unit : names(scenario_)) {
    expect_recovery(scenario_, kernel_fault("backward " + unit));
  }
  // The first two have inputs without gradients.
  for (const std::string unit : {"layers.1", "layers.2"}) {
    expect_recovery(scenario_, kernel_fault("backward end " + unit));
  }
}

TEST_P(RecoveryTest, FromAFailingLeaseOfParameters) {
  for (const std::string& unit : names(scenario_)) {
    for (const bool backward : {false, true}) {
      expect_recovery(scenario_,
                      lease_fault(Category::gathered, unit, backward));
      expect_recovery(scenario_,
                      lease_fault(Category::gather_input, unit, backward));
    }
  }
}

TEST_P(RecoveryTest, FromAFailingGather) {
  for (const std::string& unit : names(scenario_)) {
    for (const bool backward : {false, true}) {
      expect_recovery(scenario_,
                      collective_fault(comm::Kind::all_gather, unit, backward));
    }
  }
}

TEST_P(RecoveryTest, FromAFailingReduction) {
  if (!scenario_.sync.back()) return;
  for (const std::string& unit : names(scenario_)) {
    expect_recovery(scenario_, collective_fault(comm::Kind::reduce_scatter,
                                                unit, /*backward=*/true));
  }
}

TEST_P(RecoveryTest, FromAFailingLeaseOfGradients) {
  for (const std::string& unit : names(scenario_)) {
    if (scenario_.sync.back() && scenario_.sync.front() &&
        scenario_.sync.size() == 1) {
      expect_recovery(scenario_, lease_fault(Category::sharded_gradients, unit,
                                             /*backward=*/true));
    }
    if (!scenario_.sync.back()) {
      expect_recovery(scenario_, lease_fault(Category::gradient_slab, unit,
                                             /*backward=*/true));
    }
    if (!scenario_.sync.front()) {
      // The results of a slab's reduction.
      expect_recovery(scenario_, lease_fault(Category::gradient_stream, unit,
                                             /*backward=*/true));
    }
  }
  if (scenario_.sync.back() && scenario_.sync.front()) {
    expect_recovery(scenario_, lease_fault(Category::gradient_stream, "model",
                                           /*backward=*/true));
  }
}

TEST_P(RecoveryTest, FromAnExceptionWhileGradientsBecomeVisible) {
  // Gradients that were visible before are not made visible again.
  if (scenario_.sync != std::vector<bool>{true}) return;
  for (const std::string& name : names(scenario_)) {
    expect_recovery(
        scenario_, {.name = "wrap " + name, .before_backward = [&](Rank& rank) {
                      rank.on_wrap = [&](const std::string& unit) {
                        if (unit == name) throw std::runtime_error("wrap");
                      };
                    }});
  }
}

TEST_P(RecoveryTest, FromACollectiveThatCanNotBeIssued) {
  std::int64_t issues = 0;
  run_ranks(1, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario_.units);
    failure_of_step(rank, scenario_, 0,
                    {.name = "none", .before_forward = [](Rank& counting) {
                       counting.collectives->fail_issue(-1);
                     }});
    issues = rank.collectives->num_issues();
  });
  EXPECT_GE(issues, 8);  // gathers of forward and backward
  for (std::int64_t k = 0; k < issues; ++k) {
    expect_recovery(scenario_, {.name = base::concat("issue ", k),
                                .before_forward = [k](Rank& rank) {
                                  rank.collectives->fail_issue(k);
                                }});
  }
}

// --- other ways to fail and to go on ----------------------------------------

class FailedOnce : public testing::Test {
 protected:
  void on_two_ranks(const std::function<void(Rank&)>& run) {
    run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
      Rank rank(exchange, r, scenario_.units);
      run(rank);
      EXPECT_THAT(rank.runtime->violations(), IsEmpty());
    });
  }

  at::Tensor forward(Rank& rank, int step) const {
    return loss_of(
        scenario_.program(rank, input_of(scenario_, rank.rank(), step, 0)));
  }

  void expect_step(Rank& rank, int step) const {
    run_step(rank, scenario_, step);
    EXPECT_EQ(rank.gradient_difference(expected_[step].gradients), "");
    rank.optimize();
    rank.zero_grad();
    EXPECT_EQ(rank.unrest(), "");
  }

  // Throws at `kernel`, once.
  static void break_once(Rank& rank, const std::string& kernel) {
    rank.on_kernel = [&rank, kernel](const std::string& name) {
      if (name != kernel) return;
      rank.on_kernel = nullptr;
      throw std::runtime_error("a kernel failed");
    };
  }

  const Scenario scenario_ = scenario_with({true});
  const std::vector<NaiveStep> expected_ = train_naively(scenario_, kWorldSize);
};

TEST_F(FailedOnce, AForwardWithoutGradKeepsTheGradients) {
  on_two_ranks([&](Rank& rank) {
    run_step(rank, scenario_, 0);
    break_once(rank, "forward layers.1");
    {
      const at::NoGradGuard no_grad;
      EXPECT_THROW(forward(rank, 1), std::runtime_error);
      forward(rank, 1);
    }
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_EQ(rank.gradient_difference(expected_[0].gradients), "");
    rank.optimize();
    rank.zero_grad();
    expect_step(rank, 1);
  });
}

TEST_F(FailedOnce, AForwardWithoutGradKeepsWhatAccumulatesWithoutSync) {
  Scenario accumulating = scenario_with({false, true});
  const auto expected = train_naively(accumulating, kWorldSize);
  on_two_ranks([&](Rank& rank) {
    rank.set_sync(false);
    loss_of(
        accumulating.program(rank, input_of(accumulating, rank.rank(), 0, 0)))
        .backward();
    break_once(rank, "forward layers.1");
    {
      const at::NoGradGuard no_grad;
      EXPECT_THROW(forward(rank, 1), std::runtime_error);
    }
    rank.set_sync(true);
    loss_of(
        accumulating.program(rank, input_of(accumulating, rank.rank(), 0, 1)))
        .backward();
    EXPECT_EQ(rank.gradient_difference(expected[0].gradients), "");
  });
}

TEST_F(FailedOnce, AUnitThatWasCalledByItself) {
  on_two_ranks([&](Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      break_once(rank, "forward layers.1");
      EXPECT_THROW(
          rank.call(2, input_of(scenario_, rank.rank(), step, 0), layer()),
          std::runtime_error);
      expect_step(rank, step);
    }
  });
}

TEST_F(FailedOnce, BackwardCanBeRunAgainOverTheSameGraph) {
  on_two_ranks([&](Rank& rank) {
    for (const std::string kernel : {"backward layers.1", "backward model"}) {
      const at::Tensor loss = forward(rank, 0);
      break_once(rank, kernel);
      EXPECT_THROW(loss.backward({}, /*retain_graph=*/true),
                   std::runtime_error);
      loss.backward({}, /*retain_graph=*/true);
      EXPECT_EQ(rank.gradient_difference(expected_[0].gradients), "");
      EXPECT_EQ(rank.unrest(), "");
      rank.zero_grad();
    }
    expect_step(rank, 0);
    expect_step(rank, 1);
  });
}

TEST_F(FailedOnce, AbortAtRestDropsTheGradientsAndNothingElse) {
  on_two_ranks([&](Rank& rank) {
    run_step(rank, scenario_, 0);
    rank.root->abort();
    EXPECT_EQ(rank.live(Category::sharded_gradients), 0);
    EXPECT_FALSE(rank.shard(1, 0).grad().defined());
    expect_step(rank, 0);
    rank.root->abort(/*drop_gradients=*/false);
    expect_step(rank, 1);
  });
}

TEST_F(FailedOnce, AnAbortedForwardLeavesNothingGathered) {
  on_two_ranks([&](Rank& rank) {
    const at::Tensor loss = forward(rank, 0);
    break_once(rank, "forward layers.1");
    EXPECT_THROW(forward(rank, 0), std::runtime_error);
    EXPECT_NE(rank.unrest(), "");  // that unit, the next one and the model
    rank.root->abort();
    EXPECT_EQ(rank.unrest(), "");
    expect_step(rank, 0);
  });
}

TEST_F(FailedOnce, AReductionOutsideOfBackward) {
  const Scenario accumulating = scenario_with({false});
  on_two_ranks([&](Rank& rank) {
    run_step(rank, accumulating, 0);
    rank.collectives->recording().fail_next(comm::Kind::reduce_scatter,
                                            "layers.1", "connection reset");
    rank.set_sync(true);
    EXPECT_THROW(rank.root->reduce_accumulated(), Error);
    expect_step(rank, 0);
  });
}

// What is on its way works on bytes that go back to compute.
TEST(DeletedAfterAFailure, NothingIsWrittenToBytesThatWereGivenBack) {
  for (const std::string kernel :
       {"forward layers.0", "forward layers.1", "backward layers.2",
        "backward layers.1", "backward layers.0", "backward model"}) {
    for (const std::vector<bool>& sync :
         {std::vector<bool>{true}, {false, true}}) {
      SCOPED_TRACE(kernel + testing::PrintToString(sync));
      run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
        const auto scenario = scenario_with(sync);
        std::shared_ptr<device::ScriptedRuntime> runtime;
        std::shared_ptr<memory::Ledger> ledger;
        {
          Rank rank(exchange, r, scenario.units);
          runtime = rank.runtime;
          ledger = rank.ledger;
          EXPECT_EQ(failure_of_step(rank, scenario, 0, kernel_fault(kernel)),
                    "a kernel failed");
        }
        EXPECT_THAT(ledger->live(), testing::Each(0));
        EXPECT_THAT(runtime->violations(), IsEmpty());
      });
    }
  }
}

TEST_F(FailedOnce, TheErrorOfACollectiveNamesUnitAndCause) {
  on_two_ranks([&](Rank& rank) {
    rank.collectives->recording().fail_next(comm::Kind::reduce_scatter,
                                            "layers.1", "connection reset");
    const at::Tensor loss = forward(rank, 0);
    EXPECT_THAT([&] { loss.backward(); },
                ThrowsMessage<Error>(HasSubstr(base::concat(
                    "lowtide: layers.1: expected the reduce-scatter to finish "
                    "on all ranks, got 'connection reset' (rank ",
                    rank.rank(), " of 2). "))));
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
