#include "shard/sharded_gradients.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "memory/flat_layout.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

std::int64_t align_up(std::int64_t bytes) {
  return (bytes + memory::kAlignment - 1) / memory::kAlignment *
         memory::kAlignment;
}

std::int64_t slice_bytes(const ShardedGradients::Parameter& parameter) {
  return align_up(parameter.local_numel *
                  static_cast<std::int64_t>(c10::elementSize(parameter.dtype)));
}

}  // namespace

std::int64_t ShardedGradients::generation_bytes(
    const std::vector<std::int32_t>& trainable) const {
  std::int64_t bytes = 0;
  for (const auto i : trainable) {
    bytes += slice_bytes(parameters_[static_cast<std::size_t>(i)]);
  }
  return bytes;
}

void ShardedGradients::set_parameters(std::vector<Parameter> parameters) {
  parameters_ = std::move(parameters);
  slots_.clear();
  slots_.resize(parameters_.size());
  offsets_.assign(parameters_.size(), 0);
}

// [Note: Whose gradient is it]
// A `.grad` counts as ours only while it is the very tensor we set and the
// local tensor inside is the very slice we made.  Anything else (the user
// assigned a tensor, unpickled one, ...) is foreign: results get a fresh slice
// and are added to it through the public operators at the end.
ShardedGradients::Target ShardedGradients::choose(std::size_t i) {
  const at::Tensor& grad = parameters_[i].shard.grad();
  if (!grad.defined()) {
    return Target::fresh;
  }
  const auto wrapped = slots_[i].wrapped.lock();
  auto local = slots_[i].local.lock();
  if (!local || wrapped.get() != grad.unsafeGetTensorImpl()) {
    return Target::foreign;
  }
  slots_[i].flat = at::Tensor(std::move(local)).view({-1});
  return Target::add;
}

void ShardedGradients::prepare(const std::vector<std::int32_t>& trainable) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::int64_t bytes = 0;
  for (const auto p : trainable) {
    const auto i = static_cast<std::size_t>(p);
    slots_[i].target = choose(i);
    if (slots_[i].target == Target::add) {
      continue;
    }
    offsets_[i] = bytes;
    bytes += align_up(
        parameters_[i].local_numel *
        static_cast<std::int64_t>(c10::elementSize(parameters_[i].dtype)));
  }
  if (bytes > 0) {
    generation_ = owning_storage(
        memory_->lease(memory::Category::sharded_gradients, *unit_, bytes),
        bytes);
  }
  for (const auto p : trainable) {
    const auto i = static_cast<std::size_t>(p);
    if (slots_[i].target == Target::add) {
      continue;
    }
    // A rank without rows may have no generation at all.
    slots_[i].flat = parameters_[i].local_numel == 0
                         ? at::Tensor()
                         : flat_view(generation_, parameters_[i].dtype,
                                     offsets_[i], parameters_[i].local_numel);
  }
  prepared_ = true;
}

void ShardedGradients::land(std::int32_t p, std::int64_t begin,
                            const at::Tensor& result) {
  const auto i = static_cast<std::size_t>(p);
  const auto numel =
      std::min(result.numel(), parameters_[i].local_numel - begin);
  if (numel <= 0) {
    return;
  }
  auto& slot = slots_[i];
  auto to = slot.flat.narrow(0, begin, numel);
  const auto from = result.narrow(0, 0, numel);
  auto& runtime = memory_->runtime();
  runtime.touches(runtime.current(), from.const_data_ptr(), from.nbytes(),
                  device::Access::read);
  runtime.touches(runtime.current(), to.const_data_ptr(), to.nbytes(),
                  device::Access::write);
  if (slot.target == Target::add) {
    to.add_(from);
  } else {
    to.copy_(from);
  }
}

at::Tensor ShardedGradients::fresh_local(std::size_t i) const {
  const auto& parameter = parameters_[i];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto flat = slots_[i].flat.defined()
                        ? slots_[i].flat
                        : RepointedStorage(memory_->runtime().device())
                              .view(parameter.dtype, {0}, {1});
  return flat.view(parameter.local_sizes);
}

void ShardedGradients::publish(const std::vector<std::int32_t>& used,
                               const Wrap& wrap) {
  std::vector<std::int32_t> fresh;
  std::vector<at::Tensor> locals;
  for (const auto p : used) {
    const auto i = static_cast<std::size_t>(p);
    if (slots_[i].target == Target::fresh ||
        slots_[i].target == Target::foreign) {
      fresh.push_back(p);
      locals.push_back(fresh_local(i));
    }
  }
  if (!fresh.empty()) {
    const auto wrapped = wrap(fresh, locals);
    const at::NoGradGuard no_grad;
    for (std::size_t k = 0; k < fresh.size(); ++k) {
      const auto i = static_cast<std::size_t>(fresh[k]);
      auto& grad = parameters_[i].shard.mutable_grad();
      if (slots_[i].target == Target::foreign) {
        grad.add_(wrapped[k]);
        continue;
      }
      grad = wrapped[k];
      slots_[i].wrapped = c10::weak_intrusive_ptr<c10::TensorImpl>(
          wrapped[k].getIntrusivePtr());
      slots_[i].local =
          c10::weak_intrusive_ptr<c10::TensorImpl>(locals[k].getIntrusivePtr());
    }
  }
  for (auto& slot : slots_) {
    slot.target = Target::none;
    slot.flat.reset();
  }
  generation_ = c10::Storage();
  prepared_ = false;
  for (const auto p : used) {
    const auto& shard = parameters_[static_cast<std::size_t>(p)].shard;
    if (const auto& hooks = torch::autograd::impl::post_acc_grad_hooks(shard)) {
      (*hooks)(shard);
    }
  }
}

void ShardedGradients::abort() {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    slots_[i].target = Target::none;
    slots_[i].flat.reset();
    if (parameters_[i].shard.defined()) {
      parameters_[i].shard.mutable_grad().reset();
    }
  }
  generation_ = c10::Storage();
  prepared_ = false;
}

}  // namespace lowtide::shard
