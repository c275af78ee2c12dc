#include "shard/gradients/partial_gradients.h"

#include <ATen/ceil_div.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

std::int64_t aligned(std::int64_t numel) {
  return at::round_up(numel, kPieceColumnMultiple);
}

}  // namespace

PartialGradients::PartialGradients(UnitName unit,
                                   std::vector<Parameter> parameters,
                                   std::shared_ptr<memory::DeviceMemory> memory)
    : unit_(std::move(unit)),
      parameters_(std::move(parameters)),
      memory_(std::move(memory)),
      places_(parameters_.size()) {}

bool PartialGradients::holds(std::int32_t i) const {
  return places_[static_cast<std::size_t>(i)].has_value();
}

std::int64_t PartialGradients::bytes_of(
    const std::vector<std::int32_t>& parameters) const {
  std::int64_t bytes = 0;
  for (const auto i : parameters) {
    const auto& [numel, dtype] = parameters_[static_cast<std::size_t>(i)];
    bytes += (aligned(numel) + 1) * itemsize(dtype);
  }
  return bytes;
}

bool PartialGradients::prepare(const std::vector<std::int32_t>& parameters) {
  auto lacking = parameters;
  std::erase_if(lacking, [&](auto i) { return holds(i); });
  const bool any = !lacking.empty();
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  while (!lacking.empty()) {
    const auto dtype =
        parameters_[static_cast<std::size_t>(lacking.front())].dtype;
    Flat flat;
    std::int64_t column = 0;
    std::erase_if(lacking, [&](auto i) {
      const auto k = static_cast<std::size_t>(i);
      if (parameters_[k].dtype != dtype) return false;
      const auto numel = parameters_[k].shard_numel;
      places_[k] = Place{flats_.size(), flat.pieces.size()};
      flat.pieces.push_back({i, 0, numel, column});
      column += aligned(numel);
      return true;
    });
    flat.flags_column = column;
    const auto numel = column + static_cast<std::int64_t>(flat.pieces.size());
    const auto bytes = numel * itemsize(dtype);
    flat.row = flat_view(
        owning_storage(
            memory_->lease(memory::Category::sharded_gradients, *unit_, bytes),
            bytes),
        dtype, 0, numel);
    auto& runtime = memory_->runtime();
    runtime.touches(runtime.current(), flat.row.const_data_ptr(),
                    flat.row.nbytes(), device::Access::write);
    flat.row.fill_(-0.0);
    flats_.push_back(std::move(flat));
  }
  return any;
}

const PartialGradients::Place& PartialGradients::place_of(
    std::int32_t i) const {
  const auto& place = places_[static_cast<std::size_t>(i)];
  LOWTIDE_INVARIANT(place.has_value(), "results have been prepared for");
  return *place;
}

void PartialGradients::add(const at::Tensor& to, const at::Tensor& from) {
  auto& runtime = memory_->runtime();
  runtime.touches(runtime.current(), from.const_data_ptr(), from.nbytes(),
                  device::Access::read);
  runtime.touches(runtime.current(), to.const_data_ptr(), to.nbytes(),
                  device::Access::write);
  to.add_(from);
}

void PartialGradients::add(const std::vector<Piece>& pieces,
                           const at::Tensor& row) {
  for (const auto& piece : pieces) {
    const auto& place = place_of(piece.parameter);
    const auto& flat = flats_[place.flat];
    add(slice_of(flat.row, flat.pieces[place.piece].column + piece.begin,
                 piece.size()),
        slice_of(row, piece.column, piece.size()));
  }
}

void PartialGradients::add_flags(const std::vector<std::int32_t>& parameters,
                                 const at::Tensor& flags) {
  for (const auto i : parameters) {
    const auto& place = place_of(i);
    const auto& flat = flats_[place.flat];
    const auto column =
        flat.flags_column + static_cast<std::int64_t>(place.piece);
    add(slice_of(flat.row, column, 1), slice_of(flags, i, 1));
  }
}

std::pair<at::Tensor, at::Tensor> PartialGradients::views_of(
    std::int32_t i) const {
  const auto& place = place_of(i);
  const auto& flat = flats_[place.flat];
  const auto& piece = flat.pieces[place.piece];
  const auto column =
      flat.flags_column + static_cast<std::int64_t>(place.piece);
  return {slice_of(flat.row, piece.column, piece.size()),
          slice_of(flat.row, column, 1)};
}

at::Tensor PartialGradients::read(std::int32_t i) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& runtime = memory_->runtime();
  const auto [sum, flag] = views_of(i);
  for (const auto& tensor : {sum, flag}) {
    runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                    device::Access::read);
  }
  return at::cat({sum, flag});
}

void PartialGradients::add(std::int32_t i, const at::Tensor& read) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto [sum, flag] = views_of(i);
  add(sum, slice_of(read, 0, sum.numel()));
  add(flag, slice_of(read, sum.numel(), 1));
}

void PartialGradients::clear(std::int32_t i) {
  if (!holds(i)) {
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto& runtime = memory_->runtime();
  const auto [sum, flag] = views_of(i);
  for (const auto& tensor : {sum, flag}) {
    runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                    device::Access::write);
    tensor.fill_(-0.0);
  }
}

std::vector<PartialGradients::Flat> PartialGradients::take() {
  std::fill(places_.begin(), places_.end(), std::nullopt);
  return std::exchange(flats_, {});
}

}  // namespace lowtide::shard
