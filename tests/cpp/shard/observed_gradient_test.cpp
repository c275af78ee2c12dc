#include "shard/graph/observed_gradient.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

bool yes() { return true; }
bool no() { return false; }

at::Tensor leaf() { return at::ones({2}).set_requires_grad(true); }

TEST(ObservedGradientTest, ALeafKeepsWhatItHad) {
  auto p = leaf();
  p.mutable_grad() = at::full({2}, 3.f);
  int hooks = 0;
  p.register_hook([&](const at::Tensor& gradient) {
    ++hooks;
    return gradient;
  });
  const ObservedGradient observed({p}, nullptr);
  EXPECT_TRUE(p.requires_grad());
  (p * 2).sum().backward();
  EXPECT_TRUE(p.grad().equal(at::full({2}, 5.f)));
  EXPECT_EQ(hooks, 1);
}

TEST(ObservedGradientTest, SeesThatNoneIsSetToNone) {
  auto p = leaf();
  ObservedGradient observed({p}, &no);
  p.mutable_grad().reset();
  EXPECT_FALSE(observed.cleared());  // not asked to look
  observed.observe(true);
  EXPECT_FALSE(observed.cleared());
  EXPECT_FALSE(p.grad().defined());
  EXPECT_FALSE(observed.cleared());
  p.mutable_grad().reset();
  EXPECT_TRUE(observed.cleared());
  observed.observe(true);
  EXPECT_FALSE(observed.cleared());
  p.mutable_grad() = at::ones({2});
  EXPECT_FALSE(observed.cleared());
}

TEST(ObservedGradientTest, SeesAReadByWhatClears) {
  auto p = leaf();
  ObservedGradient observed({leaf(), p}, &yes);
  observed.observe(true);
  EXPECT_FALSE(observed.cleared());
  EXPECT_FALSE(p.grad().defined());
  EXPECT_TRUE(observed.cleared());
  observed.observe(false);
  EXPECT_FALSE(p.grad().defined());
  EXPECT_FALSE(observed.cleared());
}

TEST(ObservedGradientTest, ABackwardClearsNothing) {
  auto p = leaf();
  ObservedGradient observed({p}, &yes);
  observed.observe(true);
  (p * 2).sum().backward();
  EXPECT_FALSE(observed.cleared());
}

TEST(ObservedGradientTest, TellsWhoMissesWhatWasTaken) {
  auto p = leaf();
  const ObservedGradient observed({p}, nullptr,
                                  [] { throw std::runtime_error("taken"); });
  EXPECT_FALSE(p.grad().defined());
  observed.set_taken(true);
  EXPECT_THROW(static_cast<void>(p.grad()), std::runtime_error);
  (p * 2).sum().backward();  // which looks for one to add to
  EXPECT_TRUE(p.grad().defined());
  p.mutable_grad().reset();
  observed.set_taken(false);
  EXPECT_FALSE(p.grad().defined());
}

TEST(ObservedGradientTest, OutlivesNothing) {
  auto p = leaf();
  { ObservedGradient(std::vector<at::Tensor>{p}, &yes).observe(true); }
  EXPECT_FALSE(p.grad().defined());
  const ObservedGradient again({p}, &yes);
  EXPECT_FALSE(again.cleared());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
