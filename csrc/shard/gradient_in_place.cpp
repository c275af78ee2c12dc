// The part of GradientStream for gradients that are summed where they are sent
// from: each in a slab of its own, which is leased when the first of it comes
// and leaves when the last has.  See docs/design/fused_gradients.md.
#include <algorithm>

#include "shard/gradient_stream.h"

namespace lowtide::shard {
namespace {

const Lane& lane_of(const UnitGradients& unit, std::int32_t lane) {
  return unit.lanes()[static_cast<std::size_t>(lane)];
}

}  // namespace

bool GradientStream::is_complete(const Entry& entry) const {
  const auto& lane = lane_of(*entry.unit, entry.lane);
  return lane.in_place && entry.unit->parameter(lane.members.front()).complete;
}

void GradientStream::add_in_place(
    UnitGradients& unit, std::int32_t i,
    const std::function<void(GradientSlab& slab)>& add) {
  require_here(unit, i);
  produces(unit);
  prepare(unit);
  make_room(unit, i);
  add(unit.slab(i));
  unit.parameter(i).added = true;
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
  std::int64_t waiting = unit.slab(i).bytes();
  for (std::size_t place = next_; place < entries_.size(); ++place) {
    const auto& lane = lane_of(*entries_[place].unit, entries_[place].lane);
    if (lane.in_place && entries_[place].chunk < 0 && lane.slab.allocated()) {
      waiting += lane.slab.bytes();
    }
  }
  land_in_place(std::max(unit.source_bytes() - waiting, room_));
}

// All but `keep_bytes` of slabs that have left are given back, oldest first:
// compute waits for them.  Everything lands in the order it left, because that
// may take a collective of its own.
void GradientStream::land_in_place(std::int64_t keep_bytes) {
  const auto bytes_at = [&](std::size_t place) {
    const auto& entry = entries_[place];
    const auto& lane = lane_of(*entry.unit, entry.lane);
    return entry.chunk < 0 && lane.in_place ? lane.slab.bytes() : 0;
  };
  std::int64_t on_their_way = 0;
  for (std::size_t place = landed_; place < next_; ++place) {
    on_their_way += bytes_at(place);
  }
  while (landed_ < next_ && on_their_way > keep_bytes) {
    on_their_way -= bytes_at(landed_);
    land_until(landed_ + 1);
  }
}

}  // namespace lowtide::shard
