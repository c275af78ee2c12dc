// Several linear layers behind one gather: bits, collectives, bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "harness.h"

namespace lowtide::gather {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

struct Layers {
  Paper& paper;
  std::vector<at::Tensor> weights = {Paper::weight(5, 1), Paper::weight(2, 2),
                                     Paper::weight(3, 3)};
  at::Tensor bias = at::tensor({.5f, -1.f}).requires_grad_();

  at::Tensor run(const at::Tensor& shard, const LinearOptions& options) {
    const auto outputs =
        gather_linear(paper.axis, shard, weights, {{}, bias, {}}, options);
    return loss(outputs);
  }
  static at::Tensor loss(const std::vector<at::Tensor>& outputs) {
    at::Tensor sum;
    for (const auto& output : outputs) {
      const at::Tensor one = output.pow(2).sum();
      sum = sum.defined() ? sum + one : one;
    }
    return sum;
  }
  std::vector<at::Tensor> gradients() {
    std::vector<at::Tensor> all;
    for (auto* tensor : {&weights[0], &weights[1], &weights[2], &bias}) {
      all.push_back(tensor->grad().clone());
      tensor->mutable_grad().reset();
    }
    return all;
  }
};

void expect_same(const std::vector<at::Tensor>& got,
                 const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(got[i].equal(expected[i])) << i;
  }
}

class LinearTest : public testing::TestWithParam<bool> {};

TEST_P(LinearTest, GradientsHaveTheBitsOfSeparateLayers) {
  Paper paper;
  Layers layers{paper};
  const at::Tensor shard = paper.shard(0);
  const at::Tensor loss = layers.run(shard, {{"attn_in", GetParam()}, false});
  loss.backward();
  const auto ours = layers.gradients();

  const at::Tensor whole = Paper::whole(shard.detach()).requires_grad_();
  const at::Tensor expected =
      Layers::loss({at::linear(whole, layers.weights[0]),
                    at::linear(whole, layers.weights[1], layers.bias),
                    at::linear(whole, layers.weights[2])});
  expected.backward();
  EXPECT_TRUE(loss.equal(expected));
  expect_same(ours, layers.gradients());
  // Both ranks' parts are the same here.
  EXPECT_TRUE(shard.grad().equal(whole.grad().narrow(0, 0, kRows) * 2));
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(, LinearTest, testing::Bool(), [](const auto& info) {
  return info.param ? "Regathered" : "Kept";
});

TEST(LinearNodeTest, OneGatherForwardOneBackwardOneReduceScatter) {
  Paper paper;
  Layers layers{paper};
  layers.run(paper.shard(0), {{"attn_in", true}, false}).backward();
  EXPECT_THAT(paper.calls(),
              ElementsAre("all-gather attn_in", "all-gather attn_in",
                          "reduce-scatter attn_in"));
  EXPECT_EQ(paper.figures("attn_in").regathers, 1);
  EXPECT_EQ(paper.ledger->total_peak(), kGatheredBytes);
  EXPECT_EQ(paper.held(), 0);
}

TEST(LinearNodeTest, AKeptValueIsNotGatheredAgain) {
  Paper paper;
  Layers layers{paper};
  layers.run(paper.shard(0), {{"attn_in", false}, false}).backward();
  EXPECT_THAT(paper.calls(),
              ElementsAre("all-gather attn_in", "reduce-scatter attn_in"));
  EXPECT_EQ(paper.ledger->total_peak(), 0);
}

// Its node and its site know each other.
TEST(LinearNodeTest, AGraphThatNoBackwardRunsFreesItsShard) {
  Paper paper;
  Layers layers{paper};
  at::Tensor shard = paper.shard(0);
  const c10::weak_intrusive_ptr<c10::TensorImpl> seen(shard.getIntrusivePtr());
  at::Tensor loss = layers.run(shard, {{"attn_in", true}, false});
  shard.reset();
  EXPECT_FALSE(seen.expired());
  loss.reset();
  EXPECT_TRUE(seen.expired());
}

TEST(LinearNodeTest, NoGatherWhereNoWeightWantsAGradient) {
  Paper paper;
  Layers layers{paper};
  const at::Tensor shard = paper.shard(0);
  const at::Tensor loss = layers.run(shard, {{"attn_in", true}, false});
  const auto gradient =
      torch::autograd::grad({loss}, {shard}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(gradient[0].defined());
  EXPECT_THAT(paper.calls(),
              ElementsAre("all-gather attn_in", "reduce-scatter attn_in"));
  for (auto& weight : layers.weights) weight.set_requires_grad(false);
  paper.axis->reset_figures();
  layers.run(paper.shard(0), {{"attn_in", true}, false}).backward();
  EXPECT_EQ(paper.figures("attn_in").regathers, 0);
}

TEST(LinearNodeTest, ARetainedGraphGathersOnceMore) {
  Paper paper;
  Layers layers{paper};
  const at::Tensor loss =
      layers.run(paper.shard(0), {{"attn_in", true}, false});
  loss.backward({}, /*retain_graph=*/true);
  const auto first = layers.gradients();
  loss.backward();
  expect_same(layers.gradients(), first);
  EXPECT_EQ(paper.figures("attn_in").regathers, 2);
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(LinearNodeTest, AddmmSkipsOneRounding) {
  Paper paper;
  Layers layers{paper};
  const at::Tensor exact = paper.shard(0);
  const at::Tensor inside = paper.shard(0);
  layers.run(exact, {{"attn_in", true}, false}).backward();
  layers.run(inside, {{"attn_in", true}, true}).backward();
  EXPECT_TRUE(inside.grad().allclose(exact.grad(), 1e-5));
}

TEST(LinearNodeTest, ThreeDimensionsAreTokensTimesBatch) {
  Paper paper;
  Layers layers{paper};
  const at::Tensor shard =
      paper.shard(0).detach().view({kRows, 1, kFeatures}).requires_grad_();
  const auto outputs =
      gather_linear(paper.axis, shard, layers.weights, {{}, layers.bias, {}},
                    {{"a", true}, false});
  EXPECT_EQ(outputs[0].sizes(), at::IntArrayRef({kSize * kRows, 1, 5}));
  Layers::loss(outputs).backward();
  EXPECT_EQ(shard.grad().sizes(), shard.sizes());
}

TEST(ReduceScatterTest, BackwardGathers) {
  Paper paper;
  const at::Tensor partial = at::arange(8, at::kFloat).view({4, 2});
  partial.requires_grad_();
  const at::Tensor out = reduce_scatter(paper.axis, partial);
  EXPECT_TRUE(out.equal(partial.detach().narrow(0, 0, 2) * 2));
  out.backward(at::full({2, 2}, 3.f));
  EXPECT_TRUE(partial.grad().equal(
      at::cat({at::full({2, 2}, 3.f), at::full({2, 2}, 4.f)})));
  EXPECT_THAT(paper.calls(), ElementsAre("reduce-scatter sp_reduce_scatter",
                                         "all-gather sp_reduce_scatter"));
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::gather
