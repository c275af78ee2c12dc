// Which of a stream's collectives are kept, and which is the first unfinished.
#include "comm/issued_calls.h"

#include <gtest/gtest.h>

#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using namespace std::chrono_literals;

// A stream's points, in order, of which the device has passed some.
class IssuedCallsTest : public testing::Test {
 protected:
  static constexpr std::size_t kSlots = 4;

  IssuedCalls::Point issue(const std::string& label) {
    return calls_.add(Kind::reduce_scatter, label, 1 << 20, now_ += 1s,
                      [&](c10::Event& point) {
                        order_.erase(&point);
                        order_[&point] = ++recorded_;
                      });
  }
  void passes(std::uint64_t points) { passed_ = points; }
  std::optional<IssuedCalls::Unfinished> first() {
    return calls_.first_unfinished([&](const c10::Event& point) {
      ++asked_;
      return order_.at(&point) <= passed_;
    });
  }

  IssuedCalls calls_{c10::DeviceType::CPU, kSlots};
  IssuedCalls::Time now_{};
  std::map<const c10::Event*, std::uint64_t> order_;
  std::uint64_t recorded_ = 0;
  std::uint64_t passed_ = 0;
  int asked_ = 0;
};

TEST_F(IssuedCallsTest, TheFirstThatIsNotFinished) {
  EXPECT_FALSE(first());
  EXPECT_FALSE(calls_.oldest());
  issue("a");
  issue("b");
  issue("c");
  passes(1);
  EXPECT_EQ(*calls_.oldest(), IssuedCalls::Time{} + 1s);
  const auto found = first();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->label, "b");
  EXPECT_EQ(found->kind, Kind::reduce_scatter);
  EXPECT_EQ(found->bytes, 1 << 20);
  EXPECT_EQ(found->issued, IssuedCalls::Time{} + 2s);
  EXPECT_EQ(found->number, 1U);
  EXPECT_EQ(found->behind, 1U);
  EXPECT_FALSE(found->maybe_earlier);
  EXPECT_EQ(*calls_.oldest(), found->issued);
  passes(3);
  EXPECT_FALSE(first());
  EXPECT_FALSE(calls_.oldest());
}

TEST_F(IssuedCallsTest, FinishedCallsAreAskedForOnce) {
  issue("a");
  issue("b");
  passes(1);
  first();
  EXPECT_EQ(asked_, 2);
  first();
  EXPECT_EQ(asked_, 3);
}

TEST_F(IssuedCallsTest, OfMoreThanAreKeptAnEarlierOneMayBeTheFirst) {
  for (const char* label : {"a", "b", "c", "d", "e", "f"}) issue(label);
  auto found = first();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->label, "c");
  EXPECT_TRUE(found->maybe_earlier);
  passes(3);  // so what was dropped is finished, too
  found = first();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->label, "d");
  EXPECT_EQ(found->behind, 2U);
  EXPECT_FALSE(found->maybe_earlier);
}

TEST_F(IssuedCallsTest, PointsAreUsedAgainButThoseThatSomebodyWaitsFor) {
  std::set<const c10::Event*> made;
  for (int i = 0; i < 12; ++i) made.insert(issue("x").get());
  EXPECT_EQ(made.size(), kSlots);
  const auto waited_for = issue("kept");
  for (std::size_t i = 0; i < 2 * kSlots; ++i) {
    EXPECT_NE(issue("x"), waited_for);
  }
}

TEST_F(IssuedCallsTest, ACallWhosePointCanNotBeRecordedIsNotKept) {
  issue("a");
  EXPECT_THROW(calls_.add(Kind::all_gather, "bad", 1, now_,
                          [](c10::Event&) { throw std::runtime_error("no"); }),
               std::runtime_error);
  issue("b");
  passes(1);
  EXPECT_EQ(first()->label, "b");
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
