#include "shard/planned_step.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "shard/schedule.h"

namespace lowtide::shard {
namespace {

using PlannedUnits = c10::ArrayRef<PlannedUnit>;

// Sums that are under way: one comes together, one waits for its place behind
// the next unit's first chunk, one is with the replicas.
constexpr std::size_t kSumsAtOnce = 3;
// Units' gradients on their way to the host: those that come, those that are
// being reduced, those that are being copied, each with those of the units
// around it, which begin first.  Those of the outermost are complete last.
constexpr std::size_t kLeavingAtOnce = 3;

std::int64_t largest(std::vector<std::int64_t> bytes, std::size_t at_once) {
  std::sort(bytes.begin(), bytes.end(), std::greater<>());
  bytes.resize(std::min(bytes.size(), at_once));
  return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0});
}

// What `.grad` shows, and what is not summed over replicas yet.
std::int64_t sharded_gradients_peak(PlannedUnits units) {
  std::int64_t bytes = 0;
  std::vector<std::int64_t> sums;
  std::vector<std::int64_t> leaving;
  std::set<std::int32_t> enclosing;
  for (const auto& unit : units) enclosing.insert(unit.inside);
  std::size_t levels = 1;  // of units in units, without the outermost
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto& unit = units[i];
    if (!unit.gradient_sync) continue;
    const bool outermost =
        unit.inside < 0 && enclosing.contains(static_cast<std::int32_t>(i));
    std::size_t level = 0;
    for (auto around = unit.inside; around >= 0;
         around = units[static_cast<std::size_t>(around)].inside) {
      ++level;
    }
    levels = std::max(levels, level);
    const auto partial = unit.bytes.partial_gradients;
    if (unit.all_reduce) {
      if (unit.offloaded && !outermost) {
        leaving.push_back(unit.bytes.sharded_gradients);
      } else {
        bytes += unit.bytes.sharded_gradients;
      }
      sums.push_back(partial);
    } else {
      bytes += partial != 0 ? partial : unit.bytes.sharded_gradients;
    }
  }
  return bytes + largest(std::move(sums), kSumsAtOnce) +
         largest(std::move(leaving), kLeavingAtOnce * levels);
}

// Slots that units share; a unit may replace them by its own, longer ones.
std::int64_t ring_peak(PlannedUnits units) {
  std::int64_t chunks = 0;
  std::int64_t shared_slot = 0;
  for (const auto& unit : units) {
    if (!unit.gradient_sync) continue;
    chunks += unit.bytes.gradient_chunks;
    if (unit.bytes.own_slots) continue;
    shared_slot = std::max(shared_slot, unit.bytes.gradient_slot);
  }
  std::int64_t peak = 0;
  for (const auto& unit : units) {
    if (!unit.gradient_sync) continue;
    const auto& bytes = unit.bytes;
    const auto slots = std::min(chunks, bytes.gradient_slots);
    const auto own =
        bytes.own_slots ? std::min(bytes.gradient_chunks, slots) : 0;
    peak =
        std::max(peak, own * bytes.gradient_slot + (slots - own) * shared_slot);
  }
  return peak;
}

// A forward as the schedule has it: what is next is gathered while a unit runs,
// and freed after its own forward unless it stays for backward, which walks the
// same pairs in reverse.
void play_forward(PlannedUnits units, Schedule& schedule, PlannedPeaks& peaks) {
  const auto num_units = static_cast<std::int32_t>(units.size());
  std::set<std::int32_t> gathered;
  std::vector<std::int32_t> running;
  std::int64_t held = 0;
  const auto of = [&](std::int32_t i) -> const PlannedUnit& {
    return units[static_cast<std::size_t>(i)];
  };
  const auto gather = [&](std::int32_t i) {
    if (gathered.insert(i).second) held += of(i).bytes.gathered;
    return of(i).bytes.gather_input;
  };
  const auto leave = [&](std::int32_t i) {
    schedule.leave_forward(i, /*recorded=*/false);
    if (of(i).reshard_after_forward && gathered.erase(i) == 1) {
      held -= of(i).bytes.gathered;
    }
  };
  schedule.begin_forward();
  for (std::int32_t i = 0; i < num_units; ++i) {
    while (!running.empty() && running.back() != of(i).inside) {
      leave(running.back());
      running.pop_back();
    }
    running.push_back(i);
    std::set<std::int32_t> together;
    auto ahead = schedule.enter_forward(i);
    ahead.push_back(i);
    for (const auto first : ahead) {
      together.insert(first);
      together.insert(of(first).beside.begin(), of(first).beside.end());
    }
    std::int64_t inputs = 0;
    for (const auto one : together) inputs += gather(one);
    peaks.gathered = std::max(peaks.gathered, held);
    peaks.gather_input = std::max(peaks.gather_input, inputs);
  }
  for (; !running.empty(); running.pop_back()) leave(running.back());
  schedule.end_forward();
}

}  // namespace

PlannedPeaks planned_peaks(PlannedUnits units) {
  PlannedPeaks peaks;
  std::int64_t in_place = 0;
  for (const auto& unit : units) {
    (unit.offloaded ? peaks.host_parameters : peaks.parameters) +=
        unit.bytes.parameters;
    if (unit.offloaded && unit.gradient_sync && unit.all_reduce) {
      peaks.host_gradients += unit.bytes.sharded_gradients;
    }
    if (unit.gradient_sync) {
      in_place = std::max(in_place, unit.bytes.gradient_in_place);
    } else {
      peaks.gradient_slab += unit.bytes.gradient_slab;
    }
  }
  peaks.gradient_slab += in_place;
  peaks.gradient_stream = ring_peak(units);
  peaks.sharded_gradients = sharded_gradients_peak(units);
  Schedule schedule(static_cast<std::int32_t>(units.size()));
  play_forward(units, schedule, peaks);  // which units run in which is recorded
  play_forward(units, schedule, peaks);
  return peaks;
}

}  // namespace lowtide::shard
