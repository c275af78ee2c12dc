#include "shard/prefetch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

// Covered by 100 elements a token's backward; whoever knows no token knows
// nothing that covers it.
class Other final : public UnitAhead {
 public:
  Other(std::int32_t number, std::vector<std::int32_t>& gathered)
      : number_(number), gathered_(gathered) {}

  std::int32_t number() const override { return number_; }
  void gather_ahead() override { gathered_.push_back(number_); }
  bool is_gathered_in_backward() const override { return in_backward; }
  std::int64_t elements_to_cover(std::int64_t tokens) const override {
    return tokens > 0 ? 100 / tokens : 1'000'000;
  }

  bool in_backward = true;

 private:
  std::int32_t number_;
  std::vector<std::int32_t>& gathered_;
};

class PrefetchTest : public testing::Test {
 protected:
  bool waits(std::int64_t tokens) {
    return prefetch_.waits({}, {60, 60, 60}, tokens);
  }

  std::vector<std::int32_t> gathered_;
  Prefetch prefetch_;
  std::shared_ptr<Other> first_ = std::make_shared<Other>(1, gathered_);
  std::shared_ptr<Other> second_ = std::make_shared<Other>(2, gathered_);
};

TEST_F(PrefetchTest, GathersWhatIsListedAndElseWhatIsNext) {
  Prefetch::gather({}, {});
  EXPECT_THAT(gathered_, IsEmpty());
  Prefetch::gather({}, {first_.get()});
  EXPECT_THAT(gathered_, ElementsAre(1));
  Prefetch::gather({second_, first_}, {first_.get()});
  EXPECT_THAT(gathered_, ElementsAre(1, 2, 1));
}

TEST_F(PrefetchTest, AUnitThatDiedIsNotGatheredAndNothingIsInItsPlace) {
  const Prefetch::Listed listed = {second_};
  second_.reset();
  Prefetch::gather(listed, {first_.get()});
  EXPECT_THAT(gathered_, IsEmpty());
}

TEST_F(PrefetchTest, WhatIsPutOffIsGatheredWhenItIsAskedFor) {
  prefetch_.gather_put_off({});
  prefetch_.put_off({first_.get()});
  EXPECT_THAT(gathered_, IsEmpty());
  prefetch_.gather_put_off({});
  EXPECT_THAT(gathered_, ElementsAre(1));
  prefetch_.gather_put_off({second_});  // again, by another loss
  EXPECT_THAT(gathered_, ElementsAre(1, 2));
  prefetch_.forget_forward();
  prefetch_.gather_put_off({second_});  // the forward is over
  EXPECT_THAT(gathered_, ElementsAre(1, 2));
}

TEST_F(PrefetchTest, BackwardGathersAtOnceWhatNothingCovers) {
  prefetch_.expect({first_.get()});
  EXPECT_FALSE(waits(/*tokens=*/0));
  EXPECT_THAT(gathered_, ElementsAre(1));
  EXPECT_FALSE(prefetch_.on_gradient());
}

// Ten elements cover it: behind the second gradient they are still to come.
TEST_F(PrefetchTest, BackwardGathersBehindAsManyGradientsAsCoverIt) {
  prefetch_.expect({first_.get()});
  ASSERT_TRUE(waits(/*tokens=*/10));
  EXPECT_THAT(gathered_, IsEmpty());
  EXPECT_EQ(prefetch_.gradients_before(), 2);
  EXPECT_FALSE(prefetch_.on_gradient());
  EXPECT_TRUE(prefetch_.on_gradient());
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, ElementsAre(1));
  EXPECT_FALSE(prefetch_.on_gradient());  // it has left
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, ElementsAre(1));
}

TEST_F(PrefetchTest, WhatRunsInsideTheNextIsGatheredAndCoveredWithIt) {
  prefetch_.expect({first_.get(), second_.get()});
  EXPECT_FALSE(waits(/*tokens=*/1));  // each wants 100 of 180 elements
  EXPECT_THAT(gathered_, ElementsAre(1, 2));
  prefetch_.expect({first_.get(), second_.get()});
  ASSERT_TRUE(waits(/*tokens=*/2));
  EXPECT_EQ(prefetch_.gradients_before(), 1);
  first_->in_backward = false;
  prefetch_.expect({first_.get(), second_.get()});
  ASSERT_TRUE(waits(/*tokens=*/2));
  EXPECT_EQ(prefetch_.gradients_before(), 2);
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, ElementsAre(1, 2, 2));
  first_->in_backward = true;
  prefetch_.expect({first_.get(), second_.get()});
  EXPECT_FALSE(waits(/*tokens=*/0));
  EXPECT_THAT(gathered_, ElementsAre(1, 2, 2, 1, 2));
}

TEST_F(PrefetchTest, GradientsOfAnEarlierCallDoNotCount) {
  prefetch_.expect({first_.get()});
  ASSERT_TRUE(waits(/*tokens=*/10));
  prefetch_.on_gradient();
  prefetch_.expect({second_.get()});
  ASSERT_TRUE(waits(/*tokens=*/10));
  EXPECT_FALSE(prefetch_.on_gradient());
  EXPECT_TRUE(prefetch_.on_gradient());
  prefetch_.forget_backward();
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, IsEmpty());
}

TEST_F(PrefetchTest, WhatBackwardDoesNotReadIsNotGathered) {
  first_->in_backward = false;
  prefetch_.expect({first_.get()});
  EXPECT_FALSE(waits(/*tokens=*/10));
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, IsEmpty());
}

TEST_F(PrefetchTest, WhatIsListedForBackwardTakesThePlaceOfTheExpected) {
  prefetch_.expect({first_.get()});
  EXPECT_FALSE(prefetch_.waits({second_}, {60, 60, 60}, /*tokens=*/10));
  EXPECT_THAT(gathered_, ElementsAre(2));
  prefetch_.gather_expected();
  EXPECT_THAT(gathered_, ElementsAre(2));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
