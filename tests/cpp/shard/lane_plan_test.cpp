#include "shard/gradients/lane_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::int64_t kRanks = 2;
constexpr std::int64_t kSlots = 2;
constexpr std::int64_t kBudget = 1 << 20;

std::vector<PlannedLane> plan(const std::vector<GradientShape>& gradients,
                              const std::vector<bool>& takes_part,
                              const std::vector<std::int32_t>& order,
                              std::int64_t budget = kBudget) {
  return plan_lanes(gradients, takes_part, order, budget, kSlots, kRanks);
}

TEST(LanePlanTest, DtypesTravelApartInTheOrderOfTheirFirstGradient) {
  const std::vector<GradientShape> gradients = {
      {at::kFloat, 256, 128}, {at::kBFloat16, 256, 128}, {at::kFloat, 64, 32}};
  const auto lanes = plan(gradients, {true, true, true}, {1, 2, 0});
  ASSERT_EQ(lanes.size(), 2);
  EXPECT_EQ(lanes[0].dtype, at::kBFloat16);
  EXPECT_THAT(lanes[0].members, ElementsAre(1));
  EXPECT_EQ(lanes[1].dtype, at::kFloat);
  EXPECT_THAT(lanes[1].members, ElementsAre(2, 0));
}

TEST(LanePlanTest, WhatTakesNoPartHasNoColumns) {
  const std::vector<GradientShape> gradients = {{at::kFloat, 256, 128},
                                                {at::kFloat, 256, 128}};
  const auto lanes = plan(gradients, {false, true}, {0, 1});
  ASSERT_EQ(lanes.size(), 1);
  EXPECT_THAT(lanes[0].members, ElementsAre(1));
  ASSERT_EQ(lanes[0].plan.chunks.size(), 1);
  EXPECT_EQ(lanes[0].plan.chunks[0].pieces.size(), 1);
  EXPECT_THAT(plan(gradients, {false, false}, {0, 1}), IsEmpty());
}

TEST(LanePlanTest, GradientsInPlaceLeaveFirstEachInALaneOfItsOwn) {
  const std::vector<GradientShape> gradients = {
      {at::kFloat, 64, 32},
      {at::kFloat, 4096, 2048, 0, /*fused=*/true},
      {at::kFloat, 4096, 2048, 0, /*fused=*/true}};
  const auto lanes = plan(gradients, {true, true, true}, {0, 2, 1});
  ASSERT_EQ(lanes.size(), 3);
  EXPECT_TRUE(lanes[0].in_place);
  EXPECT_THAT(lanes[0].members, ElementsAre(2));
  EXPECT_THAT(lanes[0].plan.chunks, IsEmpty());
  EXPECT_THAT(lanes[1].members, ElementsAre(1));
  EXPECT_FALSE(lanes[2].in_place);
  EXPECT_THAT(lanes[2].members, ElementsAre(0));
}

TEST(LanePlanTest, AGradientInBlocksOfRowsIsNotSummedInPlace) {
  const std::vector<GradientShape> gradients = {
      {at::kFloat, 4096, 2048, /*strip=*/1024, /*fused=*/true}};
  const auto lanes = plan(gradients, {true}, {0});
  ASSERT_EQ(lanes.size(), 1);
  EXPECT_FALSE(lanes[0].in_place);
  EXPECT_EQ(lanes[0].plan.chunks.size(), 2);
}

TEST(LanePlanTest, ChunksFitTheSlotsOfTheirDtype) {
  constexpr std::int64_t kSmall = 3 * 2 * 256 * 4;  // two slots of 256 columns
  const std::vector<GradientShape> gradients = {{at::kFloat, 4096, 2048},
                                                {at::kBFloat16, 4096, 2048}};
  const auto lanes = plan(gradients, {true, true}, {0, 1}, kSmall);
  ASSERT_EQ(lanes.size(), 2);
  EXPECT_EQ(lanes[0].plan.chunks.front().columns, 256);
  EXPECT_EQ(lanes[1].plan.chunks.front().columns, 512);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
