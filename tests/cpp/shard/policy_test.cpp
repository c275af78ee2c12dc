#include "shard/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kGiB = kMiB << 10;

TEST(PackedBytesTest, GrowWithTheRing) {
  EXPECT_EQ(packed_bytes(1), 64 << 10);
  EXPECT_EQ(packed_bytes(8), 64 << 10);
  EXPECT_EQ(packed_bytes(16), 384 << 10);
  EXPECT_EQ(packed_bytes(64), 3 * kMiB / 2);
  EXPECT_EQ(packed_bytes(128), 3 * kMiB);
  EXPECT_EQ(packed_bytes(1024), 4 * kMiB);
}

// A unit as large as that, and a small one.
std::vector<RingUnit> model(std::int64_t ranks, std::int64_t wire_bytes,
                            bool experts = false) {
  return {{.ranks = ranks, .wire_bytes = 4096},
          {.ranks = ranks, .wire_bytes = wire_bytes, .experts = experts}};
}

TEST(RingBytesTest, TheBudgetGrowsWithTheRanks) {
  EXPECT_EQ(default_ring_budget({}), 192 * kMiB);
  EXPECT_EQ(default_ring_budget(model(8, kGiB)), 192 * kMiB);
  EXPECT_EQ(default_ring_budget(model(63, kGiB)), 192 * kMiB);
  EXPECT_EQ(default_ring_budget(model(64, kGiB)), 288 * kMiB);
  EXPECT_EQ(default_ring_budget(model(256, kGiB)), 288 * kMiB);
  EXPECT_EQ(default_ring_budget(model(512, kGiB)), 576 * kMiB);
}

TEST(RingBytesTest, TheBudgetGrowsWithAUnitOfManyChunks) {
  EXPECT_EQ(default_ring_budget(model(32, 2 * kGiB)), 192 * kMiB);
  EXPECT_EQ(default_ring_budget(model(32, 11 * kGiB)), kGiB);
}

TEST(RingBytesTest, TheBudgetOfExpertsIsLargerButBounded) {
  const auto budget = [](std::int64_t ranks, std::int64_t wire_bytes) {
    return default_ring_budget(model(ranks, wire_bytes, /*experts=*/true));
  };
  EXPECT_EQ(budget(8, 512 * kMiB), 192 * kMiB);
  EXPECT_EQ(budget(31, 2 * kGiB), 512 * kMiB);
  EXPECT_EQ(budget(8, 6 * kGiB), 640 * kMiB);
  // Half of them and a result of each chunk, for four chunks in two slots.
  EXPECT_EQ(budget(64, 2 * kGiB), kGiB + 16 * kMiB + kMiB);
  EXPECT_EQ(budget(64, 6 * kGiB), 1280 * kMiB);
}

// A mesh of their own, of few ranks, in which little latency is to be saved.
TEST(RingBytesTest, ExpertsOverFewRanksAreCutAsAmongFew) {
  std::vector<RingUnit> units = {
      {.ranks = 256, .wire_bytes = 512 * kMiB},
      {.ranks = 8, .wire_bytes = 2 * kGiB, .experts = true}};
  EXPECT_EQ(default_ring_budget(units), 512 * kMiB);
  EXPECT_EQ(ring_bytes(units, kGiB), 512 * kMiB);
  // All share one slot.
  EXPECT_EQ(ring_slots(units, 512 * kMiB), 1);
}

TEST(RingBytesTest, AmongFewRanksARingOfAUnitsOwnHasMoreSlots) {
  EXPECT_EQ(ring_slots(model(8, kGiB), kMiB), 2);
  EXPECT_EQ(own_ring_slots(31), 4);
  EXPECT_EQ(own_ring_slots(32), 2);
  EXPECT_EQ(own_ring_slots(128), 2);
}

TEST(RingBytesTest, AmongVeryManyRanksOneSlotUntilItsCopiesOutweighALatency) {
  EXPECT_EQ(ring_slots(model(63, kGiB), kMiB), 2);
  EXPECT_EQ(ring_slots(model(64, kGiB), 320 * kMiB), 1);
  EXPECT_EQ(ring_slots(model(64, kGiB), 321 * kMiB), 2);
}

TEST(RingBytesTest, BlocksOfRowsAreShorterThanOneSlot) {
  EXPECT_EQ(slots_for_rows(1), 3);
  EXPECT_EQ(slots_for_rows(2), 2);
  EXPECT_EQ(slots_for_rows(4), 4);
}

TEST(RingBytesTest, ARingIsAPartOfTheLargestUnitAtMost) {
  EXPECT_EQ(ring_bytes(model(8, 40 * kMiB), 64 * kMiB), 10 * kMiB);
  EXPECT_EQ(ring_bytes(model(8, 400 * kMiB), 64 * kMiB), 64 * kMiB);
  EXPECT_EQ(ring_bytes(model(8, 4 * kMiB), 64 * kMiB), 2 * kMiB);
  EXPECT_EQ(ring_bytes(model(8, kMiB), 64 * kMiB), 4 * kMiB);
  EXPECT_EQ(ring_bytes(model(63, 384 * kMiB), 640 * kMiB), 96 * kMiB);
  EXPECT_EQ(ring_bytes(model(64, 384 * kMiB), 640 * kMiB),
            (128 + 2 + 1) * kMiB);
  EXPECT_EQ(ring_bytes(model(64, 384 * kMiB, /*experts=*/true), 640 * kMiB),
            (192 + 3 + 1) * kMiB);
}

// Llama 8B's blocks, 832 MiB, leave in three chunks among 64 ranks and more.
TEST(RingBytesTest, TheDefaultHoldsAThirdOfABlockAndItsResult) {
  for (const std::int64_t ranks : {64, 256}) {
    const auto units = model(ranks, 2 * kGiB);
    const auto ring = ring_bytes(units, default_ring_budget(units));
    EXPECT_EQ(ring_slots(units, ring), 1) << ranks;
    EXPECT_GE(ring / (ranks + 1) * ranks, 832 * kMiB / 3) << ranks;
    EXPECT_LE(ring, 292 * kMiB) << ranks;
  }
}

// Llama 8B's embedding: 128256 rows of 4096 in fp32, 2004 MiB.
TEST(RingBytesTest, EqualChunksOfARingOfItsOwn) {
  constexpr std::int64_t kRow = std::int64_t{4} * 4096;
  // 64 ranks, 1248 MiB: 3.26 chunks of a slot each become 3 of 668 rows.
  EXPECT_EQ(ring_bytes_of_equal_chunks(1248 * kMiB, 2004 * kMiB, 64, kRow),
            2 * 65 * (668 + 1) * kRow);
  // 8 ranks, 832 MiB: 10.8 chunks become 11.
  EXPECT_EQ(ring_bytes_of_equal_chunks(832 * kMiB, 2004 * kMiB, 8, kRow),
            4 * 9 * (16032 * kRow / 11 + kRow));
}

TEST(RingBytesTest, AsManyChunksAsSlotsAtLeast) {
  EXPECT_EQ(ring_bytes_of_equal_chunks(900, 200, 2, 4), 4 * 3 * (25 + 4));
}

// A Llama 8B as units: the root, the embedding, two blocks, the head.
class OwnRingTest : public testing::Test {
 protected:
  static constexpr std::int64_t kTable = 1002 * kMiB;  // bf16
  static constexpr std::int64_t kBlockBytes = 416 * kMiB;

  void reduced_by(std::int64_t ranks) {
    for (auto& unit : units_) unit.ranks = ranks;
  }
  std::int64_t of(std::int32_t number,
                  std::int64_t budget = kDefaultRingBudget) const {
    return ring_bytes_of(units_, order_, number, budget, 64 * kMiB);
  }

  std::vector<RingUnit> units_{
      {8, kMiB, kMiB / 2, /*outermost=*/true, false},
      {8, 2 * kTable, kTable, false, false},
      {8, 2 * kBlockBytes, kBlockBytes, false, false},
      {8, 2 * kBlockBytes, kBlockBytes, false, false},
      {8, 2 * kTable, kTable, false, false},
  };
  std::vector<std::int32_t> order_{4, 3, 2, 1, 0};
};

TEST_F(OwnRingTest, TheLastUnitFillsWhatTheOneBeforeItLeaves) {
  EXPECT_EQ(of(1), 2 * kBlockBytes - kMiB);
  EXPECT_EQ(of(2), 64 * kMiB);
  EXPECT_EQ(of(4), 64 * kMiB);
}

TEST_F(OwnRingTest, AmongManyRanksItIsLongerAndTheFirstHasOne) {
  reduced_by(63);
  EXPECT_EQ(of(1), 3 * kBlockBytes - kMiB);
  EXPECT_EQ(of(4), kTable);
  reduced_by(64);
  EXPECT_EQ(of(1), 2 * kBlockBytes - kMiB);
  EXPECT_EQ(of(4), kTable);
}

TEST_F(OwnRingTest, RowsThatAreStreamedNeedNone) {
  reduced_by(64);
  units_[4].streams_rows = true;
  EXPECT_EQ(of(4), 64 * kMiB);
}

TEST_F(OwnRingTest, ManyExpertsNeedNone) {
  reduced_by(64);
  units_[1].experts = units_[4].experts = true;
  EXPECT_EQ(of(1), 64 * kMiB);
  EXPECT_EQ(of(4), 64 * kMiB);
  units_[1].wire_bytes = 640 * kMiB;
  EXPECT_EQ(of(1), 640 * kMiB);
}

TEST_F(OwnRingTest, ABudgetBelowTheDefaultIsKept) {
  reduced_by(64);
  EXPECT_EQ(of(1, kDefaultRingBudget - 1), 64 * kMiB);
  EXPECT_EQ(of(4, kDefaultRingBudget - 1), 64 * kMiB);
}

TEST_F(OwnRingTest, NoLongerThanItsGradients) {
  reduced_by(64);
  units_[1].wire_bytes = 5 * 64 * kMiB;
  EXPECT_EQ(of(1), 5 * 64 * kMiB);
  units_[1].wire_bytes = 4 * 64 * kMiB;  // not worth one
  EXPECT_EQ(of(1), 64 * kMiB);
}

TEST_F(OwnRingTest, UnitsWithoutGradientsAreNeitherFirstNorLast) {
  reduced_by(63);
  units_[4].wire_bytes = 0;
  units_[1].wire_bytes = 0;
  EXPECT_EQ(of(3), kBlockBytes);
  EXPECT_EQ(of(2), 2 * kBlockBytes);  // less than three of the one before it
}

// A block of Llama 8B: 218.1 M elements, 416 MiB in bf16.
constexpr std::int64_t kFfn = 4096 * 14336;
constexpr std::int64_t kSquare = 4096 * 4096;
constexpr std::int64_t kKeys = 4096 * 1024;
constexpr std::int64_t kBlock = 3 * kFfn + 2 * kSquare + 2 * kKeys;

// Whatever the units: no ring is shorter than the shared one, or longer than it
// and its unit's gradients; equal chunks fit the slots they are made for.
TEST(RingBytesTest, HoldsForRandomUnits) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937_64 random(seed);
    const auto bytes = [&] {
      return static_cast<std::int64_t>(random() >> (34 + random() % 30));
    };
    const std::int64_t ranks = 1 + static_cast<std::int64_t>(random() % 300);
    std::vector<RingUnit> units(1 + random() % 12);
    for (auto& unit : units) {
      unit = {ranks,
              bytes(),
              bytes(),
              random() % 4 == 0,
              random() % 4 == 0,
              random() % 4 == 0};
    }
    std::vector<std::int32_t> order(units.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    order.resize(random() % (order.size() + 1));
    const auto budget = 1 + bytes();
    const auto shared = ring_bytes(units, budget);
    ASSERT_LE(shared, budget) << "seed " << seed;
    for (std::size_t u = 0; u < units.size(); ++u) {
      const auto own = ring_bytes_of(units, order, static_cast<std::int32_t>(u),
                                     budget, shared);
      ASSERT_GE(own, shared) << "seed " << seed;
      ASSERT_LE(own, std::max(shared, units[u].wire_bytes)) << "seed " << seed;
    }
    const std::int64_t row =
        4 * (1 + static_cast<std::int64_t>(random() % 9000));
    const auto wire =
        ranks * row * (1 + static_cast<std::int64_t>(random() % 999));
    const auto slots = own_ring_slots(ranks);
    const auto equal = ring_bytes_of_equal_chunks(shared, wire, ranks, row);
    ASSERT_EQ(equal % (slots * (ranks + 1)), 0) << "seed " << seed;
    // A chunk a slot each, with a row to spare.
    const auto of_a_slot = equal / (slots * (ranks + 1));
    ASSERT_LE(of_a_slot, wire / ranks / slots + row) << "seed " << seed;
  }
}

TEST(GradientsBeforeGather, AreTheMostThatLeaveEnoughWhateverTheSizes) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::int64_t> elements(random() % 20);
    for (auto& each : elements) each = random() % (1U << random() % 24);
    const std::int64_t cover = random() % (1U << random() % 26);
    const auto left = [&](std::size_t before) {
      return std::accumulate(elements.begin() + static_cast<long>(before),
                             elements.end(), std::int64_t{0});
    };
    const auto before = gradients_before_gather(elements, cover);
    ASSERT_LE(before, elements.size()) << "seed " << seed;
    if (before > 0) {
      ASSERT_GE(left(before), cover) << "seed " << seed;
    }
    if (before < elements.size()) {
      ASSERT_LT(left(before + 1), cover) << "seed " << seed;
    }
  }
}

TEST(ElementsThatCover, AreBytesOverTheLinkAtTheRateOfTheDevice) {
  // 364 MiB arrive; 3000 FLOPs a byte; 4 * 8192 FLOPs an element.
  EXPECT_EQ(elements_that_cover(416 * kMiB, 8, 8192),
            364 * kMiB * 3000 / (4 * 8192));
  EXPECT_EQ(elements_that_cover(2, 2, 1), 750);
}

TEST(ElementsThatCover, AreMoreBetweenNodes) {
  EXPECT_EQ(elements_that_cover(416 * kMiB, 64, 8192),
            416 * kMiB / 64 * 63 * 20000 / (4 * 8192));
}

TEST(ElementsThatCover, AreThoseOfACopyForOneRank) {
  EXPECT_EQ(elements_that_cover(416 * kMiB, 1, 8192),
            416 * kMiB * 300 / (4 * 8192));
}

TEST(ElementsThatCover, UnknownTokensCoverNothing) {
  EXPECT_EQ(elements_that_cover(2, 2, 0),
            std::numeric_limits<std::int64_t>::max());
}

// 364 MiB take 1.27 ms at 300 GB/s.
TEST(SlowLink, IsOneThatTakesTwiceAsLongAsAssumedAndALatency) {
  constexpr std::int64_t kLimit = 2 * 1'272'273 + 200'000;
  EXPECT_EQ(slow_link(416 * kMiB, 8, kLimit - 1000), 0);
  EXPECT_NEAR(slow_link(416 * kMiB, 8, kLimit + 1000), 139e9, 1e9);
  EXPECT_NEAR(slow_link(416 * kMiB, 8, 19'000'000), 20e9, 0.2e9);
  // 45 GB/s between nodes: 9.5 ms.
  EXPECT_EQ(slow_link(416 * kMiB, 64, 19'000'000), 0);
  EXPECT_NEAR(slow_link(416 * kMiB, 64, 40'000'000), 10.7e9, 0.1e9);
}

TEST(SlowLink, IsNoneOfOneRankNorBeforeItIsKnown) {
  EXPECT_EQ(slow_link(416 * kMiB, 1, 40'000'000), 0);
  EXPECT_EQ(slow_link(416 * kMiB, 8, 0), 0);
}

TEST(ElementsThatCover, AreThoseOfTheMeasuredTimeOfASlowLink) {
  // 19 ms at 900 TFLOP/s.
  EXPECT_NEAR(elements_that_cover(416 * kMiB, 8, 8192, 19'000'000),
              19e-3 * 900e12 / (4 * 8192), 1e6);
  EXPECT_EQ(elements_that_cover(416 * kMiB, 8, 8192, 1'300'000),
            elements_that_cover(416 * kMiB, 8, 8192));
}

TEST(WireOutlastsBackward, OfASlowLink) {
  EXPECT_TRUE(
      wire_outlasts_backward(416 * kMiB, 832 * kMiB, 8, kBlock, 8192, 20e9));
  EXPECT_FALSE(
      wire_outlasts_backward(416 * kMiB, 832 * kMiB, 8, kBlock, 32768, 20e9));
}

TEST(ElementsEveryTokenUses, AreNoneOfStackedExperts) {
  EXPECT_EQ(elements_every_token_uses({1024, 4096}), 4 * kMiB);
  EXPECT_EQ(elements_every_token_uses({4096}), 4096);
  EXPECT_EQ(elements_every_token_uses({64, 64, 3, 3}), 64 * 64 * 9);
  EXPECT_EQ(elements_every_token_uses({8, 28672, 4096}), 0);
}

// A block of Llama 3 8B: 416 MiB gathered, 832 reduced.

TEST(WireOutlastsBackward, NotOfDenseBlocksWithLongSequences) {
  for (const std::int64_t ranks : {2, 8, 64, 256}) {
    EXPECT_FALSE(
        wire_outlasts_backward(416 * kMiB, 832 * kMiB, ranks, kBlock, 8192));
  }
}

TEST(WireOutlastsBackward, OfDenseBlocksWithShortOnes) {
  // 4.3 ms of 8 ranks, 5.4 of 64; 3.1 ms for 1024 tokens.
  EXPECT_TRUE(wire_outlasts_backward(416 * kMiB, 832 * kMiB, 8, kBlock, 1024));
  EXPECT_FALSE(wire_outlasts_backward(416 * kMiB, 832 * kMiB, 8, kBlock, 2048));
  EXPECT_TRUE(wire_outlasts_backward(416 * kMiB, 832 * kMiB, 64, kBlock, 1024));
}

TEST(WireOutlastsBackward, OfExperts) {
  // Mixtral's block: 42 M elements beside its experts' 1.4 G.
  EXPECT_TRUE(wire_outlasts_backward(2 * 1409 * kMiB, 4 * 1409 * kMiB, 64,
                                     42 * kMiB, 4096));
}

TEST(WireOutlastsBackward, NotOfOneRankOrUnknownTokens) {
  EXPECT_FALSE(wire_outlasts_backward(416 * kMiB, 832 * kMiB, 1, kBlock, 1));
  EXPECT_FALSE(wire_outlasts_backward(416 * kMiB, 832 * kMiB, 8, kBlock, 0));
}

const std::vector<std::int64_t> kGradients = {kFfn,  kFfn,  kFfn,   kSquare,
                                              kKeys, kKeys, kSquare};

TEST(GradientsBeforeGather, AreThoseThatLeaveEnoughToCover) {
  // Behind the three of the MLP 41.9 M are left, 34.9 M needed, 16.8 M come
  // next.
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 8, 8192)),
            3u);
}

TEST(GradientsBeforeGather, AreNoneWhereTheBackwardIsTooShort) {
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 8, 1024)),
            0u);
  EXPECT_EQ(gradients_before_gather(kGradients,
                                    elements_that_cover(416 * kMiB, 64, 8192)),
            0u);
  EXPECT_EQ(gradients_before_gather({kFfn}, 1), 0u);
}

TEST(GradientsBeforeGather, AreAllWhereNothingHasToBeCovered) {
  EXPECT_EQ(gradients_before_gather({kFfn, kSquare}, 0), 2u);
  EXPECT_EQ(gradients_before_gather({}, 0), 0u);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
