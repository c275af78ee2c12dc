#include "shard/gradients/lane_plan.h"

#include <algorithm>

#include "shard/policy.h"

namespace lowtide::shard {

std::vector<PlannedLane> plan_lanes(c10::ArrayRef<GradientShape> gradients,
                                    const std::vector<bool>& takes_part,
                                    c10::ArrayRef<std::int32_t> order,
                                    std::int64_t budget_bytes,
                                    std::int64_t num_slots,
                                    std::int64_t ranks) {
  std::vector<PlannedLane> lanes;
  for (const auto i : order) {
    const auto k = static_cast<std::size_t>(i);
    if (!takes_part[k]) {
      continue;
    }
    const auto& gradient = gradients[k];
    const bool in_place = gradient.fused && gradient.strip == 0;
    auto lane = std::find_if(lanes.begin(), lanes.end(), [&](const auto& one) {
      return !in_place && !one.in_place && one.dtype == gradient.dtype;
    });
    if (lane == lanes.end()) {
      lane = lanes.insert(lanes.end(), {gradient.dtype, in_place, {}, {}});
    }
    lane->members.push_back(i);
  }
  std::stable_partition(lanes.begin(), lanes.end(),
                        [](const auto& lane) { return lane.in_place; });
  std::vector<std::int64_t> shard_numel;
  std::vector<std::int64_t> strips;
  for (const auto& gradient : gradients) {
    shard_numel.push_back(gradient.shard_numel);
    strips.push_back(gradient.strip);
  }
  for (auto& lane : lanes) {
    const auto itemsize =
        static_cast<std::int64_t>(c10::elementSize(lane.dtype));
    lane.plan = plan_unit(
        shard_numel, lane.in_place ? std::vector<std::int32_t>() : lane.members,
        columns_for_budget(budget_bytes, num_slots, ranks, itemsize), strips,
        cuts_evenly(ranks));
  }
  return lanes;
}

}  // namespace lowtide::shard
