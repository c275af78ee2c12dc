#include "shard/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

using Units = std::vector<std::int32_t>;
using Guess = std::optional<std::int32_t>;
constexpr std::nullopt_t none = std::nullopt;

// Of units that run one behind the other one is expected.
Guess only(const Units& next) {
  EXPECT_LE(next.size(), 1u);
  return next.empty() ? Guess() : next.front();
}

// Enters and leaves `units` one after another; returns what was expected next
// each time.
std::vector<Guess> forward(Schedule& schedule, const Units& units,
                           bool recorded = true) {
  schedule.begin_forward();
  std::vector<Guess> guesses;
  for (const std::int32_t unit : units) {
    guesses.push_back(only(schedule.enter_forward(unit)));
    schedule.leave_forward(unit, recorded);
  }
  schedule.end_forward();
  return guesses;
}

std::vector<Guess> backward(Schedule& schedule, const Units& units) {
  std::vector<Guess> guesses;
  for (const std::int32_t unit : units) {
    guesses.push_back(only(schedule.enter_backward(unit).next));
  }
  return guesses;
}

TEST(ScheduleTest, ExpectsRegistrationOrderAtFirst) {
  Schedule schedule(4);
  EXPECT_THAT(forward(schedule, {0, 1, 2, 3}), ElementsAre(1, 2, 3, none));
}

TEST(ScheduleTest, ExpectsTheRecordedOrderAfterwards) {
  Schedule schedule(4);
  forward(schedule, {2, 0, 3, 1});
  EXPECT_THAT(forward(schedule, {2, 0, 3, 1}), ElementsAre(0, 3, 1, none));
}

TEST(ScheduleTest, AWrongGuessFindsItsWayBack) {
  Schedule schedule(4);
  // 1 is skipped: after 2 the order is known again.
  EXPECT_THAT(forward(schedule, {0, 2, 3}), ElementsAre(1, 3, none));
  // 1 was not seen in the last forward, so nothing follows it.
  EXPECT_THAT(forward(schedule, {0, 1, 2, 3}), ElementsAre(2, none, 3, none));
  EXPECT_THAT(forward(schedule, {0, 1, 2, 3}), ElementsAre(1, 2, 3, none));
}

TEST(ScheduleTest, ForgetsAUnitThatIsNoLongerRun) {
  Schedule schedule(3);
  forward(schedule, {0, 1, 2});
  forward(schedule, {0, 2});
  EXPECT_THAT(forward(schedule, {0, 2}), ElementsAre(2, none));
}

TEST(ScheduleTest, AUnitCalledTwiceIsExpectedTwice) {
  Schedule schedule(3);
  forward(schedule, {0, 1, 0, 2});
  EXPECT_THAT(forward(schedule, {0, 1, 0, 2}), ElementsAre(1, 0, 2, none));
  schedule.forget_forwards();
  forward(schedule, {0, 0, 1});
  EXPECT_THAT(backward(schedule, {1, 0, 0}), ElementsAre(0, 0, none));
}

TEST(ScheduleTest, BackwardExpectsTheReverseWithMultiplicity) {
  Schedule schedule(3);
  forward(schedule, {0, 1, 0, 2});
  EXPECT_THAT(backward(schedule, {2, 0, 1, 0}), ElementsAre(0, 1, 0, none));
  // Nothing is left to expect.
  EXPECT_THAT(backward(schedule, {2, 0}), ElementsAre(none, none));
}

TEST(ScheduleTest, NestedUnitsAreExpectedInTheOrderTheyWereLeft) {
  Schedule schedule(3);
  schedule.begin_forward();
  EXPECT_EQ(only(schedule.enter_forward(0)), 1);
  EXPECT_EQ(only(schedule.enter_forward(1)), 2);
  schedule.leave_forward(1, true);
  EXPECT_EQ(only(schedule.enter_forward(2)), none);
  schedule.leave_forward(2, true);
  schedule.leave_forward(0, true);
  schedule.end_forward();
  EXPECT_THAT(schedule.completion_order(), ElementsAre(2, 1, 0));
  EXPECT_THAT(backward(schedule, {0, 2, 1}), ElementsAre(2, 1, none));
}

// The model (0), two blocks (1, 3), and in each its experts (2, 4).
std::vector<Units> forward_of_blocks(Schedule& schedule) {
  std::vector<Units> next;
  schedule.begin_forward();
  next.push_back(schedule.enter_forward(0));
  for (const std::int32_t block : {1, 3}) {
    next.push_back(schedule.enter_forward(block));
    next.push_back(schedule.enter_forward(block + 1));
    schedule.leave_forward(block + 1, true);
    schedule.leave_forward(block, true);
  }
  schedule.leave_forward(0, true);
  schedule.end_forward();
  return next;
}

TEST(ScheduleTest, WhoeverExpectsAUnitExpectsTheFirstInsideIt) {
  Schedule schedule(5);
  forward_of_blocks(schedule);  // who runs in whom is known from now on
  schedule.forget_forwards();
  EXPECT_THAT(
      forward_of_blocks(schedule),
      ElementsAre(Units{1, 2}, Units{2}, Units{3, 4}, Units{4}, Units{}));
  EXPECT_EQ(schedule.enter_backward(0).next, (Units{3, 4}));
  EXPECT_EQ(schedule.enter_backward(3).next, Units{4});
  EXPECT_EQ(schedule.enter_backward(4).next, (Units{1, 2}));
  EXPECT_EQ(schedule.enter_backward(1).next, Units{2});
  EXPECT_EQ(schedule.enter_backward(2).next, Units{});
}

// A head that is called behind the model's forward does not expect what ran in
// the model: that begins with the model, and a part of the head may be in it.
TEST(ScheduleTest, WhatIsInTheOutermostIsExpectedByThatAlone) {
  Schedule schedule(5);
  forward_of_blocks(schedule);
  schedule.begin_forward();
  schedule.enter_forward(4);
  schedule.leave_forward(4, true);
  EXPECT_EQ(schedule.enter_backward(4).next, Units{0});
  EXPECT_EQ(schedule.enter_backward(0).next, (Units{3, 4}));
}

TEST(ScheduleTest, AUnitAroundOthersCompletesBehindThem) {
  Schedule schedule(5);
  forward_of_blocks(schedule);
  EXPECT_THAT(schedule.completion_order(), ElementsAre(4, 3, 2, 1, 0));
  schedule.enter_backward(0);
  schedule.enter_backward(3);
  const auto experts = schedule.enter_backward(4);
  EXPECT_EQ(experts.around, 3);
  EXPECT_FALSE(schedule.is_over(3, *experts.place));
  const auto block = schedule.enter_backward(1);
  EXPECT_EQ(block.around, 0);
  EXPECT_TRUE(schedule.is_over(3, *block.place));
}

TEST(ScheduleTest, CompletionOrderCountsAUnitAtItsFirstCall) {
  Schedule schedule(3);
  EXPECT_THAT(schedule.completion_order(), IsEmpty());
  forward(schedule, {0, 1, 0, 2});
  EXPECT_THAT(schedule.completion_order(), ElementsAre(2, 1, 0));
  schedule.forget_forwards();
  EXPECT_THAT(schedule.completion_order(), IsEmpty());
}

TEST(ScheduleTest, ForwardsWithoutGradLeaveNoTraceInBackward) {
  Schedule schedule(2);
  forward(schedule, {0, 1});
  forward(schedule, {1, 0}, /*recorded=*/false);
  EXPECT_THAT(schedule.completion_order(), ElementsAre(1, 0));
  EXPECT_THAT(backward(schedule, {1, 0}), ElementsAre(0, none));
}

TEST(ScheduleTest, BackwardsOfSeveralForwardsComeInReverse) {
  Schedule schedule(3);
  forward(schedule, {0, 1, 2});
  forward(schedule, {0, 2, 1});
  EXPECT_THAT(schedule.completion_order(), ElementsAre(2, 1, 0));
  EXPECT_THAT(backward(schedule, {1, 2, 0}), ElementsAre(2, 0, 2));
  EXPECT_THAT(backward(schedule, {2, 1, 0}), ElementsAre(1, 0, none));
}

TEST(ScheduleTest, BackwardsOfSeveralForwardsAreToldByTheirCalls) {
  Schedule schedule(3);
  std::int64_t call = 0;
  for (const Units& units : {Units{0}, Units{1, 2, 0}}) {
    schedule.begin_forward();
    ++call;
    for (const auto unit : units) schedule.enter_forward(unit);
    for (const auto unit : units) schedule.leave_forward(unit, true, call);
    schedule.end_forward();
  }
  const auto first = schedule.enter_backward(0, 1);
  EXPECT_EQ(first.place, 0u);
  EXPECT_FALSE(first.last);
  const auto second = schedule.enter_backward(0, 2);
  EXPECT_EQ(second.place, 3u);
  EXPECT_TRUE(second.last);
  EXPECT_EQ(second.next.front(), 2);
  EXPECT_FALSE(schedule.is_over(2, *second.place));
  EXPECT_EQ(schedule.enter_backward(0, 2).place, std::nullopt);
}

TEST(ScheduleTest, AUnitIsOverWhenAnEarlierCallBegins) {
  Schedule schedule(4);
  forward(schedule, {0, 1, 2, 1});
  const auto again = schedule.enter_backward(1);
  EXPECT_EQ(again.place, 3u);
  EXPECT_FALSE(again.last);
  const auto two = schedule.enter_backward(2);
  EXPECT_TRUE(two.last);
  EXPECT_FALSE(schedule.is_over(1, *two.place));  // its first call is to come
  const auto one = schedule.enter_backward(1);
  EXPECT_TRUE(one.last);
  EXPECT_TRUE(schedule.is_over(2, *one.place));
  EXPECT_FALSE(schedule.is_over(1, *one.place));
  EXPECT_FALSE(schedule.is_over(3, *one.place));  // not called
  EXPECT_TRUE(schedule.is_over(1, *schedule.enter_backward(0).place));
  schedule.forget_forwards();
  EXPECT_FALSE(schedule.is_over(2, 0));
}

TEST(ScheduleTest, AUnitAroundAnotherIsNotOverWhenThatBegins) {
  Schedule schedule(2);
  schedule.begin_forward();
  for (const auto unit : {0, 1}) schedule.enter_forward(unit);
  for (const auto unit : {1, 0}) schedule.leave_forward(unit, true);
  schedule.end_forward();
  const auto outer = schedule.enter_backward(0);
  EXPECT_FALSE(outer.alone);
  const auto inner = schedule.enter_backward(1);
  EXPECT_TRUE(inner.alone);
  EXPECT_FALSE(schedule.is_over(0, *inner.place));
}

// A model (0) of two layers (1, 2), and a head (3) on two chunks of what it
// gave.
void forward_by_chunks(Schedule& schedule) {
  forward(schedule, {0, 1, 2});
  for (const std::int64_t call : {1, 2}) {
    schedule.begin_forward();
    schedule.enter_forward(3);
    schedule.leave_forward(3, /*recorded=*/true, call);
    schedule.end_forward(/*detached=*/true);
  }
}

TEST(ScheduleTest, ADetachedForwardHasABackwardOfItsOwn) {
  Schedule schedule(4);
  forward_by_chunks(schedule);
  for (const std::int64_t call : {1, 2}) {
    const auto chunk = schedule.detached_of(3, call);
    ASSERT_TRUE(chunk);
    EXPECT_EQ(schedule.first_of(*chunk), 3);
    EXPECT_THAT(schedule.completion_order(chunk), ElementsAre(3));
    EXPECT_THAT(schedule.completion_order(), ElementsAre(3, 2, 1, 0));
    const auto entered = schedule.enter_backward(3, call, chunk);
    EXPECT_TRUE(entered.earliest);
    EXPECT_THAT(entered.next, IsEmpty());
    EXPECT_EQ(schedule.detached_of(3, call), std::nullopt);
    schedule.end_backward();
  }
  EXPECT_EQ(schedule.open_forwards(), 1u);
  EXPECT_THAT(schedule.completion_order(), ElementsAre(2, 1, 0));
  EXPECT_EQ(schedule.detached_of(2, Schedule::kNoCall), std::nullopt);
  EXPECT_FALSE(schedule.enter_backward(2).earliest);
}

// Also where the backward comes to a unit inside it first.
TEST(ScheduleTest, ADetachedForwardIsOfTheUnitThatItBeganWith) {
  Schedule schedule(4);
  forward(schedule, {0, 1});
  schedule.begin_forward();
  schedule.enter_forward(2);
  schedule.enter_forward(3);
  schedule.leave_forward(3, /*recorded=*/true, 7);
  schedule.leave_forward(2, /*recorded=*/true, 8);
  schedule.end_forward(/*detached=*/true);
  const auto inner = schedule.detached_of(3, 7);
  ASSERT_TRUE(inner);
  EXPECT_EQ(inner, schedule.detached_of(2, 8));
  EXPECT_EQ(schedule.first_of(*inner), 2);
}

// Where a rank has called it otherwise.
TEST(ScheduleTest, WhatIsTakenForOneOfEverythingExpectsTheRest) {
  Schedule schedule(4);
  forward_by_chunks(schedule);
  const auto entered = schedule.enter_backward(3, 1);
  EXPECT_FALSE(entered.earliest);
  EXPECT_THAT(entered.next, ElementsAre(2));
}

TEST(ScheduleTest, RowsThatAreReadBehindADetachedForwardAreNotInIt) {
  Schedule schedule(4);
  forward_by_chunks(schedule);
  schedule.leave_forward(0, /*recorded=*/true);
  schedule.enter_backward(3, 2);
  schedule.end_backward();
  EXPECT_EQ(schedule.open_forwards(), 3u);
  EXPECT_THAT(schedule.completion_order(), ElementsAre(3, 2, 1, 0));
}

// However many forwards one backward goes through, and though a rank does not
// use what one of its calls gave.
TEST(ScheduleTest, AForwardWaitsForTheFirstBackwardThatComesToIt) {
  Schedule schedule(5);
  forward(schedule, {0, 1, 2});
  forward(schedule, {3});
  forward(schedule, {4});
  EXPECT_EQ(schedule.open_forwards(), 3u);
  EXPECT_THAT(schedule.enter_backward(4).next, ElementsAre(3));
  schedule.enter_backward(2);
  schedule.enter_backward(0);
  schedule.end_backward();
  EXPECT_EQ(schedule.open_forwards(), 1u);
  EXPECT_THAT(schedule.completion_order(), ElementsAre(3));
  EXPECT_FALSE(schedule.is_over(1, 0));
  EXPECT_EQ(schedule.enter_backward(1).place, std::nullopt);
  // Nothing that is over is expected.
  const auto last = schedule.enter_backward(3);
  EXPECT_THAT(last.next, IsEmpty());
  EXPECT_TRUE(last.earliest);
  schedule.end_backward();
  EXPECT_EQ(schedule.open_forwards(), 0u);
}

TEST(ScheduleTest, ForwardsThatBeginWithAnotherUnitAreExpectedByThemselves) {
  Schedule schedule(4);
  forward(schedule, {0, 2, 1});
  forward(schedule, {3, 2});
  EXPECT_THAT(forward(schedule, {0, 2, 1}), ElementsAre(2, 1, none));
  EXPECT_THAT(forward(schedule, {3, 2}), ElementsAre(2, none));
}

struct Call {
  std::int32_t unit;
  std::size_t entered_at;  // how many calls had been left then
  Guess around;
};

// Calls in calls, to a depth of 3; what was left, in order.
void call_some(Schedule& schedule, std::mt19937& random, std::int32_t units,
               int depth, std::vector<Call>& left, Guess around = none) {
  for (unsigned calls = random() % 4; calls > 0; --calls) {
    const auto unit = static_cast<std::int32_t>(random()) % units;
    const Call call{unit < 0 ? unit + units : unit, left.size(), around};
    schedule.enter_forward(call.unit);
    if (depth > 0) {
      call_some(schedule, random, units, depth - 1, left, call.unit);
    }
    schedule.leave_forward(call.unit, /*recorded=*/true);
    left.push_back(call);
  }
}

TEST(ScheduleTest, RandomForwardsComeBackInReverseAndSayWhatIsOver) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    std::mt19937 random(seed);
    const std::int32_t units = 1 + static_cast<std::int32_t>(random() % 6);
    Schedule schedule(units);
    std::vector<Call> left;
    for (unsigned forwards = 1 + random() % 3; forwards > 0; --forwards) {
      schedule.begin_forward();
      call_some(schedule, random, units, 3, left);
      schedule.end_forward();
    }
    for (std::size_t place = left.size(); place-- > 0;) {
      const auto call = schedule.enter_backward(left[place].unit);
      ASSERT_EQ(call.place, place) << "seed " << seed;
      ASSERT_EQ(call.around, left[place].around) << "seed " << seed;
      Units next;
      for (auto before = place; before-- > 0;) {
        next.push_back(left[before].unit);
        if (left[before].entered_at == before || !left[before].around) break;
      }
      ASSERT_EQ(call.next, next) << "seed " << seed;
      ASSERT_EQ(call.alone, left[place].entered_at == place) << "seed " << seed;
      for (std::int32_t unit = 0; unit < units; ++unit) {
        // All of its calls were entered after this one had been left.
        bool over = false;
        bool called = false;
        for (const auto& other : left) {
          if (other.unit != unit) continue;
          over = (!called || over) && other.entered_at > place;
          called = true;
        }
        ASSERT_EQ(schedule.is_over(unit, place), over) << "seed " << seed;
      }
    }
    EXPECT_EQ(schedule.open_forwards() == 0, left.empty());
    schedule.end_backward();
    ASSERT_EQ(schedule.open_forwards(), 0u);
    ASSERT_TRUE(schedule.completion_order().empty()) << "seed " << seed;
  }
}

TEST(ScheduleTest, AbortForgetsTheUnfinishedStepOnly) {
  Schedule schedule(3);
  forward(schedule, {0, 2, 1});
  schedule.begin_forward();
  schedule.enter_forward(0);
  schedule.leave_forward(0, true);
  schedule.abort();
  EXPECT_THAT(schedule.completion_order(), IsEmpty());
  EXPECT_EQ(only(schedule.enter_backward(0).next), none);
  EXPECT_THAT(forward(schedule, {0, 2, 1}), ElementsAre(2, 1, none));
  EXPECT_THAT(backward(schedule, {1, 2, 0}), ElementsAre(2, 0, none));
}

TEST(ScheduleTest, ForwardsWithoutBackwardDoNotGrowTheRecordForEver) {
  Schedule schedule(2);
  for (int step = 0; step < 20'000; ++step) forward(schedule, {0, 1});
  int recorded = 0;
  while (schedule.enter_backward(1).place) ++recorded;
  EXPECT_LE(recorded, 1 << 14);
  EXPECT_GE(recorded, 1);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
