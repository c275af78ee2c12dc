// The settings of PYTORCH_ALLOC_CONF that change what is reserved, and the
// memory of the simulated device.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

namespace lowtide::phantom {

struct AllocatorSettings {
  bool expandable = false;  // expandable_segments
  // Bytes the device can give to the allocator; none: as much as is asked for.
  std::optional<std::size_t> capacity;
  // per_process_memory_fraction: the share of `capacity`, in [0, 1], that the
  // allocator may take.
  double memory_fraction = 1;
  // garbage_collection_threshold, in [0, 1): the share of what it may take
  // above which blocks not used for long are given back; 0 never.  As in
  // torch, works only with a memory_fraction below 1.
  double garbage_collection_threshold = 0;
  // max_split_size_mb, in bytes, >= large_segment: blocks from this size on are
  // neither split nor given to smaller requests; none: no such size.
  std::optional<std::size_t> max_split;
  // large_segment_size_mb, in bytes: the segment of requests of 1 to 10 MiB.
  std::size_t large_segment = std::size_t{20} << 20;
  // max_non_split_rounding_mb, in bytes, >= large_segment: how much larger than
  // a request beyond max_split its block may be; none: large_segment.
  std::optional<std::size_t> max_non_split_rounding;
  // roundup_power2_divisions: in how many steps the way from one power of two
  // to the next is divided, 0 or 1 for none.  Entry i is for requests of 2^i to
  // 2^(i+1) MiB; the first also for smaller ones, the last for larger ones.
  std::array<std::size_t, 16> roundup_power2_divisions{};
};

// Throws lowtide::InvalidArgument for settings that torch refuses too.
void check_settings(const AllocatorSettings& settings);

// capacity * memory_fraction, if that limits anything.
std::optional<std::size_t> allowed_bytes(const AllocatorSettings& settings);

}  // namespace lowtide::phantom
