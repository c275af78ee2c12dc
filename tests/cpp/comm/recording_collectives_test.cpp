#include "testing/recording_collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using device::Access;
using device::ScriptedRuntime;
using device::Stream;
using device::StreamScope;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;
using testing::ThrowsMessage;

class RecordingCollectivesTest : public testing::Test {
 protected:
  // A float tensor in the runtime's memory, filled on compute.
  at::Tensor tensor(const at::Tensor& values) {
    const auto bytes = values.nbytes();
    at::Tensor result =
        at::empty({0}, values.options())
            .set_(c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                               runtime_->allocate(bytes)),
                  0, values.sizes(), values.strides());
    touch(Stream::compute, result, Access::write);
    return result.copy_(values);
  }

  void touch(Stream stream, const at::Tensor& tensor, Access access) {
    runtime_->touches(stream, tensor.const_data_ptr(), tensor.nbytes(), access);
  }

  std::shared_ptr<ScriptedRuntime> runtime_ =
      std::make_shared<ScriptedRuntime>();
};

TEST_F(RecordingCollectivesTest, GathersWhatPeersPass) {
  RecordingCollectives collectives(
      1, 3, runtime_,
      [](const RecordingCollectives::Request& request, const at::Tensor& mine) {
        return at::full_like(mine, 10 * request.rank + request.index);
      });
  std::vector<at::Tensor> ins = {at::full({2}, 99, at::kByte),
                                 at::full({1}, 98, at::kByte)};
  std::vector<at::Tensor> outs = {at::zeros({6}, at::kByte),
                                  at::zeros({3}, at::kByte)};
  for (at::Tensor& in : ins) in = tensor(in);
  for (at::Tensor& out : outs) out = tensor(out);
  const auto pending = collectives.all_gather(outs, ins, "layers.0");
  EXPECT_TRUE(outs[0].equal(at::full({6}, 255, at::kByte)));  // not yet
  pending->wait();
  EXPECT_TRUE(outs[0].equal(at::tensor({0, 0, 99, 99, 20, 20}, at::kByte)));
  EXPECT_TRUE(outs[1].equal(at::tensor({1, 98, 21}, at::kByte)));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(RecordingCollectivesTest, ReplicatesWithoutPeers) {
  RecordingCollectives collectives(0, 2, runtime_);
  at::Tensor in = tensor(at::arange(4, at::kFloat));
  at::Tensor out = tensor(at::zeros({2}));
  collectives.reduce_scatter(out, in, Reduction::sum, "a")->wait();
  EXPECT_TRUE(out.equal(at::tensor({0.f, 2.f})));
  collectives.reduce_scatter(out, in, Reduction::average, "a")->wait();
  EXPECT_TRUE(out.equal(at::tensor({0.f, 1.f})));
  EXPECT_THAT(runtime_->violations(), IsEmpty());
}

TEST_F(RecordingCollectivesTest, SumsInTheOrderOfGloosRing) {
  // 2^24 + 1 is 2^24 in fp32, so the order shows.  Rank 1 of 4 owns element
  // 1; the order is rank 0, 3, 2, 1.
  const float big = 16777216;
  const float by_rank[] = {1, 1, -big, big};  // 1 + big - big + 1
  RecordingCollectives collectives(
      1, 4, runtime_,
      [&](const RecordingCollectives::Request& request, const at::Tensor&) {
        return at::full({4}, by_rank[request.rank]);
      });
  at::Tensor in = tensor(at::full({4}, by_rank[1]));
  at::Tensor out = tensor(at::zeros({1}));
  collectives.reduce_scatter(out, in, Reduction::sum, "a")->wait();
  EXPECT_EQ(out.item<float>(), 1);  // in rank order: 2
}

TEST_F(RecordingCollectivesTest, RecordsEveryCall) {
  RecordingCollectives collectives(0, 2, runtime_);
  std::vector<at::Tensor> outs = {tensor(at::zeros({2})), at::zeros({0})};
  std::vector<at::Tensor> ins = {tensor(at::zeros({4})), at::zeros({0})};
  {
    const StreamScope scope(*runtime_, Stream::reduce);
    runtime_->wait(Stream::reduce, runtime_->record(Stream::compute));
    collectives.reduce_scatter_coalesced(outs, ins, Reduction::average, "a")
        ->wait();
  }
  const auto unwaited =
      collectives.reduce_scatter(outs[0], ins[0], Reduction::sum, "b");
  std::vector<at::Tensor> none;
  collectives.all_gather(none, none, "c")->wait();

  ASSERT_EQ(collectives.calls().size(), 2u);
  const RecordingCollectives::Call& a = collectives.calls()[0];
  EXPECT_EQ(a.kind, Kind::reduce_scatter);
  EXPECT_EQ(a.label, "a");
  EXPECT_TRUE(a.coalesced);
  EXPECT_EQ(a.reduction, Reduction::average);
  EXPECT_EQ(a.dtype, at::kFloat);
  EXPECT_THAT(a.full_bytes, ElementsAre(16));
  EXPECT_EQ(a.issued_from, Stream::reduce);
  EXPECT_EQ(a.waited_from, Stream::reduce);
  EXPECT_EQ(runtime_->log()[a.start].name, "reduce-scatter a");
  EXPECT_EQ(runtime_->log()[a.start].stream, Stream::wire);
  const RecordingCollectives::Call& b = collectives.calls()[1];
  EXPECT_FALSE(b.coalesced);
  EXPECT_EQ(b.issued_from, Stream::compute);
  EXPECT_EQ(b.waited_from, std::nullopt);
  EXPECT_EQ(collectives.counters()[1].calls, 2);
  EXPECT_EQ(collectives.counters()[1].wire_bytes, 16);
  EXPECT_EQ(collectives.counters()[0].calls, 0);
}

TEST_F(RecordingCollectivesTest, TheIssuingStreamMustHoldTheInputs) {
  // Issued from the gather stream, which does not wait for compute.
  RecordingCollectives collectives(0, 1, runtime_);
  at::Tensor in = tensor(at::zeros({4}));
  at::Tensor out = tensor(at::zeros({4}));
  const StreamScope scope(*runtime_, Stream::gather);
  collectives.reduce_scatter(out, in, Reduction::sum, "a")->wait();
  EXPECT_THAT(runtime_->violations(),
              testing::Contains(HasSubstr("read 'reduce-scatter a' on wire")));
}

TEST_F(RecordingCollectivesTest, AResultUsedBeforeTheWaitIsARace) {
  for (const bool waits : {true, false}) {
    const auto runtime = runtime_ = std::make_shared<ScriptedRuntime>();
    RecordingCollectives collectives(0, 1, runtime);
    at::Tensor in = tensor(at::zeros({4}));
    at::Tensor out = tensor(at::zeros({4}));
    const auto pending =
        collectives.reduce_scatter(out, in, Reduction::sum, "a");
    if (waits) pending->wait();
    touch(Stream::compute, out, Access::read);
    EXPECT_EQ(runtime->violations().empty(), waits);
    EXPECT_EQ(out.isnan().all().item<bool>(), !waits);
  }
}

TEST_F(RecordingCollectivesTest, TensorsLiveUntilTheWait) {
  for (const bool waits : {true, false}) {
    const auto runtime = runtime_ = std::make_shared<ScriptedRuntime>();
    RecordingCollectives collectives(0, 1, runtime);
    at::Tensor in = tensor(at::zeros({4}));
    at::Tensor out = tensor(at::zeros({4}));
    auto pending = collectives.reduce_scatter(out, in, Reduction::sum, "a");
    in.reset();
    EXPECT_THAT(runtime->violations(), IsEmpty());
    if (waits) pending->wait();
    pending.reset();  // unwaited: released while the wire still reads
    EXPECT_EQ(runtime->violations().empty(), waits);
  }
}

TEST_F(RecordingCollectivesTest, AnInjectedFailureHitsOneCallOfThatLabel) {
  RecordingCollectives collectives(0, 2, runtime_);
  at::Tensor in = tensor(at::zeros({4}));
  at::Tensor out = tensor(at::zeros({2}));
  const auto reduce = [&](const std::string& label) {
    return collectives.reduce_scatter(out, in, Reduction::sum, label);
  };
  collectives.fail_next(Kind::reduce_scatter, "layers.1", "peer died");
  reduce("layers.0")->wait();
  const auto pending = reduce("layers.1");
  EXPECT_THAT([&] { pending->wait(); },
              ThrowsMessage<Error>(StrEq(
                  "lowtide: layers.1: expected the reduce-scatter to finish on "
                  "all ranks, got 'peer died' (rank 0 of 2). Look at the log "
                  "of the rank that failed first; then call "
                  "lowtide.abort_step() or restart from the last "
                  "checkpoint.")));
  EXPECT_NO_THROW(pending->wait());
  reduce("layers.1")->wait();
}

TEST_F(RecordingCollectivesTest, StandsForRankZeroToo) {
  RecordingCollectives collectives(1, 2, runtime_);
  EXPECT_THAT(collectives.from_rank_zero({7, 8}, "a"), ElementsAre(7, 8));
}

TEST_F(RecordingCollectivesTest, InPlaceGathersKeepTheInput) {
  RecordingCollectives collectives(1, 2, runtime_);
  std::vector<at::Tensor> outs = {tensor(at::arange(4, at::kByte))};
  std::vector<at::Tensor> ins = {outs[0].narrow(0, 2, 2)};
  const auto pending = collectives.all_gather(outs, ins, "a");
  EXPECT_TRUE(ins[0].equal(at::tensor({2, 3}, at::kByte)));
  pending->wait();
  EXPECT_TRUE(outs[0].equal(at::tensor({2, 3, 2, 3}, at::kByte)));
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
