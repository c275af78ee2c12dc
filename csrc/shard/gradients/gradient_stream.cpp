#include "shard/gradients/gradient_stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <c10/util/Logging.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"

namespace lowtide::shard {

using device::Stream;

namespace {

// That may stay of the unit before, see [Note: Sources of the unit before].
std::int64_t newest_bytes(const UnitGradients& unit) {
  const auto slots = unit.num_slots();
  return unit.slot_bytes() * slots / slots_for_rows(slots);
}

}  // namespace

GradientStream::GradientStream(std::string root,
                               std::shared_ptr<memory::DeviceMemory> memory,
                               StepLog& log)
    : memory_(memory),
      log_(log),
      ring_(std::move(root), std::move(memory)),
      sums_(*memory_, ring_, log) {
  last_in_slot_.fill(kNone);
}

// --- the sequence -----------------------------------------------------------

void GradientStream::begin() {
  LOWTIDE_INVARIANT(next_ == entries_.size(), "one backward at a time");
}

void GradientStream::append(UnitGradients& unit) {
  units_.push_back(&unit);
  for (std::size_t l = 0; l < unit.lanes().size(); ++l) {
    auto& lane = unit.lanes()[l];
    const auto number = static_cast<std::int32_t>(l);
    lane.place = entries_.size();
    if (unit.accumulating() || lane.in_place) {
      add_entry({std::make_unique<SlabParcel>(unit, number, *memory_, ring_)});
      continue;
    }
    for (std::size_t c = 0; c < lane.plan.chunks.size(); ++c) {
      auto chunk = std::make_unique<ChunkParcel>(
          unit, number, static_cast<std::int32_t>(c), *memory_, ring_);
      auto* const as_chunk = chunk.get();
      add_entry({std::move(chunk), as_chunk});
    }
  }
  if (!unit.own_slots()) {
    ring_.fit(unit.slot_bytes());
  }
}

// Slabs have bytes of their own, but take turns as chunks in two slots do: when
// one has landed compute waits for it.
void GradientStream::add_entry(Entry entry) {
  const auto slots = entry.parcel->unit().num_slots();
  entry.slot =
      turn_++ % static_cast<std::size_t>(entry.chunk == nullptr
                                             ? std::max(slots, kRingSlots)
                                             : slots);
  auto& last = last_in_slot_[entry.slot];
  entry.before = std::exchange(last, entries_.size());
  entry.opens_at = entry.before == kNone ? 0 : entry.before + 1;
  if (!entries_.empty()) {
    entry.opens_at = std::max(entry.opens_at, entries_.back().opens_at);
  }
  entries_.push_back(std::move(entry));
}

bool GradientStream::contains(const UnitGradients& unit) const {
  return !unit.lanes().empty() && unit.lanes().front().place.has_value();
}

bool GradientStream::last_of_unit(std::size_t place) const {
  return place + 1 == entries_.size() ||
         &parcel(place + 1).unit() != &parcel(place).unit();
}

bool GradientStream::in_window(std::size_t place) const {
  return entries_[place].opens_at <= next_;
}

// --- gradients come ---------------------------------------------------------

void GradientStream::accept(UnitGradients& unit, std::int32_t i,
                            at::Tensor gradient, bool hold) {
  auto& parameter = unit.parameter(i);
  if (!gradient.defined() && parameter.product != Product::added) {
    return;
  }
  require_here(unit, i);
  produces(unit);
  unit.prepare_results();
  unit.arrives(i, hold);
  if (unit.in_place(i)) {
    if (gradient.defined()) {
      make_room(unit, i);
      unit.accumulate(i, std::move(gradient));
    }
    pump();
    return;
  }
  if (unit.accumulating()) {
    unit.accumulate(i, std::move(gradient));
    return;
  }
  const bool is_new = !parameter.source.defined();
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    parameter.source =
        is_new ? std::move(gradient) : at::add(parameter.source, gradient);
  }
  ring_.compute_has_moved();
  if (parameter.arrival == Arrival::held) {
    return;
  }
  const auto first =
      *unit.lanes()[static_cast<std::size_t>(parameter.lane)].place;
  for (const auto& where : parameter.places) {
    const auto place = first + static_cast<std::size_t>(where.chunk);
    if (!in_window(place)) {
      break;
    }
    if (!parameter.waits_as_small()) {
      write(place, {static_cast<std::size_t>(where.piece)});
    } else if (is_new) {
      entries_[place].chunk->hold_small_piece();
    }
    leave_complete();
  }
  if (parameter.places.empty()) {
    parameter.source.reset();
  }
  pump();
}

void GradientStream::require_here(const UnitGradients& unit,
                                  std::int32_t i) const {
  if (unit.sealed() || unit.parameter(i).pieces_written > 0) {
    throw Error(base::error_text(
        base::concat("parameter '", unit.name_of(i), "'"),
        "every gradient of a backward before its unit's gradients leave",
        base::concat("another one after unit '", unit.unit(), "' was reduced"),
        "Where re-entrant checkpointing runs a module several times, use "
        "torch.utils.checkpoint with use_reentrant=False; where one backward "
        "goes through a later graph and one that was kept, run two, or leave "
        "LOWTIDE_COMPARE_RANKS on."));
  }
}

void GradientStream::accept_rows(UnitGradients& unit, std::int32_t i,
                                 std::int64_t block, at::Tensor rows) {
  auto& parameter = unit.parameter(i);
  if (unit.sealed() || parameter.source.defined() ||
      block != parameter.rows.seen) {
    throw Error(base::error_text(
        base::concat("parameter '", unit.name_of(i), "'"),
        base::concat("block ", parameter.rows.seen,
                     " of its gradient's rows, once in a backward"),
        base::concat(
            "block ", block,
            parameter.source.defined() ? " beside a whole gradient" : ""),
        "A parameter whose gradient comes in rows (a head inside its loss, a "
        "large embedding) gets one gradient in a backward: call its module, "
        "and do not use its weight otherwise."));
  }
  ++parameter.rows.seen;
  produces(unit);
  unit.prepare_results();
  unit.arrives(i, /*hold=*/false);
  if (unit.accumulating()) {
    unit.accumulate_rows(i, block, rows);
    return;
  }
  parameter.rows.blocks.push_back(std::move(rows));
  ring_.compute_has_moved();
  const auto& where = parameter.places[static_cast<std::size_t>(block)];
  const auto place =
      *unit.lanes()[static_cast<std::size_t>(parameter.lane)].place +
      static_cast<std::size_t>(where.chunk);
  if (in_window(place)) {
    write(place, {static_cast<std::size_t>(where.piece)});
  }
  pump();
}

void GradientStream::add_in_place(
    UnitGradients& unit, std::int32_t i,
    const std::function<void(GradientSlab& slab)>& add) {
  require_here(unit, i);
  produces(unit);
  unit.prepare_results();
  make_room(unit, i);
  add(unit.slab(i));
  unit.parameter(i).product = Product::added;
}

void GradientStream::open(std::size_t place) {
  auto& entry = entries_[place];
  if (entry.parcel->is_open()) {
    return;
  }
  if (entry.before != kNone) {
    land_until(entry.before + 1);
  }
  entry.parcel->open(entry.slot);
}

void GradientStream::write(std::size_t place,
                           c10::ArrayRef<std::size_t> pieces) {
  if (!pieces.empty()) {
    open(place);
    entries_[place].chunk->write(pieces);
    const auto& unit = parcel(place).unit();
    ring_.reclaim(
        std::max(unit.source_bytes() + unit.lingering_bytes(), room_));
  }
}

// --- memory -----------------------------------------------------------------

// [Note: Sources of the unit before]
// The peak of a step is where a unit's backward has recomputed everything and
// gradients begin to come.  Those of the unit before must not be in it, so
// compute waits for their copies once a unit, as FSDP2's waits for the
// reduce-scatter before: for most of them when the unit's backward begins, for
// those that came last only at the first gradient, after the recomputation.
// The newest, of a slot's bytes, may stay, of a third of an only slot, which is
// as much longer: a small unit whose turn in the ring has just come is copied
// behind the reduction that had the slot.
//
// A unit with a much larger output than input, a head that was called as a
// module, leaves room when its backward is over: its own sources and slots stay
// in it as long as they like, and compute waits for nothing.  Without room,
// slots of its own go first.
//
// Where the wire is slower than backward ([Note: A wire that is slower than
// backward]) compute would stand still until gradients have left that its next
// unit could hide.  There those of one unit may stay until the next one's
// backward is over.
void GradientStream::expects(UnitGradients& unit) {
  if (producing_ != &unit) {
    if (producing_ != nullptr && producing_->own_slots() &&
        room_ < producing_->source_bytes()) {
      land_until(next_);
      ring_.drop_slots();
    }
    const auto keep = std::max({unit.source_bytes() / 4, newest_bytes(unit),
                                room_, unit.lingering_bytes()});
    land_in_place(keep);
    ring_.reclaim(keep);
  }
  // What outlives the unit's backward is leased ahead of what does not.
  if (contains(unit) && unit.prepare_results()) {
    ring_.compute_has_moved();
  }
}

void GradientStream::produces(const UnitGradients& unit) {
  if (producing_ != &unit) {
    const auto keep =
        std::max({newest_bytes(unit), room_, unit.lingering_bytes()});
    land_in_place(keep);
    ring_.reclaim(keep);
    producing_ = &unit;
  }
}

// [Note: Room for a gradient in place]
// Slabs take the place of the sources that other gradients have, so they have
// the same budget: the bytes of the unit's gradients in the compute dtype.
// Beyond it compute waits for the oldest that is on its way.  One slab there
// must be, whatever its size.
void GradientStream::make_room(UnitGradients& unit, std::int32_t i) {
  if (unit.slab(i).allocated()) {
    return;
  }
  auto waiting = unit.slab(i).bytes();
  for (auto place = next_; place < entries_.size(); ++place) {
    waiting += parcel(place).in_place_bytes();
  }
  land_in_place(std::max(unit.source_bytes() - waiting, room_));
}

// Oldest first: compute waits for them.  Everything lands in the order it left,
// because that may take a collective of its own.
void GradientStream::land_in_place(std::int64_t keep_bytes) {
  std::int64_t on_their_way = 0;
  for (auto place = landed_; place < next_; ++place) {
    on_their_way += parcel(place).in_place_bytes();
  }
  while (landed_ < next_ && on_their_way > keep_bytes) {
    on_their_way -= parcel(landed_).in_place_bytes();
    land_until(landed_ + 1);
  }
}

// --- parcels leave ----------------------------------------------------------

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
    auto& unit = parcel(next_).unit();
    if (unit.sealed() || !is_over(unit)) {
      return;
    }
    seal(unit);
  }
}

bool GradientStream::may_leave(const Parcel& parcel) const {
  const auto& unit = parcel.unit();
  return unit.sealed() || (unit.leaves_early() && parcel.complete());
}

// To write a slot is to wait, on `reduce`, for what left from it, and whatever
// leaves next waits behind that: so what can leave does before the next slot is
// written, and a chunk is written while the one before it is on its way.
void GradientStream::pump() {
  leave_complete();
  while (opened_ < entries_.size() && in_window(opened_)) {
    if (auto* const chunk = entries_[opened_].chunk; chunk != nullptr) {
      write(opened_, chunk->ready(/*small_too=*/false));
    }
    ++opened_;
    leave_complete();
  }
}

void GradientStream::leave_complete() {
  while (next_ < entries_.size() && may_leave(parcel(next_))) {
    issue_gathers(next_);
    leave(next_);
    auto& unit = parcel(next_++).unit();
    const bool last = last_of_unit(next_ - 1);
    start_sums(&unit);
    if (last && unit.reduction().of_whole_units() &&
        !unit.reduction().keeps_partial()) {
      sums_.add(unit, next_);
    }
    if (last && unit.on_landed) {
      show(unit);
    }
  }
  opened_ = std::max(opened_, next_);
}

void GradientStream::leave(std::size_t place) {
  auto& parcel = *entries_[place].parcel;
  auto& unit = parcel.unit();
  log_.note({StepNote::What::reduce, unit.number(), parcel.chunk()});
  auto* const chunk = entries_[place].chunk;
  // Of a unit that got no gradient: ahead of the slot, which reduce zeroes.
  if (chunk != nullptr && unit.prepare_results()) {
    ring_.compute_has_moved();
  }
  open(place);
  if (chunk != nullptr) {
    write(place, chunk->ready(/*small_too=*/true));
  } else {
    unit.add_small();
    unit.prepare_results();
    if (parcel.lane().in_place) {
      make_room(unit, parcel.lane().members.front());
    }
  }
  parcel.leave();
}

void GradientStream::land_until(std::size_t place) {
  for (; landed_ < place; ++landed_) {
    const device::StreamScope scope(memory_->runtime(), Stream::reduce);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    ring_.reduce_has_moved();
    parcel(landed_).land();
    auto& unit = parcel(landed_).unit();
    if (last_of_unit(landed_) && !unit.reduction().of_whole_units()) {
      unit.all_landed(ring_);
    }
  }
}

void GradientStream::start_sums(const UnitGradients* leaving) {
  sums_.start(leaving, [this](std::size_t places) { land_until(places); });
}

// A hook may drop a gradient while `reduce` still works on it.
void GradientStream::show(UnitGradients& unit) {
  start_sums(nullptr);
  land_until(next_);
  sums_.finish();
  const c10::Storage results = unit.sharded().results();
  {
    const device::StreamScope scope(memory_->runtime(), Stream::reduce);
    unit.on_landed();
  }
  ring_.reduce_has_moved();
  if (results) {
    ring_.retire({results}, static_cast<std::int64_t>(results.nbytes()));
  }
}

// --- gathers between parcels ------------------------------------------------

void GradientStream::precede(const UnitGradients& unit,
                             std::size_t num_gradients,
                             std::function<void()> gather) {
  std::vector<std::size_t> turns(unit.size(), 0);
  for (std::size_t k = 0; k < unit.trainable().size(); ++k) {
    turns[static_cast<std::size_t>(unit.trainable()[k])] = k + 1;
  }
  auto place = *unit.lanes().front().place;
  while (parcel(place).gradients_for(turns) <= num_gradients &&
         place + 1 < entries_.size() && &parcel(place + 1).unit() == &unit) {
    ++place;
  }
  gathers_.push_back({&unit, place, std::move(gather)});
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

// --- the end ----------------------------------------------------------------

void GradientStream::finish() {
  for (auto* unit : units_) {
    unit->seal();
  }
  pump();
  start_sums(nullptr);
  land_until(next_);
  sums_.finish();
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
    pending.push_back(entry.parcel->pending());
  }
  const auto sums = sums_.in_flight();
  pending.insert(pending.end(), sums.begin(), sums.end());
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
  sums_.clear();
  next_ = opened_ = landed_ = turn_ = 0;
  last_in_slot_.fill(kNone);
  producing_ = nullptr;
  room_ = 0;
}

}  // namespace lowtide::shard
