// The part of Unit that reacts to autograd.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/trace.h"
#include "shard/root.h"
#include "shard/unit.h"

namespace lowtide::shard {

bool Unit::needs_gather_in_backward() const {
  return unshard_in_backward && (ever_saved_ || !leaf_module);
}

void Unit::on_output_gradient() {
  const base::TraceRange trace("lowtide::pre_backward", *name_);
  root_->open_backward();
  begin_backward();
  if (needs_gather_in_backward()) {
    gather();
  }
  prefetched_ = false;
  if (!output_gradient_) {
    output_gradient_ = true;
    prefetch_for_backward();
    // After the gather, which must not wait for other units' gradients.
    root_->stream().expects(gradients_);
    open_main_gradients();
  }
  if (needs_gather_in_backward()) {
    wait_for_gather();
    show_full();
  }
}

void Unit::prefetch_for_backward() {
  Unit* next = root_->enter_backward(*this);
  if (!backward_prefetch.empty()) {
    for (const auto& other : backward_prefetch) {
      if (const auto unit = other.lock()) prefetch(*unit);
    }
    return;
  }
  if (next == nullptr || !next->needs_gather_in_backward()) {
    return;
  }
  next_in_backward_ = next;
  const auto& order = gradients_.trainable();
  std::int64_t elements = 0;
  for (const auto i : order) {
    elements += gradients_.parameter(i).numel;
  }
  gather_point_.begin(elements, elements_to_cover(*next));
  prefetch_when_due(order.begin());
}

// Other calls of the module or the units inside it take their own time before
// its gradients come.
std::int64_t Unit::elements_to_cover(const Unit& next) const {
  const bool gradients_come_now =
      !encloses_units && !rows_ &&
      static_cast<std::int64_t>(open_calls_.size()) + calls_without_inputs_ <=
          1;
  return elements_that_cover(next.buffers_.gathered_bytes(),
                             next.groups_.gather->size(),
                             gradients_come_now ? output_rows_ : 0);
}

void Unit::prefetch_when_due(
    std::vector<std::int32_t>::const_iterator next_gradient) {
  if (next_gradient == gradients_.trainable().end() ||
      gather_point_.reached(gradients_.parameter(*next_gradient).numel)) {
    prefetch(*std::exchange(next_in_backward_, nullptr));
  }
}

void Unit::begin_backward() {
  if (in_backward_) {
    return;
  }
  in_backward_ = true;
  capture_ = memory_->runtime().capture();
  output_gradient_ = false;
  nested_calls_done_ = 0;
  gradients_.begin(gradient_sync);
  gradients_.on_landed = nullptr;
  if (gradient_sync && has_gradient_hooks()) {
    gradients_.on_landed = [this] { publish_gradients(); };
  }
}

void Unit::on_parameter_gradient(std::int32_t i, at::Tensor gradient) {
  root_->open_backward();
  begin_backward();
  if (!wants_gradient(i)) {
    return;
  }
  gradient = what_main_gradient_lacks(i, std::move(gradient));
  if (gradient.defined()) {
    if (gradient.key_set().has(c10::DispatchKey::Python) && view_) {
      gradient = view_->local_gradient(i, gradient);
    }
    // Here and not where it is copied: memory comes from compute's pool.
    gradient = gradient.layout() == at::kStrided ? gradient.contiguous()
                                                 : gradient.to_dense();
    gradient = rank_major(i, std::move(gradient));
  }
  if (gradients_.sync()) {
    if (!root_->stream().contains(gradients_)) {
      root_->stream().append(gradients_);
    }
    root_->stream().accept(gradients_, i, std::move(gradient),
                           root_->nested_backward());
  } else if (gradient.defined()) {
    gradients_.accumulate(i, std::move(gradient));
  }
  if (next_in_backward_ != nullptr) {
    gather_point_.came(gradients_.parameter(i).numel);
    const auto& order = gradients_.trainable();
    prefetch_when_due(std::next(std::find(order.begin(), order.end(), i)));
  }
}

// Of a contiguous gradient whose parameter is split along another dimension
// than the first: every rank's part, one after the other.
at::Tensor Unit::rank_major(std::int32_t i, at::Tensor gradient) const {
  const auto& info = infos_[static_cast<std::size_t>(i)];
  const auto size = groups_.gather->size();
  if (info.shard_dim == 0 || size == 1) {
    return gradient;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return gradient.view(info.split(size)).transpose(0, 1).contiguous();
}

void Unit::on_inputs_done(const torch::autograd::Node* node) {
  const base::TraceRange trace("lowtide::post_backward", *name_);
  root_->open_backward();
  if (next_in_backward_ != nullptr) {  // not all gradients came
    prefetch(*std::exchange(next_in_backward_, nullptr));
  }
  output_gradient_ = false;
  const bool nested = root_->nested_backward();
  if (nested) {
    ++nested_calls_done_;
  }
  bool more_to_come =
      calls_without_inputs_ > 0 || calls_without_grad_ > nested_calls_done_;
  const auto is_over = [&](const WeakNodePtr& weak, bool open) {
    const auto call = weak.lock();
    if (!call || call.get() == node) {
      if (call) done_now_.push_back(weak);
      return true;
    }
    // Other calls count if this backward reaches them; of the outer graph a
    // nested backward only knows that they are open.
    more_to_come |= nested ? open : in_current_backward(call.get());
    return false;
  };
  std::erase_if(open_calls_,
                [&](const auto& weak) { return is_over(weak, true); });
  std::erase_if(done_before_,
                [&](const auto& weak) { return is_over(weak, false); });
  if (!more_to_come) {
    finish_backward();
  }
}

// All gradients of this unit have been seen, and nobody reads its parameters.
void Unit::finish_backward() {
  if (encloses_units) {
    return;
  }
  gradients_.add_small();
  if (gradients_.sync() && root_->stream().contains(gradients_)) {
    root_->stream().seal(gradients_);
  }
  if (reshard_after_backward && state() == UnitState::unsharded) {
    if (shown_ && view_) {
      view_->show_shards();
    }
    shown_ = false;
    buffers_.release();
    state_.on(UnitEvent::seal);
  }
}

std::vector<at::Tensor> Unit::wrap_gradients(
    const std::vector<std::int32_t>& parameters,
    const std::vector<at::Tensor>& locals) {
  return view_ ? view_->wrap_gradients(parameters, locals) : locals;
}

void Unit::publish_gradients() {
  if (!gradients_.sharded().prepared()) {
    return;
  }
  std::vector<std::int32_t> used;
  for (const auto i : gradients_.trainable()) {
    if (gradients_.used_by_any_rank(i)) {
      used.push_back(i);
    }
  }
  std::sort(used.begin(), used.end());
  gradients_.sharded().publish(
      used, [this](const auto& parameters, const auto& locals) {
        return wrap_gradients(parameters, locals);
      });
}

// [Note: Hooks on gradients]
// A post-accumulate hook, an optimizer in backward, wants its gradient as soon
// as it is there: such a unit lands when its last chunk has left.  All others
// land when their slots are needed and become `.grad` at the end.
bool Unit::has_gradient_hooks() const {
  return std::any_of(shards_.begin(), shards_.end(), [](const auto& shard) {
    return shard.requires_grad() &&
           torch::autograd::impl::post_acc_grad_hooks(shard) != nullptr;
  });
}

void Unit::end_backward(bool more_backwards) {
  if (in_backward_ && gradients_.sync()) {
    publish_gradients();
  }
  for (std::size_t i = 0; i < main_gradients_.size(); ++i) {
    close_main_gradient(static_cast<std::int32_t>(i));
  }
  if (in_backward_) {
    gradients_.end();
  }
  in_backward_ = output_gradient_ = false;
  next_in_backward_ = nullptr;
  calls_without_grad_ = nested_calls_done_ = 0;
  if (!more_backwards) {
    calls_without_inputs_ = 0;
  }
  const auto expired = [](const WeakNodePtr& call) { return call.expired(); };
  std::erase_if(open_calls_, expired);
  std::move(done_now_.begin(), done_now_.end(),
            std::back_inserter(done_before_));
  done_now_.clear();
  std::erase_if(done_before_, expired);
  if (state() == UnitState::reducing) {
    state_.on(UnitEvent::drain);
  }
  if (reshard_after_backward) {
    reshard();
  }
}

}  // namespace lowtide::shard
