// Gathers ahead of their use, within a bound, and every wait they need.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness.h"

namespace lowtide::gather {
namespace LOWTIDE_FILE {

using testing::AnyOf;
using testing::Each;
using testing::ElementsAre;
using testing::IsEmpty;

// Square layers one after the other, each behind a gather of its own.
at::Tensor chain(Paper& paper, const at::Tensor& shard,
                 std::int64_t prefetch_bytes) {
  at::Tensor x = shard;
  for (const char* name : {"a", "b", "c"}) {
    const auto outputs =
        gather_linear(paper.axis, x, {Paper::weight(kFeatures, 1)},
                      {at::Tensor()}, {{name, true, prefetch_bytes}, false});
    x = reduce_scatter(paper.axis, outputs[0].sin());
  }
  return x.sum();
}

std::vector<std::string> backward_calls(Paper& paper,
                                        std::int64_t prefetch_bytes) {
  const at::Tensor loss = chain(paper, paper.shard(0), prefetch_bytes);
  const std::size_t before = paper.calls().size();
  paper.ledger->reset_peaks();
  loss.backward();
  auto calls = paper.calls();
  calls.erase(calls.begin(), calls.begin() + static_cast<long>(before));
  return calls;
}

TEST(PrefetchTest, TheNextGatherGoesOutBehindThisOnesReduceScatter) {
  Paper paper;
  EXPECT_THAT(backward_calls(paper, kGatheredBytes),
              ElementsAre("all-gather sp_reduce_scatter", "all-gather c",
                          "reduce-scatter c", "all-gather b",
                          "all-gather sp_reduce_scatter", "reduce-scatter b",
                          "all-gather a", "all-gather sp_reduce_scatter",
                          "reduce-scatter a"));
  for (const char* name : {"a", "b", "c"}) {
    EXPECT_EQ(paper.figures(name).regathers, 1) << name;
    EXPECT_EQ(paper.figures(name).prefetched, name[0] == 'c' ? 0 : 1) << name;
    EXPECT_EQ(paper.figures(name).unused, 0) << name;
  }
  EXPECT_EQ(paper.ledger->total_peak(), 2 * kGatheredBytes);
  EXPECT_EQ(paper.held(), 0);
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

TEST(PrefetchTest, ASiteLargerThanTheBoundIsGatheredWhenUsed) {
  Paper paper;
  backward_calls(paper, kGatheredBytes - 1);
  for (const char* name : {"a", "b", "c"}) {
    EXPECT_EQ(paper.figures(name).regathers, 1);
    EXPECT_EQ(paper.figures(name).prefetched, 0);
  }
  EXPECT_EQ(paper.ledger->total_peak(), kGatheredBytes);
}

// The wire is free while compute multiplies: no edge from the later site's
// weight gradient to the earlier one's gather.
TEST(PrefetchTest, APrefetchIsIssuedFromTheGatherStream) {
  Paper paper;
  backward_calls(paper, kGatheredBytes);
  for (const auto& call : paper.collectives->calls()) {
    EXPECT_EQ(call.issued_from, call.kind == comm::Kind::all_gather
                                    ? device::Stream::gather
                                    : device::Stream::reduce);
    EXPECT_EQ(call.waited_from, device::Stream::compute);
  }
}

TEST(PrefetchTest, OtherGraphsAreLeftAlone) {
  Paper paper;
  const at::Tensor other = chain(paper, paper.shard(1), kGatheredBytes);
  const at::Tensor loss = chain(paper, paper.shard(0), kGatheredBytes);
  loss.backward();
  EXPECT_EQ(paper.figures("c").regathers, 1);
  other.backward();
  EXPECT_EQ(paper.figures("a").regathers, 2);
  EXPECT_EQ(paper.figures("a").unused, 0);
}

TEST(PrefetchTest, WhatWasPrefetchedInVainGoesAtTheEndOfBackward) {
  Paper paper;
  SavedValues saved;
  const at::Tensor first =
      rematerialised(paper, paper.shard(0), "first", saved);
  const at::Tensor never = square(first, saved);
  const auto later = gather_linear(paper.axis, first.narrow(0, 0, kRows),
                                   {Paper::weight(kFeatures, 1)},
                                   {at::Tensor()}, {{"later", true}, false});
  later[0].sum().backward();
  EXPECT_EQ(paper.figures("first").prefetched, 1);
  EXPECT_EQ(paper.figures("first").unused, 1);
  EXPECT_EQ(paper.held(), 0);
  never.sum().backward();
  EXPECT_EQ(paper.figures("first").unused, 1);
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

// Without one of the waits a rule of the stream order is broken.
TEST(PrefetchTest, EveryWaitMatters) {
  const auto run = [](int skipped) {
    Paper paper;
    paper.waits->skip(skipped);
    backward_calls(paper, kGatheredBytes);
    return std::pair(paper.scripted->violations(), paper.waits->waits());
  };
  const auto [violations, waits] = run(-1);
  ASSERT_THAT(violations, IsEmpty());
  EXPECT_THAT(waits,
              Each(AnyOf("gather after compute", "reduce after compute")));
  for (std::size_t k = 0; k < waits.size(); ++k) {
    EXPECT_FALSE(run(static_cast<int>(k)).first.empty()) << waits[k] << k;
  }
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::gather
