#include "shard/graph/weight_owners.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace lowtide::shard {
namespace LOWTIDE_FILE {

class Receiver final : public BackwardReceiver {
 public:
  void on_output_gradient(std::int64_t /*call*/) override {}
  void on_parameter_gradient(std::int32_t, at::Tensor) override {}
  void on_inputs_done(const torch::autograd::Node*) override {}
};

class WeightOwnersTest : public testing::Test {
 protected:
  std::shared_ptr<Receiver> receiver_ = std::make_shared<Receiver>();
  at::Tensor weight_ = at::zeros({4, 3}).requires_grad_();
  NodePtr node_ = install_gradient_node(weight_, receiver_, 7);
};

TEST_F(WeightOwnersTest, ATensorOnTheSameStorageHasTheOwner) {
  EXPECT_FALSE(owner_of(weight_).has_value());
  const ListedWeight listed(weight_, receiver_, 7, node_);
  for (const auto& tensor : {weight_, weight_.detach(), weight_.t()}) {
    const auto owner = owner_of(tensor);
    ASSERT_TRUE(owner.has_value());
    EXPECT_EQ(owner->receiver, receiver_);
    EXPECT_EQ(owner->index, 7);
    EXPECT_EQ(owner->node, node_);
  }
  EXPECT_FALSE(owner_of(weight_.clone()).has_value());
}

TEST_F(WeightOwnersTest, AnEntryEndsWithItsListing) {
  { const ListedWeight listed(weight_, receiver_, 7, node_); }
  EXPECT_FALSE(owner_of(weight_).has_value());
}

TEST_F(WeightOwnersTest, ListingsMove) {
  std::vector<ListedWeight> listed;
  listed.emplace_back(weight_, receiver_, 7, node_);
  auto moved = std::move(listed);
  EXPECT_TRUE(owner_of(weight_).has_value());
  moved[0] = ListedWeight();
  EXPECT_FALSE(owner_of(weight_).has_value());
}

TEST_F(WeightOwnersTest, NobodyOwnsTheWeightOfAModelThatIsGone) {
  const ListedWeight listed(weight_, receiver_, 7, node_);
  receiver_.reset();
  EXPECT_FALSE(owner_of(weight_).has_value());
}

// Its address is not used again as long as it is listed.
TEST_F(WeightOwnersTest, AnotherStorageNeverTakesItsPlace) {
  const ListedWeight listed(weight_, receiver_, 7, node_);
  node_.reset();
  weight_.reset();
  std::vector<at::Tensor> others;
  for (int i = 0; i < 1000; ++i) {
    others.push_back(at::zeros({4, 3}));
    EXPECT_FALSE(owner_of(others.back()).has_value());
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
