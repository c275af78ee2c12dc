// The part of Unit for gradients that are summed in place.
#include "base/check.h"
#include "base/trace.h"
#include "shard/policy.h"
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
    plan_gradients(ring_bytes(kDefaultRingBudget, gradients_.wire_bytes()));
  }
}

bool Unit::on_product(std::int32_t i, const at::Tensor& grad_output,
                      const at::Tensor& input, Obstacle obstacle) {
  if (!wants_gradient(i)) {
    return true;
  }
  if (!gradients_.in_place(i)) {
    return false;
  }
  root_->open_backward();
  begin_backward();
  auto& parameter = gradients_.parameter(i);
  parameter.offered = true;
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
    case Obstacle::elsewhere:
      ++uses.elsewhere;
      return false;
    case Obstacle::unwanted:  // the node has not been asked for it then
    case Obstacle::none:
      break;
  }
  if (parameter.added) {
    ++uses.repeated;
    return false;
  }
  add_product(i, grad_output, input);
  return true;
}

void Unit::on_only_product(std::int32_t i, const at::Tensor& grad_output,
                           const at::Tensor& input) {
  if (!wants_gradient(i)) {
    return;
  }
  auto& parameter = gradients_.parameter(i);
  if (!gradients_.in_place(i)) {
    throw Error(base::error_text(
        base::concat("parameter '", parameter.name, "'"),
        "its gradient in blocks of rows, from the loss that reads them",
        "a compiled call of its layer",
        "Call the layer's module only inside lowtide.losses, or shard it with "
        "grads=\"exact\"."));
  }
  root_->open_backward();
  begin_backward();
  require_host(i);
  parameter.offered = true;
  add_product(i, grad_output, input);
}

// A graph of the compiled code alone would run again without this call.
void Unit::require_host(std::int32_t i) const {
  if (memory_->runtime().capture() == capture_) {
    return;
  }
  throw Error(base::error_text(
      base::concat("parameter '", gradients_.parameter(i).name, "'"),
      "compiled code whose backward runs on the host in every step, or a CUDA "
      "graph of the whole step",
      "a CUDA graph of the compiled backward",
      "Compile it without mode=\"reduce-overhead\" (CUDA graph trees), or "
      "shard it with grads=\"exact\"."));
}

void Unit::add_product(std::int32_t i, const at::Tensor& grad_output,
                       const at::Tensor& input) {
  const base::TraceRange trace("lowtide::weight_gradient", *name_);
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
    gradients_.parameter(i).added = true;
  }
  ++fused_uses_[static_cast<std::size_t>(i)].added;
}

// [Note: Main gradients]
// The layers read `main_grad` in forward already and write to it in backward,
// some before the weight's other uses are done: the tensor is there all the
// time, its bytes for the unit's backward.
at::Tensor Unit::main_gradient(std::int32_t i) {
  if (!gradients_.in_place(i)) {
    return {};
  }
  const auto& info = infos_[static_cast<std::size_t>(i)];
  const auto inner = buffers_.slice(static_cast<std::size_t>(i)).inner;
  if (!gradients_.slab(i).gapless(i)) {
    return {};
  }
  main_gradients_.resize(infos_.size());
  auto& main = main_gradients_[static_cast<std::size_t>(i)];
  if (!main) {
    RepointedStorage bytes(memory_->runtime().device(),
                           buffers_.slice(static_cast<std::size_t>(i)).rows *
                               inner * itemsize(info.reduce_dtype));
    bytes.set_read_error(read_error(*name_, info.name + ".main_grad"));
    auto tensor = bytes.view(
        info.reduce_dtype,
        {buffers_.slice(static_cast<std::size_t>(i)).rows, inner}, {inner, 1});
    main = std::make_unique<MainGradient>(
        MainGradient{std::move(bytes), std::move(tensor)});
  }
  return main->tensor;
}

void Unit::open_main_gradients() {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t k = 0; k < main_gradients_.size(); ++k) {
    const auto i = static_cast<std::int32_t>(k);
    auto* main = main_gradients_[k].get();
    if (main == nullptr || main->open || !gradients_.in_place(i) ||
        gradients_.parameter(i).pieces_written > 0) {
      continue;
    }
    if (gradients_.sync()) {
      auto& stream = root_->stream();
      if (!stream.contains(gradients_)) {
        stream.append(gradients_);
      }
      stream.make_room(gradients_, i);
    }
    auto& slab = gradients_.slab(i);
    const auto whole = slab.whole(i, buffers_.slice(k).inner);
    main->bytes.bind(whole.mutable_data_ptr(),
                     static_cast<std::int64_t>(whole.nbytes()));
    main->open = true;
    if (!slab.touched(i)) {
      whole.zero_();
    }
  }
}

void Unit::close_main_gradient(std::int32_t i) {
  const auto k = static_cast<std::size_t>(i);
  if (k < main_gradients_.size() && main_gradients_[k]) {
    main_gradients_[k]->bytes.unbind();
    main_gradients_[k]->open = false;
  }
}

// Of a complete gradient, what is not in its slab yet.
at::Tensor Unit::what_main_gradient_lacks(std::int32_t i, at::Tensor gradient) {
  const auto k = static_cast<std::size_t>(i);
  if (gradients_.in_place(i) && gradient.defined() &&
      !gradients_.parameter(i).offered) {
    ++fused_uses_[k].unseen;
  }
  if (k >= main_gradients_.size() || !main_gradients_[k] || !view_) {
    return gradient;
  }
  const auto use = view_->took_main_gradient(i);
  close_main_gradient(i);
  if (!use.added) {
    return gradient;
  }
  gradients_.slab(i).touch(i);
  gradients_.parameter(i).added = true;
  ++fused_uses_[k].added;
  fused_uses_[k].unseen -= gradient.defined() ? 1 : 0;
  return use.zero_out ? gradient : at::Tensor();
}

}  // namespace lowtide::shard
