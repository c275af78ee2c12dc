#include "shard/gradient_stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "shard/gradient_rows.h"
#include "shard/storage.h"

namespace lowtide::shard {
namespace {

using device::Access;
using device::Stream;

std::int64_t itemsize(at::ScalarType dtype) {
  return static_cast<std::int64_t>(c10::elementSize(dtype));
}

void touch(device::Runtime& runtime, const at::Tensor& tensor, Access access) {
  runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                  access);
}

}  // namespace

GradientStream::GradientStream(std::string root,
                               std::shared_ptr<memory::DeviceMemory> memory)
    : root_(std::move(root)), memory_(memory), ring_(root_, std::move(memory)) {
  last_in_slot_.fill(kNone);
}

void GradientStream::begin(const std::vector<UnitGradients*>& units) {
  LOWTIDE_INVARIANT(next_ == entries_.size(), "one backward at a time");
  for (auto* unit : units) {
    append(*unit);
  }
}

void GradientStream::append(UnitGradients& unit) {
  units_.push_back(&unit);
  for (std::size_t l = 0; l < unit.lanes().size(); ++l) {
    auto& lane = unit.lanes()[l];
    lane.place = entries_.size();
    Entry entry;
    entry.unit = &unit;
    entry.lane = static_cast<std::int32_t>(l);
    if (unit.accumulating() || lane.in_place) {
      add_entry(std::move(entry));
      continue;
    }
    for (std::size_t c = 0; c < lane.plan.chunks.size(); ++c) {
      Entry chunk;
      chunk.unit = &unit;
      chunk.lane = static_cast<std::int32_t>(l);
      chunk.chunk = static_cast<std::int32_t>(c);
      chunk.pieces_missing =
          static_cast<std::int32_t>(lane.plan.chunks[c].pieces.size());
      add_entry(std::move(chunk));
    }
  }
  if (!unit.own_slots()) {
    ring_.fit(unit.slot_bytes());
  }
}

void GradientStream::add_entry(Entry entry) {
  const auto slots = static_cast<std::size_t>(entry.unit->num_slots());
  entry.slot = turn_++ % slots;
  const auto place = entries_.size();
  auto& last = last_in_slot_[entry.slot];
  entry.before = std::exchange(last, place);
  entry.opens_at = entry.before == kNone ? 0 : entry.before + 1;
  if (!entries_.empty()) {
    entry.opens_at = std::max(entry.opens_at, entries_.back().opens_at);
  }
  entries_.push_back(std::move(entry));
}

bool GradientStream::contains(const UnitGradients& unit) const {
  return !unit.lanes().empty() && unit.lanes().front().place.has_value();
}

const Chunk& GradientStream::chunk_of(const Entry& entry) const {
  return entry.unit->lanes()[static_cast<std::size_t>(entry.lane)]
      .plan.chunks[static_cast<std::size_t>(entry.chunk)];
}

bool GradientStream::in_window(std::size_t place) const {
  return entries_[place].opens_at <= next_;
}

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
      unit.accumulate(i, gradient);
    }
    parameter.held = parameter.held || hold;
    parameter.complete = !parameter.held;
    pump();
    return;
  }
  if (unit.accumulating()) {
    unit.accumulate(i, gradient);
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  parameter.source = parameter.source.defined()
                         ? at::add(parameter.source, gradient)
                         : std::move(gradient);
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
    write_piece(place, static_cast<std::size_t>(where.piece));
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
    write_piece(place, static_cast<std::size_t>(where.piece));
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
  if (unit.sharded().prepared() || unit.reduction().keeps_partial()) {
    return false;
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

// Copies those pieces of a chunk that wait for it with their source.
void GradientStream::write_ready_pieces(std::size_t place) {
  const auto& entry = entries_[place];
  if (entry.chunk < 0) {
    return;
  }
  const auto& pieces = chunk_of(entry).pieces;
  for (std::size_t p = 0; p < pieces.size(); ++p) {
    auto& parameter = entry.unit->parameter(pieces[p].parameter);
    const auto next = static_cast<std::size_t>(parameter.pieces_written);
    const bool here =
        parameter.source.defined() || next < parameter.blocks.size();
    const bool next_in_line = here && next < parameter.places.size() &&
                              parameter.places[next].chunk == entry.chunk;
    if (next_in_line && (!parameter.held || entry.unit->sealed())) {
      write_piece(place, p);
    }
  }
}

void GradientStream::write_piece(std::size_t place, std::size_t piece_index) {
  open_slot(place);
  ring_.catch_up_reduce();
  auto& entry = entries_[place];
  const auto& chunk = chunk_of(entry);
  const auto& piece = chunk.pieces[piece_index];
  auto& parameter = entry.unit->parameter(piece.parameter);
  auto& runtime = memory_->runtime();
  const bool whole = parameter.source.defined();
  auto& source =
      whole ? parameter.source
            : parameter
                  .blocks[static_cast<std::size_t>(parameter.pieces_written)];
  const auto columns =
      whole ? entry.unit->columns(piece.parameter, piece.begin, piece.end)
            : entry.unit->block_columns(piece.parameter,
                                        parameter.pieces_written);
  {
    const device::StreamScope scope(runtime, Stream::reduce);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    touch(runtime, source, Access::read);
    touch(runtime, entry.input, Access::write);
    copy_columns(source, columns, entry.input, {piece.column, chunk.columns});
  }
  --entry.pieces_missing;
  ++parameter.pieces_written;
  if (!whole || static_cast<std::size_t>(parameter.pieces_written) ==
                    parameter.places.size()) {
    ring_.retire(source, std::max(entry.unit->source_bytes(), room_));
    source.reset();
  }
}

// Gives the chunk its slot: leased on first use, otherwise taken over from the
// chunk that had it before, which has left.
void GradientStream::open_slot(std::size_t place) {
  auto& entry = entries_[place];
  if (entry.input.defined()) {
    return;
  }
  if (entry.before != kNone) {
    land(entry.before);
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

void GradientStream::seal(UnitGradients& unit) {
  if (unit.sealed()) {
    return;
  }
  unit.seal();
  room_ = std::max(room_, unit.room());
  pump();
}

void GradientStream::pump() {
  while (next_ < entries_.size()) {
    const auto& entry = entries_[next_];
    const bool full = entry.chunk >= 0 ? entry.pieces_missing == 0 &&
                                             chunk_of(entry).flags_column < 0
                                       : is_complete(entry);
    if (!full && !entry.unit->sealed()) {
      return;
    }
    if (entry.chunk < 0) {
      send_slab(next_);
    } else {
      complete(next_);
      send(next_);
    }
    ++next_;
    opened_ = std::max(opened_, next_);
    for (; opened_ < entries_.size() && in_window(opened_); ++opened_) {
      write_ready_pieces(opened_);
    }
  }
}

// Whatever no gradient came for leaves as -0.0, and the flags say so.
void GradientStream::complete(std::size_t place) {
  open_slot(place);
  write_ready_pieces(place);
  auto& entry = entries_[place];
  auto& unit = *entry.unit;
  const auto& chunk = chunk_of(entry);
  if (entry.pieces_missing == 0 && chunk.flags_column < 0) {
    return;
  }
  if (prepare(unit)) {
    ring_.compute_has_moved();
  }
  ring_.catch_up_reduce();
  auto& runtime = memory_->runtime();
  const device::StreamScope scope(runtime, Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  touch(runtime, entry.input, Access::write);
  if (entry.pieces_missing > 0) {
    for (const auto& piece : chunk.pieces) {
      if (!unit.parameter(piece.parameter).produced) {
        fill_columns_neutral(
            unit.columns(piece.parameter, piece.begin, piece.end), entry.input,
            {piece.column, chunk.columns});
      }
    }
  }
  if (chunk.flags_column >= 0) {
    const auto rows = unit.group().size();
    strided_view(entry.input,
                 {rows, unit.lanes()[static_cast<std::size_t>(entry.lane)]
                            .plan.num_parameters},
                 {chunk.columns, 1},
                 entry.input.storage_offset() + chunk.flags_column)
        .fill_(1.0);
    for (const auto i :
         unit.lanes()[static_cast<std::size_t>(entry.lane)].members) {
      if (!unit.parameter(i).produced) {
        fill_columns_neutral({rows, 0, 0, 0, 1}, entry.input,
                             {chunk.flags_column + i, chunk.columns});
      }
    }
  }
}

void GradientStream::send(std::size_t place) {
  auto& entry = entries_[place];
  auto& unit = *entry.unit;
  const device::StreamScope scope(memory_->runtime(), Stream::reduce);
  entry.pending = unit.group().reduce_scatter(
      entry.output, entry.input, unit.reduction().over_shards(unit.group()),
      unit.unit());
  entry.sent = true;
}

void GradientStream::send_slab(std::size_t place) {
  auto& entry = entries_[place];
  if (entry.before != kNone) {
    land(entry.before);
  }
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  prepare(unit);
  if (lane.in_place) {
    make_room(unit, lane.members.front());
    unit.parameter(lane.members.front()).pieces_written = 1;
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    lane.slab.complete(lane.members);
  }
  entry.slab_inputs = lane.slab.inputs(lane.members);
  std::int64_t columns = 0;
  for (const auto& input : entry.slab_inputs) {
    columns += input.numel() / unit.group().size();
  }
  const auto bytes = columns * itemsize(lane.dtype);
  const c10::Storage results = owning_storage(
      memory_->lease(memory::Category::gradient_stream, unit.unit(), bytes),
      bytes);
  std::int64_t column = 0;
  for (const auto& input : entry.slab_inputs) {
    const auto width = input.numel() / unit.group().size();
    entry.slab_outputs.push_back(
        flat_view(results, lane.dtype, column * itemsize(lane.dtype), width));
    column += width;
  }
  ring_.compute_has_moved();
  ring_.catch_up_reduce();
  const device::StreamScope scope(memory_->runtime(), Stream::reduce);
  entry.pending = unit.group().reduce_scatter_coalesced(
      entry.slab_outputs, entry.slab_inputs,
      unit.reduction().over_shards(unit.group()), unit.unit());
  entry.sent = true;
}

void GradientStream::land(std::size_t place) {
  auto& entry = entries_[place];
  if (!entry.sent || entry.landed) {
    return;
  }
  auto& runtime = memory_->runtime();
  const device::StreamScope scope(runtime, Stream::reduce);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  ring_.reduce_has_moved();
  entry.pending->wait();
  entry.pending.reset();
  entry.landed = true;
  if (entry.chunk < 0) {
    land_slab(entry);
    return;
  }
  const auto& chunk = chunk_of(entry);
  const auto& lane = entry.unit->lanes()[static_cast<std::size_t>(entry.lane)];
  const auto flags =
      chunk.flags_column >= 0
          ? slice_of(entry.output, chunk.flags_column, lane.plan.num_parameters)
          : at::Tensor();
  if (after_shards(*entry.unit, lane, chunk.pieces, entry.output, flags)) {
    entry.unit->reduction().finish(entry.output, entry.unit->group(),
                                   entry.unit->unit());
    entry.unit->sharded().land(chunk.pieces, entry.output);
    if (flags.defined()) {
      read_flags(entry, flags);
    }
  }
  entry.input.reset();
  entry.output.reset();
}

// False: the results stay with the shards.
bool GradientStream::after_shards(UnitGradients& unit, const Lane& lane,
                                  const std::vector<Piece>& pieces,
                                  const at::Tensor& row,
                                  const at::Tensor& flags) {
  if (unit.reduction().replicas) {
    unit.exchange_partial(pieces, row);
    if (flags.defined()) {
      unit.exchange_partial_flags(lane, flags);
    }
  }
  return !unit.reduction().keeps_partial();
}

void GradientStream::land_slab(Entry& entry) {
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  auto output = entry.slab_outputs.begin();
  const auto finish = [&](const at::Tensor& row) {
    unit.reduction().finish(row, unit.group(), unit.unit());
  };
  for (const auto i : lane.members) {
    if (lane.slab.columns(i) == 0) {
      continue;
    }
    const std::vector<Piece> pieces{{i, 0, unit.parameter(i).shard_numel, 0}};
    if (after_shards(unit, lane, pieces, *output, {})) {
      finish(*output);
      unit.sharded().land(pieces, *output);
    }
    ++output;
  }
  if (after_shards(unit, lane, {}, *output, *output)) {
    finish(*output);
    read_flags(entry, *output);
  }
  // The slab and the results go back in the compute stream's order.
  ring_.catch_up_compute();
  entry.slab_inputs.clear();
  entry.slab_outputs.clear();
  lane.slab.release_bytes();
}

// The one place where the host reads a value back, and only where this rank
// left a parameter of the unit without a gradient.
void GradientStream::read_flags(Entry& entry, const at::Tensor& flags) {
  auto& lane = entry.unit->lanes()[static_cast<std::size_t>(entry.lane)];
  if (entry.unit->used_all(lane)) {
    return;
  }
  touch(memory_->runtime(), flags, Access::read);
  const auto host = flags.to(at::kCPU, at::kFloat).contiguous();
  const auto* values = host.const_data_ptr<float>();
  lane.used_anywhere.assign(values, values + lane.plan.num_parameters);
}

void GradientStream::land_sent() {
  for (std::size_t place = 0; place < next_; ++place) {
    land(place);
  }
}

void GradientStream::finish() {
  for (auto* unit : units_) {
    unit->seal();
  }
  pump();
  land_sent();
  clear();
}

void GradientStream::abort() {
  auto& runtime = memory_->runtime();
  for (auto& entry : entries_) {
    if (entry.pending) {
      const device::StreamScope scope(runtime, Stream::reduce);
      ring_.reduce_has_moved();
      try {
        entry.pending->wait();
      } catch (const std::exception& error) {
        LOG(WARNING) << error.what();
      }
    }
  }
  clear();
}

// In the compute stream's order, after everything on `reduce`.
void GradientStream::clear() {
  ring_.release();
  for (auto* unit : units_) {
    for (auto& lane : unit->lanes()) {
      lane.place.reset();
    }
  }
  units_.clear();
  entries_.clear();
  next_ = opened_ = turn_ = 0;
  last_in_slot_.fill(kNone);
  producing_ = nullptr;
  room_ = 0;
}

}  // namespace lowtide::shard
