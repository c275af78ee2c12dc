// The part of Unit that says which parameters' gradients it expects.
#include <torch/csrc/autograd/variable.h>

#include <numeric>
#include <utility>

#include "shard/unit.h"

namespace lowtide::shard {

void Unit::plan_gradients(std::int64_t budget_bytes) {
  if (gradient_order_.size() != shards_.size()) {
    // Backward completes a module's parameters roughly in reverse.
    gradient_order_.resize(shards_.size());
    std::iota(gradient_order_.rbegin(), gradient_order_.rend(), 0);
  }
  gradients_.plan(trainable(), gradient_order_, budget_bytes);
  list_fused();
}

void Unit::expect_gradients(std::vector<std::int32_t> order) {
  gradient_order_ = std::move(order);
}

void Unit::extend_plan(std::int64_t budget_bytes) {
  gradients_.extend_plan(trainable(), gradient_order_, budget_bytes);
}

// Makes autograd deliver gradients here.  Once a parameter, for forwards before
// and after another plan, whose gradients may be summed in one backward.
void Unit::install_nodes() {
  nodes_.assign(full_.size(), nullptr);
  for (std::size_t i = 0; i < full_.size(); ++i) {
    install_node(i);
  }
  written_.watch(full_, nodes_);
}

void Unit::install_node(std::size_t i) {
  if (torch::autograd::isDifferentiableType(full_[i].scalar_type())) {
    nodes_[i] = install_gradient_node(full_[i], weak_from_this(),
                                      static_cast<std::int32_t>(i));
  }
}

// For compiled code, which knows a weight by its storage.
void Unit::list_fused() {
  listed_.clear();
  for (std::size_t i = 0; i < full_.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    if (nodes_[i] && gradients_.parameter(index).fused) {
      listed_.emplace_back(full_[i], weak_from_this(), index, nodes_[i]);
    }
  }
}

// [Note: Frozen and shown]
// `requires_grad` is changed at what the module shows.  As in FSDP2, a full
// parameter takes it over from its shard whenever it begins to be shown; what
// changes while it is shown counts until it is not.
void Unit::follow_shards() {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const bool trainable = shards_[i].requires_grad();
    if (full_[i].requires_grad() != trainable) {
      full_[i].set_requires_grad(trainable);
    }
  }
}

bool Unit::may_want_gradient(std::size_t i) const {
  return shards_[i].requires_grad() || (shown_ && full_[i].requires_grad());
}

bool Unit::plan_lacks_any() const {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (may_want_gradient(i) &&
        gradients_.parameter(static_cast<std::int32_t>(i)).lane < 0) {
      return true;
    }
  }
  return false;
}

void Unit::follow_current_stream() {
  for (const auto& node : nodes_) {
    if (node) {
      shard::follow_current_stream(*node);
    }
  }
}

std::vector<bool> Unit::trainable() const {
  std::vector<bool> trainable;
  trainable.reserve(shards_.size());
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    trainable.push_back(may_want_gradient(i));
  }
  return trainable;
}

// Edges of graphs keep a parameter's node alive.
std::uint64_t Unit::used_hash() const {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].use_count() > 1) hash = mix(hash, i);
  }
  return hash;
}

bool Unit::is_frozen(std::size_t i) const {
  return !(shown_ ? full_ : shards_)[i].requires_grad();
}

// Not if it has been frozen since its forward: AccumulateGrad ignores it, too.
bool Unit::wants_gradient(std::int32_t i) const {
  return gradients_.parameter(i).lane >= 0 &&
         !is_frozen(static_cast<std::size_t>(i));
}

}  // namespace lowtide::shard
