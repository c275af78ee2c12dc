#include "comm/call_observer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "base/torch_version.h"
#include "comm/c10d_collectives.h"

namespace lowtide::comm {
namespace LOWTIDE_FILE {

using testing::ElementsAre;
using testing::IsEmpty;

class Notes final : public CallListener {
 public:
  void collective(const ObservedCall& call) override { calls.push_back(call); }
  void node(std::uint64_t, std::uint64_t sequence) override {
    nodes.push_back(sequence);
  }
  std::vector<std::string> kinds() const {
    std::vector<std::string> result;
    for (const ObservedCall& call : calls) result.push_back(call.kind);
    return result;
  }
  std::vector<ObservedCall> calls;
  std::vector<std::uint64_t> nodes;
};

class DoneWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// Leaves buffers as they are.
class QuietBackend final : public c10d::Backend {
 public:
  QuietBackend() : Backend(0, 2) {}
  using Tensors = std::vector<at::Tensor>;
  using Work = c10::intrusive_ptr<c10d::Work>;
  const std::string getBackendName() const override { return "quiet"; }
  Work allreduce(Tensors&, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<DoneWork>();
  }
  Work broadcast(Tensors&, const c10d::BroadcastOptions&) override {
    return c10::make_intrusive<DoneWork>();
  }
  Work _allgather_base(at::Tensor&, at::Tensor&,
                       const c10d::AllgatherOptions&) override {
    return c10::make_intrusive<DoneWork>();
  }
  Work alltoall_base(at::Tensor&, at::Tensor&, std::vector<std::int64_t>&,
                     std::vector<std::int64_t>&,
                     const c10d::AllToAllOptions&) override {
    return c10::make_intrusive<DoneWork>();
  }
};

c10::intrusive_ptr<c10d::ProcessGroup> quiet_group() {
  auto backend = c10::make_intrusive<QuietBackend>();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM, backend);
  group->setGroupName("pair");
  return group;
}

// Its backward sends over a group.
class SendingNode final : public torch::autograd::Node {
 public:
  explicit SendingNode(c10::intrusive_ptr<c10d::ProcessGroup> group)
      : group_(std::move(group)) {}
  std::string name() const override { return "SendingNode"; }
  torch::autograd::variable_list apply(
      torch::autograd::variable_list&& gradients) override {
    std::vector<at::Tensor> sent = {gradients[0].clone()};
    group_->allreduce(sent)->wait();
    return {sent[0]};
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

TEST(CallObserverTest, SeesCallsOnAGroupAndWhatTheyCarry) {
  Notes notes;
  const auto group = quiet_group();
  std::vector<at::Tensor> sent = {at::zeros({1, 128}, at::kBFloat16)};
  at::Tensor out = at::zeros({8}), in = at::zeros({4});
  {
    const Observation observation(notes);
    group->allreduce(sent);
    std::invoke(base::all_gather_single, *group, out, in,
                c10d::AllgatherOptions());
    std::vector<at::Tensor> pair = {at::zeros({2}), at::zeros({3})};
    group->broadcast(pair);
  }
  group->allreduce(sent);  // nobody listens
  EXPECT_THAT(notes.kinds(),
              ElementsAre("all-reduce", "all-gather", "broadcast"));
  EXPECT_EQ(notes.calls[0].value, "bfloat16[1, 128]");
  EXPECT_EQ(notes.calls[0].bytes, 256);
  EXPECT_EQ(notes.calls[0].group, "pair");
  EXPECT_EQ(notes.calls[0].issuer, "");
  EXPECT_FALSE(notes.calls[0].in_backward);
  EXPECT_EQ(notes.calls[1].bytes, 32);  // the whole, not the piece
  EXPECT_EQ(notes.calls[2].value, "2 tensors");
  EXPECT_EQ(notes.calls[2].bytes, 20);
}

TEST(CallObserverTest, KnowsTheNodeThatSends) {
  Notes notes;
  const at::Tensor x = at::ones({4}).requires_grad_();
  at::Tensor y = (x * 2).detach();
  const auto node = base::make_node<SendingNode>(quiet_group());
  node->set_next_edges(torch::autograd::collect_next_edges(x));
  torch::autograd::set_history(y, node);
  {
    const Observation observation(notes);
    torch::autograd::backward({y}, {at::ones({4})});
  }
  ASSERT_EQ(notes.calls.size(), 1u);
  const ObservedCall& call = notes.calls[0];
  EXPECT_TRUE(call.in_backward);
  EXPECT_EQ(call.node_name, "SendingNode");
  EXPECT_EQ(call.node_sequence, node->sequence_nr());
  EXPECT_EQ(call.node_thread, node->thread_id());
  EXPECT_THAT(notes.nodes, testing::Contains(node->sequence_nr()));
}

TEST(CallObserverTest, LowtidesOwnCallsCarryTheirLabel) {
  Notes notes;
  C10dCollectives collectives(
      std::make_shared<BorrowedGroup>(quiet_group(), ""), c10::DeviceType::CPU);
  at::Tensor x = at::zeros({4}), in = at::zeros({4});
  const Observation observation(notes);
  collectives.all_reduce(x, Reduction::sum, "layers.0")->wait();
  collectives.all_to_all(x, in, "experts")->wait();
  EXPECT_THAT(notes.kinds(), ElementsAre("all-reduce", "all-to-all"));
  EXPECT_EQ(notes.calls[0].issuer, "layers.0");
  EXPECT_EQ(notes.calls[1].issuer, "experts");
  const auto count = [&](Kind kind) {
    return collectives.counters()[static_cast<std::size_t>(kind)];
  };
  EXPECT_EQ(count(Kind::all_reduce).wire_bytes, 16);
  EXPECT_EQ(count(Kind::all_to_all).wire_bytes, 8);
}

TEST(CallObserverTest, OneListenerAtATime) {
  Notes notes;
  const Observation observation(notes);
  EXPECT_THROW(Observation second(notes), Error);
}

}  // namespace LOWTIDE_FILE
}  // namespace lowtide::comm
