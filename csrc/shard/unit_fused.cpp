// The part of Unit for gradients that are summed in place.
#include "base/trace.h"
#include "shard/root.h"
#include "shard/unit.h"

#include <ATen/core/LegacyTypeDispatch.h>

namespace lowtide::shard {

void Unit::fuse_gradients(const std::vector<bool>& fused) {
  bool changed = false;
  for (std::size_t i = 0; i < infos_.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    const bool wanted = i < fused.size() && fused[i];
    changed = changed || gradients_.parameter(index).fused != wanted;
    gradients_.fuse(index, wanted);
  }
  fused_uses_.resize(infos_.size());
  if (!changed || shards_.empty()) {
    return;  // attach plans
  }
  if (root_) {
    root_->replan(*this);
  } else {
    plan_gradients(GradientRing::bytes_for(GradientRing::kDefaultBudget,
                                           gradients_.wire_bytes()));
  }
}

bool Unit::on_product(std::int32_t i, const at::Tensor& grad_output,
                      const at::Tensor& input, Obstacle obstacle) {
  auto& parameter = gradients_.parameter(i);
  if (parameter.lane < 0) {
    return true;  // frozen since its forward: nobody wants it
  }
  if (!gradients_.in_place(i)) {
    return false;
  }
  auto& uses = fused_uses_[static_cast<std::size_t>(i)];
  switch (obstacle) {
    case Obstacle::hooks:
      ++uses.hooks;
      return false;
    case Obstacle::asked_for:
      ++uses.asked_for;
      return false;
    case Obstacle::recorded:
      ++uses.recorded;
      return false;
    case Obstacle::none:
      break;
  }
  const base::TraceRange trace("lowtide::weight_gradient", *name_);
  root_->open_backward();
  begin_backward();
  if (parameter.added) {
    ++uses.repeated;
    return false;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (gradients_.sync()) {
    auto& stream = root_->stream();
    if (!stream.contains(gradients_)) {
      stream.append(gradients_);
    }
    stream.add_in_place(gradients_, i, [&](GradientSlab& slab) {
      slab.add_product(i, grad_output, input);
    });
  } else {
    gradients_.slab(i).add_product(i, grad_output, input);
    parameter.added = true;
  }
  ++uses.added;
  return true;
}

at::Tensor Unit::open_gradient(std::int32_t i) {
  if (!gradients_.in_place(i)) {
    return {};
  }
  root_->open_backward();
  begin_backward();
  const auto inner = buffers_.slice(static_cast<std::size_t>(i)).inner;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor opened;
  const auto open = [&](GradientSlab& slab) {
    opened = slab.whole(i, inner);
    if (opened.defined() && !slab.touched(i)) {
      opened.zero_();
      slab.touch(i);
    }
  };
  if (gradients_.sync()) {
    auto& stream = root_->stream();
    if (!stream.contains(gradients_)) {
      stream.append(gradients_);
    }
    stream.add_in_place(gradients_, i, open);
  } else {
    open(gradients_.slab(i));
    gradients_.parameter(i).added = true;
  }
  return opened;
}

}  // namespace lowtide::shard
