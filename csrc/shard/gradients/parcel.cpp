#include "shard/gradients/parcel.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <utility>

#include "shard/gradients/gradient_rows.h"
#include "shard/policy.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

using device::Access;
using device::Stream;

void touch(device::Runtime& runtime, const at::Tensor& tensor, Access access) {
  runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                  access);
}

}  // namespace

// --- a chunk ----------------------------------------------------------------

ChunkParcel::ChunkParcel(UnitGradients& unit, std::int32_t lane,
                         std::int32_t chunk, memory::DeviceMemory& memory,
                         GradientRing& ring)
    : Parcel(unit, lane, memory, ring),
      chunk_(chunk),
      pieces_missing_(static_cast<std::int32_t>(plan().pieces.size())) {}

bool ChunkParcel::complete() const {
  return pieces_missing_ == pieces_waiting_ && plan().flags_column < 0;
}

std::size_t ChunkParcel::gradients_for(
    const std::vector<std::size_t>& turns) const {
  if (plan().flags_column >= 0) {
    return unit_.trainable().size() + 1;
  }
  std::size_t most = 0;
  for (const auto& piece : plan().pieces) {
    most = std::max(most, turns[static_cast<std::size_t>(piece.parameter)]);
  }
  return most;
}

void ChunkParcel::open(std::size_t slot) {
  const auto dtype = lane().dtype;
  ring_.retire_slots(static_cast<std::size_t>(unit_.num_slots()));
  const auto& storage = ring_.slot(slot, unit_.slot_bytes(), dtype);
  const auto numel = unit_.group().size() * plan().columns;
  input_ = flat_view(storage, dtype, 0, numel);
  output_ = flat_view(storage, dtype, numel * itemsize(dtype), plan().columns);
  is_open_ = true;
}

std::vector<std::size_t> ChunkParcel::ready(bool small_too) {
  pieces_waiting_ = 0;
  std::vector<std::size_t> ready;
  const auto& pieces = plan().pieces;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    const auto& parameter = unit_.parameter(pieces[p].parameter);
    if (!parameter.next_piece_is_for(chunk_, unit_.sealed())) {
      continue;
    }
    if (parameter.waits_as_small() && !small_too) {
      ++pieces_waiting_;
    } else {
      ready.push_back(p);
    }
  }
  return ready;
}

void ChunkParcel::write(c10::ArrayRef<std::size_t> written) {
  ring_.catch_up_reduce();
  auto& runtime = memory_.runtime();
  {
    const device::StreamScope scope(runtime, Stream::reduce);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ColumnTransfers transfers;
    for (const auto p : written) {
      const auto& piece = plan().pieces[p];
      const auto& parameter = unit_.parameter(piece.parameter);
      const auto& source = parameter.next_source();
      touch(runtime, source, Access::read);
      transfers.push_back(
          source,
          parameter.source.defined()
              ? unit_.columns(piece.parameter, piece.begin, piece.end)
              : unit_.block_columns(piece.parameter, parameter.pieces_written),
          input_, {piece.column, plan().columns});
    }
    touch(runtime, input_, Access::write);
    transfers.copy();
  }
  std::vector<c10::Storage> read;
  std::int64_t bytes = 0;
  for (const auto p : written) {
    --pieces_missing_;
    const auto source =
        unit_.parameter(plan().pieces[p].parameter).piece_written_from();
    if (source.defined()) {
      read.push_back(source.storage());
      bytes += static_cast<std::int64_t>(source.nbytes());
    }
  }
  ring_.retire(std::move(read), bytes);
}

// Whatever no gradient came for leaves as -0.0 or zeros, and the flags say so.
void ChunkParcel::fill_missing() {
  if (pieces_missing_ == 0 && plan().flags_column < 0) {
    return;
  }
  ring_.catch_up_reduce();
  const device::StreamScope scope(memory_.runtime(), Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  touch(memory_.runtime(), input_, Access::write);
  const auto columns = plan().columns;
  if (pieces_missing_ > 0) {
    for (const auto& piece : plan().pieces) {
      if (!unit_.parameter(piece.parameter).produced()) {
        fill_columns(unit_.columns(piece.parameter, piece.begin, piece.end),
                     input_, {piece.column, columns}, unit_.missing());
      }
    }
  }
  if (plan().flags_column >= 0) {
    const auto rows = unit_.group().size();
    strided_view(input_, {rows, lane().plan.num_parameters}, {columns, 1},
                 input_.storage_offset() + plan().flags_column)
        .fill_(1.0);
    for (const auto i : lane().members) {
      if (!unit_.parameter(i).produced()) {
        fill_columns({rows, 0, 0, 0, 1}, input_,
                     {plan().flags_column + i, columns}, kNeutral);
      }
    }
  }
}

void ChunkParcel::leave() {
  fill_missing();
  const device::StreamScope scope(memory_.runtime(), Stream::reduce);
  const auto& reduction = unit_.reduction();
  reduction.prepare(input_, unit_.group());
  pending_ = unit_.group().reduce_scatter(
      output_, input_,
      reduction.over_shards(unit_.group(), input_.scalar_type()), unit_.unit());
}

void ChunkParcel::land() {
  pending_->wait();
  pending_.reset();
  const auto flags =
      plan().flags_column >= 0
          ? slice_of(output_, plan().flags_column, lane().plan.num_parameters)
          : at::Tensor();
  unit_.land(lane(), plan().pieces, output_, flags);
  input_.reset();
  output_.reset();
}

// --- a slab -----------------------------------------------------------------

bool SlabParcel::complete() const {
  return lane().in_place &&
         unit_.parameter(lane().members.front()).arrival == Arrival::complete;
}

std::size_t SlabParcel::gradients_for(
    const std::vector<std::size_t>& turns) const {
  return lane().in_place
             ? turns[static_cast<std::size_t>(lane().members.front())]
             : unit_.trainable().size() + 1;
}

std::int64_t SlabParcel::in_place_bytes() const {
  const auto& slab = lane().slab;
  return lane().in_place && slab.allocated() ? slab.bytes() : 0;
}

void SlabParcel::leave() {
  auto& slab = lane().slab;
  if (lane().in_place) {
    unit_.parameter(lane().members.front()).pieces_written = 1;
  }
  const auto dtype = lane().dtype;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    slab.complete(lane().members, unit_.missing());
  }
  inputs_ = slab.inputs(lane().members);
  const auto ranks = unit_.group().size();
  std::int64_t columns = 0;
  for (const auto& input : inputs_) {
    columns += input.numel() / ranks;
  }
  const auto bytes = columns * itemsize(dtype);
  const c10::Storage results = owning_storage(
      memory_.lease(memory::Category::gradient_stream, unit_.unit(), bytes),
      bytes);
  std::int64_t column = 0;
  for (const auto& input : inputs_) {
    const auto width = input.numel() / ranks;
    outputs_.push_back(
        flat_view(results, dtype, column * itemsize(dtype), width));
    column += width;
  }
  ring_.compute_has_moved();
  ring_.catch_up_reduce();
  const device::StreamScope scope(memory_.runtime(), Stream::reduce);
  const auto& reduction = unit_.reduction();
  for (const auto& input : inputs_) {
    reduction.prepare(input, unit_.group());
  }
  pending_ = unit_.group().reduce_scatter_coalesced(
      outputs_, inputs_, reduction.over_shards(unit_.group(), dtype),
      unit_.unit());
}

void SlabParcel::land() {
  pending_->wait();
  pending_.reset();
  auto output = outputs_.begin();
  for (const auto i : lane().members) {
    if (lane().slab.columns(i) > 0) {
      const Piece whole{i, 0, unit_.parameter(i).shard_numel, 0};
      unit_.land(lane(), {whole}, *output++, {});
    }
  }
  unit_.land(lane(), {}, *output, *output);
  // The slab and the results go back in the compute stream's order.
  ring_.catch_up_compute();
  inputs_.clear();
  outputs_.clear();
  lane().slab.release_bytes();
}

}  // namespace lowtide::shard
