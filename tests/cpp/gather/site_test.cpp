// The life of a value that backward gathers again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>

#include "harness.h"

namespace lowtide::gather {
namespace LOWTIDE_FILE {

using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using testing::StrEq;
using testing::ThrowsMessage;

// `hook` runs in backward, ahead of what made `tensor`.
void on_gradient(const at::Tensor& tensor, std::function<void()> hook) {
  tensor.register_hook([hook = std::move(hook)](const at::Tensor& gradient) {
    hook();
    return gradient;
  });
}

TEST(SiteTest, ForwardKeepsTheShardAlone) {
  Paper paper;
  SavedValues saved;
  at::Tensor loss;
  const at::Tensor shard = paper.shard(0);
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> gathered;
  {
    const at::Tensor x = rematerialised(paper, shard, "attn_in", saved);
    gathered = x.storage().getWeakStorageImpl();
    loss = square(x, saved).sum() + square(x.t(), saved).sum();
  }
  EXPECT_TRUE(gathered->expired());
  loss.backward();
  EXPECT_TRUE(shard.grad().equal(shard.detach() * 2 * 2 * kSize));
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

TEST(SiteTest, AllConsumersShareOneGatherAndTheLastReleasesIt) {
  Paper paper;
  SavedValues saved;
  const at::Tensor x = rematerialised(paper, paper.shard(0), "a", saved);
  const at::Tensor first = square(x, saved);
  const at::Tensor last = square(x.view({-1}), saved);
  std::vector<std::int64_t> held;
  on_gradient(x, [&] { held.push_back(paper.held()); });
  on_gradient(first, [&] { held.push_back(paper.held()); });
  (first.sum() + last.sum()).backward();
  EXPECT_THAT(held, ElementsAre(kGatheredBytes, 0));
  EXPECT_EQ(paper.figures("a").regathers, 1);
  EXPECT_EQ(paper.ledger->total_peak(), kGatheredBytes);
}

TEST(SiteTest, AConsumerThatBackwardNeverReachesHoldsNothing) {
  Paper paper;
  SavedValues saved;
  const at::Tensor x = rematerialised(paper, paper.shard(0), "a", saved);
  const at::Tensor used = square(x, saved).sum();
  const at::Tensor unused = square(x, saved).sum();
  used.backward();
  EXPECT_EQ(paper.held(), 0);
  EXPECT_EQ(paper.figures("a").regathers, 1);
  unused.backward();
  EXPECT_EQ(paper.figures("a").regathers, 2);
  EXPECT_EQ(paper.held(), 0);
}

TEST(SiteTest, ARetainedGraphGathersOncePerBackward) {
  Paper paper;
  SavedValues saved;
  const at::Tensor shard = paper.shard(0);
  const at::Tensor x = rematerialised(paper, shard, "a", saved);
  const at::Tensor loss = (square(x, saved) + square(x, saved)).sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor first = shard.grad().clone();
  loss.backward();
  EXPECT_TRUE(shard.grad().equal(first * 2));
  EXPECT_EQ(paper.figures("a").regathers, 2);
  EXPECT_EQ(paper.held(), 0);
}

TEST(SiteTest, ReadingOutsideOfBackwardIssuesNothing) {
  Paper paper;
  SavedValues saved;
  const at::Tensor x = rematerialised(paper, paper.shard(0), "a", saved);
  const at::Tensor y = square(x, saved);
  const auto& node = dynamic_cast<SquareNode&>(*y.grad_fn());
  EXPECT_THAT(
      [&] { node.saved().unpack(); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: sequence-parallel gather 'a': expected its saved value to "
          "be read inside backward, which gathers it again, got a read outside "
          "of it (rank 0 of 2). Read a tensor of your own, or keep this one "
          "with regather=False.")));
  EXPECT_THAT(paper.calls(), SizeIs(1));
}

TEST(SiteTest, AWriteThatNoVersionTellsIsAnErrorWhereBitsAreCompared) {
  for (const bool compares : {false, true}) {
    Paper paper(compares);
    SavedValues saved;
    const at::Tensor shard = paper.shard(0) * 1;
    const at::Tensor x = rematerialised(paper, shard, "a", saved);
    const at::Tensor loss = square(x, saved).sum();
    loss.backward({}, /*retain_graph=*/true);
    shard.variable_data().mul_(2);  // as .data
    if (!compares) {
      EXPECT_NO_THROW(loss.backward());
      continue;
    }
    EXPECT_THAT(
        [&] { loss.backward(); },
        ThrowsMessage<Error>(StrEq(
            "lowtide: sequence-parallel gather 'a': expected the shard's bits "
            "as they were gathered, got others, which no version counter told: "
            "a write through .data, or by a kernel that torch does not know "
            "(rank 0 of 2). Write to a clone(): backward gathers the shard "
            "again.")));
    EXPECT_EQ(paper.figures("a").regathers, 1);
  }
}

TEST(SiteTest, AWriteToTheShardIsAnError) {
  Paper paper;
  SavedValues saved;
  const at::Tensor shard = paper.shard(0) * 1;
  const at::Tensor x = rematerialised(paper, shard, "a", saved);
  const at::Tensor loss = square(x, saved).sum();
  {
    const at::NoGradGuard no_grad;
    at::Tensor(shard).mul_(2);
  }
  EXPECT_THAT(
      [&] { loss.backward(); },
      ThrowsMessage<Error>(
          StrEq("lowtide: sequence-parallel gather 'a': expected the shard at "
                "version "
                "0, as it was gathered, got version 1: something wrote to it "
                "in place "
                "(rank 0 of 2). Write out of place: backward gathers the shard "
                "again.")));
  EXPECT_THAT(paper.calls(), SizeIs(1));
}

TEST(SiteTest, AWriteToTheGatheredTensorIsAnErrorBeforeAndAfterItIsSaved) {
  Paper paper;
  SavedValues saved;
  at::Tensor x = rematerialised(paper, paper.shard(0), "a", saved);
  const at::Tensor loss = square(x, saved).sum();
  {
    const at::NoGradGuard no_grad;
    x.mul_(2);
  }
  const auto message = HasSubstr(
      "'a': expected the gathered tensor at version 0, as it was gathered, got "
      "version 1: something wrote to it in place");
  EXPECT_THAT([&] { loss.backward(); }, ThrowsMessage<Error>(message));
  EXPECT_THAT([&] { square(x, saved); }, ThrowsMessage<Error>(message));
}

TEST(SiteTest, OtherTensorsAreKeptAndWatched) {
  Paper paper;
  SavedValues saved;
  at::Tensor plain = at::ones({2}).requires_grad_() * 1;
  const at::Tensor loss = square(plain, saved).sum();
  loss.backward({}, true);
  {
    const at::NoGradGuard no_grad;
    plain.mul_(2);
  }
  EXPECT_THAT([&] { loss.backward(); },
              ThrowsMessage<Error>(HasSubstr(
                  "gather_policy: expected a tensor that backward needs at "
                  "version 0, as it was saved, got version 1")));
}

// A storage that is gone is no gathered value, whatever has its address.
TEST(SiteTest, ANewStorageAtAnOldAddressIsNotTheSite) {
  Paper paper;
  SavedValues saved;
  for (int i = 0; i < 50; ++i) {
    rematerialised(paper, paper.shard(0), "a", saved);
    const at::Tensor fresh = at::ones({kSize * kRows, kFeatures});
    EXPECT_TRUE(saved.pack(fresh)->unpack().equal(fresh));
  }
  EXPECT_EQ(paper.figures("a").regathers, 0);
}

TEST(SiteTest, AnExceptionLeavesNothingBehind) {
  Paper paper;
  SavedValues saved;
  const at::Tensor shard = paper.shard(0);
  const at::Tensor x = rematerialised(paper, shard, "a", saved);
  const at::Tensor first = square(x, saved);
  const at::Tensor loss = first.sum() + square(x, saved).sum();
  bool fail = true;
  on_gradient(first, [&] {
    if (fail) throw std::runtime_error("on purpose");
  });
  EXPECT_THROW(loss.backward({}, true), std::runtime_error);
  EXPECT_EQ(paper.held(), 0);
  fail = false;
  loss.backward();
  EXPECT_TRUE(shard.grad().equal(shard.detach() * 2 * 2 * kSize));
  EXPECT_EQ(paper.held(), 0);
  EXPECT_THAT(paper.scripted->violations(), IsEmpty());
}

TEST(SiteTest, AFailedReGatherNamesTheSite) {
  Paper paper;
  SavedValues saved;
  const at::Tensor x = rematerialised(paper, paper.shard(0), "a", saved);
  const at::Tensor loss = square(x, saved).sum();
  paper.collectives->fail_next(comm::Kind::all_gather, "a", "a peer died");
  EXPECT_THAT([&] { loss.backward({}, true); },
              ThrowsMessage<Error>(HasSubstr(
                  "lowtide: a: expected the all-gather to finish on all ranks, "
                  "got 'a peer died'")));
  EXPECT_EQ(paper.held(), 0);
  loss.backward();
  EXPECT_EQ(paper.held(), 0);
}

TEST(SiteTest, HigherOrderDerivativesAreRefused) {
  Paper paper;
  const at::Tensor shard = paper.shard(0);
  const at::Tensor y = all_gather(paper.axis, shard, {"a", false}).tensor;
  EXPECT_THAT([&] { y.sum().backward({}, true, /*create_graph=*/true); },
              ThrowsMessage<Error>(StrEq(
                  "lowtide: sequence-parallel gather 'a': expected a backward "
                  "without create_graph, got create_graph=True. Compute "
                  "higher-order derivatives on a model without sequence "
                  "parallelism.")));
}

TEST(AxisTest, RowsThatTheRanksCanNotShareAreRefused) {
  Paper paper;
  EXPECT_THAT(
      [&] {
        reduce_scatter(paper.axis, at::ones({5, 2}));
      },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: sp_reduce_scatter: expected a number of rows that the "
          "group's size 2 divides, got [5, 2] (rank 0 of 2). Pad the sequence "
          "to a multiple of the group's size.")));
}

TEST(AxisTest, NewLinesAreComparedAtOnceAndTheirOrderInTheFirstBackward) {
  Paper paper;
  SavedValues saved;
  for (int step = 0; step < 2; ++step) {
    at::Tensor loss;
    for (const char* name : {"a", "b", "a"}) {
      const at::Tensor x = rematerialised(paper, paper.shard(0), name, saved);
      const at::Tensor one = square(x, saved).sum();
      loss = loss.defined() ? loss + one : one;
    }
    loss.backward();
  }
  const std::string rest = " Float [3, 4], gathered again in backward";
  EXPECT_THAT(
      paper.compared,
      ElementsAre(ElementsAre("'a'" + rest), ElementsAre("'b'" + rest),
                  ElementsAre("'a'" + rest, "'b'" + rest, "'a'" + rest)));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::gather
