#include "comm/host_channel.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/check.h"
#include "base/exception_text.h"
#include "comm/collectives.h"
#include "comm/python_state.h"

namespace lowtide::comm {
namespace {

[[noreturn]] void throw_failed(const std::exception& cause, std::int64_t rank,
                               std::int64_t size) {
  throw Error(base::error_text(
      "comparing what ranks did", "all ranks to take part in the step",
      failure_text(base::exception_text(cause), rank, size),
      "A peer raised, died or ran another number of steps: look for its error "
      "first."));
}

class BackendChannel final : public HostChannel {
 public:
  explicit BackendChannel(std::shared_ptr<BorrowedGroup> group)
      : group_(std::move(group)) {}

  const BorrowedGroup* group() const override { return group_.get(); }
  std::int64_t rank() const override { return group_->rank(); }
  std::int64_t size() const override { return group_->size(); }

  std::unique_ptr<Maximum> maximum(std::vector<std::int64_t> numbers) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto tensor =
        at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
    std::memcpy(tensor.mutable_data_ptr(), numbers.data(), tensor.nbytes());
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    std::vector<at::Tensor> tensors{tensor};
    const auto group = group_->get();
    const WithoutPythonState state;
    try {
      auto work = group->getBackend(at::kCPU)->allreduce(tensors, options);
      return std::make_unique<OnItsWay>(*this, std::move(tensor),
                                        std::move(work));
    } catch (const std::exception& cause) {
      throw_failed(cause, rank(), size());
    }
  }

  std::vector<std::string> texts(const std::string& mine) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto longest =
        maximum({static_cast<std::int64_t>(mine.size())})->wait().front();
    auto padded = at::full({longest + 1}, 0, at::kByte);
    std::memcpy(padded.mutable_data_ptr(), mine.data(), mine.size());
    std::vector<std::vector<at::Tensor>> all(1);
    for (std::int64_t r = 0; r < size(); ++r) {
      all[0].push_back(at::empty_like(padded));
    }
    std::vector<at::Tensor> in{padded};
    const auto group = group_->get();
    const WithoutPythonState state;
    try {
      group->getBackend(at::kCPU)->allgather(all, in)->wait();
    } catch (const std::exception& cause) {
      throw_failed(cause, rank(), size());
    }
    std::vector<std::string> texts;
    for (const auto& text : all[0]) {
      // Another rank's bytes, which need not end with a zero.
      const auto* bytes =
          reinterpret_cast<const char*>(text.const_data_ptr<std::uint8_t>());
      texts.emplace_back(bytes, strnlen(bytes, text.nbytes()));
    }
    return texts;
  }

 private:
  class OnItsWay final : public Maximum {
   public:
    OnItsWay(const BackendChannel& channel, at::Tensor tensor,
             c10::intrusive_ptr<c10d::Work> work)
        : rank_(channel.rank()),
          size_(channel.size()),
          tensor_(std::move(tensor)),
          work_(std::move(work)) {}
    std::vector<std::int64_t> wait() override {
      try {
        work_->wait();
      } catch (const std::exception& cause) {
        throw_failed(cause, rank_, size_);
      }
      const auto* begin = tensor_.const_data_ptr<std::int64_t>();
      return {begin, begin + tensor_.numel()};
    }

   private:
    std::int64_t rank_;
    std::int64_t size_;
    at::Tensor tensor_;
    c10::intrusive_ptr<c10d::Work> work_;
  };

  std::shared_ptr<BorrowedGroup> group_;
};

}  // namespace

std::shared_ptr<HostChannel> make_host_channel(
    std::shared_ptr<BorrowedGroup> group) {
  return std::make_shared<BackendChannel>(std::move(group));
}

}  // namespace lowtide::comm
