// The units of a root by number, in registration order; null for those that
// died.
#pragma once

#include <ranges>
#include <vector>

namespace lowtide::shard {

class Unit;

using Units = std::vector<Unit*>;

inline auto living(const Units& units) {
  return units |
         std::views::filter([](const Unit* unit) { return unit != nullptr; });
}

}  // namespace lowtide::shard
