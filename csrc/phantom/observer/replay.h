// What was asked of an allocator, asked of torch's again.
#pragma once

#include <cstdint>

namespace lowtide::dry {

// As lowtide/planning/replays.py writes it.
struct AllocatorRequest {
  enum Kind : std::int64_t {
    kAllocate,    // id, bytes, stream
    kRecord,      // id, stream: uses it too
    kFree,        // id
    kWaitStream,  // stream: the host waits
    kWaitDevice,
    kEmptyCache,
  };
  std::int64_t kind = 0;
  std::int64_t id = 0;  // from 0 on, in the order of allocation
  std::int64_t bytes = 0;
  std::int64_t stream = 0;  // 0: the default one; the rest in any numbers
};

struct ReplayAnswer {
  std::int64_t fits = 1;  // else it ended where memory did
  std::int64_t peak_reserved = 0;
  std::int64_t retries = 0;  // allocations for which the cache was flushed
};

}  // namespace lowtide::dry
