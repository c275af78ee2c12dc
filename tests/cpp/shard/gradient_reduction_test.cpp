#include "shard/gradients/gradient_reduction.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <utility>

#include "testing/recording_collectives.h"

namespace lowtide::shard {
namespace LOWTIDE_FILE {

using comm::Kind;
using comm::RecordingCollectives;
using comm::Reduction;

// Four shards and three replicas; every rank holds what this one holds.
class GradientReductionTest : public testing::Test {
 protected:
  at::Tensor finish(const GradientReduction& reduction, double value) {
    at::Tensor row = at::full({2}, value);
    if (const auto sum = reduction.over_replicas(row, "layers.0")) sum->wait();
    reduction.finish(row, shards_);
    return row;
  }

  std::shared_ptr<device::ScriptedRuntime> runtime_ =
      std::make_shared<device::ScriptedRuntime>();
  RecordingCollectives shards_{0, 4, runtime_};
  std::shared_ptr<RecordingCollectives> replicas_ =
      std::make_shared<RecordingCollectives>(0, 3, runtime_);
};

TEST_F(GradientReductionTest, IsTheAverageByDefault) {
  const GradientReduction reduction;
  EXPECT_FALSE(reduction.of_whole_units());
  EXPECT_EQ(reduction.over_shards(shards_, at::kFloat), Reduction::average);
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 6.0)));
  EXPECT_TRUE(shards_.calls().empty());
}

TEST_F(GradientReductionTest, DividesASumByTheFactorOrTheRanks) {
  GradientReduction reduction;
  reduction.divide_factor = 3.0;
  EXPECT_EQ(reduction.over_shards(shards_, at::kFloat), Reduction::sum);
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 2.0)));
  reduction = GradientReduction();
  reduction.sum_only = true;
  EXPECT_EQ(reduction.over_shards(shards_, at::kFloat), Reduction::sum);
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 1.5)));
}

TEST_F(GradientReductionTest, AFactorOfTheShardsIsTheirAverage) {
  GradientReduction reduction;
  reduction.replicas = replicas_;
  reduction.divide_factor = 4.0;
  EXPECT_EQ(reduction.over_shards(shards_, at::kFloat), Reduction::average);
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 18.0)));
}

TEST_F(GradientReductionTest, AveragesReplicasOrSumsThemBeforeTheDivision) {
  GradientReduction reduction;
  reduction.replicas = replicas_;
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 6.0)));
  ASSERT_EQ(replicas_->calls().size(), 1);
  EXPECT_EQ(replicas_->calls()[0].kind, Kind::all_reduce);
  EXPECT_EQ(replicas_->calls()[0].reduction, Reduction::average);
  EXPECT_EQ(replicas_->counters()[static_cast<std::size_t>(Kind::all_reduce)]
                .wire_bytes,
            2 * 2 * 8 / 3);
  reduction.sum_only = true;
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 6.0 * 3 / 12)));
  EXPECT_EQ(replicas_->calls()[1].reduction, Reduction::sum);
}

TEST_F(GradientReductionTest, DividesHalfBeforeAndBehindTheSum) {
  GradientReduction reduction;
  EXPECT_EQ(reduction.over_shards(shards_, at::kHalf), Reduction::sum);
  const auto halves = [&](double factor) {
    reduction.divide_factor = factor;
    at::Tensor input = at::full({1}, 6144.0, at::kHalf);
    at::Tensor row = input.clone();
    reduction.prepare(input, shards_);
    if (const auto sum = reduction.over_replicas(row, "layers.0")) sum->wait();
    reduction.finish(row, shards_);
    return std::make_pair(6144.0 / input.item<double>(),
                          6144.0 / row.item<double>());
  };
  using Pair = std::pair<double, double>;
  EXPECT_EQ(halves(1), Pair(1, 1));
  EXPECT_EQ(halves(2), Pair(2, 1));
  EXPECT_EQ(halves(3), Pair(2, 1.5));
  EXPECT_EQ(halves(4), Pair(2, 2));
  EXPECT_EQ(halves(6), Pair(4, 1.5));
  EXPECT_EQ(halves(64), Pair(8, 8));
  reduction.divide_factor.reset();
  reduction.replicas = replicas_;
  at::Tensor row = at::full({1}, 6.0, at::kHalf);
  reduction.prepare(row, shards_);
  EXPECT_EQ(row.item<double>(), 1.5);  // of 12 ranks, 4 before the sums
  if (const auto sum = reduction.over_replicas(row, "layers.0")) sum->wait();
  reduction.finish(row, shards_);
  EXPECT_EQ(replicas_->calls()[0].reduction, Reduction::sum);
}

TEST_F(GradientReductionTest, TheHookRunsBeforeTheDivision) {
  GradientReduction reduction;
  reduction.divide_factor = 2.0;
  reduction.hook = [](const at::Tensor& row) { row.add_(4); };
  EXPECT_TRUE(finish(reduction, 6).equal(at::full({2}, 5.0)));
}

TEST_F(GradientReductionTest, KeepsPartialResultsOnlyBesideReplicas) {
  GradientReduction reduction;
  reduction.all_reduce = false;
  EXPECT_FALSE(reduction.keeps_partial());
  reduction.replicas = replicas_;
  EXPECT_TRUE(reduction.of_whole_units());
  EXPECT_TRUE(reduction.keeps_partial());
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::shard
