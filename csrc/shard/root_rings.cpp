// The part of Root that decides how long the rings of gradient chunks are.
#include <algorithm>

#include "shard/root.h"
#include "shard/unit.h"

namespace lowtide::shard {
namespace {

constexpr auto kManyRanks = GradientRing::kManyRanks;

}  // namespace

std::int64_t Root::ring_bytes() const {
  std::int64_t largest = 0;
  for (const auto* unit : units_) {
    if (unit != nullptr) {
      largest = std::max(largest, unit->gradients().wire_bytes());
    }
  }
  return GradientRing::bytes_for(gradient_budget(), largest);
}

std::int64_t Root::gradient_budget() const {
  std::int64_t ranks = 1;
  for (const auto* unit : units_) {
    if (unit != nullptr) {
      ranks = std::max(ranks, unit->groups().reduce->size());
    }
  }
  return gradient_budget_.value_or(GradientRing::default_budget(ranks));
}

// [Note: The end of backward]
// Nothing hides the reduction of the last unit, usually the embedding, so it
// leaves in few collectives.  Where the unit before it held its parameters, its
// gradients and its activations, a ring three times as long as those parameters
// fits, less what units that enclose others keep until the end: parameters and
// gradients.  Among few ranks, where latency counts for little, twice as long
// is enough and fits between what other units left.  A budget below the default
// is kept.
//
// [Note: The beginning of backward]
// The first unit to reduce, usually the head, has no unit before it to hide
// behind either, and the next one's backward waits for its gradients.  Among
// many ranks, where a chunk would be all latency, its ring is as long as its
// own parameters, which go when its backward is over.  How much room its output
// leaves must not decide that: ranks may differ in it, and a plan may not.
std::int64_t Root::ring_bytes_of(const Unit& unit, std::int64_t ring) const {
  const auto ranks = unit.groups().reduce->size();
  const auto wire = unit.gradients().wire_bytes();
  constexpr std::int64_t kWorthIt = 4;  // times the ring
  if (gradient_budget() < GradientRing::kDefaultBudget ||
      wire <= kWorthIt * ring) {
    return ring;
  }
  if (&unit == first_to_reduce() && !unit.streams_rows() &&
      ranks >= kManyRanks) {
    return std::max(ring, std::min(wire, unit.planned_gathered_bytes()));
  }
  const auto [last, before] = last_to_reduce();
  if (&unit != last || before == nullptr) {
    return ring;
  }
  auto held = (ranks >= kManyRanks && ranks < 128 ? 3 : 2) *
              before->planned_gathered_bytes();
  for (const auto* other : units_) {
    if (other != nullptr && other->encloses_units) {
      held -= 2 * other->planned_gathered_bytes();
    }
  }
  return std::max(ring, std::min(wire, held));
}

void Root::plan_gradients_of(Unit& unit, std::int64_t ring) {
  const auto bytes = ring_bytes_of(unit, ring);
  const bool own = bytes > ring;
  unit.gradients().set_own_slots(own);
  constexpr auto kItemsize = static_cast<std::int64_t>(sizeof(float));
  unit.plan_gradients(own ? GradientRing::bytes_of_equal_chunks(
                                bytes, unit.gradients().wire_bytes(),
                                unit.groups().reduce->size(),
                                unit.buffers().slice(0).inner * kItemsize)
                          : ring);
}

// Of those that do not enclose others.
const Unit* Root::first_to_reduce() const {
  for (const auto number : last_order_) {
    const auto* unit = units_[static_cast<std::size_t>(number)];
    if (unit != nullptr && !unit->encloses_units &&
        unit->gradients().wire_bytes() > 0) {
      return unit;
    }
  }
  return nullptr;
}

// The last two of those that do not enclose others: these are small.
std::pair<const Unit*, const Unit*> Root::last_to_reduce() const {
  const Unit* last = nullptr;
  for (auto number = last_order_.rbegin(); number != last_order_.rend();
       ++number) {
    const auto* unit = units_[static_cast<std::size_t>(*number)];
    if (unit == nullptr || unit->encloses_units ||
        unit->gradients().wire_bytes() == 0) {
      continue;
    }
    if (last != nullptr) {
      return {last, unit};
    }
    last = unit;
  }
  return {last, nullptr};
}

}  // namespace lowtide::shard
