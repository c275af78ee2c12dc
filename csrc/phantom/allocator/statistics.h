// The counters of torch.cuda.memory_stats(), same names and meanings.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lowtide::phantom {

struct Stat {
  std::int64_t current = 0;
  std::int64_t peak = 0;       // since the last reset_peak
  std::int64_t allocated = 0;  // every increase, since reset_accumulated
  std::int64_t freed = 0;      // every decrease

  void increase(std::size_t amount);
  void decrease(std::size_t amount);
  void reset_peak() { peak = current; }
  void reset_accumulated() { allocated = freed = 0; }
};

// "all", "small_pool", "large_pool".
inline constexpr std::size_t kAll = 0, kSmallPool = 1, kLargePool = 2;
using PoolStats = std::array<Stat, 3>;

struct Statistics {
  // Counts.
  PoolStats allocation;      // live allocations
  PoolStats segment;         // pieces of device memory
  PoolStats active;          // blocks allocated or waiting for an event
  PoolStats inactive_split;  // free blocks beside used ones
  // Bytes.
  PoolStats allocated_bytes;
  PoolStats reserved_bytes;
  PoolStats active_bytes;
  PoolStats inactive_split_bytes;
  PoolStats requested_bytes;  // before rounding
  // Blocks beyond max_split.
  Stat oversize_allocations;
  Stat oversize_segments;

  std::int64_t num_alloc_retries = 0;  // device memory ran out, cache flushed
  std::int64_t num_ooms = 0;           // and the flush did not help
  std::int64_t num_sync_all_streams = 0;
  std::int64_t num_device_alloc = 0;  // segments allocated or pieces mapped
  std::int64_t num_device_free = 0;
  std::int64_t max_split_size = -1;  // bytes; -1: no limit

  void reset_peaks();
  void reset_accumulated();
};

}  // namespace lowtide::phantom
