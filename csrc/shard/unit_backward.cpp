// The part of Unit that reacts to autograd.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/trace.h"
#include "shard/policy.h"
#include "shard/root.h"
#include "shard/unit.h"

namespace lowtide::shard {

bool Unit::needs_gather_in_backward() const {
  return unshard_in_backward && (saved_by_any_ || !leaf_module);
}

void Unit::on_output_gradient() {
  const base::TraceRange trace("lowtide::pre_backward", *name_);
  root_->open_backward();
  begin_backward();
  const bool entered = !std::exchange(output_gradient_, true);
  if (entered) {
    next_in_backward_ = root_->enter_backward(*this);
  }
  if (needs_gather_in_backward()) {
    gather();
  }
  prefetched_ = false;
  if (entered) {
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
  if (!backward_prefetch.empty()) {
    next_in_backward_ = nullptr;
    for (const auto& other : backward_prefetch) {
      if (const auto unit = other.lock()) prefetch(*unit);
    }
    return;
  }
  if (next_in_backward_ == nullptr ||
      !next_in_backward_->needs_gather_in_backward()) {
    next_in_backward_ = nullptr;
    return;
  }
  gradients_come_ = 0;
  gradients_before_next_ = gradients_before(*next_in_backward_);
  if (gradients_before_next_ == 0) {
    gather_next();
  } else if (root_->stream().contains(gradients_)) {
    root_->stream().precede(gradients_, gradients_before_next_,
                            [this] { gather_next(); });
  }
}

void Unit::gather_next() {
  if (auto* next = std::exchange(next_in_backward_, nullptr)) {
    prefetch(*next);
  }
}

// Other calls of the module or the units inside it take their own time before
// its gradients come.
std::size_t Unit::gradients_before(const Unit& next) const {
  const bool gradients_come_now = gradients_.leaves_early() && !rows_;
  std::vector<std::int64_t> elements;
  for (const auto i : gradients_.trainable()) {
    elements.push_back(gradients_.parameter(i).numel);
  }
  return gradients_before_gather(
      elements, elements_that_cover(next.buffers_.gathered_bytes(),
                                    next.groups_.gather->size(),
                                    gradients_come_now ? rows_of_all_ : 0));
}

void Unit::begin_backward() {
  if (in_backward_) {
    return;
  }
  drop_cleared_gradients();
  in_backward_ = true;
  capture_ = memory_->runtime().capture();
  output_gradient_ = false;
  nested_calls_done_ = 0;
  gradients_.begin(gradient_sync);
  gradients_.on_landed = nullptr;
  if (gradient_sync && listened_by_any_) {
    gradients_.on_landed = [this] { publish_gradients(); };
  }
}

void Unit::on_parameter_gradient(std::int32_t i, at::Tensor gradient) {
  root_->open_backward();
  begin_backward();
  if (!wants_gradient(i)) {
    return;
  }
  deliver(i, with_written(i, what_main_gradient_lacks(i, std::move(gradient))));
  ++gradients_come_;
  if (next_in_backward_ != nullptr &&
      gradients_come_ >= gradients_before_next_) {
    if (root_->stream().contains(gradients_)) {
      root_->stream().gather_if_next(gradients_);
    } else {
      gather_next();
    }
  }
}

void Unit::deliver(std::int32_t i, at::Tensor gradient) {
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
}

// AccumulateGrad adds in the gradient's dtype.  Where that is the slab's, too,
// the slab is what it would have added to.
at::Tensor Unit::with_written(std::int32_t i, at::Tensor gradient) {
  auto written = written_.take(i);
  if (!written.defined() || !gradient.defined()) {
    return written.defined() ? written : gradient;
  }
  const bool in_slab = !gradients_.sync() || gradients_.accumulating();
  const auto slab_dtype = infos_[static_cast<std::size_t>(i)].reduce_dtype;
  if (in_slab && written.scalar_type() == slab_dtype) {
    deliver(i, std::move(written));
    return gradient;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::add(written, gradient);
}

void Unit::take_written_gradients() {
  if (!in_backward_ || gradients_.sealed()) {
    return;
  }
  for (const auto i : gradients_.trainable()) {
    if (written_.any(i) && wants_gradient(i)) {
      deliver(i, written_.take(i));
    }
  }
}

// The next one will be written where the one before still is, unless that has
// gone to the slab that both are added to.
void Unit::on_gradient_returned(std::int32_t i) {
  written_.returned(i);
  if (!in_backward_) {
    drop_cleared_gradients();
  }
  const bool waits = gradients_.accumulating() && !in_backward_ &&
                     wants_gradient(i) && gradients_.touched(i);
  if (waits && written_.any(i) &&
      full_[static_cast<std::size_t>(i)].scalar_type() ==
          infos_[static_cast<std::size_t>(i)].reduce_dtype) {
    gradients_.begin(/*sync=*/false);
    deliver(i, written_.take(i));
    gradients_.end();
    observe_gradients();
  }
}

// While gradients wait; what is cleared during a backward keeps what it has.
void Unit::observe_gradients() {
  const bool observes = gradients_.waiting();
  if (!observes && !observes_) {
    return;
  }
  observes_ = observes;
  for (auto& gradient : observed_) {
    gradient.observe(observes);
  }
}

void Unit::drop_cleared_gradients() {
  if (!observes_) {
    return;
  }
  for (std::size_t k = 0; k < observed_.size(); ++k) {
    if (observed_[k].cleared()) {
      drop_waiting_gradient(static_cast<std::int32_t>(k));
    }
  }
}

void Unit::drop_waiting_gradient(std::int32_t i) {
  written_.take(i);
  gradients_.drop(i);
}

void Unit::require_split_backward_complete() {
  const auto missing = written_.take_missing();
  if (missing < 0 || !wants_gradient(missing)) {
    return;
  }
  throw Error(base::error_text(
      base::concat("parameter '", gradients_.parameter(missing).name, "'"),
      "its gradient from the backward of the weights, which a zero-bubble "
      "schedule runs apart from that of the input",
      "none: the schedule was shown the shards when it split the backward",
      "Shard the stage with reshard_after_forward=False."));
}

void Unit::on_recorded_backward(WeakNodePtr result) {
  graphs_.record(std::move(result));
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
  written_.inputs_done();
  output_gradient_ = false;
  const bool nested = root_->nested_backward();
  if (nested) {
    ++nested_calls_done_;
  }
  bool more_to_come = graphs_.recorded() || calls_without_inputs_ > 0 ||
                      calls_without_grad_ > nested_calls_done_;
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
  gather_next();  // chunks of other units are ahead of this one's
}

// All gradients of this unit have been seen, and nobody reads its parameters.
void Unit::finish_backward() {
  if (encloses_units) {
    return;
  }
  take_written_gradients();
  gradients_.add_small();
  if (gradients_.sync() && root_->stream().contains(gradients_)) {
    root_->stream().seal(gradients_);
  }
  if (reshard_after_backward && state() == UnitState::unsharded) {
    buffers_.release();
    if (shown_ && view_) {
      view_->show_shards();
    }
    shown_ = false;
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
// as it is there: such a unit lands when its last chunk has left, also on ranks
// that have no hook, because sums over replicas then leave as well.  All others
// land when their slots are needed and become `.grad` at the end.
bool Unit::has_gradient_hooks() const {
  return std::any_of(shards_.begin(), shards_.end(), [](const auto& shard) {
    return shard.requires_grad() &&
           torch::autograd::impl::post_acc_grad_hooks(shard) != nullptr;
  });
}

void Unit::end_backward(bool more_backwards, bool graph_kept) {
  if (in_backward_ && gradients_.sync()) {
    publish_gradients();
  }
  for (std::size_t i = 0; i < main_gradients_.size(); ++i) {
    close_main_gradient(static_cast<std::int32_t>(i));
  }
  if (in_backward_) {
    gradients_.end();
    observe_gradients();
  }
  in_backward_ = output_gradient_ = false;
  next_in_backward_ = nullptr;
  calls_without_grad_ = nested_calls_done_ = 0;
  if (!more_backwards) {
    calls_without_inputs_ = 0;
  }
  const auto expired = [](const WeakNodePtr& call) { return call.expired(); };
  std::erase_if(open_calls_, expired);
  graphs_.forget_expired();
  if (graph_kept) {
    graphs_.keep(done_now_);
  }
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
