// RecordingCollectives that agree with the other ranks of an Exchange, and can
// forget to wait for one call or fail to issue one: what a missing line in the
// engine, or a broken group, would do.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"

namespace lowtide::shard {

class RankCollectives final : public comm::Collectives {
 public:
  RankCollectives(Exchange& exchange, std::int64_t rank,
                  std::shared_ptr<device::ScriptedRuntime> runtime)
      : exchange_(exchange),
        recording_(rank, exchange.world_size(), std::move(runtime),
                   exchange.peer(rank)) {}

  comm::RecordingCollectives& recording() { return recording_; }

  // As torch's TORCH_NCCL_NAN_CHECK does, padding included: fresh bytes are
  // NaN.
  bool checks_values = true;

  // Ignores the wait that comes after `k` others, counted from now.
  void skip_wait(std::int64_t k) {
    state_->waits = 0;
    state_->skipped = k;
  }
  std::int64_t num_waits() const { return state_->waits; }

  // The issue that comes after `k` others throws, before anything is on the
  // wire.
  void fail_issue(std::int64_t k) {
    issues_ = 0;
    failing_ = k;
  }
  std::int64_t num_issues() const { return issues_; }

  std::int64_t rank() const override { return recording_.rank(); }
  std::int64_t size() const override { return recording_.size(); }
  std::string backend() const override { return recording_.backend(); }

  std::unique_ptr<comm::Pending> all_gather(std::vector<at::Tensor>& outs,
                                            std::vector<at::Tensor>& ins,
                                            const std::string& label) override {
    check_issue();
    return wrap(recording_.all_gather(outs, ins, label));
  }
  std::unique_ptr<comm::Pending> reduce_scatter(
      at::Tensor& out, at::Tensor& in, comm::Reduction reduction,
      const std::string& label) override {
    check_issue();
    check_values({in});
    return wrap(recording_.reduce_scatter(out, in, reduction, label));
  }
  std::unique_ptr<comm::Pending> reduce_scatter_coalesced(
      std::vector<at::Tensor>& outs, std::vector<at::Tensor>& ins,
      comm::Reduction reduction, const std::string& label) override {
    check_issue();
    check_values(ins);
    return wrap(
        recording_.reduce_scatter_coalesced(outs, ins, reduction, label));
  }
  std::unique_ptr<comm::Pending> all_reduce(at::Tensor& tensor,
                                            comm::Reduction reduction,
                                            const std::string& label) override {
    check_issue();
    check_values({tensor});
    return wrap(recording_.all_reduce(tensor, reduction, label));
  }
  std::unique_ptr<comm::Pending> all_to_all(at::Tensor& out, at::Tensor& in,
                                            const std::string& label) override {
    check_issue();
    return wrap(recording_.all_to_all(out, in, label));
  }
  std::vector<std::int64_t> from_rank_zero(std::vector<std::int64_t> values,
                                           const std::string& label) override {
    const device::UnobservedAllocations unobserved;
    return exchange_.broadcast(rank(), values, label);
  }

 private:
  struct State {
    std::int64_t waits = 0;
    std::int64_t skipped = -1;
  };

  class ForgetfulPending final : public comm::Pending {
   public:
    ForgetfulPending(std::unique_ptr<comm::Pending> pending,
                     std::shared_ptr<State> state)
        : pending_(std::move(pending)), state_(std::move(state)) {}
    void wait() override {
      if (state_->waits++ != state_->skipped) pending_->wait();
    }
    void abandon() override { pending_->abandon(); }

   private:
    std::unique_ptr<comm::Pending> pending_;
    std::shared_ptr<State> state_;
  };

  void check_issue() {
    if (issues_++ == failing_) throw std::runtime_error("no route to host");
  }
  void check_values(const std::vector<at::Tensor>& sent) const {
    if (!checks_values) return;
    const device::UnobservedAllocations unobserved;
    for (const auto& tensor : sent) {
      if (tensor.isnan().any().item<bool>()) {
        throw std::runtime_error("NaN is sent");
      }
    }
  }
  std::unique_ptr<comm::Pending> wrap(std::unique_ptr<comm::Pending> pending) {
    return std::make_unique<ForgetfulPending>(std::move(pending), state_);
  }

  Exchange& exchange_;
  comm::RecordingCollectives recording_;
  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::int64_t issues_ = 0;
  std::int64_t failing_ = -1;
};

}  // namespace lowtide::shard
