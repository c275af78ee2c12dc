// Chunks that all leave by one slot of the ring ([Note: One slot]).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "base/check.h"
#include "harness.h"
#include "shard/policy.h"
#include "steps.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using device::Entry;
using device::Stream;
using memory::Category;
using testing::IsEmpty;

constexpr std::size_t kLayers = 3;

Scenario layers(std::vector<bool> sync = {true},
                at::ScalarType reduce = at::kFloat) {
  return {.units = with_dtypes(model_of(kLayers, odd_shapes()), at::kFloat,
                               at::kBFloat16, reduce),
          .program = chain(kLayers),
          .sync = std::move(sync)};
}

// Budgets for strips of one parameter, several chunks a unit, one chunk a unit.
constexpr std::int64_t kBudgets[] = {1, 10'000, 64 << 20};

// All units', in the order in which they left.
std::vector<EntryId> reductions(const Step& step) {
  std::vector<EntryId> all = step.all("reduce-scatter model");
  for (std::size_t i = 0; i < kLayers; ++i) {
    const auto of = step.all(base::concat("reduce-scatter layers.", i));
    all.insert(all.end(), of.begin(), of.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

TEST(OneSlotTest, AChunkIsCopiedBehindTheReductionThatHadTheSlot) {
  const Scenario scenario = with_bystander(layers());
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    rank.root->set_gradient_budget(1);
    for (int step = 0; step < 2; ++step) {
      const std::size_t from = rank.runtime->log().size();
      run_step(rank, scenario, step);
      const auto log = rank.runtime->log();
      const auto left = reductions(Step(*rank.runtime, from));
      EXPECT_GT(left.size(), 3 * kLayers);
      for (std::size_t k = 0; k + 1 < left.size(); ++k) {
        std::size_t copies = 0;
        for (EntryId id = left[k]; id < left[k + 1]; ++id) {
          if (log[id].stream != Stream::reduce) continue;
          if (log[id].kind != Entry::Kind::write) continue;
          EXPECT_TRUE(rank.runtime->happens_before(left[k], id)) << k;
          ++copies;
        }
        EXPECT_GT(copies, 0u) << k;
      }
      rank.zero_grad();
    }
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

TEST(OneSlotTest, IsAllTheRingHolds) {
  const Scenario scenario = with_bystander(layers());
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    for (const std::int64_t budget : kBudgets) {
      rank.root->set_gradient_budget(budget);
      rank.ledger->reset_peaks();
      run_step(rank, scenario, 0);
      EXPECT_EQ(rank.peak(Category::gradient_stream),
                rank.unit(1).gradients().slot_bytes());
      rank.zero_grad();
    }
  });
}

// A head's slots of its own stay in the room that its output leaves; what is
// more than that goes, those that no other unit uses too.
TEST(OneSlotTest, IsWhatSlotsOfAUnitsOwnLeave) {
  Scenario scenario = with_bystander(layers());
  scenario.program = [](Layers& layers, const at::Tensor& x) {
    return layers.call(0, x, [&](const auto& parameters, const auto& in) {
      at::Tensor y = layers.call(1, layer()(parameters, in), layer());
      y = layers.call(2, y, layer());
      const auto wide =
          layers.call(kLayers, y, [](const auto& p, const auto& h) {
            return layer()(p, h).repeat({1, 30});
          });
      return wide.narrow(1, 0, kWidth);
    });
  };
  run_ranks(2, [&](Exchange& exchange, std::int64_t r) {
    Rank rank(exchange, r, scenario.units);
    rank.root->set_gradient_budget(1);
    for (int step = 0; step < 2; ++step) run_step(rank, scenario, step);
    auto& head = rank.unit(kLayers).gradients();
    head.set_slots(2, /*own=*/true);
    const auto slot = head.slot_bytes();
    EXPECT_EQ(slot, rank.unit(1).gradients().slot_bytes());
    std::int64_t at_the_end = 0;
    rank.on_kernel = [&](const std::string& kernel) {
      if (kernel != "backward end layers.0") return;
      EXPECT_GE(head.room(), head.source_bytes());
      EXPECT_LT(head.room(), slot);
      at_the_end = rank.live(Category::gradient_stream);
    };
    rank.ledger->reset_peaks();
    run_step(rank, scenario, 2);
    EXPECT_EQ(rank.peak(Category::gradient_stream), 2 * slot);
    EXPECT_EQ(at_the_end, slot);
    EXPECT_EQ(rank.unrest(), "");
    EXPECT_THAT(rank.runtime->violations(), IsEmpty());
  });
}

class OneSlotBitsTest : public testing::TestWithParam<std::int64_t> {};

INSTANTIATE_TEST_SUITE_P(Worlds, OneSlotBitsTest, testing::Values(1, 2, 3));

TEST_P(OneSlotBitsTest, AreNaiveWithEveryChunkSize) {
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    for (const std::vector<bool>& sync :
         {std::vector<bool>{true, true}, {true, false, true, true}}) {
      for (const std::int64_t budget : kBudgets) {
        SCOPED_TRACE(testing::PrintToString(sync) + " " +
                     std::to_string(budget));
        expect_naive_bits(with_bystander(layers(sync, reduce)), GetParam(),
                          [&](Rank& rank) {
                            rank.root->set_gradient_budget(budget);
                            rank.memory->set_poison(true);
                          });
      }
    }
  }
}

// Cut evenly, too.
TEST(OneSlotTest, AmongVeryManyRanksBitsAreNaive) {
  constexpr std::int64_t kRanks = 128;
  auto parameters = dense();
  parameters.push_back({{kRanks, 300}});
  const Scenario scenario{
      .units = with_dtypes(model_of(2, parameters), at::kFloat, at::kBFloat16,
                           at::kFloat),
      .program = chain(2)};
  std::atomic<std::int64_t> chunks = 0;
  expect_naive_bits(scenario, kRanks, [&](Rank& rank) {
    rank.root->set_gradient_budget(1);
    rank.on_kernel = [&](const std::string&) {
      EXPECT_EQ(rank.unit(1).gradients().num_slots(), 1);
      chunks = rank.unit(1).gradients().num_chunks();
    };
  });
  EXPECT_EQ(chunks, 4);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
