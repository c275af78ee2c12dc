// Bytes of a step against DESIGN's formulas, from the ledger.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/check.h"
#include "harness.h"
#include "shard/policy.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using memory::Category;
using testing::Each;
using testing::IsEmpty;

constexpr std::int64_t kWorldSize = 2;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Elements of one rank's padded piece.
std::int64_t shard_numel(const ParameterSpec& parameter) {
  std::int64_t inner = 1;
  for (std::size_t d = 1; d < parameter.sizes.size(); ++d) {
    inner *= parameter.sizes[d];
  }
  return (parameter.sizes[0] + kWorldSize - 1) / kWorldSize * inner;
}

template <typename Bytes>
std::int64_t sum(const UnitSpec& unit, Bytes bytes) {
  std::int64_t total = 0;
  for (const auto& parameter : unit.parameters) total += bytes(parameter);
  return total;
}

std::int64_t gathered_bytes(const UnitSpec& unit) {
  return sum(unit, [](const auto& p) {
    return round_up(kWorldSize * shard_numel(p) * itemsize(p.compute), 256);
  });
}

// The cast shards, and all ranks' rows of them packed: every parameter here is
// small and cast.
std::int64_t input_bytes(const UnitSpec& unit) {
  return (1 + kWorldSize) * sum(unit, [](const auto& p) {
           return round_up(shard_numel(p), 16) * itemsize(p.compute);
         });
}

// One chunk for the whole unit: pieces at multiples of 64 columns, a flag per
// parameter, a row for the result.
std::int64_t slot_bytes(const UnitSpec& unit) {
  const std::int64_t columns =
      sum(unit, [](const auto& p) { return round_up(shard_numel(p), 64); }) +
      static_cast<std::int64_t>(unit.parameters.size());
  return (kWorldSize + 1) * round_up(columns, 128) *
         itemsize(unit.parameters[0].reduce);
}

std::int64_t generation_bytes(const UnitSpec& unit) {
  return sum(unit, [](const auto& p) {
    return round_up(shard_numel(p), 16) * itemsize(p.storage);
  });
}

std::int64_t slab_bytes(const UnitSpec& unit) {
  const auto columns =
      sum(unit, [](const auto& p) { return round_up(shard_numel(p), 128); }) +
      128;
  return kWorldSize * columns * itemsize(unit.parameters[0].reduce);
}

Scenario layers(std::size_t num_layers) {
  return {.units = with_dtypes(model_of(num_layers, odd_shapes()), at::kFloat,
                               at::kBFloat16, at::kFloat),
          .program = chain(num_layers),
          .num_steps = 3};
}

std::int64_t sum_over_units(const Scenario& scenario,
                            std::int64_t (*bytes)(const UnitSpec&)) {
  std::int64_t total = 0;
  for (const auto& unit : scenario.units) total += bytes(unit);
  return total;
}

void on_two_ranks(const Scenario& scenario,
                  const std::function<void(Rank&)>& check) {
  run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    check(rank);
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

class NumLayersTest : public testing::TestWithParam<std::size_t> {};

INSTANTIATE_TEST_SUITE_P(Layers, NumLayersTest, testing::Values(4, 8, 16));

// The right sides do not depend on the number of layers.
TEST_P(NumLayersTest, TransientBytesAreTwoLayersAndTheRing) {
  const Scenario scenario = layers(GetParam());
  const UnitSpec& model = scenario.units[0];
  const UnitSpec& layer = scenario.units[1];
  on_two_ranks(scenario, [&](Rank& rank) {
    for (int step = 0; step < scenario.num_steps; ++step) {
      rank.ledger->reset_peaks();
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.peak(Category::gathered),
                gathered_bytes(model) + 2 * gathered_bytes(layer));
      EXPECT_EQ(rank.peak(Category::gather_input), 2 * input_bytes(layer));
      EXPECT_EQ(rank.peak(Category::gradient_stream),
                kRingSlots * slot_bytes(layer));
      EXPECT_EQ(rank.peak(Category::gradient_slab), 0);
      rank.optimize();
      rank.zero_grad();
    }
  });
}

TEST_P(NumLayersTest, GradientsOnTheirWayAreThoseOfOneUnitAtMost) {
  const Scenario scenario = layers(GetParam());
  const std::int64_t largest = sum(scenario.units[1], [](const auto& p) {
    return std::accumulate(p.sizes.begin(), p.sizes.end(), itemsize(p.compute),
                           std::multiplies<>());
  });
  on_two_ranks(scenario, [&](Rank& rank) {
    std::int64_t most = 0;
    rank.on_kernel = [&](const std::string&) {
      most = std::max(most, rank.root->stream().ring().retired_bytes());
    };
    run_step(rank, scenario, 0);
    EXPECT_GT(most, 0);
    EXPECT_LE(most, largest);
    EXPECT_EQ(rank.root->stream().ring().retired_bytes(), 0);
  });
}

TEST_P(NumLayersTest, WhereTheWireIsSlowerTheyAreThoseOfTwoUnitsAtMost) {
  const Scenario scenario = layers(GetParam());
  const std::int64_t largest = sum(scenario.units[1], [](const auto& p) {
    return std::accumulate(p.sizes.begin(), p.sizes.end(), itemsize(p.compute),
                           std::multiplies<>());
  });
  const auto expected = train_naively(scenario, kWorldSize);
  on_two_ranks(scenario, [&](Rank& rank) {
    rank.root->set_lingering_from(0);
    std::int64_t most = 0;
    rank.on_kernel = [&](const std::string&) {
      most = std::max(most, rank.root->stream().ring().retired_bytes());
    };
    for (int step = 0; step < scenario.num_steps; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.gradient_difference(expected[step].gradients), "");
      rank.optimize();
      rank.zero_grad();
    }
    EXPECT_GT(most, largest);
    EXPECT_LE(most, 2 * largest);
    EXPECT_EQ(rank.root->stream().ring().retired_bytes(), 0);
  });
}

Scenario blocks(std::size_t num_blocks) {
  auto experts = dense();
  experts.push_back({{40000}});
  return {.units = with_dtypes(
              blocks_around_experts(num_blocks, odd_shapes(), experts),
              at::kFloat, at::kBFloat16, at::kFloat),
          .program = chain_of_blocks(num_blocks)};
}

TEST_P(NumLayersTest, OfBlocksAroundExpertsTheyAreTwoBlocks) {
  const Scenario scenario = blocks(GetParam());
  const auto of = [&](std::size_t unit) {
    return gathered_bytes(scenario.units[unit]);
  };
  on_two_ranks(scenario, [&](Rank& rank) {
    std::int64_t at_the_end = 0;
    rank.on_kernel = [&](const std::string& kernel) {
      if (kernel == "backward end blocks.1") {
        at_the_end = rank.live(Category::gathered);
      }
    };
    for (int step = 0; step < scenario.num_steps; ++step) {
      rank.ledger->reset_peaks();
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.peak(Category::gathered), of(0) + 2 * (of(1) + of(2)));
      // Its experts' are gone, those of the next block are there.
      EXPECT_EQ(at_the_end, of(0) + 2 * of(1) + of(2));
      EXPECT_EQ(rank.unrest(), "");
      rank.optimize();
      rank.zero_grad();
    }
  });
}

TEST_P(NumLayersTest, ABlockHidesWhatItsExpertsLeaveToASlowWire) {
  const Scenario scenario = blocks(GetParam());
  const std::int64_t experts = 40000 * itemsize(at::kBFloat16);
  on_two_ranks(scenario, [&](Rank& rank) {
    std::int64_t least = experts;
    rank.on_kernel = [&](const std::string& kernel) {
      if (kernel.starts_with("backward end blocks.") &&
          !kernel.ends_with("experts")) {
        least = std::min(least, rank.root->stream().ring().retired_bytes());
      }
    };
    rank.root->set_lingering_from(0);
    run_step(rank, scenario, 0);
    EXPECT_EQ(least, experts);
    rank.zero_grad();
    rank.root->set_lingering_from(1 << 30);
    run_step(rank, scenario,
             1);  // the last backward counts for a block's begin
    rank.zero_grad();
    least = experts;
    run_step(rank, scenario, 2);
    EXPECT_LT(least, experts);
    EXPECT_EQ(rank.root->stream().ring().retired_bytes(), 0);
  });
}

// Bytes of sources that wait where the backward of layers.0 begins, after that
// of layers.1 whose output is `times` as wide as its input.
std::int64_t retired_behind(std::int64_t times) {
  Scenario scenario = layers(2);
  scenario.units = model_of(2, dense());
  scenario.units[2].parameters.push_back({{4000}});
  scenario.program = [times](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& in) {
      const at::Tensor first = layer()(parameters, in);
      const at::Tensor y = layers.call(1, first, layer());
      const at::Tensor wide =
          layers.call(2, y, [times](const auto& p, const auto& h) {
            return layer()(p, h).repeat({1, times});
          });
      return wide.narrow(1, 0, kWidth);
    });
  };
  std::int64_t retired = -1;
  on_two_ranks(scenario, [&](Rank& rank) {
    rank.root->set_gradient_budget(1);
    rank.on_kernel = [&](const std::string& kernel) {
      if (rank.rank() == 0 && kernel == "backward layers.0") {
        retired = rank.root->stream().ring().retired_bytes();
      }
    };
    run_step(rank, scenario, 0);
  });
  return retired;
}

TEST(MemoryTest, SourcesStayWhereAnOutputLeftRoom) {
  const std::int64_t gradient = 4000 * itemsize(at::kFloat);
  EXPECT_LT(retired_behind(1), gradient);
  EXPECT_GE(retired_behind(2000), gradient);
}

TEST(MemoryTest, ASmallBudgetBoundsTheRing) {
  const Scenario scenario = layers(3);
  on_two_ranks(scenario, [&](Rank& rank) {
    const std::int64_t column_bytes =
        kRingSlots * (kWorldSize + 1) * itemsize(at::kFloat);
    for (const std::int64_t columns : {256, 128}) {
      rank.root->set_gradient_budget(column_bytes * (columns + 100));
      rank.ledger->reset_peaks();
      run_step(rank, scenario, 0);
      // The last chunk of a unit may be wider by its flags.
      EXPECT_LE(rank.peak(Category::gradient_stream),
                column_bytes * (columns + 128));
      EXPECT_GE(rank.peak(Category::gradient_stream), column_bytes * columns);
    }
  });
}

TEST(MemoryTest, ForwardLeasesNothingThatBelongsToBackward) {
  for (const bool sync : {true, false}) {
    Scenario scenario = layers(3);
    on_two_ranks(scenario, [&](Rank& rank) {
      rank.set_sync(sync);
      for (int step = 0; step < scenario.num_steps; ++step) {
        rank.ledger->reset_peaks();
        const at::Tensor loss = loss_of(
            scenario.program(rank, input_of(scenario, rank.rank(), step, 0)));
        for (const Category category :
             {Category::gradient_stream, Category::gradient_slab,
              Category::sharded_gradients}) {
          EXPECT_EQ(rank.ledger->num_leases(category), 0)
              << memory::category_name(category);
        }
        loss.backward();
      }
    });
  }
}

TEST(MemoryTest, ASteadyStepLeasesTheSameBuffersEveryTime) {
  for (const std::vector<bool>& sync :
       {std::vector<bool>{true}, {false, false, true}, {true, true}}) {
    Scenario scenario = layers(4);
    scenario.sync = sync;
    scenario.num_steps = 5;
    on_two_ranks(scenario, [&](Rank& rank) {
      std::vector<std::vector<std::int64_t>> leases;
      std::vector<std::int64_t> peaks;
      for (int step = 0; step < scenario.num_steps; ++step) {
        rank.ledger->reset_peaks();
        run_step(rank, scenario, step);
        rank.optimize();
        rank.zero_grad();
        std::vector<std::int64_t> counts;
        for (std::size_t i = 0; i < memory::kNumCategories; ++i) {
          counts.push_back(rank.ledger->num_leases(static_cast<Category>(i)));
        }
        leases.push_back(counts);
        peaks.push_back(rank.ledger->total_peak());
      }
      EXPECT_THAT(leases, Each(leases.back()));
      EXPECT_THAT(peaks, Each(peaks.back()));
      EXPECT_EQ(leases.back()[static_cast<std::size_t>(Category::parameters)],
                0);
      EXPECT_EQ(
          leases.back()[static_cast<std::size_t>(Category::gathered)],
          static_cast<std::int64_t>(2 * sync.size() * scenario.units.size()));
    });
  }
}

TEST(MemoryTest, GradientsLiveFromBackwardToZeroGrad) {
  const Scenario scenario = layers(3);
  on_two_ranks(scenario, [&](Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.live(Category::sharded_gradients),
                sum_over_units(scenario, generation_bytes));
      // Added to what is there.
      run_step(rank, scenario, step);
      EXPECT_EQ(rank.live(Category::sharded_gradients),
                sum_over_units(scenario, generation_bytes));
      rank.zero_grad();
      EXPECT_EQ(rank.live(Category::sharded_gradients), 0);
    }
  });
}

TEST(MemoryTest, SlabsLiveFromTheFirstBackwardToTheOneThatReduces) {
  const Scenario scenario = layers(3);
  on_two_ranks(scenario, [&](Rank& rank) {
    for (const bool sync : {false, false, true}) {
      rank.set_sync(sync);
      const at::Tensor loss = loss_of(
          scenario.program(rank, input_of(scenario, rank.rank(), 0, 0)));
      loss.backward();
      EXPECT_EQ(rank.live(Category::gradient_slab),
                sync ? 0 : sum_over_units(scenario, slab_bytes));
      EXPECT_EQ(rank.live(Category::sharded_gradients),
                sync ? sum_over_units(scenario, generation_bytes) : 0);
    }
  });
}

TEST(MemoryTest, AllBytesGoWithTheUnits) {
  const Scenario scenario = layers(2);
  run_ranks(kWorldSize, [&](Exchange& exchange, std::int64_t r) {
    std::shared_ptr<memory::Ledger> ledger;
    {
      Rank rank(exchange, r, scenario.units);
      ledger = rank.ledger;
      EXPECT_GT(ledger->total_live(), 0);
      run_step(rank, scenario, 0);
    }
    EXPECT_EQ(ledger->total_live(), 0);
  });
}

TEST(MemoryTest, NothingReadsBytesThatNobodyWrote) {
  for (const std::vector<bool>& sync :
       {std::vector<bool>{true}, {false, true}}) {
    Scenario scenario = layers(3);
    scenario.sync = sync;
    expect_naive_bits(scenario, kWorldSize,
                      [](Rank& rank) { rank.memory->set_poison(true); });
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
