// Post-accumulate hooks of sharded parameters: an optimizer in backward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "base/check.h"
#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Access;
using device::Stream;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr std::size_t kLayers = 3;

// Reads the gradient and writes the parameter on the current stream, then drops
// the gradient.
class Optimizer final : public torch::autograd::PostAccumulateGradHook {
 public:
  Optimizer(Rank& rank, std::string name)
      : rank_(rank), name_(std::move(name)) {}

  void operator()(const at::Tensor& shard) override {
    auto& runtime = *rank_.runtime;
    const device::ScriptedRuntime::Label label(name_);
    const at::Tensor gradient = shard.grad();
    runtime.touches(runtime.current(), gradient.const_data_ptr(),
                    gradient.nbytes(), Access::read);
    runtime.touches(runtime.current(), shard.const_data_ptr(), shard.nbytes(),
                    Access::write);
    runtime.mark(runtime.current(), name_);
    optimize(shard, gradient);
    shard.mutable_grad().reset();
  }

 private:
  Rank& rank_;
  std::string name_;
};

Scenario chain_of_layers() {
  return {.units = model_of(kLayers, dense()),
          .program = chain(kLayers),
          .num_steps = 2};
}

void update_in_backward(Rank& rank, std::size_t unit) {
  for (std::size_t p = 0; p < dense().size(); ++p) {
    torch::autograd::impl::set_post_acc_grad_hooks(
        rank.shard(unit, p),
        std::make_unique<Optimizer>(rank, base::concat("update ", unit)));
  }
}

TEST(GradientHooksTest, UnitsAreUpdatedWhereTheyAreReducedInAnyCase) {
  const Scenario scenario = chain_of_layers();
  const auto expected = train_naively(scenario, 2);
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    for (std::size_t unit = 0; unit <= kLayers; ++unit) {
      update_in_backward(rank, unit);
    }
    for (int step = 0; step < scenario.num_steps; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.parameter_difference(
                    expected[static_cast<std::size_t>(step)].parameters),
                "");
    }
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

// All of a unit at once, by its setting, behind the hooks of its parameters.
TEST(GradientHooksTest, AUnitsGradientsAreTakenTogether) {
  const Scenario scenario = chain_of_layers();
  const auto expected = train_naively(scenario, 2);
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    std::vector<std::string> taken;
    for (std::size_t unit = 0; unit <= kLayers; ++unit) {
      rank.unit(unit).settings().on_gradients = [&, unit] {
        EXPECT_FALSE(rank.root->ended(rank.root->backwards()));
        taken.push_back(rank.unit(unit).name());
        for (std::size_t p = 0; p < dense().size(); ++p) {
          if (rank.shard(unit, p).grad().defined()) {
            Optimizer(rank, base::concat("take ", unit))(rank.shard(unit, p));
          }
        }
      };
    }
    for (int step = 0; step < scenario.num_steps; ++step) {
      run_step(rank, scenario, step);
      EXPECT_TRUE(rank.root->ended(rank.root->backwards()));
      EXPECT_EQ(rank.parameter_difference(
                    expected[static_cast<std::size_t>(step)].parameters),
                "");
    }
    EXPECT_EQ(taken.size(), 2 * (kLayers + 1));
    EXPECT_EQ(rank.runtime->log()[rank.runtime->entries("take 3")[0]].stream,
              Stream::reduce);
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

TEST(GradientHooksTest, ABackwardThatRaisedNeverEnds) {
  const Scenario scenario = chain_of_layers();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    rank.unit(1).settings().on_gradients = [] {
      throw std::runtime_error("an optimizer failed");
    };
    EXPECT_THROW(run_step(rank, scenario, 0), std::runtime_error);
    rank.unit(1).settings().on_gradients = nullptr;
    run_step(rank, scenario, 0);
    EXPECT_FALSE(rank.root->ended(1));
    EXPECT_TRUE(rank.root->ended(2));
  });
}

TEST(GradientHooksTest, AUnitIsUpdatedBeforeTheNextOnesBackward) {
  const Scenario scenario = chain_of_layers();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    update_in_backward(rank, kLayers);  // layers.2, whose backward is first
    std::vector<std::string> order;
    rank.on_kernel = [&](const std::string& kernel) {
      if (kernel.rfind("backward layers", 0) == 0) {
        order.push_back(base::concat(
            kernel,
            rank.runtime->entries("update 3").empty() ? "" : ", updated"));
      }
    };
    run_step(rank, scenario, 0);
    EXPECT_THAT(order,
                ElementsAre("backward layers.2", "backward layers.1, updated",
                            "backward layers.0, updated"));
    EXPECT_EQ(rank.runtime->log()[rank.runtime->entries("update 3")[0]].stream,
              Stream::reduce);
    // Only units with hooks: the others' gradients are there at the end.
    EXPECT_FALSE(rank.shard(kLayers, 0).grad().defined());
    EXPECT_TRUE(rank.shard(1, 0).grad().defined());
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

TEST(GradientHooksTest, BytesThatAHookDropsAreFreeWhenReduceIsDone) {
  const Scenario scenario = chain_of_layers();
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    for (std::size_t unit = 1; unit <= kLayers; ++unit) {
      update_in_backward(rank, unit);
    }
    std::int64_t live = 0;
    rank.on_kernel = [&](const std::string& kernel) {
      if (kernel == "backward layers.0") {
        live = rank.live(memory::Category::sharded_gradients);
      }
    };
    run_step(rank, scenario, 0);
    const auto generation = [&](std::size_t unit) {
      auto& gradients = rank.unit(unit).gradients();
      return gradients.sharded().generation_bytes(gradients.trainable());
    };
    // Of layers.2 nothing is left; layers.0 comes next; layers.1 may wait.
    EXPECT_LE(live, generation(0) + generation(1) + generation(2));
    EXPECT_EQ(rank.live(memory::Category::sharded_gradients), generation(0));
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
