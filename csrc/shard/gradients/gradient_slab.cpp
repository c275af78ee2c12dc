#include "shard/gradients/gradient_slab.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

#include "ops/weight_gradient.h"
#include "shard/gradients/gradient_plan.h"
#include "shard/gradients/gradient_rows.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

std::int64_t padded(std::int64_t columns) {
  return at::round_up(columns, kChunkColumnMultiple);
}

}  // namespace

GradientSlab::GradientSlab(UnitName unit, at::ScalarType dtype,
                           std::int64_t world_size,
                           std::vector<std::int64_t> shard_numel,
                           std::vector<std::int64_t> numel,
                           const std::vector<std::int32_t>& members,
                           std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      dtype_(dtype),
      world_size_(world_size),
      shard_numel_(std::move(shard_numel)),
      numel_(std::move(numel)),
      columns_(shard_numel_.size(), 0),
      offsets_(shard_numel_.size(), 0),
      flag_columns_(padded(static_cast<std::int64_t>(shard_numel_.size()))),
      memory_(std::move(memory)),
      touched_(shard_numel_.size(), false) {
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(dtype_));
  for (const auto p : members) {
    const auto i = static_cast<std::size_t>(p);
    columns_[i] = padded(shard_numel_[i]);
    offsets_[i] = bytes_;
    bytes_ += world_size_ * columns_[i] * itemsize;
  }
  flags_offset_ = bytes_;
  bytes_ += world_size_ * flag_columns_ * itemsize;
}

void GradientSlab::allocate() {
  storage_ = owning_storage(
      memory_->lease(memory::Category::gradient_slab, *unit_, bytes_), bytes_);
  // Nobody writes to padding, and checks of what is sent would find NaN there.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    if (columns_[i] > 0 && world_size_ * columns_[i] != numel_[i]) {
      const auto padded_block = block(static_cast<std::int32_t>(i));
      memory_->runtime().touches(device::Stream::compute,
                                 padded_block.const_data_ptr(),
                                 padded_block.nbytes(), device::Access::write);
      padded_block.zero_();
    }
  }
}

at::Tensor GradientSlab::buffer() const {
  return flat_view(storage_, at::kByte, 0, bytes_);
}

at::Tensor GradientSlab::block(std::int32_t p) const {
  const auto i = static_cast<std::size_t>(p);
  return flat_view(storage_, dtype_, offsets_[i], world_size_ * columns_[i]);
}

at::Tensor GradientSlab::flags() const {
  return flat_view(storage_, dtype_, flags_offset_,
                   world_size_ * flag_columns_);
}

void GradientSlab::add(const std::vector<Gradient>& gradients) {
  Writes writes;
  for (const auto& [p, gradient] : gradients) {
    const auto i = static_cast<std::size_t>(p);
    write(p, {world_size_, shard_numel_[i], numel_[i], 0, shard_numel_[i]}, 0,
          gradient, writes);
    touched_[i] = true;
  }
  writes.first.copy();
  writes.later.add();
}

void GradientSlab::round_sum(std::int32_t p, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto sum = block(p);
  memory_->runtime().touches(device::Stream::compute, sum.const_data_ptr(),
                             sum.nbytes(), device::Access::write);
  sum.copy_(sum.to(dtype));
}

void GradientSlab::add_rows(std::int32_t p, std::int64_t begin,
                            const GradientColumns& columns,
                            const at::Tensor& rows) {
  const auto i = static_cast<std::size_t>(p);
  Writes writes;
  write(p, columns, begin, rows, writes);
  writes.first.copy();
  writes.later.add();
  if (begin + columns.shard_numel == shard_numel_[i]) {
    touched_[i] = true;
  }
}

void GradientSlab::write(std::int32_t p, const GradientColumns& columns,
                         std::int64_t begin, const at::Tensor& gradient,
                         Writes& writes) {
  if (!allocated()) {
    allocate();
  }
  const auto i = static_cast<std::size_t>(p);
  const BlockPlace place{begin, columns_[i]};
  auto& runtime = memory_->runtime();
  const auto to = block(p);
  runtime.touches(device::Stream::compute, gradient.const_data_ptr(),
                  gradient.nbytes(), device::Access::read);
  runtime.touches(device::Stream::compute, to.const_data_ptr(), to.nbytes(),
                  device::Access::write);
  auto& writes_of_its_kind = touched_[i] ? writes.later : writes.first;
  writes_of_its_kind.push_back(gradient, columns, to, place);
}

// One GEMM, or one for every rank's rows where columns are padded.
void GradientSlab::add_product(std::int32_t p, const at::Tensor& grad_output,
                               const at::Tensor& input) {
  if (!allocated()) {
    allocate();
  }
  const auto i = static_cast<std::size_t>(p);
  const auto to = block(p);
  auto& runtime = memory_->runtime();
  for (const auto* factor : {&grad_output, &input}) {
    runtime.touches(device::Stream::compute, factor->const_data_ptr(),
                    factor->nbytes(), device::Access::read);
  }
  runtime.touches(device::Stream::compute, to.const_data_ptr(), to.nbytes(),
                  device::Access::write);
  const auto rows = grad_output.size(1);
  const auto inner = input.size(1);
  const auto at_once = gapless(p) || inner == 0
                           ? rows
                           : std::max<std::int64_t>(1, shard_numel_[i] / inner);
  std::vector<at::Tensor> parts;
  for (std::int64_t row = 0, rank = 0; row < rows; row += at_once, ++rank) {
    parts.push_back(strided_view(to, {std::min(at_once, rows - row), inner},
                                 {inner, 1},
                                 to.storage_offset() + rank * columns_[i]));
  }
  ops::weight_gradient_in_parts(parts, grad_output, input, touched_[i]);
  touched_[i] = true;
}

at::Tensor GradientSlab::whole(std::int32_t p, std::int64_t inner) {
  const auto i = static_cast<std::size_t>(p);
  if (!allocated()) {
    allocate();
  }
  const auto to = block(p);
  return strided_view(to, {numel_[i] / inner, inner}, {inner, 1},
                      to.storage_offset());
}

void GradientSlab::complete(const std::vector<std::int32_t>& members,
                            double missing) {
  if (!allocated()) {
    allocate();
  }
  auto used = flags();
  auto& runtime = memory_->runtime();
  runtime.touches(device::Stream::compute, used.const_data_ptr(), used.nbytes(),
                  device::Access::write);
  used.fill_(1.0);
  for (const auto p : members) {
    const auto i = static_cast<std::size_t>(p);
    if (touched_[i]) {
      continue;
    }
    fill_columns({1, 0, 0, 0, world_size_ * columns_[i]}, block(p), {0, 0},
                 missing);
    fill_columns({world_size_, 0, 0, 0, 1}, used, {p, flag_columns_}, kNeutral);
  }
}

std::vector<at::Tensor> GradientSlab::inputs(
    const std::vector<std::int32_t>& members) {
  std::vector<at::Tensor> blocks;
  for (const auto p : members) {
    if (columns(p) > 0) {
      blocks.push_back(block(p));
    }
  }
  blocks.push_back(flags());
  return blocks;
}

at::Tensor GradientSlab::read(std::int32_t p) const {
  const auto i = static_cast<std::size_t>(p);
  const auto from = block(p);
  auto& runtime = memory_->runtime();
  runtime.touches(device::Stream::compute, from.const_data_ptr(), from.nbytes(),
                  device::Access::read);
  return strided_view(from, {world_size_, shard_numel_[i]}, {columns_[i], 1},
                      from.storage_offset())
      .reshape({-1})
      .narrow(0, 0, numel_[i])
      .clone();
}

void GradientSlab::drop(std::int32_t i) {
  touched_[static_cast<std::size_t>(i)] = false;
  if (std::find(touched_.begin(), touched_.end(), true) == touched_.end()) {
    release_bytes();
  }
}

void GradientSlab::release_bytes() { storage_ = c10::Storage(); }

void GradientSlab::reset() {
  release_bytes();
  touched_.assign(touched_.size(), false);
}

}  // namespace lowtide::shard
