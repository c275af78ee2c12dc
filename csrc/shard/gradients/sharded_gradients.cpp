#include "shard/gradients/sharded_gradients.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/to.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "memory/flat_layout.h"
#include "ops/foreach.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

// Where no gap is between two shards, none is between their slices: see
// [Note: Packed parameters], which lie closest.
std::int64_t slice_bytes(const ShardedGradients::Parameter& parameter) {
  return at::ceil_div(parameter.shard_numel, memory::kPackedMultiple) *
         memory::kPackedMultiple * itemsize(parameter.dtype);
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
  auto as_shards_lie = trainable;
  std::ranges::stable_sort(as_shards_lie, {}, [this](std::int32_t i) {
    return parameters_[static_cast<std::size_t>(i)].shard_offset;
  });
  for (const auto p : as_shards_lie) {
    const auto i = static_cast<std::size_t>(p);
    slots_[i].target = choose(i);
    if (!fresh(i)) {
      continue;
    }
    offsets_[i] = bytes;
    bytes += slice_bytes(parameters_[i]);
  }
  if (bytes > 0) {
    generation_ = owning_storage(
        memory_->lease(memory::Category::sharded_gradients, *unit_, bytes),
        bytes);
  }
  for (const auto p : trainable) {
    const auto i = static_cast<std::size_t>(p);
    if (!fresh(i) || host_ != nullptr) {
      continue;
    }
    // Without elements at all there may be no generation.
    slots_[i].flat = parameters_[i].shard_numel == 0
                         ? at::Tensor()
                         : flat_view(generation_, parameters_[i].dtype,
                                     offsets_[i], parameters_[i].local_numel);
  }
  prepared_ = true;
}

bool ShardedGradients::fresh(std::size_t i) const {
  const auto target = slots_[i].target;
  return target == Target::fresh || target == Target::foreign ||
         (target == Target::add && host_ != nullptr);
}

// As much of the piece as is no padding.
at::Tensor ShardedGradients::target_of(const Piece& piece) const {
  const auto i = static_cast<std::size_t>(piece.parameter);
  const auto& parameter = parameters_[i];
  const auto numel =
      std::min(piece.size(), parameter.local_numel - piece.begin);
  if (numel <= 0) {
    return {};
  }
  return fresh(i)
             ? flat_view(generation_, parameter.dtype,
                         offsets_[i] + piece.begin * itemsize(parameter.dtype),
                         numel)
             : slice_of(slots_[i].flat, piece.begin, numel);
}

void ShardedGradients::land(const std::vector<Piece>& pieces,
                            const at::Tensor& result) {
  auto& runtime = memory_->runtime();
  const auto touches = [&](const at::Tensor& tensor, device::Access access) {
    runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                    access);
  };
  struct Written {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
  };
  Written copied;
  Written added;
  for (const auto& piece : pieces) {
    auto to = target_of(piece);
    if (!to.defined()) {
      continue;
    }
    auto from = slice_of(result, piece.column, to.numel());
    touches(from, device::Access::read);
    touches(to, device::Access::write);
    auto& written =
        fresh(static_cast<std::size_t>(piece.parameter)) ? copied : added;
    written.to.push_back(std::move(to));
    written.from.push_back(std::move(from));
  }
  if (!copied.to.empty()) {
    ops::foreach_copy(copied.to, copied.from);
  }
  if (!added.to.empty()) {
    // FSDP2 rounds a result to the dtype of `.grad` before it adds it.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::size_t k = 0; k < added.to.size(); ++k) {
      added.from[k] = added.from[k].to(added.to[k].scalar_type());
    }
    ops::foreach_add(added.to, added.from);
  }
}

at::Tensor ShardedGradients::fresh_local(std::size_t i) const {
  const auto& parameter = parameters_[i];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (host_ != nullptr) {
    return on_host(i).view(parameter.local_sizes);
  }
  const auto flat = slots_[i].flat.defined()
                        ? slots_[i].flat
                        : RepointedStorage(memory_->runtime().device())
                              .view(parameter.dtype, {0}, {1});
  return flat.view(parameter.local_sizes);
}

std::optional<ShardedGradients::Leaving> ShardedGradients::leave_device() {
  if (host_ == nullptr || !generation_) {
    return std::nullopt;
  }
  const auto bytes = static_cast<std::int64_t>(generation_.nbytes());
  on_host_ = owning_storage(
      host_->lease(memory::Category::sharded_gradients, *unit_, bytes), bytes);
  auto copied =
      host_->to_host(on_host_.mutable_data(), generation_.data(), bytes);
  return Leaving{std::exchange(generation_, {}), std::move(copied)};
}

at::Tensor ShardedGradients::on_host(std::size_t i) const {
  const auto& parameter = parameters_[i];
  return on_host_ ? flat_view(on_host_, parameter.dtype, offsets_[i],
                              parameter.local_numel)
                  : RepointedStorage(c10::Device(c10::DeviceType::CPU))
                        .view(parameter.dtype, {0}, {1});
}

void ShardedGradients::arrive_on_host(const std::vector<std::int32_t>& used) {
  LOWTIDE_INVARIANT(!generation_, "gradients are published behind their copy");
  host_->wait();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto p : used) {
    const auto i = static_cast<std::size_t>(p);
    if (slots_[i].target == Target::add) {
      slots_[i].flat.add_(on_host(i));
    }
  }
}

void ShardedGradients::publish(const std::vector<std::int32_t>& used,
                               const Wrap& wrap) {
  if (host_ != nullptr) {
    arrive_on_host(used);
  }
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
  generation_ = on_host_ = c10::Storage();
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
  generation_ = on_host_ = c10::Storage();
  prepared_ = false;
}

}  // namespace lowtide::shard
