#include "phantom/allocator/statistics.h"

#include <algorithm>

namespace lowtide::phantom {
namespace {

template <typename Visit>
void for_each_stat(Statistics& statistics, Visit visit) {
  for (PoolStats* stats :
       {&statistics.allocation, &statistics.segment, &statistics.active,
        &statistics.inactive_split, &statistics.allocated_bytes,
        &statistics.reserved_bytes, &statistics.active_bytes,
        &statistics.inactive_split_bytes, &statistics.requested_bytes}) {
    for (Stat& stat : *stats) visit(stat);
  }
  visit(statistics.oversize_allocations);
  visit(statistics.oversize_segments);
}

}  // namespace

void Stat::increase(std::size_t amount) {
  current += static_cast<std::int64_t>(amount);
  peak = std::max(current, peak);
  allocated += static_cast<std::int64_t>(amount);
}

void Stat::decrease(std::size_t amount) {
  current -= static_cast<std::int64_t>(amount);
  freed += static_cast<std::int64_t>(amount);
}

void Statistics::reset_peaks() {
  for_each_stat(*this, [](Stat& stat) { stat.reset_peak(); });
}

void Statistics::reset_accumulated() {
  for_each_stat(*this, [](Stat& stat) { stat.reset_accumulated(); });
  num_alloc_retries = 0;
  num_ooms = 0;
  num_sync_all_streams = 0;
  num_device_alloc = 0;
  num_device_free = 0;
}

}  // namespace lowtide::phantom
