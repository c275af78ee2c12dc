// The part of GradientStream for gradients on their way into chunks: autograd's
// tensors, whole or in blocks of rows, until they are copied.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>

#include <algorithm>

#include "base/check.h"
#include "shard/gradient_rows.h"
#include "shard/gradient_stream.h"
#include "shard/policy.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

using device::Access;
using device::Stream;

}  // namespace

void GradientStream::accept(UnitGradients& unit, std::int32_t i,
                            at::Tensor gradient, bool hold) {
  auto& parameter = unit.parameter(i);
  parameter.fired = true;
  if (!gradient.defined() && !parameter.added) {
    return;
  }
  require_here(unit, i);
  produces(unit);
  produced(unit, i);
  if (unit.in_place(i)) {
    if (gradient.defined()) {
      make_room(unit, i);
      unit.accumulate(i, std::move(gradient));
    }
    parameter.held = parameter.held || hold;
    parameter.complete = !parameter.held;
    pump();
    return;
  }
  if (unit.accumulating()) {
    unit.accumulate(i, std::move(gradient));
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const bool is_new = !parameter.source.defined();
  parameter.source =
      is_new ? std::move(gradient) : at::add(parameter.source, gradient);
  ring_.compute_has_moved();
  parameter.held = parameter.held || hold;
  if (parameter.held) {
    return;
  }
  const std::size_t first =
      *unit.lanes()[static_cast<std::size_t>(parameter.lane)].place;
  for (const auto& where : parameter.places) {
    const std::size_t place = first + static_cast<std::size_t>(where.chunk);
    if (!in_window(place)) {
      break;
    }
    const auto piece = static_cast<std::size_t>(where.piece);
    if (is_small(parameter)) {
      entries_[place].pieces_waiting += is_new ? 1 : 0;
    } else {
      write_pieces(place, {piece});
    }
  }
  if (parameter.places.empty()) {
    parameter.source.reset();
  }
  pump();
}

void GradientStream::require_here(const UnitGradients& unit,
                                  std::int32_t i) const {
  const auto& parameter = unit.parameter(i);
  if (unit.sealed() || parameter.pieces_written > 0) {
    throw Error(base::error_text(
        base::concat("parameter '", parameter.name, "'"),
        "every gradient of a backward before its unit's gradients leave",
        base::concat("another one after unit '", unit.unit(), "' was reduced"),
        "This happens when re-entrant checkpointing runs a module several "
        "times; use torch.utils.checkpoint with use_reentrant=False."));
  }
}

void GradientStream::accept_rows(UnitGradients& unit, std::int32_t i,
                                 std::int64_t block, at::Tensor rows) {
  auto& parameter = unit.parameter(i);
  if (unit.sealed() || parameter.source.defined() ||
      block != parameter.blocks_seen) {
    throw Error(base::error_text(
        base::concat("parameter '", parameter.name, "'"),
        base::concat("block ", parameter.blocks_seen,
                     " of its gradient's rows, once in a backward"),
        base::concat(
            "block ", block,
            parameter.source.defined() ? " beside a whole gradient" : ""),
        "A parameter whose gradient comes in rows (a head inside its loss, a "
        "large embedding) gets one gradient in a backward: call its module, "
        "and do not use its weight otherwise."));
  }
  ++parameter.blocks_seen;
  parameter.fired = true;
  produces(unit);
  produced(unit, i);
  if (unit.accumulating()) {
    unit.accumulate_rows(i, block, rows);
    return;
  }
  parameter.blocks.push_back(std::move(rows));
  ring_.compute_has_moved();
  const auto& where = parameter.places[static_cast<std::size_t>(block)];
  const std::size_t place =
      *unit.lanes()[static_cast<std::size_t>(parameter.lane)].place +
      static_cast<std::size_t>(where.chunk);
  if (in_window(place)) {
    write_pieces(place, {static_cast<std::size_t>(where.piece)});
  }
  pump();
}

// [Note: Sources of the unit before]
// The peak of a step is where a unit's backward has recomputed everything and
// gradients begin to come.  Those of the unit before must not be in it, so
// compute waits for their copies once a unit, as FSDP2's waits for the
// reduce-scatter before: for most of them when the unit's backward begins, for
// those that came last only at the first gradient, after the recomputation.
// The newest, of a slot's bytes, may stay: a small unit whose turn in the ring
// has just come is copied behind the reduction that had the slot.
//
// A unit with a much larger output than input, a head that was called as a
// module, leaves room when its backward is over: its own sources and slots stay
// in it as long as they like, and compute waits for nothing.  Without room,
// slots of its own go first.
void GradientStream::expects(UnitGradients& unit) {
  if (producing_ != &unit) {
    if (producing_ != nullptr && producing_->own_slots() &&
        room_ < producing_->source_bytes()) {
      land_sent();
      ring_.drop_slots();
    }
    const auto keep =
        std::max({unit.source_bytes() / 4, unit.slot_bytes(), room_});
    land_in_place(keep);
    ring_.reclaim(keep);
  }
  // What outlives the unit's backward is leased ahead of what does not.
  if (contains(unit) && prepare(unit)) {
    ring_.compute_has_moved();
  }
}

void GradientStream::produces(const UnitGradients& unit) {
  if (producing_ != &unit) {
    const auto keep = std::max(unit.slot_bytes(), room_);
    land_in_place(keep);
    ring_.reclaim(keep);
    producing_ = &unit;
  }
}

// Results that stay with the shards have no place in `.grad` yet.
bool GradientStream::prepare(UnitGradients& unit) {
  const auto& reduction = unit.reduction();
  const bool leased =
      reduction.of_whole_units() && unit.partial().prepare(unit.trainable());
  if (reduction.keeps_partial() || unit.sharded().prepared()) {
    return leased;
  }
  unit.sharded().prepare(unit.trainable());
  return true;
}

void GradientStream::produced(UnitGradients& unit, std::int32_t i) {
  prepare(unit);
  if (!unit.parameter(i).produced) {
    unit.completed(i);
  }
  unit.parameter(i).produced = true;
}

bool GradientStream::is_small(const UnitGradients::Parameter& parameter) {
  return parameter.source.defined() &&
         parameter.source.nbytes() <= kSmallGradientBytes;
}

// Copies those pieces of a chunk whose source is there; of small ones only all
// at once.
void GradientStream::write_ready_pieces(std::size_t place, bool small_too) {
  auto& entry = entries_[place];
  if (entry.chunk < 0) {
    return;
  }
  entry.pieces_waiting = 0;
  std::vector<std::size_t> ready;
  const auto& pieces = chunk_of(entry).pieces;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    auto& parameter = entry.unit->parameter(pieces[p].parameter);
    const auto next = static_cast<std::size_t>(parameter.pieces_written);
    const bool here =
        parameter.source.defined() || next < parameter.blocks.size();
    const bool next_in_line = here && next < parameter.places.size() &&
                              parameter.places[next].chunk == entry.chunk;
    if (!next_in_line || (parameter.held && !entry.unit->sealed())) {
      continue;
    }
    if (is_small(parameter) && !small_too) {
      ++entry.pieces_waiting;
    } else {
      ready.push_back(p);
    }
  }
  write_pieces(place, ready);
}

void GradientStream::write_pieces(std::size_t place,
                                  c10::ArrayRef<std::size_t> written) {
  if (written.empty()) {
    return;
  }
  open_slot(place);
  ring_.catch_up_reduce();
  auto& entry = entries_[place];
  auto& unit = *entry.unit;
  const auto& chunk = chunk_of(entry);
  {
    const device::StreamScope scope(memory_->runtime(), Stream::reduce);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ColumnTransfers transfers;
    for (const auto p : written) {
      const auto& piece = chunk.pieces[p];
      const auto i = piece.parameter;
      const bool whole = unit.parameter(i).source.defined();
      const auto& source = source_of(unit.parameter(i));
      touch(source, Access::read);
      transfers.push_back(
          source,
          whole ? unit.columns(i, piece.begin, piece.end)
                : unit.block_columns(i, unit.parameter(i).pieces_written),
          entry.input, {piece.column, chunk.columns});
    }
    touch(entry.input, Access::write);
    transfers.copy();
  }
  std::vector<c10::Storage> read;
  std::int64_t bytes = 0;
  for (const auto p : written) {
    auto& parameter = unit.parameter(chunk.pieces[p].parameter);
    auto& source = source_of(parameter);
    const bool whole = parameter.source.defined();
    --entry.pieces_missing;
    ++parameter.pieces_written;
    if (!whole || static_cast<std::size_t>(parameter.pieces_written) ==
                      parameter.places.size()) {
      read.push_back(source.storage());
      bytes += static_cast<std::int64_t>(source.nbytes());
      source.reset();
    }
  }
  ring_.retire(std::move(read), bytes);
  ring_.reclaim(std::max(unit.source_bytes(), room_));
}

// Of the next piece.
at::Tensor& GradientStream::source_of(UnitGradients::Parameter& parameter) {
  return parameter.source.defined()
             ? parameter.source
             : parameter
                   .blocks[static_cast<std::size_t>(parameter.pieces_written)];
}

// Gives the chunk its slot: leased on first use, otherwise taken over from the
// chunk that had it before, which has left.
void GradientStream::open_slot(std::size_t place) {
  auto& entry = entries_[place];
  if (entry.input.defined()) {
    return;
  }
  if (entry.before != kNone) {
    land_until(entry.before + 1);
  }
  const auto& storage = ring_.slot(entry.slot, entry.unit->slot_bytes());
  const auto& chunk = chunk_of(entry);
  const auto dtype =
      entry.unit->lanes()[static_cast<std::size_t>(entry.lane)].dtype;
  const auto numel = entry.unit->group().size() * chunk.columns;
  entry.input = flat_view(storage, dtype, 0, numel);
  entry.output =
      flat_view(storage, dtype, numel * itemsize(dtype), chunk.columns);
}

}  // namespace lowtide::shard
