#include "shard/gradients/used_elsewhere.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/check.h"
#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::Contains;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

class UsedElsewhereTest : public testing::Test {
 protected:
  at::Tensor flags(const std::vector<double>& values, at::ScalarType dtype) {
    const auto numel = static_cast<std::int64_t>(values.size());
    auto made = at::tensor(values).to(dtype);
    runtime_->adopt(made.const_data_ptr(), made.nbytes(), "flags");
    runtime_->touches(device::Stream::reduce, made.const_data_ptr(),
                      made.nbytes(), device::Access::write);
    EXPECT_EQ(made.numel(), numel);
    kept_.push_back(made);
    return made;
  }

  void ask(std::vector<std::int32_t> parameters,
           std::vector<std::int32_t> columns, const at::Tensor& flags) {
    const device::StreamScope scope(*runtime_, device::Stream::reduce);
    used_.ask(std::move(parameters), std::move(columns), flags);
  }

  void expect(std::vector<std::int32_t> parameters,
              std::vector<std::int32_t> columns, const at::Tensor& flags) {
    const device::StreamScope scope(*runtime_, device::Stream::reduce);
    used_.expect(std::move(parameters), std::move(columns), flags);
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  std::shared_ptr<memory::Ledger> ledger_ = std::make_shared<memory::Ledger>();
  std::shared_ptr<memory::DeviceMemory> memory_ =
      std::make_shared<memory::DeviceMemory>(runtime_, ledger_);
  UsedElsewhere used_{std::make_shared<const std::string>("layers.0"), memory_};
  std::vector<at::Tensor> kept_;
};

TEST_F(UsedElsewhereTest, NothingAskedIsNothingUsed) {
  EXPECT_THAT(used_.parameters(), IsEmpty());
}

TEST_F(UsedElsewhereTest, AFlagIsAnyNumberButZeroOfEitherSign) {
  ask({3, 4, 7}, {0, 2, 3}, flags({-0.0, 1.0, 0.25, 0.0}, at::kFloat));
  ask({1, 2}, {1, 0}, flags({0.0, 255.0}, at::kBFloat16));
  EXPECT_THAT(used_.parameters(), ElementsAre(1, 4));
}

// The row that they came with is written again meanwhile.
TEST_F(UsedElsewhereTest, FlagsAreThoseOfWhenTheyWereAsked) {
  auto row = flags({1.0, 0.0}, at::kFloat);
  ask({0, 1}, {0, 1}, row);
  row.fill_(9.0);
  EXPECT_THAT(used_.parameters(), ElementsAre(0));
}

TEST_F(UsedElsewhereTest, ABackwardBeginsWithNothing) {
  ask({0}, {0}, flags({1.0}, at::kFloat));
  used_.begin();
  EXPECT_THAT(used_.parameters(), IsEmpty());
  ask({1, 2, 3}, {0, 1, 2}, flags({0.0, 1.0, 1.0}, at::kFloat));
  EXPECT_THAT(used_.parameters(), ElementsAre(2, 3));
}

TEST_F(UsedElsewhereTest, HostsTellOfThoseThatTheyAreExpectedTo) {
  EXPECT_FALSE(used_.ever_asked());
  ask({7, 8}, {0, 1}, flags({0.0, 1.0}, at::kFloat));
  expect({1, 2, 3}, {0, 1, 2}, flags({1.0, 0.0, 0.0}, at::kFloat));
  expect({4}, {0}, flags({0.0}, at::kFloat));
  used_.told([](std::int32_t i) { return i == 3 || i == 4 || i == 6; });
  EXPECT_THAT(used_.parameters(), ElementsAre(3, 4, 8));
  used_.begin();
  EXPECT_THAT(used_.parameters(), IsEmpty());
  EXPECT_TRUE(used_.ever_asked());
}

TEST_F(UsedElsewhereTest, WhatHostsToldIsAnAnswerForAGraph) {
  expect({1, 2}, {0, 1}, flags({0.0, 1.0}, at::kFloat));
  used_.told([](std::int32_t i) { return i == 2; });
  used_.begin();
  runtime_->set_capture(7);
  expect({1, 2}, {0, 1}, flags({0.0, 1.0}, at::kFloat));
  used_.told([](std::int32_t) { return true; });
  EXPECT_THAT(used_.parameters(), ElementsAre(2));
  EXPECT_EQ(used_.changed(), std::nullopt);
}

TEST_F(UsedElsewhereTest, AGraphCanNotCaptureAQuestionThatNobodyAsked) {
  ask({0, 1}, {0, 1}, flags({1.0, 0.0}, at::kFloat));
  used_.parameters();
  used_.begin();
  runtime_->set_capture(7);
  try {
    ask({1}, {1}, flags({1.0, 0.0}, at::kFloat));
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::StartsWith("lowtide: unit 'layers.0': expected a "
                                    "gradient of every parameter"));
    EXPECT_THAT(error.what(),
                testing::HasSubstr("set_reduce_scatter_unused_params(True)"));
  }
}

TEST_F(UsedElsewhereTest, AGraphTakesTheAnswerOfTheStepBeforeIt) {
  for (const auto& said : {flags({0.0, 1.0, 9.0}, at::kFloat),
                           flags({0.0, 0.0, 9.0}, at::kFloat)}) {
    used_.begin();
    ask({4, 5}, {0, 1}, said);
    used_.parameters();
  }
  used_.begin();
  ask({5}, {1}, flags({1.0, 1.0}, at::kFloat));
  used_.parameters();
  used_.begin();
  runtime_->set_capture(7);
  // The scripted copy comes at once, as with a first replay.
  ask({4, 5}, {0, 1}, flags({0.0, 0.0, 9.0}, at::kFloat));
  EXPECT_THAT(used_.parameters(), IsEmpty());
  ask({5}, {1}, flags({0.0, 0.5}, at::kFloat));
  EXPECT_THAT(used_.parameters(), ElementsAre(5));
  EXPECT_EQ(used_.changed(), std::nullopt);
  // What was captured outlives the next backward.
  used_.begin();
  EXPECT_THAT(used_.parameters(), IsEmpty());
  EXPECT_EQ(used_.changed(), std::nullopt);
}

TEST_F(UsedElsewhereTest, AReplayThatSaysOtherwiseIsSeen) {
  for (const bool used_first : {false, true}) {
    runtime_->set_capture(0);
    used_.begin();
    ask({4, 6}, {0, 1}, flags({0.0, used_first ? 1.0 : 0.0}, at::kFloat));
    used_.parameters();
    used_.begin();
    runtime_->set_capture(7);
    EXPECT_EQ(used_.changed(), std::nullopt);
    ask({4, 6}, {0, 1}, flags({0.0, used_first ? 0.0 : 1.0}, at::kFloat));
    EXPECT_EQ(used_.changed(), 6);
    used_ =
        UsedElsewhere(std::make_shared<const std::string>("layers.0"), memory_);
  }
}

// --- in a backward -----------------------------------------------------------

// Rank 0 leaves the bias of each layer out, all ranks the last parameter.
Scenario with_unused(std::size_t num_layers) {
  Scenario scenario;
  scenario.units = model_of(num_layers, odd_shapes());
  scenario.program = [num_layers](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& own, const at::Tensor& in) {
      at::Tensor y = in;
      for (std::size_t u = 1; u <= num_layers; ++u) {
        y = layers.call(u, y, layers.rank() == 0 ? layer({1, 6}) : layer({6}));
      }
      return layer()(own, y);
    });
  };
  return scenario;
}

struct Waits {
  std::size_t kernels = 0;
  std::vector<std::size_t> after;  // kernels before each wait of the host
};

Waits waits_of(Rank& rank, const Scenario& scenario) {
  Waits waits;
  rank.on_kernel = [&](const std::string&) { ++waits.kernels; };
  rank.waits->on_synchronize = [&] { waits.after.push_back(waits.kernels); };
  run_step(rank, scenario, 0);
  rank.waits->on_synchronize = nullptr;
  rank.on_kernel = nullptr;
  return waits;
}

void expect_used_by_any(Rank& rank) {
  for (std::size_t u = 1; u < rank.size(); ++u) {
    EXPECT_TRUE(rank.shard(u, 0).grad().defined());
    EXPECT_TRUE(rank.shard(u, 1).grad().defined());
    EXPECT_FALSE(rank.shard(u, 6).grad().defined());
  }
}

TEST(UnusedParametersTest, TheHostWaitsBehindTheFirstBackwardAlone) {
  const auto scenario = with_unused(3);
  run_ranks(2, [&](Exchange& exchange, std::int64_t number) {
    Rank rank(exchange, number, scenario.units, /*offloaded=*/false,
              /*compared=*/true);
    rank.load(initial_parameters(scenario.units));
    const auto waits = waits_of(rank, scenario);
    EXPECT_THAT(waits.after, Not(IsEmpty()));
    EXPECT_THAT(waits.after, Each(waits.kernels));
    expect_used_by_any(rank);
    for (int step = 1; step < 3; ++step) {
      rank.zero_grad();
      EXPECT_THAT(waits_of(rank, scenario).after, IsEmpty());
      expect_used_by_any(rank);
    }
    rank.runtime->expect_clean();
  });
}

TEST(UnusedParametersTest, AllHaveAGradientWhereAskedForAndNobodyWaits) {
  const auto scenario = with_unused(3);
  run_ranks(2, [&](Exchange& exchange, std::int64_t number) {
    Rank rank(exchange, number, scenario.units);
    rank.load(initial_parameters(scenario.units));
    for (std::size_t u = 0; u < rank.size(); ++u) {
      rank.unit(u).settings().reduction.unused_too = true;
    }
    EXPECT_THAT(waits_of(rank, scenario).after, IsEmpty());
    for (std::size_t u = 1; u < rank.size(); ++u) {
      const auto& unused = rank.shard(u, 6).grad();
      ASSERT_TRUE(unused.defined());
      EXPECT_TRUE(same_bits(unused, at::zeros_like(unused)));
      EXPECT_TRUE(rank.shard(u, 1).grad().defined());
    }
    rank.runtime->expect_clean();
  });
}

// A frozen parameter stays without.
TEST(UnusedParametersTest, AFrozenOneHasNone) {
  auto scenario = with_unused(1);
  scenario.units[1].parameters[6].trainable = false;
  run_ranks(1, [&](Exchange& exchange, std::int64_t number) {
    Rank rank(exchange, number, scenario.units);
    rank.load(initial_parameters(scenario.units));
    rank.unit(1).settings().reduction.unused_too = true;
    run_step(rank, scenario, 0);
    EXPECT_FALSE(rank.shard(1, 6).grad().defined());
    EXPECT_TRUE(rank.shard(1, 1).grad().defined());
  });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
