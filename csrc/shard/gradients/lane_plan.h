// Which of a unit's gradients travel together: pure arithmetic, the same on
// every rank.
//
// A lane is of one wire dtype, because a chunk never mixes dtypes; a gradient
// that is summed in place has one of its own.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

#include "shard/gradients/gradient_plan.h"

namespace lowtide::shard {

struct GradientShape {
  at::ScalarType dtype;  // on the wire
  std::int64_t numel = 0;
  std::int64_t shard_numel = 0;  // with padding
  // Columns of each block of rows; 0: it comes whole.
  std::int64_t strip = 0;
  // It is summed in place, unless it comes in blocks of rows.
  bool fused = false;
};

struct PlannedLane {
  at::ScalarType dtype;
  bool in_place = false;
  std::vector<std::int32_t> members;
  UnitPlan plan;  // without chunks where gradients are summed in place
};

// Lanes of those that take part, in the order in which their first gradient is
// expected, those in place first: what is left at the end of the unit's
// backward would hold up the others.  `order`: a permutation of all;
// `budget_bytes`: of the ring's `num_slots`.
std::vector<PlannedLane> plan_lanes(c10::ArrayRef<GradientShape> gradients,
                                    const std::vector<bool>& takes_part,
                                    c10::ArrayRef<std::int32_t> order,
                                    std::int64_t budget_bytes,
                                    std::int64_t num_slots, std::int64_t ranks);

}  // namespace lowtide::shard
