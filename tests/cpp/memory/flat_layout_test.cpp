#include "memory/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/check.h"

namespace lowtide::memory {
namespace LOWTIDE_FILE {

using testing::HasSubstr;
using testing::StrEq;
using testing::Throws;
using testing::ThrowsMessage;

std::vector<ParameterShape> shapes_of_all_kinds() {
  std::vector<ParameterShape> shapes;
  const std::int64_t rows[] = {0, 1, 2, 3, 7, 8, 9, 64, 65, 129};
  const std::vector<std::int64_t> inners[] = {{}, {0}, {1}, {3}, {5, 7}, {64}};
  for (const std::int64_t row : rows) {
    for (const auto& inner : inners) {
      for (const std::int64_t storage : {4, 2}) {
        for (const std::int64_t compute : {2, 4, 8}) {
          std::vector<std::int64_t> sizes{row};
          sizes.insert(sizes.end(), inner.begin(), inner.end());
          shapes.push_back({"p", sizes, storage, compute});
        }
      }
    }
  }
  return shapes;
}

std::int64_t aligned(std::int64_t n) { return (n + 255) / 256 * 256; }

class FlatLayoutWorldTest : public testing::TestWithParam<int> {};

INSTANTIATE_TEST_SUITE_P(WorldSizes, FlatLayoutWorldTest,
                         testing::Range(1, 10));

TEST_P(FlatLayoutWorldTest, SplitsRowsAsTorchChunkDoes) {
  const std::int64_t world_size = GetParam();
  for (const ParameterShape& shape : shapes_of_all_kinds()) {
    const FlatLayout layout(world_size, {shape});
    const ParameterSlice& slice = layout[0];
    // torch.chunk: pieces of ceil(rows / N) rows until none are left.
    const std::int64_t piece = (slice.rows + world_size - 1) / world_size;
    std::int64_t left = shape.sizes[0];
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      const std::int64_t expected = std::min(piece, left);
      EXPECT_EQ(slice.local_rows(rank), expected);
      EXPECT_EQ(slice.local_numel(rank), expected * slice.inner);
      EXPECT_LE(slice.local_numel(rank), slice.shard_numel);
      left -= expected;
    }
    EXPECT_EQ(left, 0);
    EXPECT_EQ(slice.numel(),
              std::accumulate(shape.sizes.begin(), shape.sizes.end(),
                              std::int64_t{1}, std::multiplies<>()));
  }
}

TEST_P(FlatLayoutWorldTest, SlicesAreAlignedDisjointAndFillTheTotals) {
  const std::int64_t world_size = GetParam();
  const std::vector<ParameterShape> shapes = shapes_of_all_kinds();
  const FlatLayout layout(world_size, shapes);
  ASSERT_EQ(layout.size(), shapes.size());
  std::int64_t gathered = 0;
  std::int64_t shard = 0;
  std::int64_t input = 0;
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const ParameterSlice& slice = layout[i];
    // Each starts where the aligned extent of the one before ends.
    EXPECT_EQ(slice.gathered_offset, gathered);
    EXPECT_EQ(slice.shard_offset, shard);
    EXPECT_EQ(slice.input_offset, input);
    const std::int64_t elements = slice.padded_rows * slice.inner;
    EXPECT_EQ(slice.shard_numel, elements);
    EXPECT_EQ(slice.gathered_bytes,
              world_size * elements * shapes[i].compute_itemsize);
    EXPECT_EQ(slice.shard_bytes, elements * shapes[i].storage_itemsize);
    EXPECT_EQ(slice.input_bytes, elements * shapes[i].compute_itemsize);
    EXPECT_LE(slice.numel() * shapes[i].compute_itemsize, slice.gathered_bytes);
    gathered += aligned(slice.gathered_bytes);
    shard += aligned(elements) * shapes[i].storage_itemsize;
    input += aligned(elements) * shapes[i].compute_itemsize;
  }
  EXPECT_EQ(layout.gathered_bytes(), gathered);
  EXPECT_EQ(layout.shard_bytes(), shard);
  EXPECT_EQ(layout.input_bytes(), input);
}

TEST_P(FlatLayoutWorldTest, PackedParametersComeFirstInOneRow) {
  const std::int64_t world_size = GetParam();
  const std::vector<ParameterShape> shapes = {
      {"large", {1000, 8}, 4, 2},    {"norm", {700}, 4, 2, true},
      {"empty", {0, 3}, 4, 2, true}, {"larger", {2000, 8}, 4, 2},
      {"bias", {5, 3}, 4, 4, true},
  };
  const FlatLayout layout(world_size, shapes);
  if (world_size == 1) {
    EXPECT_EQ(layout.packed_row_bytes(), 0);
    EXPECT_EQ(layout.order(), (std::vector<std::size_t>{0, 1, 2, 3, 4}));
    return;
  }
  EXPECT_EQ(layout.order(), (std::vector<std::size_t>{1, 4, 0, 2, 3}));
  const auto piece = (700 + world_size - 1) / world_size;
  const auto norm = (piece + 15) / 16 * 16;
  const auto bias = ((5 + world_size - 1) / world_size * 3 + 15) / 16 * 16;
  EXPECT_EQ(layout[1].input_offset, 0);
  EXPECT_EQ(layout[4].input_offset, norm * 2);
  EXPECT_EQ(layout.packed_row_bytes(), norm * 2 + bias * 4);
  EXPECT_EQ(layout[0].input_offset, aligned(layout.packed_row_bytes()));
  EXPECT_EQ(layout[0].shard_offset, aligned((norm + bias) * 4));
  EXPECT_TRUE(layout[1].packed && layout[4].packed);
  EXPECT_FALSE(layout[0].packed || layout[2].packed || layout[3].packed);
}

TEST(FlatLayoutTest, AParameterApartIsNotInGatheredUnlessPackedOrAlone) {
  const std::vector<ParameterShape> shapes = {
      {.name = "before", .sizes = {64}},
      {.name = "apart", .sizes = {64}, .apart = true},
      {.name = "small", .sizes = {64}, .may_pack = true, .apart = true},
      {.name = "bias", .sizes = {64}, .may_pack = true},
  };
  const FlatLayout layout(4, shapes);
  EXPECT_TRUE(layout[1].apart && layout[2].packed);
  EXPECT_FALSE(layout[0].apart || layout[2].apart || layout[3].apart);
  EXPECT_EQ(layout.gathered_bytes(), 3 * aligned(64 * 4));
  EXPECT_EQ(layout[1].gathered_bytes, 64 * 4);
  EXPECT_FALSE(FlatLayout(1, shapes)[1].apart);
}

TEST(FlatLayoutTest, ASingleSmallParameterIsNotPacked) {
  const FlatLayout layout(4,
                          {{"large", {64, 8}, 4, 2}, {"n", {8}, 4, 2, true}});
  EXPECT_EQ(layout.packed_row_bytes(), 0);
  EXPECT_EQ(layout[0].input_offset, 0);
}

TEST_P(FlatLayoutWorldTest, GatheringEveryRanksPieceRebuildsTheParameters) {
  const std::int64_t world_size = GetParam();
  std::vector<ParameterShape> shapes;
  for (ParameterShape& shape : shapes_of_all_kinds()) {
    shape.storage_itemsize = shape.compute_itemsize = sizeof(std::int32_t);
    shapes.push_back(shape);
  }
  const FlatLayout layout(world_size, shapes);
  constexpr std::int32_t kPadding = -1;
  const auto word = [](std::int64_t bytes) {
    return bytes / static_cast<std::int64_t>(sizeof(std::int32_t));
  };
  // Element e of parameter p holds 100000 p + e.
  std::vector<std::int32_t> gathered(word(layout.gathered_bytes()), kPadding);
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    std::vector<std::int32_t> input(word(layout.input_bytes()), kPadding);
    for (std::size_t p = 0; p < layout.size(); ++p) {
      const ParameterSlice& slice = layout[p];
      const std::int64_t first = rank * slice.shard_numel;
      for (std::int64_t e = 0; e < slice.local_numel(rank); ++e) {
        input[word(slice.input_offset) + e] =
            static_cast<std::int32_t>(100000 * p + first + e);
      }
      // The all-gather: piece `rank` of this parameter lands in rank order.
      std::copy_n(input.begin() + word(slice.input_offset), slice.shard_numel,
                  gathered.begin() + word(slice.gathered_offset) + first);
    }
  }
  for (std::size_t p = 0; p < layout.size(); ++p) {
    const ParameterSlice& slice = layout[p];
    const std::int32_t* begin = gathered.data() + word(slice.gathered_offset);
    for (std::int64_t e = 0; e < slice.numel(); ++e) {
      ASSERT_EQ(begin[e], static_cast<std::int32_t>(100000 * p + e));
    }
    for (std::int64_t e = slice.numel(); e < world_size * slice.shard_numel;
         ++e) {
      ASSERT_EQ(begin[e], kPadding);
    }
  }
}

using Extents = std::vector<std::pair<std::int64_t, std::int64_t>>;

// Whether they lie in [0, bytes) and none in another.
bool are_apart(Extents extents, std::int64_t bytes) {
  std::erase_if(extents, [](const auto& e) { return e.first == e.second; });
  std::sort(extents.begin(), extents.end());
  std::int64_t free = 0;
  for (const auto& [begin, end] : extents) {
    if (begin < free || end > bytes) return false;
    free = end;
  }
  return true;
}

TEST(FlatLayoutTest, RandomUnitsLieApartInEveryBuffer) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const std::int64_t world_size = 1 + random() % 40;
    std::vector<ParameterShape> shapes(random() % 20);
    for (auto& shape : shapes) {
      shape.sizes.resize(1 + random() % 3);
      for (auto& size : shape.sizes) size = random() % (1U << random() % 9);
      shape.storage_itemsize = std::int64_t{1} << random() % 4;
      shape.compute_itemsize = std::int64_t{1} << random() % 4;
      shape.may_pack = random() % 2 == 0;
      shape.apart = random() % 8 == 0;
    }
    const FlatLayout layout(world_size, shapes);
    Extents gathered, shard, input;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const auto& slice = layout[i];
      if (!slice.apart) {
        gathered.emplace_back(slice.gathered_offset,
                              slice.gathered_offset + slice.gathered_bytes);
      }
      shard.emplace_back(slice.shard_offset,
                         slice.shard_offset + slice.shard_bytes);
      input.emplace_back(slice.input_offset,
                         slice.input_offset + slice.input_bytes);
      ASSERT_EQ(slice.gathered_offset % kAlignment, 0) << "seed " << seed;
      ASSERT_EQ(slice.input_offset % shapes[i].compute_itemsize, 0)
          << "seed " << seed;
      if (slice.packed && slice.input_bytes > 0) {
        ASSERT_LE(input.back().second, layout.packed_row_bytes())
            << "seed " << seed;
      }
    }
    ASSERT_TRUE(are_apart(gathered, layout.gathered_bytes())) << seed;
    ASSERT_TRUE(are_apart(shard, layout.shard_bytes())) << "seed " << seed;
    ASSERT_TRUE(are_apart(input, layout.input_bytes())) << "seed " << seed;
    auto order = layout.order();
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < order.size(); ++i) ASSERT_EQ(order[i], i);
  }
}

TEST(FlatLayoutTest, NeighboursLieEquallyFarApartInShardAndInput) {
  const FlatLayout layout(
      3, {{"a", {5, 7}, 4, 2}, {"b", {1000}, 4, 2}, {"c", {0}, 4, 2}});
  for (std::size_t i = 0; i < layout.size(); ++i) {
    EXPECT_EQ(layout[i].shard_offset / 4, layout[i].input_offset / 2);
    EXPECT_EQ(layout[i].shard_offset % 256, 0);
    EXPECT_EQ(layout[i].input_offset % 256, 0);
  }
  EXPECT_EQ(layout[1].shard_offset, 256 * 4);
  EXPECT_EQ(layout[2].shard_offset, (256 + 512) * 4);
}

TEST(FlatLayoutTest, AUnitWithoutParametersTakesNoBytes) {
  const FlatLayout layout(4, {});
  EXPECT_EQ(layout.size(), 0u);
  EXPECT_EQ(layout.gathered_bytes(), 0);
  EXPECT_EQ(layout.shard_bytes(), 0);
  EXPECT_EQ(layout.input_bytes(), 0);
}

TEST(FlatLayoutTest, AlignmentIsAParameter) {
  const FlatLayout layout(1, {{"a", {3}, 4, 2}, {"b", {3}, 4, 2}}, 8);
  EXPECT_EQ(layout[1].gathered_offset, 8);   // 3 * 2 bytes
  EXPECT_EQ(layout[1].shard_offset, 8 * 4);  // 8 elements
  EXPECT_EQ(layout[1].input_offset, 8 * 2);
  EXPECT_EQ(layout.shard_bytes(), 2 * 8 * 4);
  EXPECT_THROW(FlatLayout(1, {}, 24), Error);
}

TEST(FlatLayoutTest, RefusesAScalarByName) {
  EXPECT_THAT(
      [] {
        FlatLayout(2, {{"scale", {}, 4, 4}});
      },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: scale: expected a parameter with at least one "
          "dimension, got a scalar. Give it the shape [1] to shard it.")));
}

TEST(FlatLayoutTest, RefusesSizesThatOverflowByName) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::string text =
      "lowtide: wide: expected a unit of at most 2^63 - 1 bytes over all "
      "ranks, got sizes [4611686018427387904, 8]. Split the unit, or correct "
      "the sizes.";
  EXPECT_THAT(
      [] {
        FlatLayout(1, {{"wide", {std::int64_t{1} << 62, 8}, 4, 4}});
      },
      ThrowsMessage<InvalidArgument>(StrEq(text)));
  const std::vector<ParameterShape> too_much[] = {
      {{"wide", {1, huge, huge}, 1, 1}},  // inner
      {{"wide", {huge}, 4, 1}},           // storage bytes
      {{"wide", {huge}, 1, 4}},           // compute bytes
      {{"wide", {huge}, 1, 1}},           // padded to alignment
      {{"ok", {huge / 2}, 1, 1}, {"wide", {huge / 2}, 1, 1}},  // the total
  };
  for (const auto& parameters : too_much) {
    EXPECT_THAT([&] { FlatLayout(1, parameters); },
                ThrowsMessage<InvalidArgument>(HasSubstr("lowtide: wide: ")));
  }
  // N padded pieces: 3 ranks hold ceil(2^62 / 3) * 2 bytes each.
  EXPECT_THAT(
      [] {
        FlatLayout(3, {{"wide", {std::int64_t{1} << 62}, 1, 2}});
      },
      Throws<InvalidArgument>());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::memory
