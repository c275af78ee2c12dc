// The settings of PYTORCH_ALLOC_CONF that change what is reserved, and the
// memory of the simulated device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace lowtide::phantom {

struct AllocatorSettings {
  bool expandable = false;  // expandable_segments
  // Bytes of device memory; none: as much as is asked for.
  std::optional<std::size_t> capacity;
  // max_split_size_mb, in bytes: larger blocks are neither split nor given to
  // smaller requests; > large_segment.
  std::optional<std::size_t> max_split;
  // max_non_split_rounding_mb, in bytes: how much larger than the request a
  // block beyond max_split may be.
  std::size_t max_non_split_rounding = std::size_t{20} << 20;
  std::size_t large_segment = std::size_t{20} << 20;  // large_segment_size_mb
  // roundup_power2_divisions: (upper bound of the request in bytes, a power of
  // two >= 1 MiB; divisions of the interval below it, a power of two or 0).
  // One entry with bound 0 applies to every size.
  std::vector<std::pair<std::size_t, std::size_t>> roundup_power2_divisions;
  // garbage_collection_threshold: the share of `capacity` above which cached
  // blocks that were not used for long are released; 0 never.
  double garbage_collection_threshold = 0;
};

}  // namespace lowtide::phantom
