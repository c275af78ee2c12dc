#include "testing/recording_collectives.h"

#include <ATen/ATen.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "comm/tensor_lists.h"

namespace lowtide::comm {
namespace {

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto* begin_a = static_cast<const char*>(a.const_data_ptr());
  const auto* begin_b = static_cast<const char*>(b.const_data_ptr());
  return begin_a < begin_b + b.nbytes() && begin_b < begin_a + a.nbytes();
}

}  // namespace

struct RecordingCollectives::State {
  struct Failure {
    Kind kind;
    std::string label;
    std::string cause;
  };

  std::int64_t rank;
  std::int64_t size;
  std::shared_ptr<device::ScriptedRuntime> runtime;
  Peer peer;
  std::vector<Call> calls;
  std::optional<Failure> failure;

  // The inputs at `index` of all ranks, in rank order.
  std::vector<at::Tensor> inputs(const Call& call, std::size_t index,
                                 const at::Tensor& mine) const {
    std::vector<at::Tensor> by_rank;
    for (std::int64_t from = 0; from < size; ++from) {
      const bool own = from == rank || !peer;
      by_rank.push_back(own ? mine
                            : peer({call.kind, call.label, index, from}, mine));
      LOWTIDE_INVARIANT(by_rank.back().numel() == mine.numel() &&
                            by_rank.back().dtype() == mine.dtype(),
                        "peers pass tensors of the same size and dtype");
    }
    return by_rank;
  }

  at::Tensor result(const Call& call, std::size_t index,
                    const at::Tensor& mine) const {
    const std::vector<at::Tensor> by_rank = inputs(call, index, mine);
    if (call.kind == Kind::all_gather) return at::cat(by_rank);
    if (call.kind == Kind::all_to_all) {
      std::vector<at::Tensor> slices;
      for (const at::Tensor& sent : by_rank) {
        slices.push_back(sent.view({size, -1})[rank]);
      }
      return at::cat(slices);
    }
    const bool whole = call.kind == Kind::all_reduce;
    const auto slice = [&](std::int64_t from) {
      return whole ? by_rank[from] : by_rank[from].view({size, -1})[rank];
    };
    at::Tensor sum = slice((rank + size - 1) % size).clone();
    for (std::int64_t i = 2; i <= size; ++i) {
      sum += slice((rank + size - i) % size);
    }
    return call.reduction == Reduction::average ? sum.div_(size) : sum;
  }
};

class RecordingCollectives::Work final : public Pending {
 public:
  Work(std::shared_ptr<State> state, std::size_t call, TensorLists lists)
      : state_(std::move(state)), call_(call), lists_(std::move(lists)) {}

  void start() {
    const device::UnobservedAllocations unobserved;
    const at::NoGradGuard no_grad;
    auto& runtime = *state_->runtime;
    Call& call = state_->calls[call_];
    const std::string name =
        base::concat(kind_name(call.kind), " ", call.label);
    const device::ScriptedRuntime::Label label(name);
    runtime.wait(device::Stream::wire, runtime.record(call.issued_from));
    call.start = runtime.mark(device::Stream::wire, name);
    for (std::size_t i = 0; i < lists_.ins.size(); ++i) {
      touch(lists_.ins[i], device::Access::read);
      touch(lists_.outs[i], device::Access::write);
      results_.push_back(state_->result(call, i, lists_.ins[i].view(-1)));
      if (!overlap(lists_.outs[i], lists_.ins[i])) {
        std::memset(lists_.outs[i].mutable_data_ptr(), 0xFF,
                    lists_.outs[i].nbytes());
      }
    }
    done_ = runtime.record(device::Stream::wire);
    auto& failure = state_->failure;
    if (failure && failure->kind == call.kind && failure->label == call.label) {
      cause_ = std::move(failure->cause);
      failure.reset();
    }
  }

  void wait() override {
    if (lists_.empty()) return;
    const TensorLists lists = std::exchange(lists_, {});
    const device::UnobservedAllocations unobserved;
    const at::NoGradGuard no_grad;
    Call& call = state_->calls[call_];
    const device::ScriptedRuntime::Label label(
        base::concat(kind_name(call.kind), " ", call.label));
    call.waited_from = state_->runtime->current();
    state_->runtime->wait(*call.waited_from, done_);
    if (cause_) {
      throw collective_failed(call.kind, call.label,
                              std::runtime_error(*cause_), state_->rank,
                              state_->size);
    }
    for (std::size_t i = 0; i < lists.outs.size(); ++i) {
      lists.outs[i].view(-1).copy_(results_[i]);
    }
    results_.clear();
  }

  void abandon() override {
    if (lists_.empty()) return;
    auto& runtime = *state_->runtime;
    runtime.wait(runtime.current(), done_);
    lists_ = {};
  }

 private:
  void touch(const at::Tensor& tensor, device::Access access) {
    state_->runtime->touches(device::Stream::wire, tensor.const_data_ptr(),
                             tensor.nbytes(), access);
  }

  std::shared_ptr<State> state_;
  std::size_t call_;
  TensorLists lists_;
  std::vector<at::Tensor> results_;
  device::Event done_;
  std::optional<std::string> cause_;
};

RecordingCollectives::RecordingCollectives(
    std::int64_t rank, std::int64_t size,
    std::shared_ptr<device::ScriptedRuntime> runtime, Peer peer)
    : state_(std::make_shared<State>(
          State{rank, size, std::move(runtime), std::move(peer), {}, {}})) {}

RecordingCollectives::~RecordingCollectives() = default;

std::int64_t RecordingCollectives::rank() const { return state_->rank; }

std::int64_t RecordingCollectives::size() const { return state_->size; }

std::unique_ptr<Pending> RecordingCollectives::issue(
    Call call, const std::vector<at::Tensor>& outs,
    const std::vector<at::Tensor>& ins) {
  TensorLists lists = checked_lists(call.kind, outs, ins, size());
  const bool gathers = call.kind == Kind::all_gather;
  for (const at::Tensor& full : gathers ? lists.outs : lists.ins) {
    call.dtype = full.scalar_type();
    call.full_bytes.push_back(static_cast<std::int64_t>(full.nbytes()));
  }
  const bool nothing_to_do = lists.empty();
  const std::int64_t bytes = lists.full_bytes(call.kind);
  const Kind kind = call.kind;
  auto work =
      std::make_unique<Work>(state_, state_->calls.size(), std::move(lists));
  if (nothing_to_do) return work;
  call.issued_from = state_->runtime->current();
  state_->calls.push_back(std::move(call));
  work->start();
  count(kind, bytes);
  return work;
}

std::unique_ptr<Pending> RecordingCollectives::all_gather(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    const std::string& label) {
  return issue({.kind = Kind::all_gather,
                .label = label,
                .coalesced = true,
                .reduction = Reduction::sum},
               outs, ins);
}

std::unique_ptr<Pending> RecordingCollectives::reduce_scatter(
    at::Tensor& out, at::Tensor& in, Reduction reduction,
    const std::string& label) {
  return issue({.kind = Kind::reduce_scatter,
                .label = label,
                .coalesced = false,
                .reduction = reduction},
               {out}, {in});
}

std::unique_ptr<Pending> RecordingCollectives::reduce_scatter_coalesced(
    std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
    Reduction reduction, const std::string& label) {
  return issue({.kind = Kind::reduce_scatter,
                .label = label,
                .coalesced = true,
                .reduction = reduction},
               outs, ins);
}

std::unique_ptr<Pending> RecordingCollectives::all_reduce(
    at::Tensor& tensor, Reduction reduction, const std::string& label) {
  return issue({.kind = Kind::all_reduce,
                .label = label,
                .coalesced = false,
                .reduction = reduction},
               {tensor}, {tensor});
}

std::unique_ptr<Pending> RecordingCollectives::all_to_all(
    at::Tensor& out, at::Tensor& in, const std::string& label) {
  return issue({.kind = Kind::all_to_all, .label = label}, {out}, {in});
}

std::vector<std::int64_t> RecordingCollectives::from_rank_zero(
    std::vector<std::int64_t> values, const std::string& /*label*/) {
  return values;
}

const std::vector<RecordingCollectives::Call>& RecordingCollectives::calls()
    const {
  return state_->calls;
}

void RecordingCollectives::fail_next(Kind kind, std::string label,
                                     std::string cause) {
  state_->failure = State::Failure{kind, std::move(label), std::move(cause)};
}

}  // namespace lowtide::comm
