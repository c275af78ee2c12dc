#include "shard/common_numbers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

CommonNumbers common(const std::vector<OwnNumbers>& ranks) {
  auto greatest = ranks.front().to_compare();
  for (const auto& rank : ranks) {
    const auto numbers = rank.to_compare();
    for (std::size_t k = 0; k < greatest.size(); ++k) {
      greatest[k] = std::max(greatest[k], numbers[k]);
    }
  }
  return CommonNumbers::of(greatest);
}

TEST(CommonNumbersTest, RowsAreThoseOfTheRankWithTheFewest) {
  EXPECT_EQ(common({{.output_rows = 8}, {.output_rows = 3}}).fewest_rows, 3);
  EXPECT_EQ(common({{.output_rows = 8}, {.output_rows = 0}}).fewest_rows, 0);
}

TEST(CommonNumbersTest, WhatOneRankHasAllKnow) {
  const OwnNumbers none;
  const auto nothing = common({none, none});
  EXPECT_FALSE(nothing.saved_by_any || nothing.listened_by_any ||
               nothing.calls_without_inputs_of_any || nothing.attached_on_any);
  EXPECT_TRUE(common({none, {.attached = true}}).attached_on_any);
  EXPECT_EQ(nothing.graphs_of_any.kept, 0);
  EXPECT_EQ(nothing.graphs_of_any.recorded, 0);
  EXPECT_FALSE(nothing.left_out_by_any);
  EXPECT_TRUE(common({none, {.left_out = true}}).left_out_by_any);
  EXPECT_TRUE(common({none, {.saved = true}}).saved_by_any);
  EXPECT_TRUE(common({{.listened = true}, none}).listened_by_any);
  EXPECT_TRUE(common({none, {.calls_without_inputs = true}})
                  .calls_without_inputs_of_any);
  EXPECT_EQ(common({none, {.graphs = {.kept = 1}}}).graphs_of_any.kept, 1);
  EXPECT_EQ(common({none, {.graphs = {.recorded = 1}}}).graphs_of_any.recorded,
            1);
}

TEST(CommonNumbersTest, AGatherTakesAsLongAsOnTheSlowestRankIfAllKnow) {
  EXPECT_EQ(common({{.gather_ns = 30}, {.gather_ns = 70}}).gather_ns, 70);
  EXPECT_EQ(common({{.gather_ns = 30}, {}}).gather_ns, 0);
  EXPECT_EQ(CommonNumbers::of(OwnNumbers{}.to_compare()).gather_ns, 0);
}

TEST(CommonNumbersTest, ParametersAreUsedAlikeIfAllHashesAreEqual) {
  const std::uint64_t high = 0xf000'0000'0000'0002;
  EXPECT_TRUE(common({{.used_hash = high}, {.used_hash = high}}).used_alike);
  EXPECT_FALSE(common({{.used_hash = high}, {.used_hash = 6}}).used_alike);
  EXPECT_FALSE(common({{.used_hash = 6}, {.used_hash = 6}, {.used_hash = 8}})
                   .used_alike);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
