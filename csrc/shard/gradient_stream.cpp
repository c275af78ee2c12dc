#include "shard/gradient_stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
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

void GradientStream::touch(const at::Tensor& tensor, Access access) {
  auto& runtime = memory_->runtime();
  runtime.touches(runtime.current(), tensor.const_data_ptr(), tensor.nbytes(),
                  access);
}

bool GradientStream::in_window(std::size_t place) const {
  return entries_[place].opens_at <= next_;
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
    const bool full = entry.chunk >= 0
                          ? entry.pieces_missing == entry.pieces_waiting &&
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
    auto& unit = *entries_[next_ - 1].unit;
    const bool last = next_ == entries_.size() || entries_[next_].unit != &unit;
    if (last && unit.on_landed) {
      show(unit);
    }
    opened_ = std::max(opened_, next_);
    for (; opened_ < entries_.size() && in_window(opened_); ++opened_) {
      write_ready_pieces(opened_, /*small_too=*/false);
    }
  }
}

// Whatever no gradient came for leaves as -0.0, and the flags say so.
void GradientStream::complete(std::size_t place) {
  open_slot(place);
  write_ready_pieces(place, /*small_too=*/true);
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
  touch(entry.input, Access::write);
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
    land_until(entry.before + 1);
  }
  auto& unit = *entry.unit;
  auto& lane = unit.lanes()[static_cast<std::size_t>(entry.lane)];
  unit.add_small();
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

void GradientStream::abandon() {
  for (auto& entry : entries_) {
    if (entry.pending) {
      const device::StreamScope scope(memory_->runtime(), Stream::reduce);
      ring_.reduce_has_moved();
      entry.pending->abandon();
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
  next_ = opened_ = landed_ = turn_ = 0;
  last_in_slot_.fill(kNone);
  producing_ = nullptr;
  room_ = 0;
}

}  // namespace lowtide::shard