#include "shard/arriving_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace lowtide::shard {

ArrivingGradients::ArrivingGradients(ParameterInfos infos,
                                     ParameterLeaves& leaves,
                                     UnitGradients& gradients)
    : infos_(std::move(infos)), leaves_(leaves), gradients_(gradients) {}

void ArrivingGradients::watch_leaves() {
  written_.watch(leaves_.full(), leaves_.nodes());
  watch_shards();
}

void ArrivingGradients::watch_shards() {
  unwatch_shards();
  const auto* const view = leaves_.view();
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    observed_.emplace_back(
        std::vector<at::Tensor>{leaves_.shards()[i], leaves_.full()[i]},
        view != nullptr ? view->clears_gradients() : nullptr,
        view != nullptr ? view->misses_gradients() : nullptr);
    observed_.back().set_taken(taken_);
  }
  observe();
}

void ArrivingGradients::unwatch_shards() {
  drop_cleared();
  observed_.clear();
}

bool ArrivingGradients::wants(std::int32_t i) const {
  return gradients_.parameter(i).lane >= 0 &&
         !leaves_.is_frozen(static_cast<std::size_t>(i));
}

// --- on their way in --------------------------------------------------------

// AccumulateGrad adds in the gradient's dtype.  Where that is the slab's, too,
// the slab is what it would have added to.
void ArrivingGradients::deliver(GradientStream* stream, std::int32_t i,
                                at::Tensor gradient, bool hold) {
  auto written = written_.take(i);
  if (written.defined() && gradient.defined()) {
    const bool in_slab = !gradients_.sync() || gradients_.accumulating();
    if (in_slab && written.scalar_type() == infos_.of(i).reduce_dtype) {
      pass_on(stream, i, std::move(written), hold);
    } else {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      gradient = at::add(written, gradient);
    }
  } else if (written.defined()) {
    gradient = std::move(written);
  }
  pass_on(stream, i, std::move(gradient), hold);
}

bool ArrivingGradients::has_written() const {
  const auto& trainable = gradients_.trainable();
  return std::any_of(trainable.begin(), trainable.end(),
                     [&](auto i) { return written_.any(i) && wants(i); });
}

void ArrivingGradients::deliver_written(GradientStream* stream, bool hold) {
  for (const auto i : gradients_.trainable()) {
    if (written_.any(i) && wants(i)) {
      pass_on(stream, i, written_.take(i), hold);
    }
  }
}

void ArrivingGradients::pass_on(GradientStream* stream, std::int32_t i,
                                at::Tensor gradient, bool hold) {
  if (gradient.defined()) {
    auto* const view = leaves_.view();
    const bool of_python = gradient.key_set().has(c10::DispatchKey::Python);
    if ((of_python || infos_.of(i).summed_before) && view != nullptr) {
      gradient = view->local_gradient(i, gradient);
    }
    // Here and not where it is copied: memory comes from compute's pool.
    gradient = gradient.layout() == at::kStrided ? gradient.contiguous()
                                                 : gradient.to_dense();
    gradient = rank_major(i, std::move(gradient));
  }
  if (stream != nullptr) {
    stream->accept(gradients_, i, std::move(gradient), hold);
  } else if (gradient.defined()) {
    gradients_.accumulate(i, std::move(gradient));
  }
}

// Of a contiguous gradient whose parameter is split along another dimension
// than the first: every rank's part, one after the other.
at::Tensor ArrivingGradients::rank_major(std::int32_t i,
                                         at::Tensor gradient) const {
  const auto& info = infos_.of(i);
  const auto ranks = gradients_.group().size();
  if (info.shard_dim == 0 || ranks == 1) {
    return gradient;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return gradient.view(info.split(ranks)).transpose(0, 1).contiguous();
}

// The next one will be written where the one before still is, unless that has
// gone to the slab that both are added to.
void ArrivingGradients::on_returned(std::int32_t i, bool idle) {
  written_.returned(i);
  if (idle) {
    drop_cleared();
  }
  const bool waits =
      gradients_.accumulating() && idle && wants(i) && gradients_.touched(i);
  const auto& full = leaves_.full()[static_cast<std::size_t>(i)];
  if (waits && written_.any(i) &&
      full.scalar_type() == infos_.of(i).reduce_dtype) {
    gradients_.begin(/*sync=*/false);
    pass_on(nullptr, i, written_.take(i), /*hold=*/false);
    gradients_.end();
    observe();
  }
}

void ArrivingGradients::require_split_backward_complete() {
  const auto missing = written_.take_missing();
  if (missing < 0 || !wants(missing)) {
    return;
  }
  throw Error(base::error_text(
      base::concat("parameter '", infos_.of(missing).name, "'"),
      "its gradient from the backward of the weights, which a zero-bubble "
      "schedule runs apart from that of the input",
      "none: the schedule was shown the shards when it split the backward",
      "Shard the stage with reshard_after_forward=False."));
}

void ArrivingGradients::expect_as_computed() {
  for (const auto i : gradients_.trainable()) {
    if (infos_.of(i).gradient_as_computed &&
        (gradients_.sync() || gradients_.touched(i) || written_.any(i))) {
      leaves_.set_gradient_dtype(i, {});
    }
  }
}

void ArrivingGradients::expect_as_reduced() {
  for (const auto i : gradients_.trainable()) {
    if (infos_.of(i).gradient_as_computed) {
      leaves_.set_gradient_dtype(i, infos_.of(i).dtype_on_arrival());
    }
  }
}

// --- what waits -------------------------------------------------------------

// While gradients wait; what is cleared during a backward keeps what it has.
void ArrivingGradients::observe() {
  const bool observes = gradients_.waiting();
  if (!observes && !observes_) {
    return;
  }
  observes_ = observes;
  for (auto& gradient : observed_) {
    gradient.observe(observes);
  }
}

void ArrivingGradients::drop_cleared() {
  if (!observes_) {
    return;
  }
  for (std::size_t k = 0; k < observed_.size(); ++k) {
    if (observed_[k].cleared()) {
      drop(static_cast<std::int32_t>(k));
    }
  }
}

void ArrivingGradients::taken(bool taken) {
  if (std::exchange(taken_, taken) == taken) {
    return;
  }
  for (auto& gradient : observed_) {
    gradient.set_taken(taken);
  }
}

void ArrivingGradients::drop(std::int32_t i) {
  written_.take(i);
  gradients_.drop(i);
}

void ArrivingGradients::clear() {
  written_.clear();
  observe();
}

}  // namespace lowtide::shard
