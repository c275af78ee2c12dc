#include "shard/gradients/gradient_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "base/check.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::ThrowsMessage;

using Sizes = std::vector<std::int64_t>;
using Order = std::vector<std::int32_t>;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Every ordered choice of some of the first `count` parameters.
std::vector<Order> orders_of(std::int32_t count) {
  std::vector<Order> orders;
  for (unsigned subset = 0; subset < (1U << count); ++subset) {
    Order order;
    for (std::int32_t p = 0; p < count; ++p) {
      if (subset >> p & 1U) order.push_back(p);
    }
    do {
      orders.push_back(order);
    } while (std::next_permutation(order.begin(), order.end()));
  }
  return orders;
}

// What every plan promises; empty if it holds, else the first broken promise.
std::string broken_promise(const Sizes& sizes, const Order& order,
                           std::int64_t max_columns, const UnitPlan& plan,
                           bool evenly = false) {
  const std::int64_t bound =
      std::max<std::int64_t>(128, max_columns / 128 * 128);
  if (order.empty()) return plan.chunks.empty() ? "" : "chunks for nothing";
  if (plan.chunks.empty()) return "no chunk carries the flags";
  std::int64_t whole = bound;
  if (evenly) {
    std::int64_t columns = 0;
    for (const auto p : order) columns += round_up(sizes[p], 64);
    const auto chunks =
        std::max<std::int64_t>(1, (columns + bound - 1) / bound);
    if (static_cast<std::int64_t>(plan.chunks.size()) != chunks) {
      return "more chunks than needed";
    }
    if (chunks > 1) {
      const auto little = std::min(bound / 16, kUncutColumns);
      whole = columns / chunks + little < bound ? little : 64;
    }
    for (const auto& chunk : plan.chunks) {
      if (chunk.columns - columns / chunks >
          kUncutColumns + 128 + round_up(sizes.size(), 128)) {
        return "a chunk wider than others";
      }
    }
  }
  // Walks the pieces in the order they leave: they must be `order`, each
  // parameter whole before the next begins.
  std::size_t at = 0;
  std::int64_t done = 0;
  const auto skip_finished = [&] {
    while (at < order.size() && done == sizes[order[at]]) ++at, done = 0;
  };
  for (const Chunk& chunk : plan.chunks) {
    const bool last = &chunk == &plan.chunks.back();
    if (!last && chunk.pieces.empty()) return "an empty chunk";
    std::int64_t used = 0;
    for (const Piece& piece : chunk.pieces) {
      skip_finished();
      if (at == order.size()) return "a piece too many";
      if (piece.parameter != order[at]) return "the order is not kept";
      if (piece.begin != done) return "a gap or an element twice";
      if (piece.size() <= 0) return "a piece without elements";
      if (piece.column < used) return "pieces overlap";
      if (piece.column % kPieceColumnMultiple != 0) return "a piece unaligned";
      const std::int64_t size = sizes[piece.parameter];
      if (size <= whole && piece.size() != size) return "cut though it fits";
      used = piece.column + piece.size();
      done = piece.end;
    }
    if (chunk.columns % kChunkColumnMultiple != 0) return "columns unrounded";
    if (used > chunk.columns) return "a piece outside its chunk";
    if ((chunk.flags_column >= 0) != last) return "flags not in the last chunk";
    if (!last && chunk.columns > bound) return "a chunk above the bound";
    if (last) {
      const auto num = static_cast<std::int64_t>(sizes.size());
      if (chunk.flags_column < used) return "flags overlap a piece";
      if (chunk.flags_column + num > chunk.columns) return "flags outside";
      if (chunk.columns > bound + round_up(num, 128)) return "last too wide";
    }
  }
  skip_finished();
  return at == order.size() ? "" : "elements left out";
}

TEST(GradientPlanTest, EveryElementLeavesOnceWhateverSizesOrderAndBound) {
  const std::int64_t choices[] = {0, 1, 63, 64, 65, 128, 129, 300, 1000};
  const std::int64_t bounds[] = {1, 128, 200, 256, 384, 1024};
  const std::vector<Order> orders = orders_of(3);
  std::int64_t plans = 0;
  for (const std::int64_t a : choices) {
    for (const std::int64_t b : choices) {
      for (const std::int64_t c : choices) {
        for (const Order& order : orders) {
          for (const std::int64_t bound : bounds) {
            const Sizes sizes = {a, b, c};
            const UnitPlan plan = plan_unit(sizes, order, bound);
            ASSERT_EQ(broken_promise(sizes, order, bound, plan), "")
                << "sizes " << testing::PrintToString(sizes) << ", order "
                << testing::PrintToString(order) << ", bound " << bound;
            ++plans;
          }
        }
      }
    }
  }
  EXPECT_EQ(plans, 9 * 9 * 9 * 16 * 6);
}

TEST(GradientPlanTest, HoldsForManyParameters) {
  // Flags of 300 parameters need more columns than a small chunk has.
  Sizes sizes(300);
  for (std::size_t p = 0; p < sizes.size(); ++p) sizes[p] = 7 * p % 513;
  Order order(300);
  std::iota(order.rbegin(), order.rend(), 0);
  for (const std::int64_t bound : {128, 256, 512, 4096, 1 << 20}) {
    EXPECT_EQ(
        broken_promise(sizes, order, bound, plan_unit(sizes, order, bound)),
        "");
  }
}

TEST(GradientPlanTest, HoldsForRandomUnits) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    Sizes sizes(1 + random() % 40);
    for (auto& size : sizes) size = random() % (1U << random() % 21);
    Order order(sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(random() % (order.size() + 1));
    const std::int64_t bound = random() % (1U << random() % 21);
    ASSERT_EQ(
        broken_promise(sizes, order, bound, plan_unit(sizes, order, bound)), "")
        << "seed " << seed;
    const UnitPlan even = plan_unit(sizes, order, bound, {}, /*evenly=*/true);
    ASSERT_EQ(broken_promise(sizes, order, bound, even, /*evenly=*/true), "")
        << "seed " << seed;
  }
}

// A block of Llama 8B on 64 ranks, in columns: 832 MiB in fp32.
TEST(GradientPlanTest, EvenChunksAreOfOneWidthAndNoMoreThanNeeded) {
  const Sizes block = {917504, 917504, 917504, 262144, 65536,
                       65536,  262144, 64,     64};
  Order order(block.size());
  std::iota(order.begin(), order.end(), 0);
  constexpr std::int64_t kMost = 1161600;  // a slot of 288 MiB
  EXPECT_EQ(plan_unit(block, order, kMost).chunks.size(), 4u);
  const UnitPlan even = plan_unit(block, order, kMost, {}, /*evenly=*/true);
  ASSERT_EQ(even.chunks.size(), 3u);
  for (const Chunk& chunk : even.chunks) {
    EXPECT_NEAR(static_cast<double>(chunk.columns), 3408000 / 3.0, 4096);
  }
  // One is enough, and as wide as what it holds.
  const UnitPlan one = plan_unit(block, order, 4 * kMost, {}, /*evenly=*/true);
  ASSERT_EQ(one.chunks.size(), 1u);
  EXPECT_LT(one.max_columns(), 3408000 + 512);
}

TEST(GradientPlanTest, EvenlyAParameterOfLittleStaysWhole) {
  // Four columns of the second would fill the first chunk of 1024.
  const UnitPlan plan =
      plan_unit({960, 100, 600}, {0, 1, 2}, 1024, {}, /*evenly=*/true);
  ASSERT_EQ(plan.chunks.size(), 2u);
  EXPECT_EQ(plan.chunks[0].pieces.size(), 1u);
  ASSERT_EQ(plan.chunks[1].pieces.size(), 2u);
  EXPECT_EQ(plan.chunks[1].pieces[0].size(), 100);
}

TEST(GradientPlanTest, ChunksAreFilledBeforeTheNextOpens) {
  // 100 -> 128 columns with alignment; 64 more fit under 256, 128 do not.
  const UnitPlan plan = plan_unit({100, 64, 128}, {0, 1, 2}, 256);
  ASSERT_EQ(plan.chunks.size(), 2u);
  ASSERT_EQ(plan.chunks[0].pieces.size(), 2u);
  EXPECT_EQ(plan.chunks[0].pieces[1].column, 128);
  EXPECT_EQ(plan.chunks[0].columns, 256);
  ASSERT_EQ(plan.chunks[1].pieces.size(), 1u);
  EXPECT_EQ(plan.chunks[1].flags_column, 128);
  EXPECT_EQ(plan.chunks[1].columns, 256);
  EXPECT_EQ(plan.max_columns(), 256);
}

TEST(GradientPlanTest, ALargeParameterLeavesInStrips) {
  const UnitPlan plan = plan_unit({300}, {0}, 128);
  ASSERT_EQ(plan.chunks.size(), 3u);
  EXPECT_EQ(plan.chunks[0].pieces[0].end, 128);
  EXPECT_EQ(plan.chunks[1].pieces[0].begin, 128);
  EXPECT_EQ(plan.chunks[2].pieces[0].begin, 256);
  EXPECT_EQ(plan.chunks[2].pieces[0].end, 300);
  EXPECT_EQ(plan.chunks[2].flags_column, 64);
}

TEST(GradientPlanTest, FixedStripsFillAChunkEach) {
  const UnitPlan plan = plan_unit({90, 500, 20}, {0, 1, 2}, 256, {0, 200, 0});
  ASSERT_EQ(plan.chunks.size(), 4u);
  for (std::size_t k = 0; k < 3; ++k) {
    const Piece& piece = plan.chunks[k + 1].pieces[0];
    EXPECT_EQ(piece.parameter, 1);
    EXPECT_EQ(piece.begin, static_cast<std::int64_t>(k) * 200);
    EXPECT_EQ(piece.end, std::min<std::int64_t>(500, piece.begin + 200));
    EXPECT_EQ(piece.column, 0);
  }
  // What follows goes behind the last strip's 100 columns.
  ASSERT_EQ(plan.chunks[3].pieces.size(), 2u);
  EXPECT_EQ(plan.chunks[3].pieces[1].parameter, 2);
  EXPECT_EQ(plan.chunks[3].pieces[1].column, 128);
}

TEST(GradientPlanTest, FixedStripsMayBeWiderThanAChunk) {
  const UnitPlan plan = plan_unit({500}, {0}, 128, {200});
  ASSERT_EQ(plan.chunks.size(), 3u);
  EXPECT_EQ(plan.chunks[0].columns, 256);
}

TEST(GradientPlanTest, WithoutElementsTheFlagsStillLeave) {
  const UnitPlan plan = plan_unit({0, 0}, {1, 0}, 256);
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_THAT(plan.chunks[0].pieces, IsEmpty());
  EXPECT_EQ(plan.chunks[0].flags_column, 0);
  EXPECT_EQ(plan.chunks[0].columns, 128);
}

TEST(GradientPlanTest, NothingTrainableNeedsNoChunk) {
  const UnitPlan plan = plan_unit({10, 20}, {}, 256);
  EXPECT_THAT(plan.chunks, IsEmpty());
  EXPECT_EQ(plan.max_columns(), 0);
}

TEST(GradientPlanTest, AnOrderNamesParametersOfTheUnit) {
  for (const std::int32_t stranger : {-1, 2}) {
    EXPECT_THAT(
        [&] {
          plan_unit({10, 20}, {0, stranger}, 256);
        },
        ThrowsMessage<Error>(
            HasSubstr("gradient order names a parameter of the unit")));
  }
}

TEST(GradientPlanTest, ColumnsForABudgetAreTheMostThatFit) {
  for (const std::int64_t budget : {1, 10'000, 65'536, 1'000'000, 64 << 20}) {
    for (const std::int64_t slots : {1, 2, 4}) {
      for (const std::int64_t world_size : {1, 2, 3, 8, 256}) {
        for (const std::int64_t itemsize : {2, 4}) {
          const std::int64_t columns =
              columns_for_budget(budget, slots, world_size, itemsize);
          const std::int64_t ring = slots * (world_size + 1) * itemsize;
          EXPECT_EQ(columns % 128, 0);
          EXPECT_GE(columns, 128);
          EXPECT_TRUE(columns == 128 || columns * ring <= budget);
          EXPECT_GT((columns + 128) * ring, budget);
        }
      }
    }
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
