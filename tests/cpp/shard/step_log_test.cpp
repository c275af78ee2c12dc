#include "shard/step_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <utility>
#include <vector>

#include "base/check.h"
#include "host_meeting.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using What = StepNote::What;

class StepLogTest : public testing::Test {
 protected:
  StepLogTest() {
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      auto& log = logs.emplace_back("model", [](std::int32_t unit) {
        return "layers." + std::to_string(unit);
      });
      log.compare_over(meeting.rank(rank), {0, 1});
    }
  }
  void note(StepNote note) {
    for (auto& log : logs) log.note(note);
  }
  // Rank r's numbers of unit u: {10 r + u, u, 0}.
  void post() {
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      logs[static_cast<std::size_t>(rank)].post(
          [&](std::size_t, std::int32_t unit) {
            return StepLog::Numbers{10 * rank + unit, unit, 0};
          });
    }
  }
  static std::string error_of(StepLog& log) {
    try {
      log.require([](std::size_t, std::int32_t, const auto&) {});
    } catch (const Error& error) {
      return error.what();
    }
    return "none";
  }

  HostMeeting meeting{2};
  std::deque<StepLog> logs;  // which do not move
};

TEST_F(StepLogTest, RanksThatDoTheSameAgreeOnTheGreatestNumbers) {
  note({What::gather, 0});
  note({What::reduce, 1, 3});
  post();
  std::vector<std::pair<std::int32_t, StepLog::Numbers>> agreed;
  logs[0].require([&](auto, std::int32_t unit, const auto& greatest) {
    agreed.emplace_back(unit, greatest);
  });
  EXPECT_EQ(agreed, (std::vector<std::pair<std::int32_t, StepLog::Numbers>>{
                        {0, {10, 0, 0}}, {1, {11, 1, 0}}}));
  EXPECT_EQ(error_of(logs[1]), "none");
}

TEST_F(StepLogTest, AsksOnlyWhenSomethingHasBeenNoted) {
  post();
  EXPECT_EQ(meeting.num_posts(0), 0);
  note({What::forward});
  post();
  post();
  EXPECT_EQ(meeting.num_posts(0), 1);
}

TEST_F(StepLogTest, UnitsMayHaveOtherNumbersOfNumbers) {
  note({What::gather, 0});
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    logs[static_cast<std::size_t>(rank)].post(
        [&](std::size_t, std::int32_t unit) {
          return unit == 0 ? StepLog::Numbers{}
                           : StepLog::Numbers{rank, -rank, 7, 0};
        });
  }
  std::vector<StepLog::Numbers> agreed;
  logs[1].require([&](auto, auto, const StepLog::Numbers& greatest) {
    agreed.push_back(greatest);
  });
  EXPECT_THAT(agreed, ElementsAre(IsEmpty(), ElementsAre(1, 0, 7, 0)));
}

// A second channel, over ranks that all are among the first's.
class StepLogOfExpertsTest : public StepLogTest {
 protected:
  StepLogOfExpertsTest() {
    for (std::int64_t rank = 0; rank < 2; ++rank) {
      logs[static_cast<std::size_t>(rank)].compare_over(of_experts.rank(rank),
                                                        {2});
    }
  }
  static StepLog::Numbers numbers(std::size_t channel, std::int32_t unit) {
    return {static_cast<std::int64_t>(channel), unit};
  }
  static bool asks(std::size_t channel, std::int32_t unit) {
    return channel == 1 && unit == 2;
  }

  HostMeeting of_experts{2};
};

TEST_F(StepLogOfExpertsTest, TheFirstChannelIsAskedAndOthersWhereThatIsSaid) {
  note({What::backward, 0});
  for (auto& log : logs) log.post(numbers);
  EXPECT_EQ(meeting.num_posts(0), 1);
  EXPECT_EQ(of_experts.num_posts(0), 0);
  for (auto& log : logs) log.post_again(numbers, asks);
  EXPECT_EQ(meeting.num_posts(0), 1);
  EXPECT_EQ(of_experts.num_posts(0), 1);
  std::vector<StepLog::Numbers> agreed;
  for (auto& log : logs) {
    agreed.clear();
    log.require([&](std::size_t channel, std::int32_t unit,
                    const StepLog::Numbers& greatest) {
      EXPECT_THAT(greatest, ElementsAre(channel, unit));
      agreed.push_back(greatest);
    });
  }
  EXPECT_THAT(agreed, ElementsAre(ElementsAre(0, 0), ElementsAre(0, 1),
                                  ElementsAre(1, 2)));
}

TEST_F(StepLogOfExpertsTest, WhatIsNotedBehindAQuestionIsComparedWithTheNext) {
  for (std::int64_t rank = 0; rank < 2; ++rank) {
    auto& log = logs[static_cast<std::size_t>(rank)];
    log.note({What::backward, 0});
    log.post(numbers);
    log.note({What::reduce, 0, rank});
    log.post_again(numbers, asks);
  }
  of_experts.say({"",
                  "the backward of unit 'layers.0'\n"
                  "the reduce-scatter of unit 'layers.0', part 1\n"});
  EXPECT_THAT(error_of(logs[0]),
              HasSubstr("the reduce-scatter of unit 'layers.0', part 0 on rank "
                        "0 and the reduce-scatter of unit 'layers.0', part 1"));
}

TEST_F(StepLogOfExpertsTest, WhatOnlySomeRanksHaveSeenStaysForAll) {
  for (auto& log : logs) {
    log.note({What::backward, 0});
    log.post(numbers);
    log.note({What::reduce, 0, 5});
    log.post_again(numbers, asks);
    EXPECT_EQ(meeting.num_posts(0), 1);
  }
  for (auto& log : logs) EXPECT_EQ(error_of(log), "none");
  logs[0].note({What::gather, 0});
  logs[1].note({What::gather, 1});
  for (auto& log : logs) log.post(numbers);
  EXPECT_EQ(meeting.num_posts(0), 2);
  EXPECT_NE(error_of(logs[0]), "none");
  EXPECT_EQ(meeting.said(0),
            "the reduce-scatter of unit 'layers.0', part 5\n"
            "the all-gather of unit 'layers.0'\n");
}

TEST_F(StepLogTest, NamesTheFirstCallThatDiffersOnEveryRank) {
  note({What::gather, 0});
  logs[0].note({What::gather, 1});
  logs[1].note({What::reduce, 1, 2});
  post();
  meeting.say(
      {"the all-gather of unit 'layers.0'\n"
       "the all-gather of unit 'layers.1'\n",
       "the all-gather of unit 'layers.0'\n"
       "the reduce-scatter of unit 'layers.1', part 2\n"});
  for (auto& log : logs) {
    const auto error = error_of(log);
    EXPECT_THAT(error, HasSubstr("step of 'model'"));
    EXPECT_THAT(error, HasSubstr("the all-gather of unit 'layers.1' on rank 0 "
                                 "and the reduce-scatter of unit 'layers.1', "
                                 "part 2 on rank 1, call 2 "));
  }
  EXPECT_EQ(meeting.said(1),
            "the all-gather of unit 'layers.0'\n"
            "the reduce-scatter of unit 'layers.1', part 2\n");
}

TEST_F(StepLogTest, ADifferenceIsNotForgottenByEqualCallsBehindIt) {
  logs[0].note({What::trainable, 0, 5});
  logs[1].note({What::trainable, 0, 6});
  note({What::forward});
  post();
  EXPECT_THAT(error_of(logs[0]), HasSubstr("every rank to run the same"));
}

TEST_F(StepLogTest, ADifferenceInAValueIsToldInWords) {
  auto& log = logs[1];
  note({What::gather, 0});
  post();
  log.note({What::trainable, 0, 10}, "frozen: 'layers.0.weight'");
  for (auto& one : logs) EXPECT_EQ(error_of(one), "none");
  log.note({What::settings, 1, 11}, "gradient_divide_factor=7");
  logs[0].note({What::gather, 0});
  post();
  meeting.say({"the all-gather of unit 'layers.0'\n", ""});
  const std::string words =
      "other trainable parameters in unit 'layers.0' (frozen: "
      "'layers.0.weight'; a)";
  EXPECT_THAT(error_of(log), HasSubstr(words + " on rank 1, call 1 "));
  EXPECT_EQ(meeting.said(1), words +
                                 "\nother settings of unit 'layers.1' "
                                 "(gradient_divide_factor=7; b)\n");
}

TEST_F(StepLogTest, OrderAndValuesCount) {
  logs[0].note({What::gather, 0});
  logs[0].note({What::gather, 1});
  logs[1].note({What::gather, 1});
  logs[1].note({What::gather, 0});
  post();
  EXPECT_NE(error_of(logs[0]), "none");
}

TEST_F(StepLogTest, WhatWasRequiredIsNotToldAgain) {
  note({What::gather, 0});
  post();
  for (auto& log : logs) EXPECT_EQ(error_of(log), "none");
  logs[0].note({What::gather, 1});
  logs[1].note({What::forward});
  post();
  EXPECT_NE(error_of(logs[1]), "none");
  EXPECT_EQ(meeting.said(1), "the end of a forward of 'model'\n");
}

TEST_F(StepLogTest, AFailedStepIsForgotten) {
  logs[0].note({What::gather, 0});
  for (auto& log : logs) log.forget();
  note({What::forward});
  post();
  for (auto& log : logs) EXPECT_EQ(error_of(log), "none");
}

TEST(StepLogAloneTest, CallsAreCountedByUnitAndKindComparedOrNot) {
  StepLog log("model", [](std::int32_t) { return std::string("layer"); });
  log.note({What::gather, 2});
  log.note({What::gather, 2});
  log.note({What::reduce, 2, 1});
  log.note({What::forward});
  log.forget();
  const auto count = [&](std::int32_t unit, What what) {
    return log.counts(unit)[static_cast<std::size_t>(what)];
  };
  EXPECT_EQ(count(2, What::gather), 2);
  EXPECT_EQ(count(2, What::reduce), 1);
  EXPECT_EQ(count(-1, What::forward), 1);
  EXPECT_EQ(log.counts(1), StepLog::Counts{});
  EXPECT_EQ(log.counts(9), StepLog::Counts{});
  EXPECT_STREQ(StepNote::kKinds[static_cast<std::size_t>(What::settings)],
               "settings");
}

TEST(StepLogAloneTest, WithoutRanksNothingIsKept) {
  StepLog log("model", [](std::int32_t) { return std::string(); });
  EXPECT_FALSE(log.compares());
  log.note({What::forward});
  log.post([](std::size_t, std::int32_t) -> StepLog::Numbers {
    ADD_FAILURE() << "nobody to ask";
    return {};
  });
  log.require([](std::size_t, std::int32_t, const auto&) { ADD_FAILURE(); });
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
