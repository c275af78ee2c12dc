#include "shard/planned_step.h"

#include <gtest/gtest.h>

#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

// A root of 10 bytes around blocks of 100, 200 and 400, whose shards are a
// tenth, sent in two chunks each through slots of 7 bytes.
std::vector<PlannedUnit> blocks_in_a_root() {
  std::vector<PlannedUnit> units;
  for (const std::int64_t bytes : {10, 100, 200, 400}) {
    PlannedUnit unit;
    unit.bytes.parameters = bytes / 10;
    unit.bytes.gathered = bytes;
    unit.bytes.gather_input = bytes / 10;
    unit.bytes.gradient_chunks = 2;
    unit.bytes.gradient_slot = 7;
    unit.bytes.gradient_slots = 3;
    unit.bytes.gradient_slab = bytes;
    unit.bytes.sharded_gradients = bytes / 10;
    unit.inside = units.empty() ? -1 : 0;
    unit.reshard_after_forward = !units.empty();
    units.push_back(unit);
  }
  return units;
}

TEST(PlannedStepTest, TwoUnitsAreGatheredBesideTheRoot) {
  const auto peaks = planned_peaks(blocks_in_a_root());
  EXPECT_EQ(peaks.gathered, 10 + 200 + 400);
  EXPECT_EQ(peaks.gather_input, 20 + 40);
  EXPECT_EQ(peaks.parameters, 1 + 10 + 20 + 40);
  EXPECT_EQ(peaks.sharded_gradients, 1 + 10 + 20 + 40);
}

TEST(PlannedStepTest, OffloadedUnitsAreOnTheHostAndLeaveThreeAtATime) {
  auto units = blocks_in_a_root();
  units.push_back(units[1]);
  for (auto& unit : units) unit.offloaded = true;
  const auto peaks = planned_peaks(units);
  EXPECT_EQ(peaks.parameters, 0);
  EXPECT_EQ(peaks.host_parameters, 1 + 10 + 20 + 40 + 10);
  EXPECT_EQ(peaks.host_gradients, 1 + 10 + 20 + 40 + 10);
  EXPECT_EQ(peaks.sharded_gradients, 1 + 10 + 20 + 40);
}

TEST(PlannedStepTest, OffloadedUnitsLeaveWithThoseAroundThem) {
  auto units = blocks_in_a_root();
  for (std::int32_t block = 4; block < 10; block += 2) {
    units.push_back(units[1]);
    units.push_back(units[1]);
    units.back().inside = block;
  }
  for (auto& unit : units) unit.offloaded = true;
  EXPECT_EQ(planned_peaks(units).sharded_gradients, 1 + 40 + 20 + 4 * 10);
}

TEST(PlannedStepTest, UnitsThatStayAddUp) {
  auto units = blocks_in_a_root();
  for (auto& unit : units) unit.reshard_after_forward = false;
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 100 + 200 + 400);
}

TEST(PlannedStepTest, AUnitInsideAnotherRunsBesideIt) {
  auto units = blocks_in_a_root();
  units[2].inside = 1;  // 200 runs in 100, which is over before 400 begins
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 100 + 200 + 400);
  units[3].inside = 1;
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 100 + 200 + 400);
  units[2].inside = units[3].inside = 0;
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 200 + 400);
}

TEST(PlannedStepTest, UnitsBesideEachOtherAreGatheredAheadTogether) {
  auto units = blocks_in_a_root();
  units.push_back(units[1]);
  units[2].inside = 1;
  units[4].inside = 3;
  units[3].beside = {4};
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 100 + 200 + 400 + 100);
  EXPECT_EQ(planned_peaks(units).gather_input, 20 + 40 + 10);
}

TEST(PlannedStepTest, AUnitIsGatheredAheadWithTheFirstInsideIt) {
  auto units = blocks_in_a_root();
  units.push_back(units[1]);
  units[2].inside = 1;
  units[4].inside = 3;
  EXPECT_EQ(planned_peaks(units).gathered, 10 + 100 + 200 + 400 + 100);
  EXPECT_EQ(planned_peaks(units).gather_input, 20 + 40 + 10);
}

TEST(PlannedStepTest, SlotsAreNoMoreThanChunksAndMayBeAUnitsOwn) {
  auto units = blocks_in_a_root();
  EXPECT_EQ(planned_peaks(units).gradient_stream, 3 * 7);
  units[1].bytes.own_slots = true;
  units[1].bytes.gradient_slot = 50;
  EXPECT_EQ(planned_peaks(units).gradient_stream, 2 * 50 + 7);
  for (auto& unit : units) unit.gradient_sync = false;
  units[0].gradient_sync = true;
  EXPECT_EQ(planned_peaks(units).gradient_stream, 2 * 7);
}

TEST(PlannedStepTest, SlabsOfUnitsWithoutSyncAddUp) {
  auto units = blocks_in_a_root();
  EXPECT_EQ(planned_peaks(units).gradient_slab, 0);
  units[0].bytes.gradient_in_place = 5;  // one at a time
  units[1].bytes.gradient_in_place = 50;
  EXPECT_EQ(planned_peaks(units).gradient_slab, 50);
  for (auto& unit : units) unit.gradient_sync = false;
  EXPECT_EQ(planned_peaks(units).gradient_slab, 10 + 100 + 200 + 400);
}

TEST(PlannedStepTest, ThreeSumsForReplicasAreUnderWay) {
  auto units = blocks_in_a_root();
  for (auto& unit : units) {
    unit.bytes.partial_gradients = 2 * unit.bytes.sharded_gradients;
  }
  EXPECT_EQ(planned_peaks(units).sharded_gradients, 71 + 2 * (10 + 20 + 40));
  for (auto& unit : units) unit.all_reduce = false;
  EXPECT_EQ(planned_peaks(units).sharded_gradients, 2 * 71);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
