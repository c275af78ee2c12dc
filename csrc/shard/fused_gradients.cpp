#include "shard/fused_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/trace.h"

namespace lowtide::shard {

FusedGradients::FusedGradients(UnitName unit, ParameterInfos infos,
                               const memory::FlatLayout& layout,
                               UnitGradients& gradients,
                               std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      infos_(std::move(infos)),
      layout_(layout),
      gradients_(gradients),
      memory_(std::move(memory)) {}

bool FusedGradients::choose(const std::vector<bool>& fused) {
  bool changed = false;
  for (std::size_t k = 0; k < infos_.size(); ++k) {
    const auto i = static_cast<std::int32_t>(k);
    const bool wanted = k < fused.size() && fused[k];
    changed = changed || gradients_.parameter(i).fused != wanted;
    gradients_.fuse(i, wanted);
  }
  uses_.resize(infos_.size());
  return changed;
}

void FusedGradients::list(const ParameterLeaves& leaves) {
  listed_.clear();
  for (std::size_t k = 0; k < leaves.full().size(); ++k) {
    const auto i = static_cast<std::int32_t>(k);
    const auto& node = leaves.nodes()[k];
    if (node && gradients_.parameter(i).fused) {
      listed_.emplace_back(leaves.full()[k], leaves.receiver(), i, node);
    }
  }
}

std::int64_t FusedUses::unexplained() const {
  auto left = unseen;
  for (const auto& [why, calls] : refused) left -= calls;
  return std::max<std::int64_t>(0, left);
}

void FusedGradients::refuse(std::int32_t i, const std::string& why) {
  ++uses_.at(static_cast<std::size_t>(i)).refused[why];
}

void FusedGradients::begin_backward() {
  capture_ = memory_->runtime().capture();
}

// --- products ---------------------------------------------------------------

bool FusedGradients::admits(std::int32_t i, Obstacle obstacle) {
  auto& parameter = gradients_.parameter(i);
  const bool again = parameter.product == Product::added;
  if (!again) parameter.product = Product::offered;
  auto& uses = uses_[static_cast<std::size_t>(i)];
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
  uses.repeated += again ? 1 : 0;
  return !again;
}

void FusedGradients::add_product(GradientStream* stream, std::int32_t i,
                                 const at::Tensor& grad_output,
                                 const at::Tensor& input) {
  const base::TraceRange trace("lowtide::weight_gradient", *unit_);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (stream != nullptr) {
    stream->add_in_place(gradients_, i, [&](GradientSlab& slab) {
      slab.add_product(i, grad_output, input);
    });
  } else {
    gradients_.slab(i).add_product(i, grad_output, input);
    gradients_.parameter(i).product = Product::added;
  }
  ++uses_[static_cast<std::size_t>(i)].added;
}

// A graph of the compiled code alone would run again without its call.
void FusedGradients::require_host(std::int32_t i) const {
  const auto who = base::concat("parameter '", infos_.of(i).name, "'");
  if (!gradients_.in_place(i)) {
    throw Error(base::error_text(
        who, "its gradient in blocks of rows, from the loss that reads them",
        "a compiled call of its layer",
        "Call the layer's module only inside lowtide.losses, or shard it with "
        "grads=\"exact\"."));
  }
  if (memory_->runtime().capture() != capture_) {
    throw Error(base::error_text(
        who,
        "compiled code whose backward runs on the host in every step, or a "
        "CUDA graph of the whole step",
        "a CUDA graph of the compiled backward",
        "Compile it without mode=\"reduce-overhead\" (CUDA graph trees), or "
        "shard it with grads=\"exact\"."));
  }
}

// --- main gradients ---------------------------------------------------------

at::Tensor FusedGradients::main_gradient(std::int32_t i) {
  if (!gradients_.in_place(i) || !gradients_.slab(i).gapless(i)) {
    return {};
  }
  const auto k = static_cast<std::size_t>(i);
  const auto& slice = layout_[k];
  main_gradients_.resize(infos_.size());
  auto& main = main_gradients_[k];
  if (!main) {
    const auto dtype = infos_[k].reduce_dtype;
    RepointedStorage bytes(memory_->runtime().device(),
                           slice.rows * slice.inner * itemsize(dtype));
    bytes.set_read_error(read_error(*unit_, infos_[k].name + ".main_grad"));
    auto tensor =
        bytes.view(dtype, {slice.rows, slice.inner}, {slice.inner, 1});
    main = std::make_unique<MainGradient>(
        MainGradient{std::move(bytes), std::move(tensor)});
  }
  return main->tensor;
}

void FusedGradients::open_main_gradients(GradientStream* stream) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t k = 0; k < main_gradients_.size(); ++k) {
    const auto i = static_cast<std::int32_t>(k);
    auto* main = main_gradients_[k].get();
    if (main == nullptr || main->open || !gradients_.in_place(i) ||
        gradients_.parameter(i).pieces_written > 0) {
      continue;
    }
    if (stream != nullptr) {
      stream->make_room(gradients_, i);
    }
    auto& slab = gradients_.slab(i);
    const auto whole = slab.whole(i, layout_[k].inner);
    main->bytes.bind(whole.mutable_data_ptr(),
                     static_cast<std::int64_t>(whole.nbytes()));
    main->open = true;
    if (!slab.touched(i)) {
      whole.zero_();
    }
  }
}

void FusedGradients::close_main_gradient(std::size_t i) {
  if (i < main_gradients_.size() && main_gradients_[i]) {
    main_gradients_[i]->bytes.unbind();
    main_gradients_[i]->open = false;
  }
}

void FusedGradients::close_main_gradients() {
  for (std::size_t i = 0; i < main_gradients_.size(); ++i) {
    close_main_gradient(i);
  }
}

at::Tensor FusedGradients::what_is_missing(std::int32_t i, at::Tensor gradient,
                                           ModuleView* view) {
  const auto k = static_cast<std::size_t>(i);
  auto& parameter = gradients_.parameter(i);
  if (gradients_.in_place(i) && gradient.defined() &&
      parameter.product == Product::none) {
    ++uses_[k].unseen;
  }
  if (k >= main_gradients_.size() || !main_gradients_[k] || view == nullptr) {
    return gradient;
  }
  const auto use = view->took_main_gradient(i);
  close_main_gradient(k);
  if (!use.added) {
    return gradient;
  }
  gradients_.slab(i).touch(i);
  parameter.product = Product::added;
  ++uses_[k].added;
  uses_[k].unseen -= gradient.defined() ? 1 : 0;
  return use.zero_out ? gradient : at::Tensor();
}

}  // namespace lowtide::shard
