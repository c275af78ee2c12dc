#include "shard/parameters/parameter_leaves.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "base/check.h"
#include "shard/step_log.h"

namespace lowtide::shard {

bool ParameterLeaves::attach(std::vector<at::Tensor> shards,
                             std::vector<at::Tensor> full,
                             std::unique_ptr<ModuleView> view,
                             std::weak_ptr<BackwardReceiver> receiver) {
  view_ = std::move(view);
  receiver_ = std::move(receiver);
  shards_ = std::move(shards);
  if (std::equal(full.begin(), full.end(), full_.begin(), full_.end(),
                 [](const auto& one, const auto& other) {
                   return one.is_same(other);
                 })) {
    return false;
  }
  full_ = std::move(full);
  nodes_.assign(full_.size(), nullptr);
  for (std::size_t i = 0; i < full_.size(); ++i) {
    install_node(i);
  }
  return true;
}

void ParameterLeaves::detach() {
  view_.reset();
  shards_.clear();
}

void ParameterLeaves::replace_full(std::size_t i, at::Tensor full) {
  full_[i] = std::move(full);
  install_node(i);
  view_->replace_full(static_cast<std::int32_t>(i), full_[i]);
}

void ParameterLeaves::set_gradient_dtype(std::int32_t i,
                                         std::optional<at::ScalarType> dtype) {
  if (const auto& node = nodes_[static_cast<std::size_t>(i)]) {
    shard::set_gradient_dtype(*node, dtype);
  }
}

// Once a parameter, for forwards before and after another plan, whose gradients
// may be summed in one backward.
void ParameterLeaves::install_node(std::size_t i) {
  if (torch::autograd::isDifferentiableType(full_[i].scalar_type())) {
    nodes_[i] = install_gradient_node(full_[i], receiver_,
                                      static_cast<std::int32_t>(i));
    if (infos_[i].gradient_as_computed) {
      shard::set_gradient_dtype(*nodes_[i], infos_[i].dtype_on_arrival());
    }
  }
}

// --- what the modules show --------------------------------------------------

void ParameterLeaves::show_full() {
  if (!shown_ && view_) {
    follow_shards();
    view_->show_full();
  }
  shown_ = true;
}

void ParameterLeaves::show_shards() {
  if (shown_ && view_) {
    view_->show_shards();
  }
  shown_ = false;
}

void ParameterLeaves::follow_shards() {
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    const bool trainable = shards_[i].requires_grad();
    if (full_[i].requires_grad() != trainable) {
      full_[i].set_requires_grad(trainable);
    }
  }
}

bool ParameterLeaves::is_frozen(std::size_t i) const {
  return !(shown_ ? full_ : shards_)[i].requires_grad();
}

std::vector<bool> ParameterLeaves::trainable() const {
  std::vector<bool> trainable;
  trainable.reserve(shards_.size());
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    trainable.push_back(shards_[i].requires_grad() ||
                        (shown_ && full_[i].requires_grad()));
  }
  return trainable;
}

bool ParameterLeaves::have_gradient_hooks() const {
  return std::any_of(shards_.begin(), shards_.end(), [](const auto& shard) {
    return shard.requires_grad() &&
           torch::autograd::impl::post_acc_grad_hooks(shard) != nullptr;
  });
}

std::uint64_t ParameterLeaves::frozen_hash() const {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (is_frozen(i)) hash = mix(hash, i);
  }
  return hash;
}

std::string ParameterLeaves::frozen_text() const {
  std::vector<std::string> frozen;
  for (std::size_t i = 0; i < shards_.size(); ++i) {
    if (is_frozen(i)) {
      frozen.push_back(base::concat("'", infos_[i].name, "'"));
    }
  }
  return frozen.empty() ? "none frozen"
                        : base::concat("frozen: ", base::listed(frozen));
}

// --- what graphs have of them -----------------------------------------------

void ParameterLeaves::follow_current_stream() {
  for (const auto& node : nodes_) {
    if (node) {
      shard::follow_current_stream(*node);
    }
  }
}

// Edges of graphs keep a parameter's node alive.
void ParameterLeaves::begin_uses() {
  uses_before_.clear();
  for (const auto& node : nodes_) {
    uses_before_.push_back(static_cast<std::int64_t>(node.use_count()));
  }
}

std::uint64_t ParameterLeaves::used_hash() const {
  std::uint64_t hash = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const auto uses = static_cast<std::int64_t>(nodes_[i].use_count());
    if (uses <= 1) continue;
    const bool now = i >= uses_before_.size() || uses > uses_before_[i];
    hash = mix(hash, 2 * i + (now ? 1 : 0));
  }
  return hash;
}

void ParameterLeaves::count_references(const ParameterBuffers& buffers) {
  references_.clear();
  for (std::size_t i = 0; i < full_.size(); ++i) {
    references_.emplace_back(full_[i].use_count(),
                             buffers.storage(i).use_count());
  }
}

void ParameterLeaves::look_for_saved(const ParameterBuffers& buffers) {
  ever_saved_ = ever_saved_ || any_saved(buffers);
}

bool ParameterLeaves::any_saved(const ParameterBuffers& buffers) const {
  for (std::size_t i = 0; i < full_.size(); ++i) {
    if (static_cast<std::int64_t>(full_[i].use_count()) >
            references_[i].first ||
        buffers.storage(i).use_count() > references_[i].second) {
      return true;
    }
  }
  return false;
}

}  // namespace lowtide::shard
