// The request that does not fit into the simulated device.
#pragma once

#include <cstddef>
#include <string>

#include "base/check.h"

namespace lowtide::phantom {

// Bytes at the moment of failure, after the cache was flushed.
struct OutOfMemoryFacts {
  std::size_t requested = 0;  // as asked for
  std::size_t needed = 0;     // what would have been reserved for it
  std::size_t limit = 0;      // capacity, or the share of it that is allowed
  std::size_t allocated = 0;
  std::size_t reserved = 0;
};

// Becomes torch.OutOfMemoryError in Python.
class OutOfMemory : public Error {
 public:
  explicit OutOfMemory(const OutOfMemoryFacts& facts);
  const OutOfMemoryFacts& facts() const { return facts_; }

 private:
  OutOfMemoryFacts facts_;
};

}  // namespace lowtide::phantom
