#include "shard/group_forward.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

constexpr bool kAlone = true;
constexpr bool kInside = false;

// Whether the unit's forward begins and ends with a call of that module.
std::pair<bool, bool> call(GroupForward& group, std::size_t module,
                           bool alone) {
  const bool begins = group.begins_with(module, alone);
  group.enter(module, begins);
  return {begins, group.leave(module, alone)};
}

// A call that raises: the module never returns.
bool enter(GroupForward& group, std::size_t module, bool alone) {
  const bool begins = group.begins_with(module, alone);
  group.enter(module, begins);
  return begins;
}

using Is = std::pair<bool, bool>;
constexpr Is kBegins{true, false};
constexpr Is kEnds{false, true};
constexpr Is kBoth{true, true};
constexpr Is kNeither{false, false};

TEST(GroupForward, EveryCallOfOneModuleIsAForward) {
  GroupForward group;
  EXPECT_EQ(call(group, 0, kInside), kBoth);
  EXPECT_TRUE(enter(group, 0, kInside));
  EXPECT_FALSE(group.under_way());
  EXPECT_EQ(call(group, 0, kInside), kBoth);
}

TEST(GroupForward, BeginsWithTheFirstModuleAndEndsWithTheLast) {
  GroupForward group(3);
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(call(group, 1, kInside), kBegins);
    EXPECT_EQ(call(group, 0, kInside), kNeither);
    EXPECT_EQ(call(group, 1, kInside), kNeither);
    EXPECT_TRUE(group.under_way());
    EXPECT_EQ(call(group, 2, kInside), kEnds);
    EXPECT_FALSE(group.under_way());
  }
}

TEST(GroupForward, WithoutAForwardAroundEachCallIsOne) {
  GroupForward group(2);
  EXPECT_EQ(call(group, 1, kAlone), kBoth);
  EXPECT_EQ(call(group, 1, kAlone), kBoth);
  EXPECT_EQ(call(group, 0, kAlone), kBoth);
}

TEST(GroupForward, AModuleThatCallsAnotherEndsAfterIt) {
  for (const bool alone : {false, true}) {
    GroupForward group(2);
    EXPECT_TRUE(enter(group, 0, alone));
    EXPECT_EQ(call(group, 1, alone), kNeither);
    EXPECT_TRUE(group.leave(0, alone));
  }
}

TEST(GroupForward, EndingItLetsTheNextBegin) {
  GroupForward group(2);
  call(group, 0, kInside);
  group.end();
  EXPECT_EQ(call(group, 1, kInside), kBegins);
  EXPECT_EQ(call(group, 0, kInside), kEnds);
}

TEST(GroupForward, AModuleThatRaisedAloneBeginsAgain) {
  GroupForward group(2);
  EXPECT_TRUE(enter(group, 0, kAlone));
  EXPECT_EQ(call(group, 0, kAlone), kBoth);
}

// Python may have caught the exception within the forward around the unit.
TEST(GroupForward, AModuleThatRaisedInsideMayRunAgain) {
  GroupForward group(2);
  EXPECT_TRUE(enter(group, 0, kInside));
  EXPECT_EQ(call(group, 0, kInside), kNeither);
  EXPECT_EQ(call(group, 1, kInside), kEnds);
}

TEST(GroupForward, ARecomputationLearnsWhatTheForwardDid) {
  GroupForward group(2);
  call(group, 0, kInside);
  call(group, 1, kInside);
  EXPECT_TRUE(group.began_with(0));
  EXPECT_FALSE(group.ended_with(0));
  EXPECT_FALSE(group.began_with(1));
  EXPECT_TRUE(group.ended_with(1));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
