#include "comm/collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "comm/tensor_lists.h"

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using testing::StrEq;

// Counts without communicating.
class CountingCollectives final : public Collectives {
 public:
  explicit CountingCollectives(std::int64_t size) : size_(size) {}
  using Collectives::count;

  std::int64_t rank() const override { return 0; }
  std::int64_t size() const override { return size_; }
  std::string backend() const override { return "none"; }
  std::unique_ptr<Pending> all_gather(std::vector<at::Tensor>&,
                                      std::vector<at::Tensor>&,
                                      const std::string&) override {
    return nullptr;
  }
  std::unique_ptr<Pending> reduce_scatter(at::Tensor&, at::Tensor&, Reduction,
                                          const std::string&) override {
    return nullptr;
  }
  std::unique_ptr<Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, Reduction,
      const std::string&) override {
    return nullptr;
  }

  std::unique_ptr<Pending> all_to_all(at::Tensor&, at::Tensor&,
                                      const std::string&) override {
    return nullptr;
  }
  std::unique_ptr<Pending> all_reduce(at::Tensor&, Reduction,
                                      const std::string&) override {
    return nullptr;
  }

  std::vector<std::int64_t> from_rank_zero(std::vector<std::int64_t> values,
                                           const std::string&) override {
    return values;
  }

 private:
  std::int64_t size_;
};

const Count& of(const Counters& counters, Kind kind) {
  return counters[static_cast<std::size_t>(kind)];
}

TEST(CollectivesTest, CountsBytesOfABandwidthOptimalAlgorithm) {
  CountingCollectives collectives(4);
  collectives.count(Kind::all_gather, 1024);
  collectives.count(Kind::all_gather, 64);
  collectives.count(Kind::reduce_scatter, 4096);
  collectives.count(Kind::all_reduce, 10);
  EXPECT_EQ(of(collectives.counters(), Kind::all_gather).calls, 2);
  EXPECT_EQ(of(collectives.counters(), Kind::all_gather).wire_bytes, 768 + 48);
  EXPECT_EQ(of(collectives.counters(), Kind::reduce_scatter).calls, 1);
  EXPECT_EQ(of(collectives.counters(), Kind::reduce_scatter).wire_bytes, 3072);
  EXPECT_EQ(of(collectives.counters(), Kind::all_reduce).wire_bytes, 15);
  collectives.reset_counters();
  EXPECT_EQ(of(collectives.counters(), Kind::all_gather).calls, 0);
  EXPECT_EQ(of(collectives.counters(), Kind::all_gather).wire_bytes, 0);
}

TEST(CollectivesTest, OneRankPutsNothingOnTheWire) {
  CountingCollectives collectives(1);
  collectives.count(Kind::all_reduce, 1024);
  EXPECT_EQ(of(collectives.counters(), Kind::all_reduce).calls, 1);
  EXPECT_EQ(of(collectives.counters(), Kind::all_reduce).wire_bytes, 0);
}

TEST(CollectivesTest, AFailureNamesUnitCollectiveCauseAndNextStep) {
  const std::runtime_error cause("Connection closed by peer\nat pair.cc:547");
  EXPECT_THAT(
      collective_failed(Kind::reduce_scatter, "layers.3", cause, 1, 4).what(),
      StrEq("lowtide: layers.3: expected the reduce-scatter to finish on all "
            "ranks, got 'Connection closed by peer at pair.cc:547' (rank 1 of "
            "4). Look at the log of the rank that failed first; then call "
            "lowtide.abort_step() or restart from the last checkpoint."));
}

TEST(CollectivesTest, AFailureOfTorchsIsShownWithoutItsBacktrace) {
  const c10::Error cause({__func__, __FILE__, __LINE__}, "no route to host");
  EXPECT_THAT(collective_failed(Kind::all_gather, "", cause, 0, 2).what(),
              testing::HasSubstr("got 'no route to host' (rank 0 of 2)"));
}

TEST(CollectivesTest, KindsHaveNames) {
  EXPECT_EQ(kind_name(Kind::all_gather), "all-gather");
  EXPECT_EQ(kind_name(Kind::reduce_scatter), "reduce-scatter");
  EXPECT_EQ(kind_name(Kind::all_reduce), "all-reduce");
  EXPECT_EQ(kind_name(Kind::broadcast), "broadcast");
}

TEST(TensorListsTest, LeavesOutTensorsWithoutElements) {
  const at::Tensor full = at::zeros({8}, at::kByte);
  const at::Tensor piece = at::zeros({4}, at::kByte);
  const at::Tensor none = at::zeros({0}, at::kByte);
  const TensorLists lists = checked_lists(Kind::all_gather, {none, full, none},
                                          {none, piece, none}, 2);
  ASSERT_EQ(lists.outs.size(), 1u);
  EXPECT_TRUE(lists.outs[0].is_same(full));
  EXPECT_TRUE(lists.ins[0].is_same(piece));
  EXPECT_EQ(lists.full_bytes(Kind::all_gather), 8);
  EXPECT_TRUE(checked_lists(Kind::all_gather, {}, {}, 2).empty());
  EXPECT_TRUE(checked_lists(Kind::all_gather, {none}, {none}, 2).empty());
}

TEST(TensorListsTest, RefusesWhatABackendWouldCorrupt) {
  const at::Tensor full = at::zeros({8});
  const at::Tensor piece = at::zeros({4});
  const auto scatter = Kind::reduce_scatter;
  EXPECT_EQ(checked_lists(scatter, {piece}, {full}, 2).full_bytes(scatter), 32);
  // Mixed dtypes, another world size, a stride, lists of unequal length.
  const at::Tensor other = piece.to(at::kBFloat16);
  EXPECT_THROW(checked_lists(scatter, {other}, {full}, 2), Error);
  EXPECT_THROW(
      checked_lists(scatter, {piece, other}, {full, full.to(at::kBFloat16)}, 2),
      Error);
  EXPECT_THROW(checked_lists(scatter, {piece}, {full}, 4), Error);
  EXPECT_THROW(checked_lists(scatter, {full.slice(0, 0, 8, 2)}, {full}, 2),
               Error);
  EXPECT_THROW(checked_lists(scatter, {piece, piece}, {full}, 2), Error);
  // A gather moves bytes.
  EXPECT_THROW(checked_lists(Kind::all_gather, {full}, {piece}, 2), Error);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
