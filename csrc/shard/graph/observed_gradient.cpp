#include "shard/graph/observed_gradient.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/graph_task.h"
#include "shard/graph/autograd_nodes.h"

namespace lowtide::shard {

using torch::autograd::AutogradMeta;

struct ObservedGradient::Seen {
  Clears clears = nullptr;
  Misses misses = nullptr;
  bool observes = false;
  bool cleared = false;
  bool taken = false;
};

struct ObservedGradient::Meta final : AutogradMeta {
  at::Tensor& mutable_grad() override {
    written = written || (seen->observes && !base::in_backward());
    return grad_;
  }

  const at::Tensor& grad() const override {
    if (seen->observes && !seen->cleared && !base::in_backward()) {
      seen->cleared = seen->clears != nullptr && seen->clears();
    }
    if (seen->taken && !grad_.defined() && seen->misses != nullptr &&
        !base::in_backward()) {
      seen->misses();
    }
    return grad_;
  }

  // All that a leaf has.
  void take(AutogradMeta& other) {
    name_ = std::move(other.name_);
    grad_ = std::move(other.grad_);
    grad_accumulator_ = std::move(other.grad_accumulator_);
    fw_grad_ = std::move(other.fw_grad_);
    hooks_ = std::move(other.hooks_);
    cpp_hooks_list_ = std::move(other.cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(other.post_acc_grad_hooks_);
    requires_grad_ = other.requires_grad_;
    output_nr_ = other.output_nr_;
    grad_dtype_ = other.grad_dtype_;
    allow_grad_dtype_mismatch_ = other.allow_grad_dtype_mismatch_;
  }

  static Meta* of(const at::Tensor& leaf) {
    return dynamic_cast<Meta*>(torch::autograd::impl::get_autograd_meta(leaf));
  }

  std::shared_ptr<Seen> seen;
  bool written = false;
};

ObservedGradient::ObservedGradient(const std::vector<at::Tensor>& leaves,
                                   Clears clears, Misses misses)
    : seen_(std::make_shared<Seen>()), leaves_(leaves) {
  seen_->clears = clears;
  seen_->misses = misses;
  for (const auto& leaf : leaves_) {
    auto* meta = Meta::of(leaf);
    if (meta == nullptr) {
      auto made = std::make_unique<Meta>();
      meta = made.get();
      if (auto* before = torch::autograd::impl::get_autograd_meta(leaf)) {
        meta->take(*before);
      }
      leaf.unsafeGetTensorImpl()->set_autograd_meta(std::move(made));
    }
    meta->seen = seen_;
  }
}

void ObservedGradient::observe(bool observe) {
  seen_->observes = observe;
  seen_->cleared = false;
  for (const auto& leaf : leaves_) {
    if (auto* meta = Meta::of(leaf)) meta->written = false;
  }
}

void ObservedGradient::set_taken(bool taken) const { seen_->taken = taken; }

// A leaf may have got other metadata since, when Python swaps tensors.
bool ObservedGradient::cleared() const {
  return seen_->cleared ||
         std::any_of(leaves_.begin(), leaves_.end(), [](const auto& leaf) {
           const auto* meta = Meta::of(leaf);
           return meta != nullptr && meta->written && !meta->grad_.defined();
         });
}

}  // namespace lowtide::shard
