// The most bytes that a step's units hold at once, of each category of the
// ledger, by arithmetic: what memory_report shows beside what was observed.
// The settings are those of now; the order is that of registration.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace lowtide::shard {

// Bytes of each buffer of a unit when it is there.
struct UnitBytes {
  std::int64_t parameters = 0;
  std::int64_t gathered = 0;
  std::int64_t gather_input = 0;
  std::int64_t gradient_chunks = 0;  // how many
  std::int64_t gradient_slot = 0;
  std::int64_t gradient_slots = 0;  // how many
  bool own_slots = false;           // not those that units share
  std::int64_t gradient_slab = 0;
  std::int64_t gradient_in_place = 0;
  std::int64_t partial_gradients = 0;  // a sum for replicas, of the whole unit
  std::int64_t sharded_gradients = 0;
};

struct PlannedUnit {
  UnitBytes bytes;
  std::int32_t inside = -1;  // the unit whose forward its own runs in, or none
  bool reshard_after_forward = true;
  bool gradient_sync = true;
  bool all_reduce = true;
  bool offloaded = false;  // shards and gradients are on the host
  std::vector<std::int32_t> beside = {};  // units that are gathered with it
};

struct PlannedPeaks {
  std::int64_t parameters = 0;
  std::int64_t gathered = 0;
  std::int64_t gather_input = 0;
  std::int64_t gradient_stream = 0;
  std::int64_t gradient_slab = 0;
  std::int64_t sharded_gradients = 0;
  // On the host.
  std::int64_t host_parameters = 0;
  std::int64_t host_gradients = 0;
};

PlannedPeaks planned_peaks(c10::ArrayRef<PlannedUnit> units);

}  // namespace lowtide::shard
