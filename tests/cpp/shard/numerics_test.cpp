// Losses, gradients and parameters against the naive rule, bit by bit.
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

struct Dtypes {
  std::string name;
  at::ScalarType storage;
  at::ScalarType compute;
  at::ScalarType reduce;
};

using Case = std::tuple<std::int64_t, Dtypes>;

class NumericsTest : public testing::TestWithParam<Case> {
 protected:
  std::int64_t world_size() const { return std::get<0>(GetParam()); }

  std::vector<UnitSpec> units(
      std::size_t count, const std::vector<ParameterSpec>& parameters) const {
    const Dtypes& dtypes = std::get<1>(GetParam());
    return with_dtypes(model_of(count, parameters), dtypes.storage,
                       dtypes.compute, dtypes.reduce);
  }
};

INSTANTIATE_TEST_SUITE_P(
    Worlds, NumericsTest,
    testing::Combine(
        testing::Values(1, 2, 3),
        testing::Values(Dtypes{"fp32", at::kFloat, at::kFloat, at::kFloat},
                        Dtypes{"bf16", at::kFloat, at::kBFloat16, at::kFloat},
                        Dtypes{"bf16_reduce", at::kFloat, at::kBFloat16,
                               at::kBFloat16})),
    [](const testing::TestParamInfo<Case>& info) {
      return std::get<1>(info.param).name + "_on_" +
             std::to_string(std::get<0>(info.param));
    });

TEST_P(NumericsTest, SyncEachMicrobatchWithEveryChunkSize) {
  const Scenario scenario{.units = units(3, odd_shapes()),
                          .program = chain(3),
                          .sync = {true, true}};
  // Strips of one parameter, several chunks a unit, one chunk a unit.
  for (const std::int64_t budget : {1, 20'000, 64 << 20}) {
    SCOPED_TRACE(budget);
    expect_naive_bits(scenario, world_size(), [&](Rank& rank) {
      rank.root->set_gradient_budget(budget);
    });
  }
}

TEST_P(NumericsTest, SyncLastMicrobatchOnly) {
  expect_naive_bits({.units = units(2, odd_shapes()),
                     .program = chain(2),
                     .sync = {false, false, true}},
                    world_size());
}

TEST_P(NumericsTest, SyncInBetween) {
  expect_naive_bits({.units = units(2, odd_shapes()),
                     .program = chain(2),
                     .sync = {true, false, true, true}},
                    world_size());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
