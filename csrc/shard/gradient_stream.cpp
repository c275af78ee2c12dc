#include "shard/gradient_stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <iterator>
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
                               std::shared_ptr<memory::DeviceMemory> memory,
                               StepLog& log)
    : root_(std::move(root)),
      memory_(memory),
      log_(log),
      ring_(root_, std::move(memory)) {
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

void GradientStream::seal_leading(
    const std::function<bool(const UnitGradients& unit)>& is_over) {
  while (next_ < entries_.size()) {
    auto& unit = *entries_[next_].unit;
    if (unit.sealed() || !is_over(unit)) {
      return;
    }
    seal(unit);
  }
}

// --- gathers ----------------------------------------------------------------

void GradientStream::precede(const UnitGradients& unit,
                             std::size_t num_gradients,
                             std::function<void()> gather) {
  std::vector<std::size_t> turns(unit.size(), 0);
  for (std::size_t k = 0; k < unit.trainable().size(); ++k) {
    turns[static_cast<std::size_t>(unit.trainable()[k])] = k + 1;
  }
  auto place = *unit.lanes().front().place;
  while (gradients_for(entries_[place], turns) <= num_gradients &&
         place + 1 < entries_.size() && entries_[place + 1].unit == &unit) {
    ++place;
  }
  gathers_.push_back({&unit, place, std::move(gather)});
}

std::size_t GradientStream::gradients_for(
    const Entry& entry, const std::vector<std::size_t>& turns) const {
  const auto& lane = entry.unit->lanes()[static_cast<std::size_t>(entry.lane)];
  const bool at_seal =
      entry.chunk < 0 ? !lane.in_place : chunk_of(entry).flags_column >= 0;
  if (at_seal) {
    return entry.unit->trainable().size() + 1;
  }
  if (entry.chunk < 0) {
    return turns[static_cast<std::size_t>(lane.members.front())];
  }
  std::size_t most = 0;
  for (const auto& piece : chunk_of(entry).pieces) {
    most = std::max(most, turns[static_cast<std::size_t>(piece.parameter)]);
  }
  return most;
}

void GradientStream::gather_if_next(const UnitGradients& unit) {
  const auto gather =
      std::find_if(gathers_.begin(), gathers_.end(),
                   [&](const auto& one) { return one.unit == &unit; });
  if (gather != gathers_.end() && gather->place <= next_) {
    issue_gathers(gather->place);
  }
}

void GradientStream::issue_gathers(std::size_t place) {
  std::vector<Gather> due;
  const auto later =
      std::stable_partition(gathers_.begin(), gathers_.end(),
                            [&](const auto& one) { return one.place > place; });
  std::move(later, gathers_.end(), std::back_inserter(due));
  gathers_.erase(later, gathers_.end());
  for (const auto& gather : due) {
    gather.issue();
  }
}

// --- leaving ----------------------------------------------------------------

bool GradientStream::may_leave(const Entry& entry) const {
  if (entry.unit->sealed() || !entry.unit->leaves_early()) {
    return entry.unit->sealed();
  }
  return entry.chunk >= 0 ? entry.pieces_missing == entry.pieces_waiting &&
                                chunk_of(entry).flags_column < 0
                          : is_complete(entry);
}

void GradientStream::pump() {
  while (next_ < entries_.size()) {
    const auto& entry = entries_[next_];
    if (!may_leave(entry)) {
      return;
    }
    issue_gathers(next_);
    log_.note({StepNote::What::reduce, entry.unit->number(), entry.chunk});
    if (entry.chunk < 0) {
      send_slab(next_);
    } else {
      complete(next_);
      send(next_);
    }
    ++next_;
    auto& unit = *entries_[next_ - 1].unit;
    const bool last = next_ == entries_.size() || entries_[next_].unit != &unit;
    start_sums(&unit);
    if (last && unit.reduction().of_whole_units() &&
        !unit.reduction().keeps_partial()) {
      to_sum_.push_back({&unit, next_});
    }
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
  const auto& reduction = unit.reduction();
  reduction.prepare(entry.input, unit.group());
  entry.pending = unit.group().reduce_scatter(
      entry.output, entry.input,
      reduction.over_shards(unit.group(), entry.input.scalar_type()),
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
  const auto& reduction = unit.reduction();
  for (const auto& input : entry.slab_inputs) {
    reduction.prepare(input, unit.group());
  }
  entry.pending = unit.group().reduce_scatter_coalesced(
      entry.slab_outputs, entry.slab_inputs,
      reduction.over_shards(unit.group(), lane.dtype), unit.unit());
  entry.sent = true;
}

void GradientStream::finish() {
  for (auto* unit : units_) {
    unit->seal();
  }
  pump();
  start_sums(nullptr);
  land_sent();
  finish_sum();
  clear();
}

void GradientStream::abort() {
  const device::StreamScope scope(memory_->runtime(), Stream::reduce);
  for (auto* pending : in_flight()) {
    ring_.reduce_has_moved();
    try {
      pending->wait();
    } catch (const std::exception& error) {
      LOG(WARNING) << error.what();
    }
  }
  clear();
}

void GradientStream::abandon() {
  const device::StreamScope scope(memory_->runtime(), Stream::reduce);
  for (auto* pending : in_flight()) {
    ring_.reduce_has_moved();
    pending->abandon();
  }
  clear();
}

std::vector<comm::Pending*> GradientStream::in_flight() const {
  std::vector<comm::Pending*> pending;
  for (const auto& entry : entries_) {
    pending.push_back(entry.pending.get());
  }
  if (sum_) {
    for (const auto& of_flat : sum_->pending) pending.push_back(of_flat.get());
  }
  std::erase(pending, nullptr);
  return pending;
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
  gathers_.clear();
  to_sum_.clear();
  sum_.reset();
  next_ = opened_ = landed_ = turn_ = 0;
  last_in_slot_.fill(kNone);
  producing_ = nullptr;
  room_ = 0;
}

}  // namespace lowtide::shard