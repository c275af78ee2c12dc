// Everything but what real backends do with it, which
// tests/python/dist/test_process_groups.py checks on gloo and fake groups.
#include "comm/c10d_collectives.h"

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ThreadLocalPythonObjects.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

class ScriptedWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override {
    ++num_waits;
    return on_wait ? on_wait() : true;
  }
  std::function<bool()> on_wait;
  int num_waits = 0;
};

// Notes each call as "name op list-length" and returns `work`.
class ScriptedBackend final : public c10d::Backend {
 public:
  ScriptedBackend(int rank, int size) : Backend(rank, size) {}

  const std::string getBackendName() const override { return name; }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>&,
      const c10d::AllgatherOptions& options) override {
    return note("all_gather", options.asyncOp, outs.size());
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& out, at::Tensor& in,
      const c10d::AllgatherOptions& options) override {
    if (on_gather) on_gather(out, in);
    return note("all_gather to", options.asyncOp,
                static_cast<std::size_t>(out.numel()));
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor&, at::Tensor&,
      const c10d::ReduceScatterOptions& options) override {
    return note(
        options.reduceOp == c10d::ReduceOp::AVG ? "plain avg" : "plain sum",
        options.asyncOp, 1);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>&,
      const c10d::ReduceScatterOptions& options) override {
    return note(
        options.reduceOp == c10d::ReduceOp::AVG ? "list avg" : "list sum",
        options.asyncOp, outs.size());
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors,
      const c10d::BroadcastOptions& options) override {
    EXPECT_EQ(options.rootRank, 0);
    tensors[0].add_(100);  // rank 0's values
    return note("broadcast", options.asyncOp, tensors.size());
  }

  std::string name = "scripted";
  std::vector<std::string> calls;
  c10::intrusive_ptr<ScriptedWork> work = c10::make_intrusive<ScriptedWork>();
  std::function<void(at::Tensor& full, at::Tensor& piece)> on_gather;
  std::function<void()> on_call;
  bool fails_to_issue = false;
  std::size_t most_calls = 100;  // it fails to issue more

 private:
  c10::intrusive_ptr<c10d::Work> note(const std::string& name, bool async,
                                      std::size_t length) {
    if (fails_to_issue || calls.size() >= most_calls)
      throw std::runtime_error("the store is gone");
    EXPECT_TRUE(async);
    if (on_call) on_call();
    calls.push_back(base::concat(name, " ", length));
    return work;
  }
};

std::shared_ptr<BorrowedGroup> group_of(
    const c10::intrusive_ptr<c10d::Backend>& backend) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(backend->getRank(),
                                                       backend->getSize());
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM, backend);
  return std::make_shared<BorrowedGroup>(std::move(group), "");
}

class C10dCollectivesTest : public testing::Test {
 protected:
  c10::intrusive_ptr<ScriptedBackend> backend_ =
      c10::make_intrusive<ScriptedBackend>(1, 4);
  C10dCollectives collectives_{group_of(backend_), c10::DeviceType::CPU};
  at::Tensor full_ = at::zeros({16});
  at::Tensor piece_ = at::zeros({4});
};

TEST_F(C10dCollectivesTest, KnowsItsPlaceAndBackend) {
  EXPECT_EQ(collectives_.rank(), 1);
  EXPECT_EQ(collectives_.size(), 4);
  EXPECT_EQ(collectives_.backend(), "scripted");
}

TEST_F(C10dCollectivesTest, AListIsOneCallAndIsCounted) {
  std::vector<at::Tensor> outs = {at::zeros({16}, at::kByte),
                                  at::zeros({0}, at::kByte),
                                  at::zeros({4}, at::kByte)};
  std::vector<at::Tensor> ins = {at::zeros({4}, at::kByte),
                                 at::zeros({0}, at::kByte),
                                 at::zeros({1}, at::kByte)};
  collectives_.all_gather(outs, ins, "layers.0")->wait();
  EXPECT_THAT(backend_->calls, ElementsAre("all_gather 2"));
  EXPECT_EQ(backend_->work->num_waits, 1);
  const Count& count = collectives_.counters()[0];
  EXPECT_EQ(count.calls, 1);
  EXPECT_EQ(count.wire_bytes, 15);
}

// See [Note: Python in a group's threads].
TEST_F(C10dCollectivesTest, ACallHasNothingOfPythonsState) {
  using Functions = at::impl::PythonTorchFunctionTLS;
  using Objects = at::impl::ThreadLocalPythonObjects;
  Functions::push_onto_stack(nullptr);
  Objects::set("context", nullptr);
  at::Tensor out = at::zeros({2});
  at::Tensor in = at::zeros({8});
  backend_->on_call = [] {
    EXPECT_EQ(Functions::stack_len(), 0);
    EXPECT_FALSE(Objects::contains("context"));
  };
  collectives_.reduce_scatter(out, in, Reduction::sum, "layers.0")->wait();
  EXPECT_EQ(backend_->calls.size(), 1U);
  EXPECT_EQ(Functions::stack_len(), 1);
  EXPECT_TRUE(Objects::contains("context"));
  Functions::pop_stack();
  Objects::set_state({});
}

// See [Note: Lists on gloo].
class GlooListTest : public C10dCollectivesTest {
 protected:
  // Two tensors; what is gathered has `full_bytes` and 4 bytes.
  std::unique_ptr<Pending> gather(std::int64_t full_bytes) {
    outs_ = {at::zeros({full_bytes}, at::kByte), at::zeros({4}, at::kByte)};
    ins_ = {at::ones({full_bytes / 4}, at::kByte), at::ones({1}, at::kByte)};
    return gloo_.all_gather(outs_, ins_, "layers.0");
  }

  static constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  C10dCollectives gloo_ = [this] {
    backend_->name = "gloo";
    return C10dCollectives(group_of(backend_), c10::DeviceType::CPU);
  }();
  std::vector<at::Tensor> outs_;
  std::vector<at::Tensor> ins_;
};

TEST_F(GlooListTest, ALongListIsGatheredTensorByTensor) {
  gather(kMiB)->wait();
  EXPECT_THAT(backend_->calls,
              ElementsAre("all_gather to 1048576", "all_gather to 4"));
  EXPECT_EQ(backend_->work->num_waits, 2);
  EXPECT_EQ(gloo_.counters()[0].calls, 1);
  EXPECT_EQ(gloo_.counters()[0].wire_bytes, (kMiB + 4) / 4 * 3);
}

TEST_F(GlooListTest, AShortListIsGatheredAsOneTensor) {
  backend_->on_gather = [](at::Tensor& full, at::Tensor& piece) {
    EXPECT_EQ(piece.numel(), 5);
    EXPECT_TRUE(piece.eq(1).all().item<bool>());
    full.copy_(at::arange(20, at::kByte));
  };
  const auto pending = gather(16);
  EXPECT_TRUE(outs_[0].eq(0).all().item<bool>());
  pending->wait();
  EXPECT_THAT(backend_->calls, ElementsAre("all_gather to 20"));
  const auto rows = at::arange(20, at::kByte).view({4, 5});
  EXPECT_TRUE(outs_[0].equal(rows.narrow(1, 0, 4).reshape(-1)));
  EXPECT_TRUE(outs_[1].equal(rows.select(1, 4)));
  EXPECT_EQ(gloo_.counters()[0].calls, 1);
  EXPECT_EQ(gloo_.counters()[0].wire_bytes, 15);
}

TEST_F(GlooListTest, AFailedShortListLeavesTheTensorsAsTheyWere) {
  backend_->work->on_wait = []() -> bool {
    throw std::runtime_error("a rank is gone");
  };
  backend_->on_gather = [](at::Tensor& full, at::Tensor&) { full.fill_(1); };
  const auto pending = gather(16);
  EXPECT_THAT([&] { pending->wait(); },
              ThrowsMessage<Error>(HasSubstr("got 'a rank is gone'")));
  EXPECT_TRUE(outs_[0].eq(0).all().item<bool>());
}

// The tensors of the others must not go back while they are in flight.
TEST_F(GlooListTest, AFailureOfOnePartIsThrownAfterAllWereWaitedFor) {
  backend_->work->on_wait = [this]() -> bool {
    throw std::runtime_error(base::concat("part ", backend_->work->num_waits));
  };
  const auto pending = gather(kMiB);
  EXPECT_THAT([&] { pending->wait(); },
              ThrowsMessage<Error>(HasSubstr("got 'part 1'")));
  EXPECT_EQ(backend_->work->num_waits, 2);
}

TEST_F(GlooListTest, WhatWasIssuedOfAListThatFailedIsWaitedFor) {
  backend_->most_calls = 1;
  EXPECT_THAT([&] { gather(kMiB); },
              ThrowsMessage<Error>(HasSubstr("got 'the store is gone'")));
  EXPECT_EQ(backend_->work->num_waits, 1);
}

TEST_F(C10dCollectivesTest, ReducesPlainAndCoalescedBySumOrAverage) {
  std::vector<at::Tensor> outs = {piece_, piece_};
  std::vector<at::Tensor> ins = {full_, full_};
  collectives_.reduce_scatter(piece_, full_, Reduction::sum, "a");
  collectives_.reduce_scatter(piece_, full_, Reduction::average, "a");
  collectives_.reduce_scatter_coalesced(outs, ins, Reduction::sum, "a");
  collectives_.reduce_scatter_coalesced(outs, ins, Reduction::average, "a");
  EXPECT_THAT(backend_->calls, ElementsAre("plain sum 1", "plain avg 1",
                                           "list sum 2", "list avg 2"));
  EXPECT_EQ(collectives_.counters()[1].calls, 4);
  EXPECT_EQ(collectives_.counters()[1].wire_bytes, 6 * 48);
}

TEST_F(C10dCollectivesTest, OneRankAveragesBySumming) {
  const auto alone = c10::make_intrusive<ScriptedBackend>(0, 1);
  C10dCollectives collectives(group_of(alone), c10::DeviceType::CPU);
  collectives.reduce_scatter(piece_, piece_, Reduction::average, "a");
  EXPECT_THAT(alone->calls, ElementsAre("plain sum 1"));
}

TEST_F(C10dCollectivesTest, RankZerosValuesReachEveryRank) {
  EXPECT_THAT(collectives_.from_rank_zero({3, 4}, "root"),
              ElementsAre(103, 104));
  EXPECT_THAT(backend_->calls, ElementsAre("broadcast 1"));
  EXPECT_EQ(backend_->work->num_waits, 1);
  const auto& counters = collectives_.counters();
  EXPECT_EQ(counters[static_cast<std::size_t>(Kind::broadcast)].wire_bytes, 12);
  // Nothing to agree on.
  EXPECT_THAT(collectives_.from_rank_zero({}, "root"), IsEmpty());
  const auto alone = c10::make_intrusive<ScriptedBackend>(0, 1);
  EXPECT_THAT(C10dCollectives(group_of(alone), c10::DeviceType::CPU)
                  .from_rank_zero({3}, "root"),
              ElementsAre(3));
  EXPECT_THAT(alone->calls, IsEmpty());
}

TEST_F(C10dCollectivesTest, RankZeroAndFakeGroupsKeepTheirOwnValues) {
  const auto first = c10::make_intrusive<ScriptedBackend>(0, 4);
  EXPECT_THAT(C10dCollectives(group_of(first), c10::DeviceType::CPU)
                  .from_rank_zero({3, 4}, "root"),
              ElementsAre(3, 4));
  EXPECT_THAT(first->calls, ElementsAre("broadcast 1"));
  backend_->name = "fake";
  EXPECT_THAT(C10dCollectives(group_of(backend_), c10::DeviceType::CPU)
                  .from_rank_zero({3, 4}, "root"),
              ElementsAre(3, 4));
}

TEST_F(C10dCollectivesTest, AFailedAgreementIsAFailure) {
  backend_->work->on_wait = []() -> bool {
    throw std::runtime_error("timed out");
  };
  EXPECT_THAT([&] { collectives_.from_rank_zero({3}, "root"); },
              ThrowsMessage<Error>(HasSubstr(
                  "lowtide: root: expected the broadcast to finish on all "
                  "ranks, got 'timed out' (rank 1 of 4).")));
}

TEST_F(C10dCollectivesTest, NothingToDoIssuesNothing) {
  std::vector<at::Tensor> none;
  at::Tensor empty = at::zeros({0});
  collectives_.all_gather(none, none, "a")->wait();
  collectives_.reduce_scatter(empty, empty, Reduction::sum, "a")->wait();
  collectives_.reduce_scatter_coalesced(none, none, Reduction::sum, "a")
      ->wait();
  EXPECT_THAT(backend_->calls, IsEmpty());
  for (const Count& count : collectives_.counters()) {
    EXPECT_EQ(count.calls, 0);
  }
}

TEST_F(C10dCollectivesTest, TensorsLiveUntilTheWait) {
  at::Tensor in = at::zeros({16});
  const c10::weak_intrusive_ptr<c10::StorageImpl> watch(
      in.storage().getWeakStorageImpl());
  const auto pending =
      collectives_.reduce_scatter(piece_, in, Reduction::sum, "a");
  in.reset();
  EXPECT_FALSE(watch.expired());
  pending->wait();
  EXPECT_TRUE(watch.expired());
}

TEST_F(C10dCollectivesTest, WaitingTwiceWaitsOnce) {
  const auto pending =
      collectives_.reduce_scatter(piece_, full_, Reduction::sum, "a");
  pending->wait();
  pending->wait();
  EXPECT_EQ(backend_->work->num_waits, 1);
}

TEST_F(C10dCollectivesTest, AFailureWhileWaitingNamesTheCollective) {
  backend_->work->on_wait = []() -> bool {
    throw std::runtime_error("Connection closed by peer [::1]:1\nmore");
  };
  const auto pending =
      collectives_.reduce_scatter(piece_, full_, Reduction::sum, "layers.3");
  EXPECT_THAT(
      [&] { pending->wait(); },
      ThrowsMessage<Error>(StrEq(
          "lowtide: layers.3: expected the reduce-scatter to finish on all "
          "ranks, got 'Connection closed by peer [::1]:1 more' (rank 1 of 4). "
          "Look "
          "at the log of the rank that failed first; then call "
          "lowtide.abort_step() or restart from the last checkpoint.")));
  EXPECT_NO_THROW(pending->wait());  // it is over
}

TEST_F(C10dCollectivesTest, AnAbortedGroupIsAFailure) {
  backend_->work->on_wait = [] { return false; };
  std::vector<at::Tensor> outs = {at::zeros({4}, at::kByte)};
  std::vector<at::Tensor> ins = {at::zeros({1}, at::kByte)};
  const auto pending = collectives_.all_gather(outs, ins, "head");
  EXPECT_THAT([&] { pending->wait(); },
              ThrowsMessage<Error>(HasSubstr(
                  "lowtide: head: expected the all-gather to finish on all "
                  "ranks, got 'the group was aborted' (rank 1 of 4).")));
}

TEST_F(C10dCollectivesTest, AFailureToIssueReadsTheSameAndIsNotCounted) {
  backend_->fails_to_issue = true;
  EXPECT_THAT(
      [&] {
        collectives_.reduce_scatter(piece_, full_, Reduction::sum, "layers.3");
      },
      ThrowsMessage<Error>(HasSubstr("got 'the store is gone' (rank 1 of 4)")));
  EXPECT_EQ(collectives_.counters()[1].calls, 0);
}

TEST_F(C10dCollectivesTest, AGroupWithoutABackendForTheDeviceIsRefused) {
  EXPECT_THAT(
      [&] { C10dCollectives(group_of(backend_), c10::DeviceType::CUDA); },
      ThrowsMessage<InvalidArgument>(StrEq(
          "lowtide: process group: expected a backend for cuda tensors, got "
          "one for cpu (rank 1 of 4). Pass init_process_group or "
          "init_device_mesh a backend for cuda, or move the model.")));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
