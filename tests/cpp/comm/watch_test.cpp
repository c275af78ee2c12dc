// When something is said of collectives that do not finish, and what.
#include "comm/watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

class ComplaintsTest : public testing::Test {
 protected:
  static Sight sight(int communicator, const std::string& label,
                     std::chrono::seconds issued, std::uint64_t number = 0) {
    static const char identities[8] = {};
    Sight result{identities + communicator, 3, 8, 600s, "", std::nullopt};
    IssuedCalls::Unfinished call;
    call.kind = Kind::reduce_scatter;
    call.label = label;
    call.bytes = 14'900'000;
    call.issued = IssuedCalls::Time{} + issued;
    call.number = number;
    call.behind = 2;
    result.call = call;
    return result;
  }
  std::vector<std::string> at(std::chrono::seconds now,
                              std::vector<Sight> sights) {
    return complaints_.about(std::move(sights), IssuedCalls::Time{} + now);
  }

  std::string failure_;
  int asked_ = 0;
  Complaints complaints_{[this] {
    ++asked_;
    return failure_;
  }};
};

TEST(PatienceTest, OfTimeouts) {
  EXPECT_EQ(patience(600s), 10s);
  EXPECT_EQ(patience(4s), 1s);
  EXPECT_EQ(almost(600s), 540s);
  EXPECT_EQ(almost(1800s), 1740s);
  EXPECT_EQ(almost(10s), 8s);
  EXPECT_EQ(almost(2s), 1s);
}

TEST_F(ComplaintsTest, OneThatNearsItsTimeoutIsNamedOnce) {
  const auto one = sight(0, "unit 'layers.7'", 100s);
  EXPECT_THAT(at(639s, {one}), IsEmpty());
  EXPECT_THAT(
      at(640s, {one}),
      ElementsAre(
          "lowtide: unit 'layers.7': expected the reduce-scatter of 14.9 MB to "
          "finish on all ranks, got it unfinished 540 s after it was issued "
          "(rank 3 of 8); 2 more were issued behind it; its group's timeout is "
          "600 s. Look at the log of the rank that failed first, or where a "
          "rank is that has not come to it (py-spy dump)."));
  EXPECT_THAT(at(641s, {one}), IsEmpty());
  EXPECT_THAT(at(700s, {sight(0, "unit 'next'", 101s, 1)}), SizeIs(1));
}

TEST_F(ComplaintsTest, OfSeveralGroupsAllAreNamedInTheirOrder) {
  EXPECT_THAT(at(640s, {sight(0, "second", 120s), sight(1, "first", 100s)}),
              ElementsAre(HasSubstr("first"), HasSubstr("second")));
}

TEST_F(ComplaintsTest, AnErrorOfTheGroupIsNotWaitedFor) {
  auto one = sight(0, "unit 'layers.7'", 100s);
  one.error = "a timeout";
  EXPECT_THAT(
      at(101s, {one, sight(1, "other", 99s)}),
      ElementsAre(HasSubstr("lowtide: other: "),
                  AllOf(HasSubstr("'layers.7'"),
                        HasSubstr("its group has failed (a timeout)"))));
  EXPECT_THAT(at(102s, {one}), IsEmpty());
}

TEST_F(ComplaintsTest, OfAGroupWithAnErrorWhoseCallsHaveFinished) {
  auto one = sight(0, "", 0s);
  one.error = "a timeout";
  one.call.reset();
  EXPECT_THAT(at(1s, {one}),
              ElementsAre(HasSubstr("got a timeout (rank 3 of 8); all that "
                                    "lowtide issued on it has finished. ")));
  EXPECT_THAT(at(2s, {one}), IsEmpty());
}

TEST_F(ComplaintsTest, TheRankThatRaisedIsHeardOfEarly) {
  const auto one = sight(0, "unit 'layers.7'", 100s);
  EXPECT_THAT(at(110s, {one}), IsEmpty());
  failure_ = "rank 1 raised first: 'ValueError'";
  EXPECT_THAT(at(111s, {one}), IsEmpty());  // asked every few seconds
  EXPECT_EQ(asked_, 1);
  EXPECT_THAT(at(115s, {one}),
              ElementsAre(HasSubstr(
                  "600 s; rank 1 raised first: 'ValueError'. Look at")));
  EXPECT_THAT(at(120s, {one}), IsEmpty());
  EXPECT_EQ(asked_, 2);
}

TEST_F(ComplaintsTest, NobodyIsAskedWhileNothingIsDue) {
  EXPECT_THAT(at(1000s, {}), IsEmpty());
  EXPECT_EQ(asked_, 0);
}

TEST_F(ComplaintsTest, ANameThatComesLaterIsSaidWithTheCall) {
  const auto one = sight(0, "unit 'layers.7'", 100s);
  EXPECT_THAT(at(640s, {one}), ElementsAre(Not(HasSubstr("raised first"))));
  failure_ = "rank 1 raised first: 'ValueError'";
  EXPECT_THAT(at(645s, {one}), ElementsAre(HasSubstr("rank 1 raised first")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
